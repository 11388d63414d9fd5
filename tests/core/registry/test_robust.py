"""Plugins that hang, compete, fork, or change between processes."""

import pytest

RENAME = "torch.utils.rename_privateuse1_backend({!r})"


@pytest.mark.slow
def test_a_plugin_that_hangs_at_import_blocks_only_users_of_its_device(run, plugin):
    plugin("acme-hpu", "hpu", "import sys\nsys.started.set()\nassert sys.go_on.wait(60)")
    plugin("acme-ipu", "ipu")
    answer = run("""
        import threading
        sys.started, sys.go_on = threading.Event(), threading.Event()
        found = []
        get_backend = polycast.plugin.get_backend
        held_up = [threading.Thread(target=lambda: found.append(get_backend("hpu").device_type)) for _ in range(2)]
        for thread in held_up:
            thread.start()
        assert sys.started.wait(60)
        x = torch.ones(2, 2)
        with polycast.autocast("cpu"):
            answer = [torch.mm(x, x).dtype, polycast.is_autocast_available("ipu")]
        import acme_ipu, fractions  # the import lock of the process is free
        answer += [thread.is_alive() for thread in held_up] + [list(found)]
        sys.go_on.set()
        for thread in held_up:
            thread.join(60)
        answer += [found, polycast.backends()["hpu"].state]
    """)
    assert answer == ["torch.bfloat16", True, True, True, [], ["hpu", "hpu"], "ready"]


def test_the_status_of_a_device_imports_no_plugin_of_another(run, plugin):
    plugin("acme-hpu", "hpu")
    plugin("acme-npu", "npu", RENAME.format("npu"))
    answer = run("""
        statuses = polycast.backends()
        answer = [statuses["cpu"].state, "hpu" in statuses, "privateuseone" in statuses]
        answer += [[name for name in ("acme_hpu", "acme_npu", "polycast_backends.cuda") if name in sys.modules]]
        answer += [statuses["npu"].state, "acme_npu" in sys.modules, "acme_hpu" in sys.modules]
    """)
    assert answer == ["ready", True, False, [], "ready", True, False]


def test_a_second_name_for_torchs_out_of_tree_device_breaks_its_plugin(run, plugin):
    plugin("acme-npu", "npu", RENAME.format("npu"))
    plugin("acme-tpu", "tpu", RENAME.format("tpu"))
    answer = run("""
        first = polycast.plugin.get_backend("npu").device_type
        name, text, cause, limit = error_of(polycast.plugin.get_backend, "tpu")
        answer = [first, name, limit in text, limit, {d: s.state for d, s in polycast.backends().items() if "pu" in d}]
    """)
    first, name, chained, limit, states = answer
    assert (first, name, chained) == ("npu", "BackendBrokenError", True)
    assert "torch.register_privateuse1_backend() has already been set! Current backend: npu" in limit
    assert {device: states[device] for device in ("npu", "tpu", "cpu")} == {
        "npu": "ready",
        "tpu": "broken",
        "cpu": "ready",
    }


def test_a_device_may_be_looked_up_while_the_metadata_are_read(run):
    answer = run("""
        import importlib.metadata, threading
        read, found = importlib.metadata.entry_points, []
        def reading(group):
            importlib.metadata.entry_points = read
            look_up()  # as a finalizer or a signal handler may
            return read(group=group)
        def look_up():
            found.append(polycast.plugin.get_backend("cpu"))
        importlib.metadata.entry_points = reading
        thread = threading.Thread(target=look_up, daemon=True)
        thread.start()
        thread.join(30)
        answer = [thread.is_alive(), len(found), len(set(found))]
    """)
    assert answer == [False, 2, 1]


@pytest.mark.parametrize("kind", ["plugin", "extension"])
def test_a_package_may_ask_for_a_device_at_import_while_another_thread_imports_the_package_for_it(
    run, plugin, extension, folder, kind
):
    imports = "import sys\nsys.waits.set()\nimport acme\n"
    plugin("acme-hpu", "hpu", imports * (kind == "plugin"))
    extension("acme-more", "hpu", imports * (kind == "extension"))
    asks = (
        "import polycast, sys\nsys.imports.set()\nsys.waits.wait(60)\nready = polycast.is_autocast_available('hpu')\n"
    )
    (folder / "acme.py").write_text(asks)
    answer = run("""
        import importlib, threading
        from polycast.common import importing
        importing.LONGEST_WAIT = 0.1
        sys.imports, sys.waits = threading.Event(), threading.Event()
        threads = [threading.Thread(target=importlib.import_module, args=("acme",), daemon=True)]
        threads[0].start()
        assert sys.imports.wait(60)
        threads.append(threading.Thread(target=polycast.plugin.get_backend, args=("hpu",), daemon=True))
        threads[1].start()
        for thread in threads:
            thread.join(20)
        ended = not any(thread.is_alive() for thread in threads)
        answer = [ended, ended and sys.modules["acme"].ready, ended and vars(polycast.backends()["hpu"])]
    """)
    ended, ready, status = answer
    assert (ended, ready) == (True, False)
    assert (status["state"], status["extensions"]) == ("ready", ["acme-more 1.0 (acme_more)"])


FORK = """
import os
def in_child(function):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(function())
        except BaseException as error:
            answer = repr(error)
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return found

def product():
    x = torch.ones(2, 2)
    with polycast.autocast("cpu"):
        return torch.mm(x, x).dtype
"""


@pytest.mark.parametrize("region", ["", "with polycast.autocast('cpu'): pass", "product()"])
def test_a_fork_after_discovery_has_the_plugins_and_can_load_more(run, plugin, engine, region):
    plugin("acme-hpu", "hpu")
    plugin("acme-ipu", "ipu")
    answer = run(
        f"""{FORK}
polycast.plugin.get_backend("hpu")
{region}
answer = [
    in_child(lambda: [s.state for d, s in polycast.backends().items() if d in ("hpu", "ipu", "cpu")]),
    in_child(product),
    "acme_ipu" in sys.modules,
    str(product()),
]
""",
        POLYCAST_ENGINE=engine,
    )
    assert answer == ["['ready', 'ready', 'ready']", "torch.bfloat16", False, "torch.bfloat16"]


@pytest.mark.slow
def test_a_fork_waits_until_another_thread_has_imported_a_plugin(run, plugin):
    plugin("acme-hpu", "hpu", "import sys, time\nsys.started.set()\ntime.sleep(1)")
    answer = run(f"""{FORK}
import threading
sys.started = threading.Event()
thread = threading.Thread(target=polycast.plugin.get_backend, args=("hpu",))
thread.start()
assert sys.started.wait(60)
get_backend = polycast.plugin.get_backend
answer = [in_child(lambda: get_backend("hpu").device_type), get_backend("hpu").device_type]
thread.join()
""")
    assert answer == ["hpu", "hpu"]


def test_a_fork_in_a_region_leaves_it_in_the_child_only(run, engine):
    answer = run(
        f"""{FORK}
def leave():
    region.__exit__()
    return [polycast.autocast_nesting("cpu"), polycast.is_autocast_enabled("cpu")]
region = polycast.autocast("cpu")
with region:
    child = in_child(leave)
    parent = [polycast.autocast_nesting("cpu"), polycast.is_autocast_enabled("cpu")]
answer = [child, parent]
""",
        POLYCAST_ENGINE=engine,
    )
    assert answer == ["[0, False]", [1, True]]
