"""Each check of the contract, of regions and of the suite itself, on a backend that is wrong in what it checks."""

import itertools
import re
from pathlib import Path

import pytest
import torch

from polycast.plugin import Availability, refresh
from polycast_backends.cpu import CpuBackend
from polycast_plugins.testing import BackendConformance

pytestmark = pytest.mark.filterwarnings("ignore::polycast.errors.AutocastDisabledWarning")


class Leaky(CpuBackend):
    """Its availability check leaves autocast enabled on the thread that asks, from the second time on."""

    def __init__(self):
        self.asked = 0

    def availability(self):
        refresh("cpu")  # so that it is asked again
        self.asked += 1
        if self.asked > 1:
            torch.set_autocast_enabled("cpu", True)
        return Availability(True)


class Flaky(CpuBackend):
    """It is available once."""

    def __init__(self):
        self.answers = itertools.chain([True], itertools.repeat(False))

    def availability(self):
        refresh("cpu")  # so that it is asked again
        return Availability(next(self.answers), "gone")


def saying(**answers):
    """Return a backend whose methods give these answers, or raise them."""

    def method(answer):
        def say(self, *_):
            if isinstance(answer, Exception):
                raise answer
            return answer

        return say

    return type("Wrong", (CpuBackend,), {name: method(answer) for name, answer in answers.items()})()


CONTRACT = {
    "test_availability": [
        (OSError("no driver"), "cpu: availability() raised OSError: no driver."),
        (True, "cpu: availability() returned True, expected a polycast.plugin.Avail"),
        (TypeError("an Availability has a bool"), "cpu: availability() raised TypeError: an Availability has a bool."),
        (Availability(False, " "), "says that the device cannot be used and gives no"),
    ],
    "test_supported_dtypes": [
        (OSError("no driver"), "supported_dtypes() raised OSError"),
        ((), "floating-point dtypes, at least one; got ()"),
        ([torch.int8], "floating-point dtypes, at least one; got [torch"),
        ([torch.half] * 2, "a sequence of different floating-point"),
        ({torch.half}, "must return a sequence of different"),
    ],
    "test_dtype_availability": [
        (Availability(True), "dtype_availability(torch.float32) says"),
        (Availability(False), "says False, and supported_dtypes()"),
        (None, "returned None, expected a polycast.plugin.Availability"),
    ],
    "test_is_capturing": [
        (True, "is_capturing() must return False while no graph is captured, got True."),
        (OSError("no driver"), "is_capturing() raised OSError: no driver."),
    ],
}
"""Answers of the method that each check is of."""
REGIONS = [
    ("test_region_sets_and_restores", Leaky, "after a region of None: enabled is True, expected False"),
    ("test_region_sets_and_restores", Flaky, "in a region of None: enabled is False, expected True"),
    (
        "test_region_of_an_unsupported_dtype_is_disabled",
        saying(dtype_availability=Availability(True)),
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
    ("test_default_dtype", saying(supported_dtypes=[torch.half]), "default_dtype torch.bfloat16 is not in supported"),
    ("test_custom_function_has_the_state_of_its_region", Leaky, "after the backward of a decorated function: enabled"),
    (
        "test_custom_function_has_the_state_of_its_region",
        Flaky,
        "in the forward of a decorated function: enabled is False, expected True",
    ),
    ("test_custom_function_with_cast_inputs", Flaky, "(enabled, dtype) was [(False, torch.bfloat16)]"),
]
ANSWERS = [
    (name, saying(**{name.removeprefix("test_"): answer}), message)
    for name, answers in CONTRACT.items()
    for answer, message in answers
]


CACHES = [
    ("test_weight_is_cast_once_in_a_region", "two uses of one weight in a region on cpu (trained) must"),
    ("test_weight_cache_across_regions", "two regions on cpu that share a WeightCache must make one cast"),
]


@pytest.mark.parametrize(("name", "message"), CACHES)
def test_a_backend_that_caches_nothing_fails_the_check(name, message, native, check):
    with pytest.raises(AssertionError, match=re.escape(message)):
        check(name, saying(is_capturing=True))


@pytest.mark.parametrize(("name", "wrong", "message"), ANSWERS + REGIONS + OTHERS)
def test_a_wrong_backend_fails_the_check(name, wrong, message, engine, check):
    with pytest.raises(AssertionError, match=re.escape(message)):
        check(name, wrong() if isinstance(wrong, type) else wrong)


@pytest.mark.parametrize("raises", [True, False])
def test_a_higher_order_op_that_raises_or_is_not_autocast_fails_the_check(raises, check, monkeypatch):
    def kernel(*args):
        if raises:
            raise NotImplementedError("no kernel")
        return (torch.ones(4, 4),)

    cond = torch.ops.higher_order.cond
    monkeypatch.setitem(cond.py_kernels, torch._C.DispatchKey.AutocastCPU, kernel)
    monkeypatch.setattr(cond, "non_fallthrough_keys", cond.non_fallthrough_keys.add(torch._C.DispatchKey.AutocastCPU))
    message = "torch.cond raises in a region on cpu: no kernel" if raises else "gave torch.float32 in a region on cpu"
    with pytest.raises(AssertionError, match=message):
        check("test_higher_order_op", CpuBackend())
    cond._dispatch_cache.clear()


def test_every_check_fails_in_one_of_these_files():
    checks = {name for name in dir(BackendConformance) if name.startswith("test_")}
    files = Path(__file__).parent.glob("test_*_checks_can_fail.py")
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    elsewhere = {"test_import_leaves_torch_as_it_was"}  # changes torch, and so in a process of its own
    assert {name for name in checks - elsewhere if f'"{name}"' not in source} == set()


@pytest.mark.parametrize("name", ["test_region_inside_a_compiled_function", "test_region_around_a_compiled_function"])
def test_a_compiler_that_loses_the_region(monkeypatch, name, engine, check):
    monkeypatch.setattr(torch, "compile", lambda function, backend: lambda *inputs: function(*inputs).float())
    with pytest.raises(AssertionError, match="mm on cpu gave torch.float32; in eager mode it gives torch.bfloat16"):
        check(name, CpuBackend(), "eager")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("aten::mm  the device has none\naten::celu  the table had it\n", " or a test of cpu: aten::celu. Remove or"),
        ("test_gone  it was renamed\n", " or a test of cpu: test_gone. Remove"),
        ("# a comment\n\naten::mm:int8:int8  the kernel is gone\n", " or a test of cpu: aten::mm:int8:int8. Remove"),
        ("aten::mm\n", "line 1: 'aten::mm' has no reason. Write it after the name, on the same line."),
        ("aten::mm  no\n#\naten::mm  none\n", "line 3: 'aten::mm' is named twice. Remove one of the lines."),
    ],
)
def test_a_file_of_expected_failures_that_is_wrong(text, message, tmp_path, check):
    file = tmp_path / "expected.txt"
    file.write_text(text)
    with pytest.raises((AssertionError, ValueError), match=re.escape(message)):
        check("test_expected_failures", CpuBackend(), expected_failures=file)


def test_a_device_that_is_absent_is_skipped_with_its_reason(check):
    message = re.escape("cpu is not available: gone. Set fake = True (--polycast-fake) to check it on fake")
    with pytest.raises(pytest.skip.Exception, match=message):
        check("test_exception_restores", saying(availability=Availability(False, "gone")))


def test_a_suite_that_names_no_backend(check):
    with pytest.raises(
        pytest.UsageError, match="TestWrong names no backend: set the attribute `backend` to its device"
    ):
        check("test_contract", CpuBackend(), backend="")
