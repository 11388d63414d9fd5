"""Each check of the suite, on a backend that is wrong in what it checks: it fails and says what is wrong."""

import inspect
import itertools
import re
from functools import partial
from pathlib import Path

import pytest
import torch

import polycast
from polycast import Availability, CastPolicy
from polycast.testing import BackendConformance
from polycast.testing.oracle import call_as
from polycast_cpu import CpuBackend

pytestmark = pytest.mark.filterwarnings("ignore::polycast.AutocastDisabledWarning")

MM_INT8 = (torch.ops.aten.mm.default, torch.int8, torch.int32)


class Leaky(CpuBackend):
    """Its availability check leaves autocast enabled on the thread that asks, from the second time on."""

    def __init__(self):
        self.asked = 0

    def availability(self):
        self.asked += 1
        if self.asked > 1:
            torch.set_autocast_enabled("cpu", True)
        return Availability(True)


class Flaky(CpuBackend):
    """It is available once."""

    def __init__(self):
        self.answers = itertools.chain([True], itertools.repeat(False))

    def availability(self):
        return Availability(next(self.answers), "gone")


class Capturing(CpuBackend):
    """It is always recording a graph, as it says."""

    def is_capturing(self):
        return True


def saying(**answers):
    """Return a backend whose methods give these answers, or raise them."""

    def method(answer):
        def say(self, *_):
            if isinstance(answer, Exception):
                raise answer
            return answer

        return say

    return type("Wrong", (CpuBackend,), {name: method(answer) for name, answer in answers.items()})()


def having(**attributes):
    """Return a backend with these attributes."""
    return type("Wrong", (CpuBackend,), attributes)()


def check(name, wrong, *arguments, break_later=None, **attributes):
    """Run one check of the suite on a backend for the CPU."""
    polycast.register_backend(wrong)
    if break_later is not None:
        break_later(wrong)
    suite = type("TestWrong", (BackendConformance,), {"backend": "cpu", **attributes})()
    method = getattr(suite, name)
    try:
        if "device" in inspect.signature(method).parameters:
            with suite.opened() as device:
                return method(device, *arguments)
        return method(*arguments)
    finally:
        torch.set_autocast_enabled("cpu", False)


CONTRACT = [
    (
        "test_availability",
        partial(saying, availability=OSError("no driver")),
        "cpu: availability() raised OSError: no driver.",
    ),
    (
        "test_availability",
        partial(saying, availability=True),
        "cpu: availability() returned True, expected a polycast.Avail",
    ),
    (
        "test_availability",
        partial(saying, availability=Availability(1)),
        "cpu: availability() returned Availability(available=1, reason=''), expected a polycast.Availability of a bool",
    ),
    (
        "test_availability",
        partial(saying, availability=Availability(False, " ")),
        "says that the device cannot be used and not",
    ),
    (
        "test_supported_dtypes",
        partial(saying, supported_dtypes=OSError("no driver")),
        "supported_dtypes() raised OSError",
    ),
    ("test_supported_dtypes", partial(saying, supported_dtypes=()), "floating-point dtypes, at least one; got ()"),
    (
        "test_supported_dtypes",
        partial(saying, supported_dtypes=[torch.int8]),
        "floating-point dtypes, at least one; got [torch",
    ),
    (
        "test_supported_dtypes",
        partial(saying, supported_dtypes=[torch.half] * 2),
        "a sequence of different floating-point",
    ),
    ("test_supported_dtypes", partial(saying, supported_dtypes={torch.half}), "must return a sequence of different"),
    (
        "test_default_dtype",
        partial(saying, supported_dtypes=[torch.half]),
        "default_dtype torch.bfloat16 is none of supported",
    ),
    (
        "test_dtype_availability",
        partial(saying, dtype_availability=Availability(True)),
        "dtype_availability(torch.float32) says",
    ),
    (
        "test_dtype_availability",
        partial(saying, dtype_availability=Availability(False)),
        "says False, and supported_dtypes()",
    ),
    (
        "test_dtype_availability",
        partial(saying, dtype_availability=None),
        "returned None, expected a polycast.Availability",
    ),
    ("test_is_capturing", Capturing, "is_capturing() must return False while nothing is recorded, got True."),
    (
        "test_is_capturing",
        partial(saying, is_capturing=OSError("no driver")),
        "is_capturing() raised OSError: no driver.",
    ),
]

REGIONS = [
    ("test_region_sets_and_restores", Leaky, "after a region of None: enabled is True, expected False"),
    ("test_region_sets_and_restores", Flaky, "in a region of None: enabled is False, expected True"),
    (
        "test_region_of_an_unsupported_dtype_is_disabled",
        partial(saying, dtype_availability=Availability(True)),
        "a region of torch.int8 on cpu must warn once that it is disabled; it warned: []",
    ),
    ("test_exception_restores", Leaky, "after an exception in a region: enabled is True, expected False"),
    ("test_nested_regions", Leaky, "after the third region: enabled is True, expected False"),
    ("test_nested_regions", Flaky, "in the third region: enabled is False, expected True"),
    ("test_region_nested_in_itself", Leaky, "after a region nested in itself: enabled is True, expected False"),
    ("test_region_nested_in_itself", Flaky, "in a region nested in itself twice: enabled is False, expected True"),
    ("test_threads_have_their_own_state", Leaky, "after regions on two threads: enabled is True, expected False"),
    ("test_threads_have_their_own_state", Flaky, "in its own regions: enabled is False, expected True"),
    ("test_decorated_generator", Leaky, "between the steps of a decorated generator: enabled is True, expected"),
    ("test_decorated_generator", Flaky, "in a decorated generator: enabled is False, expected True"),
    ("test_generator_closed_late", Leaky, "in a region was closed late: enabled is True, expected False"),
    ("test_decorated_coroutine", Leaky, "in the event loop, after decorated coroutines: enabled is True"),
    ("test_decorated_coroutine", Flaky, "in a decorated coroutine: enabled is False, expected True"),
]

OTHERS = [
    ("test_weight_is_cast_once_in_a_region", Capturing, "two uses of one weight in a region on cpu (trained) must"),
    ("test_weight_cache_across_regions", Capturing, "two regions on cpu that share a WeightCache must make one cast"),
    (
        "test_custom_function_has_the_state_of_its_region",
        Leaky,
        "after the backward of a decorated function: enabled",
    ),
    ("test_custom_function_has_the_state_of_its_region", Flaky, "in the forward of a decorated function on cpu: {"),
    ("test_custom_function_with_cast_inputs", Flaky, "(enabled, dtype) was [(False, torch.bfloat16)]"),
]


@pytest.mark.parametrize(("name", "wrong", "message"), CONTRACT + REGIONS + OTHERS)
def test_a_wrong_backend_fails_the_check(name, wrong, message, engine):
    with pytest.raises(AssertionError, match=re.escape(message)):
        check(name, wrong())


def test_a_backend_that_breaks_the_contract_is_told_every_problem():
    def break_later(backend):
        backend.default_dtype, backend.remedies = torch.int8, None

    with pytest.raises(polycast.InvalidBackendError, match=r"(?s)default_dtype must be .*remedies must map"):
        check("test_contract", CpuBackend(), break_later=break_later)


def test_every_check_fails_in_this_file():
    checks = {name for name in dir(BackendConformance) if name.startswith("test_")}
    source = inspect.getsource(inspect.getmodule(test_every_check_fails_in_this_file))
    elsewhere = {"test_import_leaves_torch_as_it_was"}  # changes torch, and so in a process of its own
    assert {name for name in checks - elsewhere if f'"{name}"' not in source} == set()


@pytest.mark.parametrize(
    ("policies", "op", "message"),
    [
        (
            {"aten::mm": CastPolicy.FP32},
            "aten::mm",
            "aten::mm on cpu, with float32 inputs, in a region of torch.bfloat16: FP32 says float32[2, 4] on cpu, the "
            "region gave bfloat16[2, 4] on cpu",
        ),
        (
            {"aten::mm": CastPolicy.BANNED},
            "aten::mm",
            "expected a RuntimeError that begins 'aten::mm is unsafe to autocast on cpu. ' and says what to do, got "
            "tensor(",
        ),
    ],
)
def test_an_op_that_does_not_do_what_its_policy_says(policies, op, message, engine):
    backend = CpuBackend()
    polycast.register_backend(backend)
    suite = type("TestWrong", (BackendConformance,), {"backend": "cpu"})()
    with suite.opened() as device:
        backend.policies = policies  # the kernels that are in place are for the table that was
        with pytest.raises(AssertionError, match=re.escape(message)):
            suite.test_op(device, op)


def test_an_op_that_the_device_lacks(engine):
    table = {"aten::_thnn_fused_gru_cell": CastPolicy.LOWER_PRECISION_FP}
    message = r"the device cannot do what LOWER_PRECISION_FP says, outside of any region: .*If it lacks the op, name"
    with pytest.raises(AssertionError, match=rf"(?s)^aten::_thnn_fused_gru_cell on cpu, with float32 .*{message}"):
        check("test_op", having(policies=table), "aten::_thnn_fused_gru_cell")


def test_an_op_that_fails_in_a_region_only(engine):
    wrong = saying(is_capturing=OSError("no driver"))
    samples = {"aten::mm": lambda make: (make(2, 2), torch.nn.Parameter(make(2, 2)))}
    with pytest.raises(AssertionError, match=r"LOWER_PRECISION_FP says bfloat16\[2, 2\] on cpu, the region gave OSErr"):
        check("test_op", wrong, "aten::mm", samples=samples)


def test_an_op_whose_values_differ(engine):
    table = {"conformance::unsteady": CastPolicy.LOWER_PRECISION_FP}
    calls = itertools.count()
    with torch.library._scoped_library("conformance", "FRAGMENT") as library:
        library.define("unsteady(Tensor x) -> Tensor")
        library.impl("unsteady", lambda x: x + next(calls), "CPU")
        with pytest.raises(AssertionError, match="the values are not those of the policy: Tensor-likes are not close"):
            check(
                "test_op",
                having(policies=table),
                "conformance::unsteady",
                samples={"conformance::unsteady": lambda make: (make(2),)},
            )


def test_a_ban_that_does_not_say_what_to_do(engine):
    wrong = having(policies={"aten::mm": CastPolicy.BANNED}, remedies={"aten::mm": ""})
    with pytest.raises(AssertionError, match="and says what to do, got RuntimeError"):
        check("test_op", wrong, "aten::mm")


def test_an_op_without_known_arguments_is_reported_as_not_called():
    table = {"aten::celu": CastPolicy.FP32}
    with pytest.raises(pytest.skip.Exception, match="aten::celu was not called: no arguments for it are known. Give"):
        check("test_op", having(policies=table), "aten::celu")


def test_an_op_that_this_torch_lacks_is_reported():
    table = {"aten::of_another_torch": CastPolicy.FP32}
    with pytest.raises(pytest.skip.Exception, match="has no op aten::of_another_torch"):
        check("test_op", having(policies=table), "aten::of_another_torch")


def test_a_table_that_lacks_an_op_of_torchs():
    table = {name: policy for name, policy in CpuBackend.policies.items() if name != "aten::mm"}
    named = Path(__file__).with_name("cpu.txt")
    with pytest.raises(AssertionError, match="does not name, and runs them with kernels of its own: aten::mm. Give"):
        check("test_no_op_of_torchs_table_is_missing", having(policies=table), expected_failures=named)


def test_a_device_whose_in_place_updates_are_not_counted(monkeypatch, engine):
    monkeypatch.setattr(torch.nn.Parameter, "fill_", lambda weight, value: weight.data.fill_(value), raising=False)
    with pytest.raises(AssertionError, match=re.escape("must be 6.0; it is [[2.0, 2.0], [2.0, 2.0]]. Do the device's")):
        check("test_weight_updated_in_a_region", CpuBackend())


@pytest.mark.parametrize("name", ["test_region_inside_a_compiled_function", "test_region_around_a_compiled_function"])
def test_a_compiler_that_loses_the_region(monkeypatch, name, engine):
    monkeypatch.setattr(torch, "compile", lambda function, backend: lambda *inputs: function(*inputs).float())
    with pytest.raises(AssertionError, match="mm on cpu gave torch.float32; as it is it gives torch.bfloat16"):
        check(name, CpuBackend(), "eager")


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            lambda x, y: (x.int() @ y.int()).half(),
            "must return torch.int32 of shape [32, 32], got torch.float16 of shape",
        ),
        (
            lambda x, y: (x.int() @ y.int())[:2],
            "must return torch.int32 of shape [32, 32], got torch.int32 of shape [2",
        ),
        (lambda x, y: None, "must return torch.int32 of shape [32, 32], got None"),
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
            "of shapes [32, 64], [64, 16], must return torch.int32 of shape [32, 16], got torch.int32 of shape [16",
        ),
        (
            lambda x, y: x[:, : x.shape[1] // 8 * 8].int() @ y[: x.shape[1] // 8 * 8].int(),
            "with contiguous inputs of shapes [3, 5], [5, 7], is not aten::mm",
        ),
    ],
)
def test_a_kernel_that_is_not_its_op(kernel, message):
    with pytest.raises(AssertionError, match=re.escape(message)):
        check("test_kernel", having(kernels={MM_INT8: kernel}), "aten::mm:int8:int32")


@pytest.mark.parametrize("fake", [False, True])
def test_a_device_that_is_said_to_be_there_and_is_not(fake):
    def to_device(suite, tensor):
        raise RuntimeError("no such device")

    text = (
        "cpu: availability() says that the device can be used, and a tensor cannot be put on it: RuntimeError: no such"
    )
    with pytest.raises(AssertionError, match=re.escape(text)):
        check("test_availability", CpuBackend(), fake=fake, to_device=to_device)


@pytest.mark.parametrize("op", [torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default])
@pytest.mark.parametrize(("taken", "given"), [(torch.int8, torch.int32), (torch.bfloat16, torch.float32)])
def test_a_kernel_that_is_its_op_passes(op, taken, given):
    right = having(kernels={(op, taken, given): lambda *inputs: op(*(value.to(given) for value in inputs))})
    check("test_kernel", right, f"{op.name()}:{str(taken)[6:]}:{str(given)[6:]}")


def test_a_kernel_that_declines_the_arguments_is_reported_as_not_called():
    wrong = having(kernels={MM_INT8: lambda x, y: NotImplemented})
    with pytest.raises(pytest.skip.Exception, match="aten::mm:int8:int32 does not take the suite's arguments. Give it"):
        check("test_kernel", wrong, "aten::mm:int8:int32")


def test_kernels_without_known_arguments_are_reported_as_not_called():
    wrong = having(kernels={(torch.ops.aten.celu.default, torch.half, torch.float32): max})
    with pytest.raises(pytest.skip.Exception, match="aten::celu was not called: no arguments for it are known"):
        check("test_kernel", wrong, "aten::celu:float16:float32")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("aten::mm  the device has none\naten::celu  the table had it\n", "no test of cpu: aten::celu. Remove or"),
        ("test_gone  it was renamed\n", "no test of cpu: test_gone. Remove"),
        ("# a comment\n\naten::mm:int8:int8  the kernel is gone\n", "no test of cpu: aten::mm:int8:int8. Remove"),
        ("aten::mm\n", "line 1: 'aten::mm' has no reason. Write it after the name, on the same line."),
        ("aten::mm  no\n#\naten::mm  none\n", "line 3: 'aten::mm' is named twice. Remove one of the lines."),
    ],
)
def test_a_file_of_expected_failures_that_is_wrong(text, message, tmp_path):
    file = tmp_path / "expected.txt"
    file.write_text(text)
    with pytest.raises((AssertionError, ValueError), match=re.escape(message)):
        check("test_expected_failures", CpuBackend(), expected_failures=file)


def test_a_device_that_is_absent_is_skipped_with_its_reason():
    message = re.escape("cpu is not available: gone. With fake = True (--polycast-fake) its rules are checked on fake")
    with pytest.raises(pytest.skip.Exception, match=message):
        check("test_exception_restores", saying(availability=Availability(False, "gone")))


def test_a_suite_that_names_no_backend():
    with pytest.raises(
        pytest.UsageError, match="TestWrong names no backend: set the attribute `backend` to its device"
    ):
        check("test_contract", CpuBackend(), backend="")


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
    hand_made("mtia", policies={"aten::_thnn_fused_gru_cell": CastPolicy.LOWER_PRECISION_FP})
    suite = type("TestFake", (BackendConformance,), {"backend": "mtia", "fake": True})()
    message = "aten::_thnn_fused_gru_cell was not called: fake tensors of mtia cannot run it: "
    with suite.opened() as device, pytest.raises(pytest.skip.Exception, match=message):
        suite.test_op(device, "aten::_thnn_fused_gru_cell")


def test_a_device_that_torch_makes_no_fake_tensors_of_is_skipped_with_the_reason(hand_made):
    hand_made("maia")
    suite = type("TestFake", (BackendConformance,), {"backend": "maia", "fake": True})()
    message = "cannot make fake tensors of maia that autocast sees: its rules can be checked on the device only"
    with pytest.raises(pytest.skip.Exception, match=message), suite.opened():
        pass
