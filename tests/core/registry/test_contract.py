"""Plugins whose backend violates the contract are rejected with all problems."""

import pytest

KERNEL = "must be (OpOverload, input dtype, output dtype), and its kernel callable"
OP_NAME = "is not an op name as the dispatcher has it, such as 'aten::mm' or 'aten::norm.Scalar'"
MUTABLE = "writes to its inputs: in-place and out= variants are never cast, so {} cannot hold"


def policies(name, policy="polycast.CastPolicy.FP32"):
    return f"AcmeBackend.policies = {{{name!r}: {policy}}}"


PROBLEMS = [
    ("del AcmeBackend.device_type", "device_type is missing"),
    ("del AcmeBackend.default_dtype", "default_dtype is missing"),
    ("del AcmeBackend.policies", "policies is missing"),
    ("del AcmeBackend.supported_dtypes", "supported_dtypes() is not implemented"),
    ("del AcmeBackend.availability", "availability() is not implemented"),
    ("AcmeBackend.device_type = 7", "device_type must be a str, got 7"),
    (
        "AcmeBackend.device_type = 'cuda'",
        "device_type is 'cuda', but the entry point is named 'hpu': they must be equal",
    ),
    ("AcmeBackend.default_dtype = torch.int8", "default_dtype must be a floating-point torch.dtype, got torch.int8"),
    ("AcmeBackend.default_dtype = 'fp16'", "default_dtype must be a floating-point torch.dtype, got 'fp16'"),
    ("AcmeBackend.policies = ['aten::mm']", "policies: must map op names to CastPolicy, got list"),
    (policies("aten::mm", "'fp32'"), "policies: the policy of 'aten::mm' must be a CastPolicy, got 'fp32'"),
    (policies("mm"), f"policies: 'mm' {OP_NAME}"),
    (policies("aten::mm.default.x"), f"policies: 'aten::mm.default.x' {OP_NAME}"),
    (policies(7), f"policies: 7 {OP_NAME}"),
    (
        policies("aten::mm.default"),
        "policies: 'aten::mm.default' must be written 'aten::mm': the dispatcher has no overload 'default'",
    ),
    (policies("aten::add_.Tensor"), f"policies: 'aten::add_.Tensor' {MUTABLE.format('FP32')}"),
    (
        policies("aten::mm.out", "polycast.CastPolicy.PROMOTE"),
        f"policies: 'aten::mm.out' {MUTABLE.format('PROMOTE')}",
    ),
    (
        policies("aten::mm", "polycast.CastPolicy.FP32_SET_OPT_DTYPE"),
        "policies: 'aten::mm' has no optional dtype argument, which FP32_SET_OPT_DTYPE sets",
    ),
    (
        policies("aten::mm", "polycast.CastPolicy.FP32_APPEND_DTYPE"),
        "policies: 'aten::mm' has no overload with the same arguments and a dtype, which FP32_APPEND_DTYPE calls",
    ),
    (
        "AcmeBackend.kernels = []",
        "kernels must map (OpOverload, input dtype, output dtype) to a callable, got list",
    ),
    ("AcmeBackend.kernels = {'aten::mm': max}", f"kernels: 'aten::mm' {KERNEL}"),
    (
        "AcmeBackend.kernels = {('aten::mm', torch.int8, torch.int32): max}",
        f"kernels: ('aten::mm', torch.int8, torch.int32) {KERNEL}",
    ),
    (
        "AcmeBackend.kernels = {(torch.ops.aten.mm.default, torch.int8, 'int32'): max}",
        f"kernels: (<OpOverload(op='aten.mm', overload='default')>, torch.int8, 'int32') {KERNEL}",
    ),
    (
        "AcmeBackend.kernels = {(torch.ops.aten.mm.default, torch.int8, torch.int32): 'mm'}",
        f"kernels: (<OpOverload(op='aten.mm', overload='default')>, torch.int8, torch.int32) {KERNEL}",
    ),
    ("AcmeBackend.remedies = 'none'", "remedies must map op names to sentences"),
    ("AcmeBackend.remedies = {'aten::mm': None}", "remedies must map op names to sentences"),
]


def rejected(device, *problems):
    """Return the exception for the backend of acme-DEVICE with these problems, and its cause."""
    module = f"acme_{device}"
    text = f"{module}.AcmeBackend violates the contract of polycast.plugin.Backend:\n" + "\n".join(
        f"  - {problem}" for problem in problems
    )
    return [
        "BackendBrokenError",
        f"The backend for {device!r} is broken: acme-{device} 1.0 ({module}) could not be loaded: InvalidBackendError: "
        f"{text}. Repair or uninstall acme-{device}, or set POLYCAST_BLOCK={device}.",
        "InvalidBackendError",
        text,
    ]


@pytest.mark.parametrize(("source", "problem"), PROBLEMS)
def test_a_backend_that_violates_the_contract_is_rejected(run, plugin, source, problem):
    plugin("acme-hpu", "hpu", source)
    assert run("answer = error_of(polycast.plugin.get_backend, 'hpu')") == rejected("hpu", problem)


def test_every_problem_is_listed_at_once(run, plugin):
    sources, problems = zip(PROBLEMS[7], PROBLEMS[9], PROBLEMS[-2], PROBLEMS[4], strict=True)
    plugin("acme-hpu", "hpu", "\n".join(sources))
    assert run("answer = error_of(polycast.plugin.get_backend, 'hpu')") == rejected("hpu", *problems)


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        ("meta", "torch has no Autocast dispatch key for 'meta'"),
        ("vpu", "device_type 'vpu' is not a device that torch knows; an out-of-tree device is named first"),
        ("hpu:0", "device_type 'hpu:0' must be a type without an index: 'hpu'"),
    ],
)
def test_a_device_without_an_autocast_key_is_rejected(run, plugin, device, problem):
    plugin("acme", device)
    listed = run(f"answer = polycast.backends()[{device!r}].reason")
    assert f"acme.AcmeBackend violates the contract of polycast.plugin.Backend:\n  - {problem}. Repair" in listed


def test_ops_that_torch_lacks_are_accepted(run, plugin):
    plugin("acme-hpu", "hpu", policies("acme::of_a_package_not_imported"))
    assert run("answer = polycast.is_autocast_available('hpu')") is True
