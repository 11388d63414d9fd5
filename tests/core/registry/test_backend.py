"""The contract of a backend, and the defaults of its members; plugins whose backend violates it are rejected."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch

from polycast import CastPolicy
from polycast.errors import InvalidBackendError
from polycast.plugin import Availability, Backend
from polycast.registry.validation import validate

from .conftest import HpuBackend

MM = torch.ops.aten.mm.default
INT8 = (MM, torch.int8, torch.int32)


def with_(**attributes):
    return type("HpuBackend", (HpuBackend,), attributes)()


def problems(backend, device_type=None):
    """Return the problems of a backend, without the first line of the error."""
    with pytest.raises(InvalidBackendError) as error:
        validate(backend, device_type)
    first, *lines = str(error.value).splitlines()
    cls = type(backend)
    assert first == f"{cls.__module__}.{cls.__name__} violates the contract of polycast.plugin.Backend:"
    return [line.removeprefix("  - ") for line in lines]


def test_validate_returns_a_valid_backend(subtests):
    dtypes = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
    for attributes in ({}, *({"default_dtype": dtype} for dtype in dtypes), {"kernels": {INT8: torch.mm}}):
        with subtests.test(attributes=attributes):
            backend = with_(**attributes)
            assert validate(backend) is validate(backend, "hpu") is backend


def test_attributes_may_be_set_on_the_instance():
    backend = HpuBackend()
    backend.device_type = "ipu"
    assert validate(backend, "ipu") is backend


@pytest.mark.parametrize(
    ("value", "got"),
    [(HpuBackend, "the class HpuBackend"), (None, "NoneType: None"), ([1], "list: [1]"), ("hpu", "str: 'hpu'")],
    ids=repr,
)
def test_an_object_of_another_type_is_rejected(value, got):
    text = f"expected an instance of polycast.plugin.Backend, got {got}"
    with pytest.raises(InvalidBackendError, match=f"^{re.escape(text)}$"):
        validate(value)


def test_a_bare_backend_lacks_all_required_members():
    assert problems(type("BareBackend", (Backend,), {"__module__": __name__})()) == [
        "device_type is missing",
        "default_dtype is missing",
        "policies is missing",
        "supported_dtypes() is not implemented",
        "availability() is not implemented",
    ]


UNKNOWN = "is not a device that torch knows; an out-of-tree device is named first"
KERNEL = "must be (OpOverload, input dtype, output dtype), and its kernel callable"
SUCH_AS = "such as 'aten::mm' or 'aten::norm.Scalar'"
INVALID = [
    *(("device_type", each, f"device_type must be a str, got {each!r}") for each in (None, torch.device("hpu"), 7)),
    ("device_type", "hpu:1", "device_type 'hpu:1' must be a type without an index: 'hpu'"),
    *(("device_type", each, f"device_type {each!r} {UNKNOWN}") for each in ("HPU", "", "vpu")),
    ("device_type", "meta", "torch has no Autocast dispatch key for 'meta'"),
    *(
        ("default_dtype", each, f"default_dtype must be a floating-point torch.dtype, got {each!r}")
        for each in (torch.int8, torch.complex64, torch.bool, "float16", None, float)
    ),
    ("policies", ["aten::mm"], "policies: must map op names to CastPolicy, got list"),
    *(
        ("matched_ops", each, f"matched_ops must be a frozenset of op names, got {each!r}")
        for each in (None, "aten::mv", ["aten::mv"])
    ),
    (
        "matched_ops",
        frozenset({"aten::mv", "mv"}),
        "matched_ops: 'mv' is not an op name as the dispatcher has it, such as 'aten::mm' or 'aten::norm.Scalar'",
    ),
    *(
        ("kernels", {key: torch.mm}, f"kernels: {key!r} {KERNEL}")
        for key in (
            *(MM, (MM, torch.int8), (MM, torch.int8, torch.int32, torch.int32), (MM, "int8", torch.int32)),
            *((torch.ops.aten.mm, torch.int8, torch.int32), ("aten::mm", torch.int8, torch.int32), "aten::mm"),
        )
    ),
    *(("kernels", {INT8: each}, f"kernels: {INT8!r} {KERNEL}") for each in (None, "mm")),
    *(
        ("kernels", each, f"kernels must map (OpOverload, input dtype, output dtype) to a callable, got {name}")
        for each, name in (([], "list"), (None, "NoneType"), (torch.mm, "builtin_function_or_method"))
    ),
    *(
        ("ops_in_cpp", each, f"ops_in_cpp must be a list or tuple of the names of packages, got {each!r}")
        for each in ("acme_npu.native", None, ["acme npu"], [""], [1])
    ),
    *(
        (name, each, f"{name} must map op names to sentences")
        for name in ("remedies", "excluded_ops", "added_ops", "optional_ops")
        for each in (None, [], "none", {"aten::mm": 1}, {1: "do not"}, {"aten::mm": None})
    ),
    *(
        (name, {"mm": "so it is"}, f"{name}: 'mm' is not an op name as the dispatcher has it, {SUCH_AS}")
        for name in ("remedies", "excluded_ops", "added_ops", "optional_ops")
    ),
    *(
        ("missing_kernels", each, "missing_kernels must map op names and layouts to collections of torch.dtype")
        for each in (None, [], {"mm": ()}, {"aten::mm": torch.float16}, {torch.strided: ["float16"]})
    ),
]


def test_each_violation_of_the_contract_has_its_sentence(subtests):
    for attribute, value, problem in INVALID:
        with subtests.test(attribute=attribute, value=value):
            assert problems(with_(**{attribute: value})) == [problem]


def test_the_device_must_match_the_entry_point():
    assert problems(HpuBackend(), "ipu") == [
        "device_type is 'hpu', but the entry point is named 'ipu': they must be equal"
    ]


def test_the_problems_of_a_table_are_listed_one_by_one():
    assert problems(with_(policies={"mm": CastPolicy.FP32, "aten::exp": "fp32", "aten::log": CastPolicy.FP32})) == [
        "policies: 'mm' is not an op name as the dispatcher has it, such as 'aten::mm' or 'aten::norm.Scalar'",
        "policies: the policy of 'aten::exp' must be a CastPolicy, got 'fp32'",
    ]


def test_defaults_of_the_optional_members():
    backend = HpuBackend()
    assert (dict(backend.kernels), dict(backend.remedies), backend.is_capturing()) == ({}, {}, False)


@pytest.mark.parametrize(
    ("said", "captures"), [("Backend doesn't support stream capture query.", False), ("lost", None)]
)
def test_a_stream_without_capture_queries_is_not_capturing_and_other_errors_propagate(monkeypatch, said, captures):
    class Stream:
        def is_capturing(self):
            raise RuntimeError(said)

    monkeypatch.setattr("polycast.registry.backend.STREAMS_KNOW_CAPTURE", True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("hpu"))
    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    monkeypatch.setattr(torch, "hpu", SimpleNamespace(is_initialized=lambda: True), raising=False)
    if captures is None:
        with pytest.raises(RuntimeError, match=said):
            HpuBackend().is_capturing()
    else:
        assert HpuBackend().is_capturing() is captures


def test_shared_defaults_are_read_only():
    with pytest.raises(TypeError, match="does not support item assignment"):
        Backend.kernels[MM, torch.int8, torch.int32] = torch.mm
    with pytest.raises(TypeError, match="does not support item assignment"):
        Backend.remedies["aten::mm"] = "do not"


@pytest.mark.parametrize("method", ["supported_dtypes", "availability"])
def test_required_methods_raise_not_implemented_error(method):
    with pytest.raises(NotImplementedError):
        getattr(Backend(), method)()


def test_an_availability_has_a_truth_and_is_immutable():
    answer = Availability(False, "no device")
    assert (bool(answer), bool(Availability(True, "reason"))) == (False, True)
    assert answer == dataclasses.replace(answer)
    with pytest.raises(dataclasses.FrozenInstanceError):
        answer.reason = ""


@pytest.mark.parametrize(("available", "reason"), [(1, ""), ("no", ""), (None, ""), (True, None), (False, 3)])
def test_an_availability_of_other_types_is_refused(available, reason):
    got = re.escape(f"got {available!r}, {reason!r}")
    with pytest.raises(TypeError, match=f"^an Availability has a bool and a str, the reason; {got}$"):
        Availability(available, reason)


def test_a_plugin_is_rejected_with_every_problem_at_once(run, plugin):
    amendment = "AcmeBackend.default_dtype = torch.int8\nAcmeBackend.policies = []\ndel AcmeBackend.availability"
    plugin("acme-hpu", "hpu", amendment)
    text = (
        "acme_hpu.AcmeBackend violates the contract of polycast.plugin.Backend:"
        "\n  - default_dtype must be a floating-point torch.dtype, got torch.int8"
        "\n  - policies: must map op names to CastPolicy, got list"
        "\n  - availability() is not implemented"
    )
    assert run("answer = error_of(polycast.plugin.get_backend, 'hpu')") == [
        "BackendBrokenError",
        "The backend for 'hpu' is broken: acme-hpu 1.0 (acme_hpu) could not be loaded: InvalidBackendError: "
        f"{text}\nRepair or uninstall acme-hpu, or set POLYCAST_BLOCK=hpu.",
        "InvalidBackendError",
        text,
    ]
