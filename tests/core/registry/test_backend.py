"""The contract of a backend, and the defaults of its members."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch

from polycast import CastPolicy
from polycast.errors import InvalidBackendError
from polycast.plugin import Availability, Backend
from polycast.registry.contract import validate

MM = torch.ops.aten.mm.default


class HpuBackend(Backend):
    """A minimal backend."""

    device_type = "hpu"
    default_dtype = torch.bfloat16
    policies = {"aten::mm": CastPolicy.LOWER_PRECISION_FP}

    def supported_dtypes(self):
        return [torch.bfloat16, torch.float16]

    def availability(self):
        return Availability(True)


def with_(**attributes):
    return type("HpuBackend", (HpuBackend,), attributes)()


def problems(backend, device_type=None):
    """Return the problems of a backend, without the first line of the error."""
    with pytest.raises(InvalidBackendError) as error:
        validate(backend, device_type)
    first, *lines = str(error.value).splitlines()
    assert first == f"{__name__}.{type(backend).__name__} violates the contract of polycast.plugin.Backend:"
    return [line.removeprefix("  - ") for line in lines]


def test_validate_returns_a_valid_backend():
    backend = HpuBackend()
    assert validate(backend) is backend
    assert validate(backend, "hpu") is backend


def test_attributes_may_be_set_on_the_instance():
    backend = HpuBackend()
    backend.device_type = "ipu"
    assert validate(backend, "ipu") is backend


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (HpuBackend, "the class HpuBackend"),
        (None, "NoneType: None"),
        ([1], "list: [1]"),
        ("hpu", "str: 'hpu'"),
    ],
    ids=repr,
)
def test_an_object_of_another_type_is_rejected(value, got):
    with pytest.raises(InvalidBackendError) as error:
        validate(value)
    assert str(error.value) == f"expected an instance of polycast.plugin.Backend, got {got}"


def test_a_bare_backend_lacks_all_required_members():
    class BareBackend(Backend):
        pass

    with pytest.raises(InvalidBackendError) as error:
        validate(BareBackend())
    assert str(error.value).splitlines()[1:] == [
        "  - device_type is missing",
        "  - default_dtype is missing",
        "  - policies is missing",
        "  - supported_dtypes() is not implemented",
        "  - availability() is not implemented",
    ]


@pytest.mark.parametrize(
    ("device_type", "problem"),
    [
        (None, "device_type must be a str, got None"),
        (torch.device("hpu"), "device_type must be a str, got device(type='hpu')"),
        ("hpu:1", "device_type 'hpu:1' must be a type without an index: 'hpu'"),
        ("HPU", "device_type 'HPU' is not a device that torch knows; an out-of-tree device is named first"),
        ("", "device_type '' is not a device that torch knows; an out-of-tree device is named first"),
        ("meta", "torch has no Autocast dispatch key for 'meta'"),
    ],
    ids=repr,
)
def test_the_device_must_have_an_autocast_key(device_type, problem):
    assert problems(with_(device_type=device_type)) == [problem]


def test_the_device_must_match_the_entry_point():
    assert problems(HpuBackend(), "ipu") == [
        "device_type is 'hpu', but the entry point is named 'ipu': they must be equal"
    ]


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.bool, "float16", None, float], ids=repr)
def test_the_default_dtype_must_be_floating_point(dtype):
    assert problems(with_(default_dtype=dtype)) == [
        f"default_dtype must be a floating-point torch.dtype, got {dtype!r}"
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=repr)
def test_any_floating_point_dtype_may_be_the_default(dtype):
    backend = with_(default_dtype=dtype)
    assert validate(backend) is backend


def test_the_problems_of_a_table_are_listed_one_by_one():
    assert problems(with_(policies={"mm": CastPolicy.FP32, "aten::exp": "fp32", "aten::log": CastPolicy.FP32})) == [
        "policies: 'mm' is not an op name as the dispatcher has it, such as 'aten::mm' or 'aten::norm.Scalar'",
        "policies: the policy of 'aten::exp' must be a CastPolicy, got 'fp32'",
    ]


@pytest.mark.parametrize(
    "key",
    [
        MM,
        (MM, torch.int8),
        (MM, torch.int8, torch.int32, torch.int32),
        (torch.ops.aten.mm, torch.int8, torch.int32),
        (MM, "int8", torch.int32),
        "aten::mm",
    ],
    ids=repr,
)
def test_the_key_of_a_kernel_is_an_overload_and_two_dtypes(key):
    assert problems(with_(kernels={key: torch.mm})) == [
        f"kernels: {key!r} must be (OpOverload, input dtype, output dtype), and its kernel callable"
    ]


def test_a_kernel_is_callable():
    key = (MM, torch.int8, torch.int32)
    assert problems(with_(kernels={key: None})) == [
        f"kernels: {key!r} must be (OpOverload, input dtype, output dtype), and its kernel callable"
    ]
    backend = with_(kernels={key: torch.mm})
    assert validate(backend) is backend


@pytest.mark.parametrize("kernels", [[], None, torch.mm], ids=["list", "NoneType", "builtin_function_or_method"])
def test_kernels_are_a_mapping(kernels):
    assert problems(with_(kernels=kernels)) == [
        "kernels must map (OpOverload, input dtype, output dtype) to a callable, got " + type(kernels).__name__
    ]


@pytest.mark.parametrize("packages", ["acme_npu.native", None, ["acme npu"], [""], [1]], ids=repr)
def test_ops_in_cpp_are_names_of_packages(packages):
    said = f"ops_in_cpp must be a list or tuple of the names of packages, got {packages!r}"
    assert problems(with_(ops_in_cpp=packages)) == [said]


@pytest.mark.parametrize("attribute", ["remedies", "excluded_ops", "optional_ops"])
def test_remedies_and_excluded_ops_map_names_to_sentences(attribute, subtests):
    for texts in [None, [], {"aten::mm": 1}, {1: "do not"}]:
        with subtests.test(texts=texts):
            assert problems(with_(**{attribute: texts})) == [f"{attribute} must map op names to sentences"]


def test_a_supported_dtype_is_available():
    assert HpuBackend().dtype_availability(torch.float16) == Availability(True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=repr)
def test_an_unsupported_dtype_is_unavailable_and_the_reason_lists_the_supported(dtype):
    assert HpuBackend().dtype_availability(dtype) == Availability(False, "hpu supports torch.bfloat16, torch.float16")


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


@pytest.mark.parametrize("available", [True, False])
def test_truth_of_an_availability(available):
    assert bool(Availability(available, "reason")) is available


def test_an_availability_is_immutable():
    answer = Availability(False, "no device")
    assert answer == dataclasses.replace(answer)
    with pytest.raises(dataclasses.FrozenInstanceError):
        answer.reason = ""


@pytest.mark.parametrize(("available", "reason"), [(1, ""), ("no", ""), (None, ""), (True, None), (False, 3)])
def test_an_availability_of_other_types_is_refused(available, reason):
    got = re.escape(f"got {available!r}, {reason!r}")
    with pytest.raises(TypeError, match=f"^an Availability has a bool and a str, the reason; {got}$"):
        Availability(available, reason)
