"""The environment variables that control plugins, and invalid values."""

import importlib.metadata

import pytest

BUILT_INS = sorted(
    importlib.metadata.distribution("polycast").entry_points.select(group="polycast.backends").names - {"generic"}
)

BLOCKED = "The backend for {!r} is blocked by POLYCAST_BLOCK. Take it out of that variable to use it."
BAD_VALUES = [
    ("POLYCAST_DISCOVERY", "no", "one of 0, 1, false, true"),
    ("POLYCAST_GENERIC", "no", "one of 0, 1, false, true"),
    ("POLYCAST_BLOCK", "cuda,,xpu", "device types separated by commas, such as 'cuda,xpu'"),
    (
        "POLYCAST_PROVIDER",
        "cpu",
        "device=distribution pairs separated by commas, such as 'xpu=polycast,npu=acme-npu', each device once",
    ),
]


def test_a_blocked_device_has_no_backend_and_its_plugin_is_not_imported(run, plugin):
    plugin("acme-hpu", "hpu", "raise ValueError('no firmware')")
    answer = run(
        """
        answer = [
            error_of(polycast.plugin.get_backend, "hpu"),
            error_of(polycast.autocast, "cpu"),
            [polycast.is_autocast_available(device) for device in ("hpu", "cpu")],
            polycast.plugin.get_backend("cuda").device_type,
            "acme_hpu" in sys.modules or "polycast_backends.cpu" in sys.modules,
            [polycast.backends()["hpu"].state, polycast.backends()["hpu"].reason],
        ]
        """,
        POLYCAST_BLOCK="cpu, hpu",
    )
    refusals = [["BackendNotFoundError", BLOCKED.format(device)] for device in ("hpu", "cpu")]
    assert answer == [*refusals, [False, False], "cuda", False, ["blocked", BLOCKED.format("hpu")]]


def test_a_device_whose_entry_point_has_a_dot_is_known(run, distribution):
    distribution("acme", {"hpu.acme": "acme_absent"}, {})
    script = """
        warnings.simplefilter("error")
        answer = polycast.backends()["hpu"].state
        """
    assert run(script, POLYCAST_BLOCK="hpu") == "blocked"


def test_a_blocked_out_of_tree_device_is_not_reported_as_unknown(run, plugin):
    plugin("acme-npu", "npu")
    answer = run("answer = [error_of(polycast.autocast, name) for name in ('npu', 'nqu')]", POLYCAST_BLOCK="npu")
    assert answer[0] == ["BackendNotFoundError", BLOCKED.format("npu")]
    assert answer[1][0] == "RuntimeError"
    assert answer[1][1].startswith("Invalid device string: 'nqu'. ")


@pytest.mark.parametrize("off", ["0", "FALSE"])
def test_without_discovery_there_are_only_the_built_ins(run, plugin, off):
    plugin("acme-cpu", "cpu")
    plugin("acme-hpu", "hpu")
    answer = run(
        """
        statuses = polycast.backends()
        found = [name for name, status in statuses.items() if status.state != "missing"]
        error = error_of(polycast.plugin.get_backend, "hpu")
        answer = [found, statuses["cpu"].distribution, statuses["hpu"].reason, error]
        """,
        POLYCAST_DISCOVERY=off,
    )
    off = " Plugins of third parties are ignored, because POLYCAST_DISCOVERY is off."
    reason = f"A plugin is needed: no distribution has an entry point 'hpu' in the group 'polycast.backends'.{off}"
    missing = (
        f"No polycast backend is installed for 'hpu'. Backends are installed for: {', '.join(BUILT_INS)}. "
        "Install a distribution that supplies one in the entry-point group 'polycast.backends', or pass yours to "
        f"polycast.plugin.register_backend().{off}"
    )
    assert answer == [BUILT_INS, "polycast", reason, ["BackendNotFoundError", missing]]


@pytest.mark.parametrize(("variable", "value", "expected"), BAD_VALUES)
def test_an_invalid_value_is_an_error_at_each_look_up_until_it_is_corrected(run, variable, value, expected):
    answer = run(
        f"""
        import os
        get_backend = polycast.plugin.get_backend
        uses = [get_backend, polycast.autocast, polycast.is_autocast_available, lambda _: polycast.backends()]
        answer = [error_of(use, "cpu") for use in uses]
        del os.environ[{variable!r}]
        answer.append(polycast.is_autocast_available("cpu"))
        """,
        **{variable: value},
    )
    refusal = f"{variable}={value!r} is invalid: expected {expected}. Correct or unset the variable."
    assert answer == [*[["ValueError", refusal]] * 4, True]


@pytest.mark.parametrize(
    ("variable", "value", "device", "rest"),
    [
        ("POLYCAST_BLOCK", "cpu,cudaa", "cudaa", "did you mean 'cuda'?"),
        ("POLYCAST_PROVIDER", "qqq=acme", "qqq", f"expected one of {', '.join(BUILT_INS)}."),
    ],
)
def test_a_variable_that_names_an_unknown_device_warns(run, variable, value, device, rest):
    answer = run(
        """
        get = polycast.plugin.get_backend
        answer = [text for _, text, _ in caught(lambda: (get("cuda"), get("xpu")))]
        """,
        **{variable: value},
    )
    text = f"{variable} names {device!r}, which no installed distribution offers a backend for: {rest}"
    assert answer == [text]
