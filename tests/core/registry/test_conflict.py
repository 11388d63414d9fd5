"""Several distributions for one device: precedence, conflicts and POLYCAST_PROVIDER."""

import importlib.metadata

import pytest

BUILT_IN = f"polycast {importlib.metadata.version('polycast')} (polycast_backends.cpu)"
ONE, TWO = "acme-one 1.0 (acme_one)", "acme-two 2.0 (acme_two)"
CONFLICT = (
    f"2 distributions supply the backend for 'cpu': {ONE}, {TWO}. "
    "Uninstall all but one, or choose one, such as POLYCAST_PROVIDER=cpu=acme-one."
)


@pytest.fixture
def two(plugin):
    plugin("acme-two", "cpu", version="2.0")
    plugin("acme-one", "cpu")


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("use", ["plugin.get_backend", "autocast", "install", "get_autocast_dtype"])
def test_the_error_of_a_conflict_names_both_distributions_and_the_remedy(run, use):
    assert run(f"answer = error_of(polycast.{use}, 'cpu')") == ["BackendConflictError", CONFLICT]


@pytest.mark.usefixtures("two")
def test_a_conflict_imports_neither_plugin_and_affects_no_other_device(run):
    answer = run("""
        available = [polycast.is_autocast_available("cpu"), polycast.plugin.get_backend("xpu").device_type]
        imported = {"acme_one", "acme_two", "polycast_backends.cpu"} & set(sys.modules)
        answer = [available, polycast.backends()["cpu"], imported]
    """)
    empty = {"default_dtype": None, "distribution": "", "version": "", "replaces": [], "extensions": []}
    status = {"device_type": "cpu", "state": "conflict", "reason": CONFLICT, "ops_in_cpp": [], **empty}
    assert answer == [[False, "xpu"], status, "set()"]


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("provider", "chosen", "replaces"),
    [
        ("acme-one", "acme-one", [TWO, BUILT_IN]),
        (" Acme_TWO ", "acme-two", [ONE, BUILT_IN]),
        ("polycast", "polycast", [ONE, TWO]),
    ],
)
def test_the_provider_resolves_a_conflict(run, provider, chosen, replaces):
    answer = run("answer = polycast.backends()['cpu']", POLYCAST_PROVIDER=f"xpu=polycast, cpu={provider}")
    assert (answer["state"], answer["distribution"], answer["replaces"]) == ("ready", chosen, replaces)


BY_HAND = {
    "a conflict": ("cpu", {"acme-one": "", "acme-two": ""}, {}, [ONE, "acme-two 1.0 (acme_two)", BUILT_IN]),
    "a broken one": ("hpu", {"acme-one": "raise ValueError('no firmware')"}, {}, [ONE]),
    "a blocked one": ("cpu", {}, {"POLYCAST_BLOCK": "cpu"}, [BUILT_IN]),
}


@pytest.mark.parametrize(("device", "plugins", "variables", "replaces"), BY_HAND.values(), ids=BY_HAND)
def test_a_backend_registered_by_hand_replaces_others(run, plugin, device, plugins, variables, replaces):
    for name, amendment in plugins.items():
        plugin(name, device, amendment)
    answer = run(f"register_by_hand({device!r}); answer = polycast.backends()[{device!r}]", **variables)
    assert (answer["state"], answer["distribution"], answer["replaces"]) == ("ready", "", replaces)


def test_a_provider_that_is_not_installed_is_an_error_when_its_device_is_used(run, plugin):
    plugin("acme-one", "cpu")
    answer = run(
        """
        uses = [polycast.plugin.get_backend, polycast.autocast, polycast.is_autocast_available, polycast.backends().get]
        answer = [*(error_of(use, "cpu") for use in uses), polycast.plugin.get_backend("xpu").device_type]
        """,
        POLYCAST_PROVIDER="cpu=Acme_Three",
    )
    refusal = (
        f"POLYCAST_PROVIDER names 'acme-three' for 'cpu', but what is installed for it is: {ONE}, {BUILT_IN}. "
        "Correct the variable or install that distribution."
    )
    assert answer == [*[["ValueError", refusal]] * 4, "xpu"]
