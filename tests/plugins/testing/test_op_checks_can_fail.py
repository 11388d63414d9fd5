"""Each check of ops and kernels, on a backend that is wrong in what it checks: it fails and says what is wrong."""

import ctypes
import itertools
import re

import pytest
import torch

import polycast
from polycast import CastPolicy
from polycast.torch_internals.builtin_functions import const_data_ptr
from polycast_backends.cpu import CpuBackend
from polycast_plugins.testing import BackendConformance
from polycast_plugins.testing.torch_policies import call_as

pytestmark = pytest.mark.filterwarnings("ignore::polycast.errors.AutocastDisabledWarning")
MM_INT8 = (torch.ops.aten.mm.default, torch.int8, torch.int32)


def having(**attributes):
    return type("Wrong", (CpuBackend,), attributes)()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            CastPolicy.FP32,
            "aten::mm on cpu, with float32 inputs, in a region of torch.bfloat16: FP32 gives float32[2, 4] on cpu, the "
            "region gave bfloat16[2, 4] on cpu",
        ),
        (
            CastPolicy.BANNED,
            "expected a RuntimeError that begins 'aten::mm is unsafe to autocast on cpu. ' and says what to do, got "
            "tensor(",
        ),
    ],
)
def test_an_op_that_does_not_do_what_its_policy_says(policy, message, engine):
    backend = CpuBackend()
    polycast.plugin.register_backend(backend)
    suite = type("TestWrong", (BackendConformance,), {"backend": "cpu"})()
    with suite.opened() as device:
        backend.policies = {"aten::mm": policy}  # the kernels that are in place are for the table that was
        with pytest.raises(AssertionError, match=re.escape(message)):
            suite.test_op(device, "aten::mm")


@pytest.mark.parametrize(
    ("op", "policy"),
    [
        ("aten::stack", CastPolicy.LOWER_PRECISION_FP),
        ("aten::mm", CastPolicy.FP32),
        ("aten::mse_loss", CastPolicy.PROMOTE),
        ("aten::mm", CastPolicy.BANNED),
    ],
)
def test_a_policy_that_is_not_torchs_is_reported_unless_it_is_declared(op, policy, check, capsys):
    table = {**CpuBackend.policies, op: policy}
    with pytest.raises(AssertionError, match=rf"^1 ops of the table are cast .*\n{op}, {policy.name}: with \w+ inputs"):
        check("test_policies_are_torchs", having(policies=table))
    check("test_policies_are_torchs", having(policies=table, excluded_ops={op: "it is faster here"}))
    assert capsys.readouterr().out == f"{op}: {policy.name} on purpose: it is faster here\n"


def fails(self):
    raise OSError("no driver")


SAMPLES = {"aten::mm": lambda make: (make(2, 2), torch.nn.Parameter(make(2, 2)))}
WITHOUT_MM = {name: policy for name, policy in CpuBackend.policies.items() if name != "aten::mm"}
WRONG = [
    (
        ("test_mixed_dtypes",),
        having(missing_kernels={}, matched_ops=CpuBackend().matched_ops),
        r"aten::complex with bfloat16, bfloat16: expected complex64\[2, 3\], got RuntimeError: Expected both inputs",
    ),
    (
        ("test_op", "aten::cudnn_convolution"),
        having(policies={"aten::cudnn_convolution": CastPolicy.LOWER_PRECISION_FP}),
        "(?s)^aten::cudnn_convolution on cpu, with float32 .*the device cannot do what LOWER_PRECISION_FP says, outside"
        " of any region: .*If it lacks the op, add",
    ),
    (
        ("test_op", "aten::mm"),
        having(is_capturing=fails),
        r"LOWER_PRECISION_FP gives bfloat16\[2, 2\] on cpu, the region gave OSErr",
    ),
    (
        ("test_op", "aten::mm"),
        having(policies={"aten::mm": CastPolicy.BANNED}, remedies={"aten::mm": ""}),
        "and says what to do, got RuntimeError",
    ),
    (
        ("test_op", "aten::sofmax.int"),
        having(policies={"aten::sofmax.int": CastPolicy.FP32}),
        r"cpu: policies: (?!policy: ).*sofmax.*Correct the name or, .* name it in optional_ops",
    ),
    (
        ("test_no_op_of_torchs_table_is_missing",),
        having(policies=WITHOUT_MM),
        "does not name, and runs them: aten::mm. Give",
    ),
]
NOT_CALLED = [
    (
        ("test_op", "aten::celu"),
        having(policies={"aten::celu": CastPolicy.FP32}),
        "aten::celu was not called: no arguments for it are known. Give",
    ),
    (
        ("test_op", "aten::of_2_99"),
        having(policies={"aten::of_2_99": CastPolicy.FP32}, optional_ops={"aten::of_2_99": "it is new in 2.99"}),
        r"has no op aten::of_2_99: it is new in 2\.99",
    ),
    (
        ("test_kernel", "aten::mm:int8:int32"),
        having(kernels={MM_INT8: lambda x, y: NotImplemented}),
        "aten::mm:int8:int32 does not take the suite's arguments. Give it",
    ),
    (
        ("test_kernel", "aten::celu:float16:float32"),
        having(kernels={(torch.ops.aten.celu.default, torch.half, torch.float32): max}),
        "aten::celu was not called: no arguments for it are known",
    ),
]


@pytest.mark.parametrize(("call", "wrong", "message"), WRONG)
def test_a_wrong_backend_fails_the_check(call, wrong, message, engine, check):
    name, *arguments = call
    with pytest.raises(AssertionError, match=message):
        check(name, wrong, *arguments, samples=SAMPLES)


@pytest.mark.parametrize(("call", "backend", "message"), NOT_CALLED)
def test_what_cannot_be_called_is_reported(call, backend, message, check):
    name, *arguments = call
    with pytest.raises(pytest.skip.Exception, match=message):
        check(name, backend, *arguments)


def test_an_op_whose_values_differ(engine, check):
    table = {"conformance::unsteady": CastPolicy.LOWER_PRECISION_FP}
    calls = itertools.count()
    with torch.library._scoped_library("conformance", "FRAGMENT") as library:
        library.define("unsteady(Tensor x) -> Tensor")
        library.impl("unsteady", lambda x: x + next(calls), "CPU")
        samples = {"conformance::unsteady": lambda make: (make(2),)}
        with pytest.raises(AssertionError, match="the values differ from those of the policy: Tensor-likes are not cl"):
            check("test_op", having(policies=table), "conformance::unsteady", samples=samples)


@pytest.mark.parametrize("attribute", ["excluded_ops", "added_ops"])
def test_a_reason_for_an_op_that_torch_lacks_fails_unless_it_is_optional(check, attribute):
    reasons = {"aten::bnm": "it is faster here"}
    text = rf"^cpu: {attribute}: .*has no op 'bnm'; the nearest is 'bmm'.*Correct the name or, .* optional_ops"
    with pytest.raises(AssertionError, match=text):
        check("test_reasons_are_for_ops_of_torch", having(**{attribute: reasons}))
    check("test_reasons_are_for_ops_of_torch", having(optional_ops=reasons, **{attribute: reasons}))


def test_a_device_whose_in_place_updates_are_not_counted(monkeypatch, native, check):
    def fill(weight, value):
        ctypes.memmove(const_data_ptr(weight), const_data_ptr(torch.full_like(weight, value)), weight.nbytes)

    monkeypatch.setattr(torch.nn.Parameter, "fill_", fill, raising=False)
    with pytest.raises(AssertionError, match=re.escape("must be 6.0; it is [[2.0, 2.0], [2.0, 2.0]]. Do the device's")):
        check("test_weight_updated_in_a_region", CpuBackend())


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (lambda x, y: (x.int() @ y.int()).half(), "must return int32[32, 32], got float16[32, 32]"),
        (lambda x, y: (x.int() @ y.int())[:2], "must return int32[32, 32], got int32[2, 32]"),
        (lambda x, y: None, "must return int32[32, 32], got None"),
        (
            lambda x, y: (x @ y).int(),
            "aten::mm:int8:int32 on cpu, with contiguous inputs of shapes [32, 32], [32, 32], is not aten::mm: "
            "Tensor-likes are not equal!",
        ),
        (
            lambda x, y: x.int() @ y.as_strided(y.shape, (y.shape[1], 1)).int(),
            "with transposed inputs of shapes [32, 32], [32, 32], is not aten::mm",
        ),
        (
            lambda x, y: (x.int() @ y.int()).reshape(y.shape[1], x.shape[0]),
            "of shapes [32, 64], [64, 16], must return int32[32, 16], got int32[16",
        ),
        (
            lambda x, y: x[:, : x.shape[1] // 8 * 8].int() @ y[: x.shape[1] // 8 * 8].int(),
            "with contiguous inputs of shapes [3, 5], [5, 7], is not aten::mm",
        ),
    ],
)
def test_a_kernel_that_is_not_its_op(kernel, message, check):
    with pytest.raises(AssertionError, match=re.escape(message)):
        check("test_kernel", having(kernels={MM_INT8: kernel}), "aten::mm:int8:int32")


@pytest.mark.parametrize("fake", [False, True])
def test_a_device_that_is_said_to_be_there_and_is_not(fake, check):
    def to_device(suite, tensor):
        raise RuntimeError("no such device")

    why = (
        "cpu: availability() says that the device can be used, and a tensor cannot be put on it: RuntimeError: no such"
    )
    with pytest.raises(AssertionError, match=re.escape(why)):
        check("test_availability", CpuBackend(), fake=fake, to_device=to_device)


@pytest.mark.parametrize("op", [torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default])
@pytest.mark.parametrize(("taken", "given"), [(torch.int8, torch.int32), (torch.bfloat16, torch.float32)])
def test_a_kernel_that_is_its_op_passes(op, taken, given, check):
    right = having(kernels={(op, taken, given): lambda *inputs: op(*(value.to(given) for value in inputs))})
    check("test_kernel", right, f"{op.name()}:{str(taken)[6:]}:{str(given)[6:]}")


HALF = torch.ones(2, 2).half()


@pytest.mark.parametrize(
    ("policy", "op", "args"),
    [
        (CastPolicy.LOWER_PRECISION_FP, torch.ops.aten.mm.default, (HALF, HALF)),
        (CastPolicy.FP32, torch.ops.aten.mm.default, (HALF, HALF)),
        (CastPolicy.PROMOTE, torch.ops.aten.mm.default, (HALF, HALF)),
        (CastPolicy.FP32_SET_OPT_DTYPE, torch.ops.aten.sum.default, (HALF,)),
        (CastPolicy.FP32_APPEND_DTYPE, torch.ops.aten.norm.Scalar, (HALF, 2)),
    ],
)
def test_no_policy_casts_what_is_on_another_device(policy, op, args):
    assert call_as(policy, op, (args, {}), "cuda", torch.bfloat16).dtype is torch.float16


def test_an_op_that_fake_tensors_cannot_run_is_reported_as_not_called(hand_made, engine):
    hand_made("mtia", policies={"aten::cudnn_convolution": CastPolicy.LOWER_PRECISION_FP})
    suite = type("TestFake", (BackendConformance,), {"backend": "mtia", "fake": True})()
    message = "aten::cudnn_convolution was not called: fake tensors of mtia cannot run it: "
    with suite.opened() as device, pytest.raises(pytest.skip.Exception, match=message):
        suite.test_op(device, "aten::cudnn_convolution")


def test_a_device_that_torch_makes_no_fake_tensors_of_is_skipped_with_the_reason(hand_made):
    hand_made("maia")
    suite = type("TestFake", (BackendConformance,), {"backend": "maia", "fake": True})()
    message = "cannot make fake tensors of maia that autocast sees: check it on the device"
    with pytest.raises(pytest.skip.Exception, match=message), suite.opened():
        pass
