"""A vendor's own kernels at the Autocast key, which a table keeps or replaces op by op."""

import pytest

VENDOR = """
from types import SimpleNamespace
torch.hpu = SimpleNamespace(is_initialized=lambda: False, is_available=lambda: False)
key = torch._C._parse_dispatch_key("AutocastHPU")
calls = []

def vendors(op):
    def kernel(*inputs):
        calls.append(op.__name__)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return op(*(value.bfloat16() for value in inputs))
    return kernel

vendor = torch.library.Library("aten", "IMPL")
vendor.impl("mm", vendors(torch.mm), "AutocastHPU")
vendor.impl("exp", vendors(torch.exp), "AutocastHPU")

from torch._subclasses import FakeTensorMode
def use(**settings):
    calls.clear()
    with FakeTensorMode():
        x = torch.empty(2, 2, device="hpu")
        with polycast.autocast("hpu", **settings):
            dtypes = [str(torch.mm(x, x).dtype), str(torch.exp(x).dtype)]
    return [*dtypes, *calls]
"""
REDUCED, FULL = "torch.bfloat16", "torch.float32"


def amended(policies):
    return f"AcmeBackend.policies = {policies}"


FP32 = "{'aten::mm': polycast.CastPolicy.FP32}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policies", "use", "found"),
    [
        ("{}", "use()", [REDUCED, REDUCED, "mm", "exp"]),
        (FP32, "use()", [FULL, REDUCED, "exp"]),
        ("dict.fromkeys(('aten::mm', 'aten::exp'), polycast.CastPolicy.FP32)", "use()", [FULL, FULL]),
        ("{}", f"[use(policy={FP32}), use()]", [[FULL, REDUCED, "exp"]] * 2),
    ],
    ids=["none", "one", "both", "of a region"],
)
def test_a_policy_replaces_only_the_vendors_kernel_of_its_op(run, plugin, engine, policies, use, found):
    plugin("acme-hpu", "hpu", amended(policies))
    assert run(f"{VENDOR}\nanswer = {use}", POLYCAST_ENGINE=engine) == found


@pytest.mark.slow
def test_uninstalling_restores_the_vendors_kernels(run, plugin, engine, request):
    if engine == "reference":
        reason = "the vendor's kernels here are Python ones too, and torch keeps one of those for an op and a key"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    plugin("acme-hpu", "hpu", amended(FP32))
    answer = run(
        f"""{VENDOR}
inside = use()
polycast.uninstall("hpu")
with FakeTensorMode():
    x = torch.empty(2, 2, device="hpu")
    torch.set_autocast_enabled("hpu", True)
    after = str(torch.mm(x, x).dtype)
answer = [inside, after]
""",
        POLYCAST_ENGINE=engine,
    )
    assert answer == [[FULL, REDUCED, "exp"], REDUCED]
