"""Plugins that cannot be loaded: the error has the cause, and every other device works."""

import pytest

NO_HOOK = (
    "acme_hpu must implement the hook polycast_backend (marked with @polycast.plugin.hookimpl) and return a Backend "
    "from it; got {} answers"
)
GOT = "expected an instance of polycast.plugin.Backend, got {}"
HOOK = "polycast_backend = polycast.plugin.hookimpl(lambda: {})"
INVALID = {
    "no hook": ("del polycast_backend", NO_HOOK.format(0)),
    "no marker": ("def polycast_backend(): return AcmeBackend()", NO_HOOK.format(0)),
    "returns None": (HOOK.format(None), NO_HOOK.format(0)),
    "two hooks": (
        "second = polycast.plugin.hookimpl(specname='polycast_backend')(lambda: AcmeBackend())",
        NO_HOOK.format(2),
    ),
    "returns a class": (HOOK.format("AcmeBackend"), GOT.format("the class AcmeBackend")),
    "returns a list": (HOOK.format([None]), GOT.format("list: [None]")),
    "returns two backends": (
        "AcmeBackend.__repr__ = lambda self: 'acme'\n" + HOOK.format("(AcmeBackend(), AcmeBackend())"),
        GOT.format("tuple: (acme, acme)"),
    ),
}
CASES = {
    "an exception": ("raise ValueError('no firmware')", "ValueError", "no firmware"),
    "SystemExit": ("sys.exit(3)", "SystemExit", "3"),
    "a missing module": ("import acme_driver", "ModuleNotFoundError", "No module named 'acme_driver'"),
    "a missing library": ("raise ImportError('libacme.so: cannot open')", "ImportError", "libacme.so: cannot open"),
    **{case: (source, "InvalidBackendError", text) for case, (source, text) in INVALID.items()},
    "raises": ("@polycast.plugin.hookimpl\ndef polycast_backend(): raise OSError('no driver')", "OSError", "no driver"),
    "exits": ("@polycast.plugin.hookimpl\ndef polycast_backend(): sys.exit('no licence')", "SystemExit", "no licence"),
    "an unknown argument": (
        "@polycast.plugin.hookimpl\ndef polycast_backend(device): ...",
        "PluginValidationError",
        "Plugin 'acme-hpu' for hook 'polycast_backend'\nhookimpl definition: polycast_backend(device)\n"
        "Argument(s) {'device'} are declared in the hookimpl but can not be found in the hookspec",
    ),
    "a misspelled name": (
        "polycast_bakend = polycast_backend\ndel polycast_backend",
        "PluginValidationError",
        "unknown hook 'polycast_bakend' in plugin <module 'acme_hpu' from '{folder}/acme_hpu.py'>",
    ),
    "uses its own device": (
        "polycast.install('hpu')",
        "BackendBrokenError",
        "The backend for 'hpu' was requested while its plugin acme-hpu 1.0 (acme_hpu) is being imported. "
        "A plugin must not use its own device at import.",
    ),
}


def broken(cause, text, *, device="hpu", plugin="acme-hpu 1.0 (acme_hpu)"):
    """Return the exception of a broken plugin and its cause, as `error_of` does."""
    return [
        "BackendBrokenError",
        f"The backend for {device!r} is broken: {plugin} could not be loaded: {cause}: {text}\n"
        f"Repair or uninstall {plugin.partition(' ')[0]}, or set POLYCAST_BLOCK={device}.",
        cause,
        text,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_error_of_a_broken_plugin_has_the_cause_and_the_distribution(run, plugin, folder, case):
    source, cause, text = CASES[case]
    plugin("acme-hpu", "hpu", f"import sys\n{source}")
    assert run("answer = error_of(polycast.plugin.get_backend, 'hpu')") == broken(
        cause, text.replace("{folder}", str(folder))
    )


@pytest.mark.parametrize(
    ("value", "cause", "text"),
    [
        ("acme_absent", "ModuleNotFoundError", "No module named 'acme_absent'"),
        ("acme_hpu:plugin", "AttributeError", "module 'acme_hpu' has no attribute 'plugin'"),
    ],
)
def test_an_entry_point_that_points_nowhere_is_broken(run, distribution, value, cause, text):
    distribution("acme-hpu", {"hpu": value}, {"acme_hpu.py": ""})
    expected = broken(cause, text, plugin=f"acme-hpu 1.0 ({value})")
    assert run("answer = error_of(polycast.plugin.get_backend, 'hpu')") == expected


def test_the_error_of_a_plugin_that_asks_for_the_backend_it_replaces_says_what_to_write(run, plugin):
    plugin("acme-cpu", "cpu", "class Own(type(polycast.plugin.get_backend('cpu'))): pass")
    *_, cause = run("answer = error_of(polycast.plugin.get_backend, 'cpu')")
    assert cause.endswith(
        "A plugin must not use its own device at import. To build on the backend of polycast_backends.cpu, import its "
        "class from there, or write a polycast.plugin.Extension, which adds policies and kernels to it."
    )


@pytest.mark.parametrize("case", ["SystemExit", "no hook", "two hooks", "uses its own device"])
def test_a_broken_plugin_affects_no_other_device(run, plugin, case):
    source, *_ = CASES[case]
    plugin("acme-hpu", "hpu", f"import sys\n{source}")
    plugin("acme-ipu", "ipu")
    answer = run("""
        uses = (polycast.autocast, polycast.install, lambda device: polycast.set_autocast_enabled(device, True))
        answer = [
            [polycast.is_autocast_available(device) for device in ("hpu", "ipu", "cpu")],
            [error_of(use, "hpu")[0] for use in uses],
            [polycast.backends()[device].state for device in ("hpu", "ipu", "cpu")],
            torch.is_autocast_enabled("hpu"),
        ]
        polycast.install("ipu")
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        answer += [has_kernel("aten::mm", key) for key in ("AutocastHPU", "AutocastIPU")]
        with polycast.autocast("cpu"):
            answer.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
    """)
    states = [[False, True, True], ["BackendBrokenError"] * 3, ["broken", "ready", "ready"], False]
    assert answer == [*states, False, True, "torch.bfloat16"]


STATUS = {"default_dtype": None, "replaces": [], "extensions": [], "ops_in_cpp": []}


def test_the_status_of_a_broken_plugin_has_the_distribution_and_the_reason(run, plugin):
    plugin("acme-hpu", "hpu", "raise ValueError('no firmware')", version="0.3")
    reason = broken("ValueError", "no firmware", plugin="acme-hpu 0.3 (acme_hpu)")[1]
    names = {"device_type": "hpu", "distribution": "acme-hpu", "version": "0.3"}
    assert run("answer = polycast.backends()['hpu']") == {**names, "state": "broken", "reason": reason, **STATUS}


def test_a_broken_plugin_is_imported_once_and_raises_at_each_use(run, plugin):
    plugin(
        "acme-hpu", "hpu", "import sys\nsys.imports = getattr(sys, 'imports', 0) + 1\nraise ValueError('no firmware')"
    )
    answer = run("answer = [*(error_of(polycast.plugin.get_backend, 'hpu') for _ in range(3)), sys.imports]")
    assert answer == [*[broken("ValueError", "no firmware")] * 3, 1]


def test_an_interrupted_import_propagates_and_is_repeated_at_the_next_use(run, plugin):
    interrupt = (
        "import sys\nif not hasattr(sys, 'interrupted'):\n    sys.interrupted = True\n    raise KeyboardInterrupt"
    )
    plugin("acme-hpu", "hpu", interrupt)
    answer = run("answer = [error_of(polycast.plugin.get_backend, 'hpu'), polycast.is_autocast_available('hpu')]")
    assert answer == [["KeyboardInterrupt", ""], True]


def test_a_plugin_may_use_other_devices_at_import(run, plugin):
    plugin("acme-hpu", "hpu", "with polycast.autocast('cpu'): torch.mm(torch.ones(1, 1), torch.ones(1, 1))")
    assert run("answer = polycast.is_autocast_available('hpu')") is True


@pytest.mark.parametrize("metadata", [None, "Metadata-Version: 2.1\n"], ids=["absent", "nameless"])
def test_a_distribution_without_metadata_breaks_only_its_own_device(run, distribution, metadata):
    record = distribution("acme-hpu", {"hpu": "acme_absent"}, {})
    if metadata is None:
        (record / "METADATA").unlink()
    else:
        (record / "METADATA").write_text(metadata)
    answer = run("answer = [polycast.is_autocast_available('cpu'), error_of(polycast.plugin.get_backend, 'hpu')]")
    nameless = "(nameless) (no version) (acme_absent)"
    error = broken("ModuleNotFoundError", "No module named 'acme_absent'", plugin=nameless)
    assert answer == [True, error]
