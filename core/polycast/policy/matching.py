"""MATCH: the operands of an op, which must agree in dtype, and their casts where torch would refuse their dtypes.

A mixture is the dtypes of all operands of a call. The table says which mixtures torch's own kernels accept: with these
nothing is cast, and the results are bitwise those of torch.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.torch_version import TorchVersion

from ..torch_internals.dispatcher import OpOverload
from .schemas import is_written

IsEligible: TypeAlias = Callable[[object], bool]
Targets: TypeAlias = "torch.dtype | list[torch.dtype | None] | None"
"""The dtype that an argument is cast to; for a list of tensors, that of each; None: it is not cast."""


class MatchedOperands(NamedTuple):
    """The dtypes that torch's kernels of an op accept; by default all its tensors in any one dtype.

    Attributes:
        names: the operands; empty: all tensors.
        scalars: the operands that may have another dtype if they have no dimensions.
        mixtures: the mixtures that torch accepts, each a letter for each operand, in the order of `names`; see
            `_LETTERS`.
        fills_masks: whether the op calls masked_fill if given one value and one mask, and then accepts any dtype of the
            value.
        takes_empty: whether it accepts tensors without elements in dtypes that it has no kernel for.
    """

    names: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    mixtures: tuple[str, ...] = ()
    fills_masks: bool = False
    takes_empty: bool = False


_LETTERS = {torch.float32: "f", torch.bfloat16: "b", torch.float16: "h", None: "-"}
"""In mixtures, ``x`` is one 16-bit dtype, the same for all operands that have an ``x``."""

_ANY = MatchedOperands()
_NORM = ("input", "weight", "bias")
_BATCH_NORM = (*_NORM, "running_mean", "running_var")
_NORM_TAKES = ("xff", "xf-", "x-f")
_BATCH_NORM_TAKES = ("xffff", "xff--", "xf-ff", "xf---", "x-fff", "x-f--", "x--ff")

_ADDMV_TAKES = ("fxx", "xff", "hbb", "bhh") if TorchVersion(torch.__version__) < "2.13" else ()

_ON_ALL_DEVICES: dict[str, MatchedOperands] = {
    **dict.fromkeys(
        (
            "aten::_chunk_cat",
            "aten::_foreach_lerp.List",
            "aten::_foreach_lerp.Scalar",
            "aten::_foreach_lerp_.List",
            "aten::_foreach_lerp_.Scalar",
            "aten::_foreach_lerp.ScalarList",
            "aten::_foreach_lerp_.ScalarList",
            "aten::addmv_",
            "aten::baddbmm_",
            "aten::bilinear",
            "aten::chain_matmul",
            "aten::dot",
            "aten::isclose",
            "aten::lerp.Scalar",
            "aten::lerp_.Scalar",
            "aten::linalg_multi_dot",
            "aten::masked_scatter",
            "aten::masked_scatter_",
            "aten::meshgrid",
            "aten::meshgrid.indexing",
            "aten::scatter.reduce",
            "aten::scatter.src",
            "aten::scatter_.reduce",
            "aten::scatter_.src",
            "aten::scatter_add",
            "aten::scatter_add_",
            "aten::scatter_reduce.two",
            "aten::scatter_reduce_.two",
            "aten::tensordot",
        ),
        _ANY,
    ),
    **dict.fromkeys(
        ("aten::_linalg_solve_ex", "aten::linalg_ldl_solve", "aten::linalg_lu_solve"), MatchedOperands(takes_empty=True)
    ),
    "aten::addmv": MatchedOperands(mixtures=_ADDMV_TAKES),
    **dict.fromkeys(("aten::lerp.Tensor", "aten::lerp_.Tensor"), MatchedOperands(scalars=("weight",))),
}
"""The ops whose dtypes torch checks before it calls a device's kernel, so it refuses the same ones on every device."""

_ON_VERIFIED_DEVICES: dict[str, MatchedOperands] = {
    **dict.fromkeys(
        (
            "aten::_embedding_bag",
            "aten::_embedding_bag_forward_only",
            "aten::_grouped_mm",
            "aten::_histogramdd_from_bin_tensors",
            "aten::_log_softmax_backward_data",
            "aten::_softmax_backward_data",
            "aten::_sparse_mm_reduce_impl",
            "aten::_weight_norm_interface",
            "aten::addbmm_",
            "aten::addmm_",
            "aten::addr",
            "aten::binomial",
            "aten::complex",
            "aten::heaviside",
            "aten::heaviside_",
            "aten::histogram.bins_tensor",
            "aten::hspmm",
            "aten::index_add",
            "aten::index_add_",
            "aten::index_copy",
            "aten::index_copy_",
            "aten::index_put_",
            "aten::index_reduce",
            "aten::index_reduce_",
            "aten::linalg_cross",
            "aten::linalg_solve_triangular",
            "aten::mv",
            "aten::put",
            "aten::put_",
            "aten::sparse_sampled_addmm",
            "aten::sspaddmm",
        ),
        _ANY,
    ),
    **dict.fromkeys(
        ("aten::instance_norm", "aten::native_group_norm", "aten::native_layer_norm"),
        MatchedOperands(_NORM, mixtures=_NORM_TAKES),
    ),
    **dict.fromkeys(
        (
            "aten::_batch_norm_with_update",
            "aten::_native_batch_norm_legit",
            "aten::_native_batch_norm_legit_no_training",
            "aten::native_batch_norm",
        ),
        MatchedOperands(_BATCH_NORM, mixtures=_BATCH_NORM_TAKES),
    ),
    "aten::_native_batch_norm_legit.no_stats": MatchedOperands(_NORM, mixtures=("xff", "xf-")),
    "aten::_scaled_dot_product_flash_attention_for_cpu": MatchedOperands(
        ("query", "key", "value", "attn_mask"), mixtures=("xxxf",)
    ),
    # A bias of another dtype is accepted only where oneDNN does not compute the product, which depends on the
    # processor, on torch.backends.mkldnn and on the call.
    "aten::convolution": MatchedOperands(_NORM, mixtures=("hhf", "hhb", "bbf", "bbh")),
    **dict.fromkeys(
        (
            "aten::_histogramdd_bin_edges",
            "aten::_histogramdd_from_bin_cts",
            "aten::_linalg_det",
            "aten::histogram.bin_ct",
            "aten::linalg_ldl_factor",
            "aten::linalg_ldl_factor_ex",
            "aten::linalg_lu",
            "aten::linalg_lu_factor_ex",
            "aten::pdist",
        ),
        MatchedOperands(takes_empty=True),
    ),
    "aten::index_put": MatchedOperands(("self", "values"), fills_masks=True),
    "aten::fake_quantize_per_channel_affine_cachemask": MatchedOperands(("scale",)),
    "aten::linalg_pinv.atol_rtol_tensor": MatchedOperands(("self",)),
}
"""The ops whose dtypes a device's kernels check: only backends with `is_verified` have them."""

_TABLE = {**_ON_ALL_DEVICES, **_ON_VERIFIED_DEVICES}

MATCHED = frozenset(_TABLE)
MATCHED_ON_ALL_DEVICES = frozenset(_ON_ALL_DEVICES)


def operands_of(op: OpOverload) -> MatchedOperands:
    """Return the operands of an op, with the dtypes that torch's kernels accept."""
    return _TABLE.get(op._schema.name + f".{op._schema.overload_name}".rstrip("."), _ANY)


class Matching:
    """Decides what MATCH casts the arguments of an op to.

    Attributes:
        positions: the positions of the operands in the op's schema.
        scalars: those of operands that may have another dtype if they have no dimensions.
        writes: those of operands that the op writes to. The others are cast to their dtype; if there are none, to
            float32.
        operands: the operands, with the dtypes that torch's kernels accept.
        by_item: whether the items of lists must agree one by one, as in ``_foreach_*`` ops.
    """

    def __init__(self, op: OpOverload) -> None:
        self.operands = operands = operands_of(op)
        arguments = op._schema.arguments
        names = operands.names or [each.name for each in arguments if "Tensor" in str(each.real_type)]
        by_name = {each.name: position for position, each in enumerate(arguments)}
        self.positions = tuple(by_name[name] for name in names)
        self.scalars = tuple(by_name[name] for name in operands.scalars)
        self.writes = tuple(at for at in self.positions if is_written(arguments[at]))
        self.by_item = op._schema.name.startswith("aten::_foreach_")

    def targets(
        self, given: Sequence[Any], is_eligible: IsEligible, missing: Collection[torch.dtype] = ()
    ) -> list[Targets] | None:
        """Return what each argument is cast to; None if torch accepts them as they are, or a cast would not help.

        Args:
            given: the arguments, in the order of the schema.
            is_eligible: whether autocast may cast a tensor.
            missing: the dtypes that the device has no kernel for.
        """
        operands = {at: given[at] for at in self.positions}
        if not self.by_item:
            tensors = {at: self._tensors(at, value) for at, value in operands.items()}
            dtype = self._dtype(tensors, is_eligible, missing)
            if self.operands.fills_masks and dtype and _fills_mask(*given):
                return None
            found = {at: self._casts(at, value, dtype) for at, value in operands.items()} if dtype else {}
        else:
            lists = {at: value for at, value in operands.items() if isinstance(value, (list, tuple))}
            dtypes = [
                self._dtype({at: [item] for at, item in zip(lists, items, strict=True)}, is_eligible, missing)
                for items in zip(*lists.values(), strict=False)
            ]
            found = {
                at: [self._cast(at, item, dtype) for item, dtype in zip_longest(value, dtypes)]
                for at, value in lists.items()
                if any(dtypes)
            }
        return [found.get(at) for at in range(len(given))] if found else None

    def _tensors(self, at: int, value: object) -> list[torch.Tensor]:
        """Return the tensors of an operand, without those that may have another dtype."""
        values = value if isinstance(value, (list, tuple)) else [value]
        return [each for each in values if isinstance(each, torch.Tensor) and (each.dim() or at not in self.scalars)]

    def _casts(self, at: int, value: object, dtype: torch.dtype) -> Targets:
        if isinstance(value, (list, tuple)):
            return [self._cast(at, item, dtype) for item in value]
        return self._cast(at, value, dtype)

    def _cast(self, at: int, value: object, dtype: torch.dtype | None) -> torch.dtype | None:
        others = [each for each in self._tensors(at, value) if each.dtype in _LETTERS and each.dtype is not dtype]
        return dtype if others else None

    def _dtype(
        self,
        operands: Mapping[int, Sequence[torch.Tensor]],
        is_eligible: IsEligible,
        missing: Collection[torch.dtype],
    ) -> torch.dtype | None:
        """Return the dtype to cast the operands to; None if torch accepts theirs, or a cast would not help."""
        floats = [each for tensors in operands.values() for each in tensors if each.is_floating_point()]
        dtypes = {each.dtype for each in floats}
        if not floats or not all(each.dtype in _LETTERS and (is_eligible(each) or _is_number(each)) for each in floats):
            return None
        is_empty = self.operands.takes_empty and any(0 in each.shape for each in floats)
        if len(dtypes) == 1 and (is_empty or dtypes.isdisjoint(missing)):
            return None
        mixtures = self.operands.mixtures
        if mixtures and not _spelled(operands.values()).isdisjoint(mixtures):
            return None
        written = {each.dtype for at in self.writes for each in operands.get(at, ())}
        if len(written) > 1 or not written <= _LETTERS.keys():
            return None  # the values of one would be written to a copy, or a cast would truncate
        return written.pop() if written else torch.float32


def _spelled(operands: Iterable[Sequence[torch.Tensor]]) -> set[str]:
    """Return the mixture of some operands: with exact letters and, if it has one 16-bit dtype, with an x for that."""
    exact = "".join(_LETTERS.get(operand[0].dtype, "?") if operand else "-" for operand in operands)
    short = set(exact) & {"b", "h"}
    return {exact, *(exact.replace(letter, "x") for letter in short if len(short) == 1)}


def _fills_mask(_: object, indices: Sequence[torch.Tensor | None], values: torch.Tensor, *__: object) -> bool:
    """Return whether ``index_put`` calls ``masked_fill``, by the rule of ATen's ``canDispatchToMaskedFill``."""
    masks = [each.dtype in (torch.bool, torch.uint8) for each in indices if each is not None]
    return masks == [True] and values.numel() == 1 and values.is_cpu


def _is_number(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may be an operand beside tensors of any device."""
    return tensor.is_cpu and tensor.dim() == 0
