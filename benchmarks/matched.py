"""Every op that has MATCH on the CPU, on 8 x 8 matrices of one dtype, in a region against torch's."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import polycast

from .timing import Race, Ratio, Result, Side

NOT_SLOWER = 60.0
"""The bound of the difference, in nanoseconds."""
_STATEMENT = "function(*arguments, **keywords)"
_BINDINGS = (torch.Tensor, torch._C._VariableFunctions, torch._C._nn, torch._C._linalg, torch._C._special)


def _samples() -> Mapping[str, tuple[Any, ...]]:
    """Return arguments by op; a dict at the end holds keyword arguments."""
    torch.manual_seed(0)
    x, y, vector, grid = torch.rand(8, 8), torch.rand(8, 8), torch.rand(8), torch.rand(1, 8, 8, 2)
    rows, index, mask = torch.arange(8), torch.arange(8).expand(8, 8).contiguous(), torch.eye(8) > 0
    batch, norm, image = torch.rand(1, 8, 8), (torch.ones(8), torch.zeros(8)), torch.rand(1, 8, 8, 8)
    solvable = x @ x.T + torch.eye(8)
    factors, pivots = torch.linalg.lu_factor(solvable)
    scattered, reduced = (x, 0, index, y), (x, 0, rows, y, "amax")
    indexed: tuple[Any, ...] = (x, 0, rows, y)
    statistics = (torch.zeros(8), torch.ones(8))
    polynomials = [f"{shift}chebyshev_polynomial_{kind}" for shift in ("", "shifted_") for kind in "tuvw"]
    polynomials += ["hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"]
    return {
        **{f"special_{name}": (x, y) for name in [*polynomials, "zeta"]},
        **dict.fromkeys(("_foreach_lerp.List", "_foreach_lerp_.List"), ([x, x], [y, y], [x, x])),
        **dict.fromkeys(("_foreach_lerp.Scalar", "_foreach_lerp_.Scalar"), ([x, x], [y, y], 0.5)),
        **dict.fromkeys(("index_put", "index_put_"), (x, [rows], y)),
        **dict.fromkeys(("_linalg_det", "_linalg_slogdet", "logdet"), (solvable,)),
        **dict.fromkeys(("linalg_lu", "linalg_lu_factor_ex"), (solvable,)),
        **dict.fromkeys(("_log_softmax_backward_data", "_softmax_backward_data"), (x, y, 1, torch.float32)),
        **dict.fromkeys(("addmv", "addmv_"), (vector.clone(), x, vector)),
        **dict.fromkeys(("complex", "heaviside", "heaviside_", "isclose"), (x, y)),
        **dict.fromkeys(("index_add", "index_add_", "index_copy", "index_copy_"), indexed),
        **dict.fromkeys(("index_reduce", "index_reduce_"), reduced),
        **dict.fromkeys(("lerp.Scalar", "lerp_.Scalar"), (x, y, 0.5)),
        **dict.fromkeys(("lerp.Tensor", "lerp_.Tensor"), (x, y, x)),
        **dict.fromkeys(("linalg_multi_dot", "chain_matmul"), ([x, y, x],)),
        **dict.fromkeys(("masked_scatter", "masked_scatter_"), (x, mask, y)),
        **dict.fromkeys(("put", "put_"), (x, rows, vector)),
        **dict.fromkeys(("scatter.reduce", "scatter_.reduce"), (*scattered, {"reduce": "add"})),
        **dict.fromkeys(("scatter.src", "scatter_.src", "scatter_add", "scatter_add_"), scattered),
        **dict.fromkeys(("scatter_reduce.two", "scatter_reduce_.two"), (*scattered, "sum")),
        "_linalg_solve_ex": (solvable, y),
        "_weight_norm_interface": (x, vector.reshape(8, 1)),
        "_batch_norm_with_update": (x, *norm, *statistics, 0.1, 1e-5),
        "_chunk_cat": ([x, y], 0, 2),
        "_native_batch_norm_legit": (x, *norm, *statistics, True, 0.1, 1e-5),
        "_native_batch_norm_legit.no_stats": (x, *norm, True, 0.1, 1e-5),
        "_native_batch_norm_legit_no_training": (x, *norm, *statistics, 0.1, 1e-5),
        "_scaled_dot_product_flash_attention_for_cpu": (image, image, image),
        "addbmm_": (x, batch, batch),
        "addmm_": (x, x, y),
        "addr": (x, vector, vector),
        "baddbmm_": (batch, batch, batch),
        "bilinear": (x, y, torch.rand(8, 8, 8)),
        "convolution": (image, torch.rand(8, 8, 1, 1), vector, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        "grid_sampler": (image, grid, 0, 0, False),
        "dot": (vector, vector),
        "linalg_cross": (torch.rand(8, 3), torch.rand(8, 3)),
        "linalg_lu_solve": (factors, pivots, y),
        "linalg_solve_triangular": (solvable, y, {"upper": True}),
        "meshgrid.indexing": ([vector, vector], {"indexing": "ij"}),
        "mv": (x, vector),
        "native_batch_norm": (x, *norm, *statistics, True, 0.1, 1e-5),
        "native_group_norm": (batch, *norm, 1, 8, 8, 2, 1e-5),
        "native_layer_norm": (x, [8], *norm, 1e-5),
        "tensordot": (x, y, [1], [0]),
    }


def _function(op: str) -> Callable[..., Any]:
    """Return the Python binding of an op, which is faster than ``torch.ops``."""
    base, _, overload = op.partition(".")
    bindings = (getattr(each, base) for each in _BINDINGS if hasattr(each, base))
    function: Callable[..., Any] = next(bindings, getattr(getattr(torch.ops.aten, base), overload or "default"))
    return function


@dataclass(frozen=True)
class Matched:
    """The race of our region on polycast's kernels and torch's region on its own, for each op."""

    def run(self, quick: bool) -> Sequence[Result]:
        """Return the ratio and the difference of each op."""
        regions = {"theirs": torch.autocast("cpu"), "ours": polycast.autocast("cpu")}
        libraries = {"theirs": "torch", "ours": "polycast"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some ops are deprecated
            calls = self._calls()
        sides = {
            f"{op}, {whose}": Side(_STATEMENT, names, _around(region), kernels=libraries[whose])
            for whose, region in regions.items()
            for op, names in calls.items()
        }
        ratios = [Ratio(op, "torch's kernel", f"{op}, ours", f"{op}, theirs", None) for op in calls]
        race = Race(sides=sides, ratios=ratios, rounds=100, most_seconds=90, seconds=0.001, least=True)
        found = race.run(quick)
        return [each for result in found for each in (result, _difference(result))]

    def _calls(self) -> dict[str, dict[str, Any]]:
        """Return the names of `_STATEMENT` for each op that can be called."""
        calls = {}
        backend, samples = polycast.plugin.get_backend("cpu"), _samples()
        assert {f"aten::{op}" for op in samples} <= backend.matched_ops | backend.policies.keys()
        for op, given in samples.items():
            keywords = given[-1] if isinstance(given[-1], dict) else {}
            names = {"function": _function(op), "arguments": given[: -1 if keywords else None], "keywords": keywords}
            try:
                with torch.no_grad(), torch.autocast("cpu"):
                    names["function"](*names["arguments"], **keywords)
            except (RuntimeError, TypeError, AttributeError):  # missing in this build or version of torch
                continue
            calls[op] = names
        return calls


def _around(region: AbstractContextManager[Any]) -> Callable[[], AbstractContextManager[Any]]:
    @contextmanager
    def both() -> Iterator[None]:
        with torch.no_grad(), region:
            yield

    return both


def _difference(ratio: Result) -> Result:
    assert ratio.times is not None
    ours, theirs = ratio.times
    return Result(f"{ratio.what}, difference", ratio.against, 1e9 * (ours - theirs), NOT_SLOWER, unit=" ns")
