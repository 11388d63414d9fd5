"""Every op in torch's own lists, under torch.autocast and polycast: the same dtypes, on the CPU the same bits."""

import pytest
import torch
from tests.sources import BUILT_INS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import polycast

DTYPES = (torch.bfloat16, torch.float16)

ACCELERATORS = [name for name in BUILT_INS if name != "cpu"]

# Where torch raises and polycast does not: the op, and why.
MIXED = "promotes float16 with bfloat16 to float32, where torch raises 'Unexpected floating ScalarType'"
POLYCAST_ONLY = dict.fromkeys(
    ("cat", "stack", "bilinear", "dot", "vdot", "grid_sampler", "index_put", "scatter_add"), MIXED
)

MODULES = {"nn": torch._C._nn, "banned": torch._C._nn, "linalg": torch._C._linalg}


def op_lists(device_type):
    """Return torch's lists as (list, op, arguments, keyword arguments), with tensors made in the mode of the caller."""
    lists = pytest.importorskip(
        "torch.testing._internal.autocast_test_lists", reason="torch's lists need the package expecttest"
    )
    made = (lists.AutocastCPUTestLists if device_type == "cpu" else lists.AutocastTestLists)(device_type)
    return [
        (list_name, entry[0], arguments, next((item for item in entry if isinstance(item, dict)), {}))
        for list_name, entries in vars(made).items()
        if isinstance(entries, list)
        for entry in entries
        for arguments in [item for item in entry[1:] if isinstance(item, tuple)]
    ]


def call(case):
    """Call an op as a function and as a method, whichever there are; an exception is a result too."""
    list_name, op, arguments, keywords = case
    module = MODULES.get(list_name.partition("_")[0], torch)
    torch.manual_seed(0)
    try:
        if callable(op):
            return tree_leaves(op(*arguments, **keywords))
        results = [getattr(module, op)(*arguments, **keywords)] if hasattr(module, op) else []
        if isinstance(arguments[0], torch.Tensor) and hasattr(torch.Tensor, op):
            results.append(getattr(arguments[0], op)(*arguments[1:], **keywords))
    except Exception as error:
        return error
    assert results, f"nothing was called for {op}"
    return tree_leaves(results)


class Casts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.dtypes.append(kwargs.get("dtype"))
        return func(*args, **(kwargs or {}))


def recorded(case):
    """Call an op; return the result, and the dtypes that were cast to."""
    with Casts() as casts:
        return call(case), casts.dtypes


def on_both(cases, device_type, dtype):
    """Call the ops by torch's kernels, then by polycast's, on a device that need not be there.

    torch.autocast would not be enabled for it.
    """
    before = torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype)
    try:
        theirs = [recorded(case) for case in cases]
        polycast.install(device_type)
        return zip(cases, theirs, [recorded(case) for case in cases], strict=True)
    finally:
        torch.set_autocast_enabled(device_type, False)
        torch.set_autocast_dtype(device_type, before)


def compare(case, theirs, ours, *, bits):
    list_name, op, *_ = case
    if list_name == "banned" and isinstance(theirs, RuntimeError):  # it is not banned on every device
        assert isinstance(ours, RuntimeError)
    elif isinstance(theirs, Exception):
        if str(theirs).startswith("Unexpected floating ScalarType"):
            assert op in POLYCAST_ONLY
            assert not isinstance(ours, Exception) or "not linked with support" in str(ours)
        else:
            assert repr(ours) == repr(theirs)
    else:
        assert not isinstance(ours, Exception), ours
        for their, our in zip(theirs, ours, strict=True):
            assert type(our) is type(their)
            if isinstance(their, torch.Tensor):
                assert our.dtype is their.dtype
                assert not bits or torch.equal(our.nan_to_num(), their.nan_to_num())
            else:
                assert our == their


@pytest.mark.filterwarnings("ignore::UserWarning")  # the lists call what torch has deprecated
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpu_ops_give_the_same_bits(dtype, engine):
    cases = op_lists("cpu")
    with torch.autocast("cpu", dtype):
        theirs = [call(case) for case in cases]
    with polycast.autocast("cpu", dtype):
        ours = [call(case) for case in cases]
    assert len(cases) > 60
    for case, their, our in zip(cases, theirs, ours, strict=True):
        compare(case, their, our, bits=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # the lists call what torch has deprecated
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device_type", ACCELERATORS)
def test_accelerator_ops_give_the_same_dtypes_on_fake_tensors(device_type, dtype, fake, engine):
    cases = op_lists(device_type)
    assert len(cases) > 110
    for case, (their, their_casts), (our, our_casts) in on_both(cases, device_type, dtype):
        compare(case, their, our, bits=False)
        assert our_casts == their_casts or isinstance(their, Exception)


def left_out(device_type):
    """Return cases of ops that a device's table has and torch's lists do not."""
    matrix, batch = (torch.ones(shape, device=device_type, dtype=torch.float16) for shape in ((4, 4), (2, 4, 4, 4)))
    row = torch.ones(4, device=device_type)
    convolution = (batch, torch.ones(4, 4, 1, 1, device=device_type), None, [0, 0], [1, 1], [1, 1], 1)
    calls = {
        "batch_norm": (batch, row, row, row, row, True, 0.1, 1e-5, False),
        "_mps_convolution": convolution,
        "frobenius_norm": (matrix, [0, 1]),
        "huber_loss": (matrix, matrix.float()),
        "linalg_matrix_norm": (matrix,),
        "linalg_vector_norm": (matrix,),
        "native_layer_norm": (matrix, [4], row, row, 1e-5),
        "nuclear_norm": (matrix,),
        "scaled_dot_product_attention": (matrix, matrix.float(), matrix),
    }
    cases = [("left out", getattr(torch.ops.aten, name), arguments, {}) for name, arguments in calls.items()]
    matrices = torch.ops.aten.linalg_matrix_norm.str_ord
    return [*cases, ("left out", matrices, (matrix, "fro"), {}), ("left out", cases[7][1].dim, (matrix, [0, 1]), {})]


@pytest.mark.filterwarnings("ignore::UserWarning")  # a device that is not there takes no seed
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device_type", ACCELERATORS)
def test_accelerator_ops_that_torchs_lists_leave_out_are_cast_alike(device_type, dtype, fake, engine):
    for case, (their, their_casts), (our, our_casts) in on_both(left_out(device_type), device_type, dtype):
        assert our_casts == their_casts, case[1]
        compare(case, their, our, bits=False)
