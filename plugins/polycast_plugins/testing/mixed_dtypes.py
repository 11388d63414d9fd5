"""Checks of the ops that have MATCH, on inputs of mixed dtypes."""

import itertools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from polycast.plugin import dtype_name, find_op

from .samples import Sample, split
from .subject import Device, Subject, describe, read_expected, require

_MOST_OPERANDS = 5


class MixedDtypeChecks(Subject):
    """Checks of the ops that accept inputs of mixed dtypes in regions."""

    def test_mixed_dtypes(self, device: Device) -> None:
        """Compare regions with torch: with a cast by hand where torch refuses the dtypes, else with torch as it is."""
        known = {**MIXED_SAMPLES, **self.samples}
        names = (
            device.backend.matched_ops - device.backend.policies.keys() - read_expected(self.expected_failures).keys()
        )
        problems, calls = [], 0
        for name in sorted(names & known.keys()):
            op = find_op(name)
            for mixture in () if op is None else _mixtures(known[name], device):
                expected = _outcome(op, mixture, _torchs_region(device))
                if isinstance(expected, Exception):
                    expected = _outcome(op, _by_hand(op, mixture, device), _torchs_region(device))
                if isinstance(expected, Exception):
                    continue  # the device cannot do it in one dtype either
                calls += 1
                found = _outcome(op, mixture, device.region())
                if not _are_equal(expected, found, device):
                    dtypes = ", ".join(dtype_name(each.dtype) for each in _floats(mixture, device))
                    problems.append(f"{name} with {dtypes}: expected {_text(expected)}, got {_text(found)}")
        require(
            not problems,
            f"{len(problems)} mixtures of dtypes are computed otherwise than after a cast by hand in regions of "
            f"{device.type}. Name the ops in `policies` as PASSTHROUGH or in the file of expected failures:\n"
            + "\n".join(problems),
        )
        if not calls:
            pytest.skip(f"no sample of an op with MATCH runs on {device.type}")


def _torchs_region(device: Device) -> AbstractContextManager[Any]:
    """Return a region of torch's, where MATCH does not cast; for a device that is absent, one of polycast's."""
    return device.region() if device.fake else torch.autocast(device.type)


def _floats(tree: Any, device: Device) -> list[torch.Tensor]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [leaf for leaf in leaves if leaf.is_floating_point() and leaf.device.type == device.type]


def _mixtures(sample: Sample, device: Device) -> Iterator[Any]:
    """Yield the arguments of a sample with each combination of float32 and the fast dtype in its tensors."""
    torch.default_generator.manual_seed(0)
    leaves, structure = tree_flatten(split(sample(device)))
    positions = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    dtypes = (torch.float32, device.backend.default_dtype)
    for chosen in itertools.product(dtypes, repeat=min(len(positions), _MOST_OPERANDS)):
        mixed = list(leaves)
        for at, dtype in zip(positions, chosen, strict=False):
            mixed[at] = leaves[at].to(dtype)
        yield tree_unflatten(mixed, structure)


def _outcome(op: Any, arguments: Any, region: Any) -> Any:
    """Return the result of a call and its arguments after it, or the exception that it raises."""
    args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, arguments)
    try:
        with warnings.catch_warnings(), region:
            warnings.simplefilter("ignore")  # torch warns of ops that it has deprecated
            result = op(*args, **kwargs)
    except Exception as error:  # is compared too
        return error
    return result, args


def _by_hand(op: Any, arguments: Any, device: Device) -> Any:
    """Return arguments cast as a caller would: to the dtype of the tensor that the op writes to, or to float32."""
    args, _ = arguments
    written = [
        value
        for argument, value in zip(op._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    dtype = written[0].dtype if written else torch.float32
    floats = {id(leaf) for leaf in _floats(arguments, device)}
    return tree_map(lambda leaf: leaf.to(dtype) if id(leaf) in floats else leaf, arguments)


def _are_equal(expected: Any, found: Any, device: Device) -> bool:
    if isinstance(found, Exception):
        return False
    pairs = list(zip(tree_leaves(expected[0]), tree_leaves(found[0]), strict=True))
    return all(
        type(one) is type(other)
        and describe(one) == describe(other)
        and (device.fake or _values_are_equal(device.values(one), device.values(other)))
        for one, other in pairs
        if isinstance(one, torch.Tensor)
    )


def _values_are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        torch.equal(one.nan_to_num(), other.nan_to_num()) if one.layout is torch.strided else one.shape == other.shape
    )


def _text(outcome: Any) -> str:
    if isinstance(outcome, Exception):
        return f"{type(outcome).__name__}: {outcome}"
    return ", ".join(describe(leaf) for leaf in tree_leaves(outcome[0]))


def _rows(names: str, sample: Sample) -> dict[str, Sample]:
    return {f"aten::{name}": sample for name in names.split()}


MIXED_SAMPLES: Mapping[str, Sample] = {
    **_rows("lerp.Scalar lerp_.Scalar", lambda m: (m(2, 3), m(2, 3), 0.5)),
    **_rows("lerp.Tensor lerp_.Tensor", lambda m: (m(2, 3), m(2, 3), m(2, 3))),
    **_rows("masked_scatter masked_scatter_", lambda m: (m(2, 3), m.integers([[1, 0, 1]] * 2, torch.bool), m(2, 3))),
    **_rows("scatter.src scatter_.src scatter_add scatter_add_", lambda m: (m(3, 2), 0, m.integers([[0, 2]]), m(1, 2))),
    **_rows("scatter.reduce scatter_.reduce", lambda m: (m(3, 2), 0, m.integers([[0, 2]]), m(1, 2), {"reduce": "add"})),
    **_rows("scatter_reduce.two scatter_reduce_.two", lambda m: (m(3, 2), 0, m.integers([[0, 2]]), m(1, 2), "sum")),
    **_rows("index_add index_add_ index_copy index_copy_", lambda m: (m(3, 2), 0, m.integers([2, 0]), m(2, 2))),
    **_rows("index_reduce index_reduce_", lambda m: (m(3, 2), 0, m.integers([2, 0]), m(2, 2), "mean")),
    **_rows("index_put index_put_", lambda m: (m(3, 2), [m.integers([2, 0])], m(2, 2))),
    **_rows("put put_", lambda m: (m(3, 2), m.integers([2, 0]), m(2))),
    **_rows("dot", lambda m: (m(3), m(3))),
    **_rows("mv", lambda m: (m(2, 3), m(3))),
    **_rows("addmv addmv_", lambda m: (m(2), m(2, 3), m(3))),
    **_rows("addr", lambda m: (m(2, 3), m(2), m(3))),
    **_rows("addmm_", lambda m: (m(2, 4), m(2, 3), m(3, 4))),
    **_rows("addbmm_", lambda m: (m(2, 4), m(3, 2, 5), m(3, 5, 4))),
    **_rows("baddbmm_", lambda m: (m(3, 2, 4), m(3, 2, 5), m(3, 5, 4))),
    **_rows("bilinear", lambda m: (m(2, 3), m(2, 4), m(5, 3, 4), m(5))),
    **_rows("tensordot", lambda m: (m(2, 3), m(3, 4), [1], [0])),
    **_rows("chain_matmul linalg_multi_dot", lambda m: ([m(2, 3), m(3, 4), m(4, 2)],)),
    **_rows("meshgrid", lambda m: ([m(2), m(3)],)),
    **_rows("meshgrid.indexing", lambda m: ([m(2), m(3)], {"indexing": "ij"})),
    **_rows("_chunk_cat", lambda m: ([m(4, 2), m(2, 2)], 0, 2)),
    **_rows("linalg_cross", lambda m: (m(2, 3), m(2, 3))),
    **_rows("isclose", lambda m: (m(2, 3), m(2, 3))),
    **_rows("complex heaviside heaviside_ special_zeta", lambda m: (m(2, 3), m(2, 3))),
    **_rows("native_layer_norm", lambda m: (m(2, 3), [3], m(3), m(3), 1e-5)),
    **_rows("native_group_norm", lambda m: (m(2, 4, 3), m(4), m(4), 2, 4, 3, 2, 1e-5)),
    **_rows("native_batch_norm", lambda m: (m(4, 3), m(3), m(3), m(3), m(3), True, 0.1, 1e-5)),
    **_rows("convolution", lambda m: (m(1, 2, 5, 5), m(3, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
    **_rows("_linalg_solve_ex", lambda m: (m.spd(3), m(3, 2))),
    **_rows("linalg_lu linalg_lu_factor_ex logdet _linalg_det", lambda m: (m.spd(3),)),
    **_rows("linalg_solve_triangular", lambda m: (m.spd(3), m(3, 2), {"upper": True})),
}
"""Samples of ops that may have MATCH. Ops that write to a tensor write to their first argument."""
