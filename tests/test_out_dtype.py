"""out_dtype: which kernel runs, that its results are those of torch's operator, and that traces keep the operator."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import polycast
import polycast_cpu.kernels
import polycast_cuda.kernels
import polycast_xpu.kernels
from polycast import out_dtype

ATEN = torch.ops.aten
MM, BMM, ADDMM, LINEAR = ATEN.mm.default, ATEN.bmm.default, ATEN.addmm.default, ATEN.linear.default
OPERATOR = torch.ops.higher_order.out_dtype


def int8(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def same(actual, expected):
    """Compare bit for bit."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.equal(actual, expected)


LAYOUTS = {
    "rows": lambda rows, columns: int8(rows, columns),
    "columns": lambda rows, columns: int8(columns, rows).t(),
    "rows of a slice": lambda rows, columns: int8(rows, columns + 3)[:, 1 : columns + 1],
    "columns of a slice": lambda rows, columns: int8(columns, rows + 3)[:, 1 : rows + 1].t(),
    "steps": lambda rows, columns: int8(2 * rows, 3 * columns)[::2, ::3],
    "one row": lambda rows, columns: int8(1, columns).expand(rows, columns),
    "one column": lambda rows, columns: int8(rows, 1).expand(rows, columns),
    "one number": lambda rows, columns: int8(1, 1).expand(rows, columns),
    "overlapping": lambda rows, columns: int8(rows + columns + 1).as_strided((rows, columns), (1, 1)),
    "largest": lambda rows, columns: torch.full((rows, columns), 127, dtype=torch.int8),
    "smallest": lambda rows, columns: torch.full((rows, columns), -128, dtype=torch.int8),
}
SIZES = (0, 1, 2, 3, 8, 17, 33)


@pytest.fixture(params=["as it is here", "without int8 instructions", "without oneDNN"])
def cpu(request, monkeypatch):
    """Run a test on each way that the CPU's kernels take."""
    if request.param == "without int8 instructions":
        monkeypatch.setattr(polycast_cpu.kernels, "_multiplies_int8", lambda: False)
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(before and request.param != "without oneDNN")
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.mark.parametrize("left", LAYOUTS)
def test_mm_of_int8_is_exact_for_every_layout_and_size(cpu, left):
    wrong = []
    for right, rows, terms, columns in itertools.product(LAYOUTS, SIZES, SIZES, SIZES):
        a, b = LAYOUTS[left](rows, terms), LAYOUTS[right](terms, columns)
        result = out_dtype(MM, torch.int32, a, b)
        if result.dtype is not torch.int32 or not torch.equal(result, torch.mm(a.int(), b.int())):
            wrong.append((right, rows, terms, columns))
    assert wrong == []


@pytest.mark.parametrize("terms", [1024, 1025, 1041, 2**17 + 5])
@pytest.mark.parametrize(("one", "other"), [(-128, -128), (-128, 127), (127, 127)])
def test_long_sums_are_exact_and_wrap_as_torchs_do(cpu, terms, one, other):
    a, b = torch.full((2, terms), one, dtype=torch.int8), torch.full((terms, 3), other, dtype=torch.int8)
    same(out_dtype(MM, torch.int32, a, b), OPERATOR(MM, torch.int32, a, b))


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    sizes=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    data=st.data(),
)
def test_linear_of_int8_is_torchs_bit_for_bit(shape, sizes, data):
    terms, columns = sizes
    dtype = data.draw(st.sampled_from([None, torch.int8, torch.int32]))
    bias = () if dtype is None else (torch.randint(-100, 100, (columns,), dtype=dtype),)
    args = (int8(*shape, terms), int8(columns, terms), *bias)
    same(out_dtype(LINEAR, torch.int32, *args), OPERATOR(LINEAR, torch.int32, *args))


@pytest.mark.parametrize("bias", [(5, 7), (7,), (1, 7), (5, 1), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_addmm_of_int8_is_exact(cpu, bias, dtype):
    bias, a, b = torch.randint(-100, 100, bias, dtype=dtype), int8(5, 33), int8(33, 7)
    same(out_dtype(ADDMM, torch.int32, bias, a, b), torch.addmm(bias.int(), a.int(), b.int()))


@pytest.mark.parametrize(
    "sizes", [(3, 5, 7, 2), (0, 1, 1, 1), (2, 0, 3, 4), (2, 3, 0, 4), (2, 64, 64, 64), (1, 2, 1030, 3)]
)
def test_bmm_of_int8_is_exact(cpu, sizes):
    count, rows, terms, columns = sizes
    a, b = int8(count, terms, rows).mT, int8(count, terms, columns)
    same(out_dtype(BMM, torch.int32, a, b), torch.bmm(a.int(), b.int()))


def test_only_the_bias_may_be_in_another_dtype():
    bias, a, b = int8(3), int8(3, 3).int(), int8(3, 3).int()
    same(out_dtype(LINEAR, torch.int32, a, b, bias), OPERATOR(LINEAR, torch.int32, a, b, bias))
    same(out_dtype(ADDMM, torch.int32, bias, a, b), torch.addmm(bias.int(), a, b))


@pytest.mark.parametrize("isa", ["SSE41", "AVX2", "AVX512_CORE", "ALL"])
def test_int8_is_exact_whatever_instructions_onednn_may_use(isa):
    script = (
        "import torch, polycast\n"
        "a = torch.full((16, 16), 127, dtype=torch.int8)\n"
        "print(polycast.out_dtype(torch.ops.aten.mm.default, torch.int32, a, a).unique().tolist())"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"[{16 * 127 * 127}]\n", "")


def outcome(function, *args):
    """Return what a call returns, or the type and the text of what it raises."""
    try:
        return function(*args)
    except Exception as error:
        return type(error), str(error)


X, Y = torch.randn(5, 5, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
DTYPES = (torch.int8, torch.uint8, torch.int32, torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64)
OPS = {
    "mm": (MM, lambda x, y: (x, y)),
    "linear": (LINEAR, lambda x, y: (x, y)),
    "mul": (ATEN.mul.Tensor, lambda x, y: (x, y)),
    "mul by a number": (ATEN.mul.Scalar, lambda x, y: (x, 2.5)),
    "div": (ATEN.div.Tensor, lambda x, y: (x, y)),
    "conv2d": (ATEN.conv2d.default, lambda x, y: (x[None, None], y[None, None, :2, :2], None, [2, 1], [1, 1])),
    "a tensor without dimensions": (ATEN.mul.Tensor, lambda x, y: (x, y[0, 0])),
}


@pytest.mark.parametrize("name", OPS)
@settings(deadline=None, max_examples=60)
@given(given=st.sampled_from(DTYPES), other=st.sampled_from(DTYPES), wanted=st.sampled_from(DTYPES))
def test_the_result_is_torchs_bit_for_bit(name, given, other, wanted):
    op, arguments = OPS[name]
    args = arguments((10 * X).to(given), (10 * Y).to(other))
    expected, actual = outcome(OPERATOR, op, wanted, *args), outcome(out_dtype, op, wanted, *args)
    if isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert actual == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduced_dtypes_into_float32_are_as_accurate_as_torchs(dtype):
    a, b = torch.randn(64, 256).to(dtype), torch.randn(256, 32).to(dtype)
    exact = a.double() @ b.double()
    error = (out_dtype(MM, torch.float32, a, b) - exact).abs().max()
    assert error <= (OPERATOR(MM, torch.float32, a, b) - exact).abs().max()


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (torch.mm, "out_dtype's first argument must be an OpOverload"),
        (ATEN.mm, "out_dtype's first argument must be an OpOverload"),
        ([], "out_dtype's first argument must be an OpOverload"),
        (ATEN.mul_.Tensor, "out_dtype's first argument needs to be a functional operator"),
        (ATEN.sort.default, "out_dtype's can only apply to ops that return a single tensor"),
        (ATEN.add.Tensor, "out_dtype only allows the following operators:"),
    ],
    ids=str,
)
def test_what_torchs_operator_refuses_is_refused_in_its_words(op, text):
    error, message = outcome(OPERATOR, op, torch.int32, int8(2, 2), int8(2, 2))
    assert error is ValueError
    assert message.startswith(text)
    assert outcome(out_dtype, op, torch.int32, int8(2, 2), int8(2, 2)) == (error, message)


@pytest.mark.parametrize(
    "args",
    [(int8(2), int8(2, 2)), (int8(2, 2), int8(3, 2)), (int8(1, 2, 2), int8(2, 2)), (int8(2, 2), 3), (int8(2, 2),)],
)
def test_an_op_refuses_its_arguments_as_under_torchs_operator(args):
    error, message = outcome(OPERATOR, MM, torch.int32, *args)
    assert outcome(out_dtype, MM, torch.int32, *args) == (error, message)


@pytest.mark.parametrize("dtype", [None, "int32", int])
def test_a_dtype_is_a_torch_dtype(dtype):
    with pytest.raises(TypeError) as caught:
        out_dtype(MM, dtype, int8(2, 2), int8(2, 2))
    assert str(caught.value) == f"dtype must be a torch.dtype, such as torch.int32; got {dtype!r}"


def test_no_tensor_is_an_error():
    with pytest.raises(TypeError) as caught:
        out_dtype(ATEN.mul.Scalar, torch.int32, 3, 4)
    assert str(caught.value) == "out_dtype needs a tensor to compute on, but aten.mul.Scalar was given (3, 4)"


def test_tensors_on_two_devices_are_an_error():
    with pytest.raises(RuntimeError) as caught:
        out_dtype(MM, torch.int32, int8(2, 2), int8(2, 2).to("meta"))
    assert (
        str(caught.value)
        == "out_dtype needs all tensors on one device, but aten.mm.default was given some on cpu and meta"
    )


def test_a_tensor_without_dimensions_may_be_elsewhere():
    x = torch.ones(2, 2, dtype=torch.int8, device="meta")
    assert out_dtype(ATEN.mul.Tensor, torch.int32, torch.ones((), dtype=torch.int8), x).device.type == "meta"


# Traces keep torch's operator.


def function(a, b):
    return out_dtype(MM, torch.int32, a, b) + 1


def batched(a, b):
    return out_dtype(BMM, torch.int32, a, b) + 1


class Module(torch.nn.Module):
    def forward(self, a, b):
        return function(a, b)


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx_keeps_the_operator(mode, pre_dispatch):
    traced = make_fx(function, tracing_mode=mode, pre_dispatch=pre_dispatch)(int8(4, 4), int8(4, 4))
    assert targets(traced.graph)[:1] == [OPERATOR]
    a, b = int8(4, 4), int8(4, 4)
    same(traced(a, b), function(a, b))


def test_functionalize_keeps_the_operator():
    a, b = int8(4, 4), int8(4, 4)
    traced = make_fx(torch.func.functionalize(function))(a, b)
    assert targets(traced.graph)[0] is OPERATOR
    same(torch.func.functionalize(function)(a, b), function(a, b))


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_operator(strict):
    a, b = int8(4, 4), int8(4, 4)
    exported = torch.export.export(Module(), (a, b), strict=strict)
    assert OPERATOR in targets(exported.graph)
    same(exported.module()(a, b), function(a, b))


# Inductor's import of torch warns of torch.
inductor_may_warn = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@inductor_may_warn
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_keeps_the_operator(backend):
    torch._dynamo.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    a, b = int8(4, 4), int8(4, 4)
    same(torch.compile(function, backend=keep, fullgraph=True)(a, b), function(a, b))
    assert targets(graphs[0].graph)[0] is OPERATOR


def test_symbolic_trace_keeps_the_operator():
    assert targets(torch.fx.symbolic_trace(function).graph)[0] is OPERATOR


@inductor_may_warn
@pytest.mark.parametrize("trace", ["make_fx", "export", "strict export", "eager", "aot_eager", "inductor"])
def test_an_op_that_only_a_kernel_takes_is_traced_as_casts_around_it(trace):
    torch._dynamo.reset()
    args = (int8(2, 3, 4), int8(2, 4, 5))
    if trace == "make_fx":
        traced = make_fx(batched)(*args)
        assert BMM in targets(traced.graph)
    elif "export" in trace:
        module = type("Batched", (torch.nn.Module,), {"forward": lambda self, a, b: batched(a, b)})()
        traced = torch.export.export(module, args, strict=trace == "strict export").module()
    else:
        traced = torch.compile(batched, backend=trace, fullgraph=True)
    same(traced(*args), batched(*args))


def test_the_first_use_may_be_inside_compile():
    script = (
        "import torch, polycast\n"
        "a = torch.ones(2, 2, 2, dtype=torch.int8)\n"
        "f = lambda a: polycast.out_dtype(torch.ops.aten.bmm.default, torch.int32, a, a)\n"
        "print(torch.compile(f, backend='eager', fullgraph=True)(a).unique().tolist())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[2]\n", done.stderr


# Where the kernel does not run.


@pytest.fixture
def ran(hand_made):
    """Register a backend for the CPU whose kernel for mm of two dtypes notes that it ran; return the notes."""
    notes = []

    def kernel(a, b):
        notes.append((torch.is_grad_enabled(), (a.float() @ b.float()).dtype))
        return torch.mm(a.to(torch.float64), b.to(torch.float64)).to(
            torch.float32 if a.is_floating_point() else torch.int32
        )

    hand_made("cpu", kernels={(MM, torch.int8, torch.int32): kernel, (MM, torch.bfloat16, torch.float32): kernel})
    return notes


def test_a_third_partys_kernel_runs(ran):
    a, b = int8(3, 4), int8(4, 5)
    same(out_dtype(MM, torch.int32, a, b), OPERATOR(MM, torch.int32, a, b))
    assert len(ran) == 1


@pytest.mark.parametrize(
    "dtypes", [(torch.int8, torch.int64), (torch.int16, torch.int32), (torch.float32, torch.float64)]
)
def test_other_dtypes_go_to_torchs_operator(ran, dtypes):
    a = torch.ones(2, 2, dtype=dtypes[0])
    same(out_dtype(MM, dtypes[1], a, a), OPERATOR(MM, dtypes[1], a, a))
    assert ran == []


def test_inputs_of_several_dtypes_go_to_torchs_operator(ran):
    a, b = int8(2, 2), int8(2, 2).to(torch.int16)
    same(out_dtype(MM, torch.int32, a, b), OPERATOR(MM, torch.int32, a, b))
    assert ran == []


@pytest.mark.parametrize("region", [polycast.autocast, torch.autocast])
def test_autocast_casts_nothing_of_a_kernel(ran, region):
    a, b = torch.randn(8, 8).bfloat16(), torch.randn(8, 8).bfloat16()
    with region("cpu"):
        result = out_dtype(MM, torch.float32, a, b)
        assert torch.is_autocast_enabled("cpu")
    same(result, torch.mm(a.double(), b.double()).float())
    assert [dtype for _, dtype in ran] == [torch.float32]


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_kernel_runs_in_every_grad_mode(ran, around):
    with around():
        a, b = int8(3, 4), int8(4, 5)
        same(out_dtype(MM, torch.int32, a, b), torch.mm(a.int(), b.int()))
    assert len(ran) == 1


def test_the_kernel_runs_where_a_default_device_is_set(ran):
    with torch.device("cpu"):
        out_dtype(MM, torch.int32, int8(3, 4), int8(4, 5))
    assert len(ran) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "operator"])
def test_backward_raises_what_torchs_operator_raises(ran, dtype):
    weight = torch.nn.Parameter(torch.arange(16.0).reshape(4, 4).bfloat16())
    result = out_dtype(MM, dtype, weight, weight)
    same(result.detach(), OPERATOR(MM, dtype, weight, weight).detach())
    errors = []
    for output in (result, OPERATOR(MM, dtype, weight, weight)):
        assert output.requires_grad
        assert not output.is_leaf
        with pytest.raises(RuntimeError) as caught:
            output.sum().backward()
        errors.append(str(caught.value))
    assert errors == ["Autograd not implemented for out_dtype"] * 2
    assert ran == ([(False, torch.float32)] if dtype is torch.float32 else [])


def test_nothing_is_recorded_where_no_gradient_is_wanted(ran):
    weight = torch.nn.Parameter(torch.randn(4, 4).bfloat16())
    with torch.no_grad():
        assert not out_dtype(MM, torch.float32, weight, weight).requires_grad
    assert ran == [(False, torch.float32)]


class Functions(TorchFunctionMode):
    def __init__(self):
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self):
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Functions, Dispatched])
def test_a_mode_sees_torchs_operator(ran, mode):
    a, b = int8(2, 2), int8(2, 2)
    with mode() as watching:
        result = out_dtype(MM, torch.int32, a, b)
    assert OPERATOR in watching.seen
    assert ran == []
    same(result, torch.mm(a.int(), b.int()))


def test_fake_and_meta_tensors_go_to_torchs_operator(ran, fake):
    on_cuda = torch.ones(3, 3, dtype=torch.bfloat16, device="cuda")
    for a in (int8(3, 3), torch.ones(3, 3, dtype=torch.int8, device="meta"), on_cuda):
        result = out_dtype(MM, torch.float32, a, a)
        assert (type(result), result.dtype, result.device) == (type(a), torch.float32, a.device)
    assert ran == []


def test_a_subclass_goes_to_torchs_operator(ran):
    class Mine(torch.Tensor):
        pass

    a = int8(3, 3)
    same(out_dtype(MM, torch.int32, a.as_subclass(Mine), a), OPERATOR(MM, torch.int32, a.as_subclass(Mine), a))
    assert ran == []


def test_a_sparse_tensor_goes_to_torchs_operator(ran):
    a = int8(3, 3)
    same(out_dtype(MM, torch.int32, a.to_sparse(), a), torch.mm(a.int(), a.int()))
    assert ran == []


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.vmap])
def test_vmap_does_what_it_does_with_torchs_operator(ran, transform):
    a = int8(2, 3, 3)
    error, message = outcome(transform(lambda a: OPERATOR(MM, torch.int32, a, a)), a)
    assert outcome(transform(lambda a: out_dtype(MM, torch.int32, a, a)), a) == (error, message)
    assert ran == []


def test_a_backend_that_is_unavailable_is_not_asked(hand_made):
    def never(*args):
        raise AssertionError

    kernels = {(MM, torch.int8, torch.int32): never, (BMM, torch.int8, torch.int32): never}
    hand_made("cpu", kernels=kernels, availability=lambda: polycast.Availability(False, "not today"))
    a = int8(2, 2)
    same(out_dtype(MM, torch.int32, a, a), OPERATOR(MM, torch.int32, a, a))
    with pytest.raises(ValueError, match="out_dtype only allows the following operators"):
        out_dtype(BMM, torch.int32, a[None], a[None])


def test_a_device_without_a_backend_goes_to_torchs_operator(monkeypatch):
    def find(device_type):
        raise polycast.BackendNotFoundError(device_type)

    monkeypatch.setattr(polycast.registry.registry, "find", find)
    a = int8(2, 2)
    same(out_dtype(MM, torch.int32, a, a), OPERATOR(MM, torch.int32, a, a))


def test_a_backend_that_cannot_be_loaded_says_so(monkeypatch):
    def find(device_type):
        raise polycast.BackendBrokenError("broken")

    monkeypatch.setattr(polycast.registry.registry, "find", find)
    with pytest.raises(polycast.BackendBrokenError, match="broken"):
        out_dtype(MM, torch.int32, int8(2, 2), int8(2, 2))


@pytest.mark.parametrize(("op", "shape"), [(MM, (3, 3)), (BMM, (2, 3, 3))], ids=["mm", "bmm"])
def test_a_kernel_may_leave_a_call_to_torch(hand_made, op, shape):
    hand_made("cpu", kernels={(op, torch.int8, torch.int32): lambda a, b: NotImplemented})
    a = int8(*shape)
    same(out_dtype(op, torch.int32, a, a), op(a.int(), a.int()))


@pytest.mark.parametrize(
    ("result", "got"), [(torch.ones(1), "one in torch.float32"), (None, "None"), ([1], "[1]")], ids=str
)
def test_a_kernel_that_returns_another_dtype_is_found_out(hand_made, result, got):
    hand_made("cpu", kernels={(MM, torch.int8, torch.int32): lambda a, b: result})
    with pytest.raises(polycast.InvalidBackendError) as caught:
        out_dtype(MM, torch.int32, int8(2, 2), int8(2, 2))
    assert str(caught.value) == f"the kernel for aten.mm.default must return a tensor in torch.int32, got {got}"


@pytest.mark.parametrize("op", [ATEN.mul_.Tensor, ATEN.sort.default, ATEN.mm.out], ids=str)
def test_a_kernel_is_for_a_functional_op_that_returns_one_tensor(hand_made, op):
    with pytest.raises(
        polycast.InvalidBackendError, match=f"kernels: {op} must be a functional op that returns one tensor"
    ):
        hand_made("cpu", kernels={(op, torch.int8, torch.int32): torch.mm})


# The kernels of devices that are not here.

ACCELERATORS = {"cuda": polycast_cuda.kernels, "xpu": polycast_xpu.kernels}
FLOAT32 = (MM, BMM, ADDMM, ATEN.baddbmm.default)
NEEDS = {MM: ATEN.mm.dtype, ADDMM: ATEN.mm.dtype, BMM: ATEN.bmm.dtype, ATEN.baddbmm.default: ATEN.bmm.dtype}


@pytest.mark.parametrize("device_type", [name for name, its in polycast.backends().items() if its.state != "missing"])
def test_a_table_has_a_kernel_only_where_the_dispatcher_has_the_op(device_type):
    key = torch._C._dispatch_key_for_device(device_type)
    for op, source, _ in polycast.get_backend(device_type).kernels:
        wanted = ATEN._int_mm.default if source is torch.int8 else NEEDS[op]
        assert torch._C._dispatch_has_kernel_for_dispatch_key(wanted.name(), key)


@pytest.mark.parametrize("kernels", ACCELERATORS.values(), ids=ACCELERATORS)
def test_the_table_of_an_accelerator_is_what_its_torch_has(kernels, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    floats = {(op, dtype, torch.float32) for op in FLOAT32 for dtype in (torch.bfloat16, torch.float16)}
    int_mm = {(MM, torch.int8, torch.int32): kernels.mm_int8}
    assert set(kernels.kernel_table(lambda op: True)) == {*int_mm, *floats}
    assert kernels.kernel_table(lambda op: op is ATEN._int_mm.default) == int_mm
    assert set(kernels.kernel_table(lambda op: op is ATEN.bmm.dtype)) == {
        key for key in floats if NEEDS[key[0]] is ATEN.bmm.dtype
    }
    assert kernels.kernel_table(lambda op: False) == {}


def test_rocm_has_only_the_int8_kernel(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    table = polycast_cuda.kernels.kernel_table(lambda op: True)
    assert list(table) == [(MM, torch.int8, torch.int32)]


@pytest.mark.parametrize("kernels", ACCELERATORS.values(), ids=ACCELERATORS)
def test_int8_of_an_accelerator_is_exact_around_the_limits_of_its_kernel(kernels):
    for rows, terms, columns in itertools.product((0, 1, 16, 17, 24, 33), (0, 1, 7, 8, 16), (0, 1, 8, 9)):
        a, b = int8(terms, rows).t(), int8(columns, terms).t()
        same(kernels.mm_int8(a, b), torch.mm(a.int(), b.int()))


def test_cudas_int8_kernel_is_called_within_its_limits(fake, monkeypatch):
    seen, int_mm = [], torch._int_mm

    def note(a, b):
        seen.append((tuple(a.shape), tuple(b.shape), [a.is_contiguous(), b.is_contiguous()]))
        return int_mm(a, b)

    monkeypatch.setattr(torch, "_int_mm", note)
    for rows, terms, columns in [(1, 1, 1), (16, 8, 8), (17, 8, 8), (24, 16, 8), (100, 50, 30)]:
        a = torch.ones(terms, rows, dtype=torch.int8, device="cuda").t()
        b = torch.ones(columns, terms, dtype=torch.int8, device="cuda").t()
        result = polycast_cuda.kernels.mm_int8(a, b)
        assert (result.shape, result.dtype, result.device) == ((rows, columns), torch.int32, a.device)
        assert result.is_contiguous()
    assert seen == [
        ((24, 8), (8, 8), [True, True]),
        ((24, 8), (8, 8), [True, True]),
        ((24, 8), (8, 8), [True, True]),
        ((24, 16), (16, 8), [True, True]),
        ((104, 56), (56, 32), [True, True]),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device_type", ACCELERATORS)
def test_float32_of_an_accelerator_has_the_shape_and_dtype_of_the_op(fake, device_type, dtype):
    def tensor(*shape):
        return torch.ones(shape, dtype=dtype, device=device_type)

    table = ACCELERATORS[device_type].kernel_table(lambda op: True)
    arguments = {
        MM: [(tensor(3, 4), tensor(4, 5)), (tensor(0, 4), tensor(4, 5))],
        BMM: [(tensor(2, 3, 4), tensor(2, 4, 5))],
        ADDMM: [(tensor(*bias), tensor(3, 4), tensor(4, 5)) for bias in [(5,), (3, 1), (3, 5), ()]],
        ATEN.baddbmm.default: [(tensor(*bias), tensor(2, 3, 4), tensor(2, 4, 5)) for bias in [(5,), (2, 3, 5)]],
    }
    for op, cases in arguments.items():
        for args in cases:
            result = table[op, dtype, torch.float32](*args)
            expected = op(*args)
            assert (result.dtype, result.shape, result.device) == (torch.float32, expected.shape, expected.device)


@pytest.mark.parametrize("kernels", ACCELERATORS.values(), ids=ACCELERATORS)
def test_an_accelerator_leaves_to_torch_what_its_kernels_do_not_take(kernels):
    assert kernels.mm_int8(int8(2, 2), int8(2, 2).int()) is NotImplemented
    assert kernels.mm_int8(int8(2, 3), int8(2, 2)) is NotImplemented


def test_a_product_in_float32_leaves_to_torch_what_it_does_not_take():
    half, single = torch.ones(2, 2).half(), torch.ones(2, 2)
    table = {op: kernel for (op, _, _), kernel in polycast.float32_products(lambda op: True).items()}
    mm, bmm, addmm, baddbmm = (table[op] for op in FLOAT32)
    assert mm(half, single) is NotImplemented
    assert addmm(half, single, single) is NotImplemented
    assert baddbmm(half, single[None], single[None]) is NotImplemented
    assert mm(half, half[0]) is NotImplemented
    assert bmm(half[None], half) is NotImplemented
    assert addmm(half[0], half, half[0]) is NotImplemented
    assert baddbmm(half[0], half, half) is NotImplemented
