"""Devices without a plugin: a generic backend serves those whose module in torch says which dtypes they have."""

import importlib.metadata

import pytest

GENERIC = f"polycast {importlib.metadata.version('polycast')} (polycast_backends.generic)"
GNU = """
import types

def name_device(**members):
    torch.utils.rename_privateuse1_backend("gnu")
    torch._register_device_module("gnu", types.SimpleNamespace(**members))

def offers(*dtypes, available=True):
    name_device(get_amp_supported_dtype=lambda: list(dtypes), is_available=lambda: available)

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
"""
WARNING = (
    "gnu: no package has a backend for it, so polycast uses the op table of other accelerators, STANDARD_POLICIES. "
    "`polycast new-backend gnu` writes a package with its own; POLYCAST_GENERIC=0 leaves the device out."
)


@pytest.fixture
def of(run):
    """Return a function that runs a script with functions that make a device "gnu"."""
    return lambda script, **variables: run(f"{GNU}\n{script}", **variables)


def test_a_device_whose_module_offers_dtypes_is_generic(of):
    answer = of("""
offers(bf16, fp16)
polycast.install("gnu")
status = polycast.backends()["gnu"]
backend = polycast.plugin.get_backend("gnu:0")
answer = [status.state, status.distribution, status.reason + ".", polycast.is_autocast_available("gnu")]
answer += [backend.default_dtype, backend.supported_dtypes(), backend.policies == polycast.plugin.STANDARD_POLICIES]
answer += [torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "AutocastPrivateUse1")]
answer += [polycast.registry.registry.registry.source(backend)[0], backend is polycast.plugin.get_backend("gnu")]
""")
    assert answer[:4] == ["generic", "polycast", WARNING.removeprefix("gnu: "), True]
    assert answer[4:] == ["torch.float16", ["torch.bfloat16", "torch.float16"], True, True, "polycast", True]


def test_the_first_region_says_once_which_table_it_uses(of, engine):
    answer = of(
        """
offers(fp16)
def enter():
    with polycast.autocast("gnu", enabled=False):
        pass
    with polycast.autocast("gnu"):
        pass
answer = caught(enter, times=2)
""",
        POLYCAST_ENGINE=engine,
    )
    assert answer == [["UserWarning", WARNING, "<string>"]]


NOTHING = {
    "no module": "torch.utils.rename_privateuse1_backend('gnu')",
    "no dtypes": "name_device(is_available=lambda: True)",
    "an empty list": "offers()",
    "dtypes that are not": "name_device(is_available=lambda: True, get_amp_supported_dtype=lambda: ['float16'])",
    "an exception": "name_device(is_available=lambda: True, get_amp_supported_dtype=lambda: 1 / 0)",
    "no availability": "name_device(get_amp_supported_dtype=lambda: [fp16])",
}


@pytest.mark.parametrize("case", NOTHING)
def test_a_device_whose_module_offers_nothing_is_missing(of, case):
    answer = of(f"""
{NOTHING[case]}
status = polycast.backends()["gnu"]
answer = [status.state, status.distribution, polycast.is_autocast_available("gnu")]
answer += error_of(polycast.autocast, "gnu")
torch.gnu = types.SimpleNamespace(is_available=lambda: True, get_amp_supported_dtype=lambda: [fp16])
torch.get_device_module.cache_clear()
answer += [polycast.backends()["gnu"].state]
""")
    assert answer[:4] == ["missing", "", False, "BackendNotFoundError"]
    assert answer[4].startswith("No polycast backend is installed for 'gnu'")
    assert answer[5:] == ["generic"]


def test_an_absent_device_is_unavailable(of):
    answer = of("offers(fp16, available=False)\nanswer = polycast.backends()['gnu']")
    assert (answer["state"], answer["reason"]) == ("unavailable", "torch.gnu.is_available() is False")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_default_dtype_is_torchs_and_not_that_of_the_region_around(of, dtype):
    answer = of(f"""
offers(bf16, fp16)
with torch.autocast("gnu", {dtype}):
    answer = [torch.get_autocast_dtype("gnu"), polycast.plugin.get_backend("gnu").default_dtype]
""")
    assert answer == [{"fp16": "torch.float16", "bf16": "torch.bfloat16"}[dtype], "torch.float16"]


def test_the_default_dtype_is_one_that_the_device_has(of):
    assert of("offers(bf16)\nanswer = polycast.plugin.get_backend('gnu').default_dtype") == "torch.bfloat16"


@pytest.mark.parametrize(
    ("variables", "state"),
    [
        ({"POLYCAST_GENERIC": "0"}, "missing"),
        ({"POLYCAST_BLOCK": "gnu"}, "blocked"),
        ({"POLYCAST_BLOCK": "generic"}, "blocked"),
        ({"POLYCAST_PROVIDER": "gnu=polycast"}, "generic"),
        ({"POLYCAST_PROVIDER": "generic=polycast"}, "generic"),
        ({"POLYCAST_DISCOVERY": "0"}, "generic"),
    ],
    ids=str,
)
def test_the_variables_hold_for_it(of, variables, state):
    script = "offers(fp16)\nanswer = [caught(lambda: polycast.backends()['cpu']), polycast.backends()['gnu'].state]"
    assert of(script, **variables) == [[], state]


def test_a_plugin_takes_precedence_and_a_broken_one_is_not_replaced(of, plugin):
    script = "offers(fp16)\nstatus = polycast.backends()['gnu']\nanswer = [status.state, status.distribution]"
    plugin("acme-gnu", "gnu")
    assert of(script) == ["ready", "acme-gnu"]
    plugin("acme-gnu", "gnu", "raise ValueError('no firmware')")
    assert of(script) == ["broken", "acme-gnu"]


THIRD_PARTY = """
@polycast.plugin.hookimpl
def polycast_backend(device_type):
    backend = AcmeBackend()
    backend.device_type = device_type
    return backend if {} else None
"""


def test_a_third_partys_generic_backend_takes_precedence(of, plugin):
    plugin("acme-any", "generic", THIRD_PARTY.format("device_type == 'gnu'"))
    status = of("offers(fp16)\nanswer = polycast.backends()['gnu']")
    assert [status[name] for name in ("state", "distribution", "replaces", "reason")] == [
        "generic",
        "acme-any",
        [GENERIC],
        "",
    ]
    assert of("offers(fp16)\nanswer = polycast.backends()['gnu'].distribution", POLYCAST_PROVIDER="gnu=polycast") == (
        "polycast"
    )
    plugin("acme-any", "generic", THIRD_PARTY.format("False"))
    text = of("offers(fp16)\nanswer = error_of(polycast.autocast, 'gnu')[1]")
    assert text == (
        "No polycast backend is installed for 'gnu', and acme-any 1.0 (acme_any), which serves devices without one, "
        "did not find working is_available() and get_amp_supported_dtype() in torch.gnu. Import the package of the "
        "device first, or install one with a backend."
    )


def test_a_backend_registered_by_hand_takes_precedence(of):
    answer = of("""
offers(fp16)
found = polycast.plugin.get_backend("gnu")
backend = register_by_hand("gnu")
answer = [polycast.plugin.get_backend("gnu") is backend, polycast.backends()["gnu"].state]
polycast.plugin.unregister_backend("gnu")
answer += [polycast.plugin.get_backend("gnu") is found, polycast.backends()["gnu"].state]
""")
    assert answer == [True, "ready", True, "generic"]


def test_autocast_kernels_of_the_device_cast_as_in_torch(of, engine):
    answer = of(
        """
offers(fp16)
library = torch.library.Library("aten", "IMPL")
library.impl("mm", torch.mm, "AutocastPrivateUse1")
backend = polycast.plugin.get_backend("gnu")
answer = [backend.policies, backend.excluded_ops, polycast.backends()["gnu"].state]
answer += [caught(lambda: polycast.autocast("gnu"), times=2)]
""",
        POLYCAST_ENGINE=engine,
    )
    assert answer == [{}, {"aten::mm": "the package of the device has a kernel of it"}, "generic", []]


def test_a_device_without_a_module_imports_nothing(run):
    answer = run("""
        polycast.is_autocast_available("hpu"), polycast.is_autocast_available("cpu"), list(polycast.backends())
        answer = "polycast_backends.generic" in sys.modules
    """)
    assert answer is False
