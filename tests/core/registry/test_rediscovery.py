"""`polycast.backends(refresh=True)`: packages that were installed, upgraded or removed since the first look."""

import importlib.metadata
import shutil

import pytest

BEGIN = """
import pathlib, shutil, types
site = pathlib.Path({site!r})
state = lambda device: (status := polycast.backends()[device]).state + " " + status.distribution + " " + status.version

def install(name):
    for path in (site.parent / "later" / name).iterdir():
        shutil.move(path, site / path.name)

def name_device():
    torch.utils.rename_privateuse1_backend("gnu")
    members = {{"is_available": lambda: True, "get_amp_supported_dtype": lambda: [torch.float16]}}
    torch._register_device_module("gnu", types.SimpleNamespace(**members))

def mark():
    with polycast.autocast("cpu"):
        return str(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
"""


@pytest.fixture
def later(folder):
    """Return a function that takes the distribution that is installed out of the path, for a script to install."""

    def later(name):
        target = folder.parent / "later" / name
        target.mkdir(parents=True)
        for path in list(folder.glob("*")):
            shutil.move(path, target / path.name)

    return later


@pytest.fixture
def script(run, folder):
    return lambda text, **variables: run(BEGIN.format(site=str(folder)) + text, **variables)


def test_what_was_installed_later_is_found(script, plugin, extension, distribution, later, engine):
    plugin("acme-hpu", "hpu")
    extension("acme-more", kind="more")
    manifest = (
        "from polycast.plugin import Plugin\nplugin = Plugin(names={'answer': 'acme_names:answer'})\nanswer = 42\n"
    )
    distribution("acme-names", {"acme": "acme_names:plugin"}, {"acme_names.py": manifest}, group="polycast.plugins")
    later("acme")
    answer = script(
        """
before = [state("hpu"), hasattr(polycast, "answer"), mark()]
found = polycast.plugin.get_backend("cpu")
install("acme")
stale = [polycast.backends()["hpu"].state]
states = polycast.backends(refresh=True)
after = [state("hpu"), polycast.answer, mark(), polycast.plugin.get_backend("cpu") is found]
answer = [before, stale, after, any("acme-more" in each for each in states["cpu"].extensions)]
""",
        POLYCAST_ENGINE=engine,
    )
    assert answer == [
        ["missing  ", False, "torch.bfloat16"],
        ["missing"],
        ["ready acme-hpu 1.0", 42, "torch.bfloat16", True],
        True,
    ]


def test_a_device_in_use_changes_to_the_backend_that_takes_precedence_now(script, plugin, later, engine):
    plugin("acme-cpu", "cpu", "AcmeBackend.default_dtype = torch.float16")
    later("acme")
    answer = script(
        """
answer = [mark()]
install("acme")
polycast.backends(refresh=True)
answer += [mark(), state("cpu")]
shutil.rmtree(site)
polycast.backends(refresh=True)
answer += [mark(), state("cpu").split()[1]]
""",
        POLYCAST_ENGINE=engine,
    )
    assert answer == ["torch.bfloat16", "torch.float16", "ready acme-cpu 1.0", "torch.bfloat16", "polycast"]


def test_nothing_changes_while_a_region_is_open_for_a_device_that_others_serve_now(script, plugin, later):
    plugin("acme-cpu", "cpu")
    later("acme")
    answer = script("""
mark()
install("acme")
with polycast.autocast("cpu"):
    answer = error_of(lambda: polycast.backends(refresh=True)) + [state("cpu").split()[1], mark()]
polycast.backends(refresh=True)
answer += [state("cpu").split()[1]]
""")
    text = "polycast's kernels for 'cpu' are in use: 1 region is open, counting all threads. Leave them first."
    assert answer == ["RuntimeError", text, "polycast", "torch.bfloat16", "acme-cpu"]


def test_regions_stay_open_on_devices_that_the_same_packages_serve(script, plugin, later, engine):
    plugin("acme-hpu", "hpu")
    later("acme")
    answer = script(
        """
with polycast.autocast("cpu"):
    x = torch.ones(2, 2)
    answer = [torch.mm(x, x).dtype]
    install("acme")
    polycast.backends(refresh=True)
    answer += [torch.mm(x, x).dtype, polycast.is_autocast_available("hpu")]
answer += [torch.mm(x, x).dtype]
""",
        POLYCAST_ENGINE=engine,
    )
    assert answer == ["torch.bfloat16", "torch.bfloat16", True, "torch.float32"]


def test_an_upgraded_plugin_keeps_running_with_its_version_and_a_broken_one_is_tried_again(script, plugin, folder):
    plugin("acme-hpu", "hpu")
    plugin("acme-ipu", "ipu", "import acme_driver")
    answer = script("""
answer = [state("hpu"), state("ipu")]
record = site / "acme_hpu-1.0.dist-info"
(record / "METADATA").write_text("Metadata-Version: 2.1\\nName: acme-hpu\\nVersion: 2.0\\n")
(site / "acme_driver.py").write_text("")
polycast.backends(refresh=True)
answer += [state("hpu"), state("ipu")]
""")
    assert answer == ["ready acme-hpu 1.0", "broken acme-ipu 1.0", "ready acme-hpu 1.0", "ready acme-ipu 1.0"]


def test_variables_that_changed_hold_for_devices_in_use(script, plugin):
    plugin("acme-gnu", "generic")
    plugin("acme-hpu", "hpu")
    plugin("acme-2-hpu", "hpu")
    answer = script(
        """
name_device()
def states(**variables):
    os.environ.update(variables)
    polycast.backends(refresh=True)
    return [state(device) for device in ("cpu", "hpu", "gnu")]
names = "hpu=acme-hpu,gnu=polycast", "hpu=acme-2-hpu,gnu=polycast"
answer = [mark(), states(POLYCAST_PROVIDER=names[0]), states(POLYCAST_PROVIDER=names[1])]
answer += [states(POLYCAST_BLOCK="cpu,gnu"), error_of(mark)[0], states(POLYCAST_BLOCK=""), mark()]
"""
    )
    own = f"polycast {importlib.metadata.version('polycast')}"
    first = [f"ready {own}", "ready acme-hpu 1.0", f"generic {own}"]
    second = [f"ready {own}", "ready acme-2-hpu 1.0", f"generic {own}"]
    blocked = ["blocked  ", "ready acme-2-hpu 1.0", "blocked  "]
    assert answer == ["torch.bfloat16", first, second, blocked, "BackendNotFoundError", second, "torch.bfloat16"]


def test_a_plugin_that_is_being_imported_is_loaded_once(script, plugin):
    plugin(
        "acme-hpu",
        "hpu",
        """
sys = __import__("sys")
sys.made = []
AcmeBackend.__init__ = lambda self: sys.made.append(self)
polycast.backends(refresh=True)
sys.during()
""",
    )
    answer = script("""
import threading
started, refreshed = threading.Event(), threading.Event()
sys.during = lambda: (started.set(), refreshed.wait())
threads = [threading.Thread(target=polycast.plugin.get_backend, args=("hpu",)) for _ in range(2)]
threads[0].start()
started.wait()
polycast.backends(refresh=True)
threads[1].start()
refreshed.set()
for thread in threads:
    thread.join()
answer = [polycast.plugin.get_backend("hpu") is sys.made[0], len(sys.made)]
""")
    assert answer == [True, 1]


def test_a_plugin_is_imported_without_a_lock_of_the_engine(script, plugin, later):
    plugin(
        "acme-cpu",
        "cpu",
        """
import sys
from concurrent.futures import ThreadPoolExecutor
from polycast.engine.installation import lock
with ThreadPoolExecutor(1) as thread:
    sys.is_free = thread.submit(lock.acquire, False).result() and not thread.submit(lock.release).result()
""",
    )
    later("acme")
    answer = script("""
from polycast.engine import installation
choose = installation.choose_engine
def refreshed():
    installation.choose_engine = choose
    install("acme")
    polycast.backends(refresh=True)
    return choose()
installation.choose_engine = refreshed
polycast.install("cpu")
answer = [sys.is_free, state("cpu")]
""")
    assert answer == [True, "ready acme-cpu 1.0"]


def test_a_status_that_is_read_after_its_backend_is_gone(script):
    answer = script("""
register_by_hand("hpu")
states = polycast.backends()
polycast.plugin.unregister_backend("hpu")
answer = [states["hpu"].state, states["hpu"].reason]
""")
    assert answer == ["missing", "No backend is installed for 'hpu'."]


def test_a_backend_registered_by_hand_stays(script, plugin, later):
    plugin("acme-hpu", "hpu")
    later("acme")
    answer = script("""
backend = register_by_hand("hpu")
answer = [polycast.plugin.get_backend("hpu") is backend]
for _ in range(2):
    polycast.backends(refresh=True)
    answer += [polycast.plugin.get_backend("hpu") is backend]
install("acme")
polycast.backends(refresh=True)
answer += [polycast.plugin.get_backend("hpu") is backend]
polycast.plugin.unregister_backend("hpu")
answer += [state("hpu")]
""")
    assert answer == [True, True, True, True, "ready acme-hpu 1.0"]


def test_a_plugin_replaces_the_generic_backend_of_its_device(script, plugin, later):
    plugin("acme-gnu", "gnu")
    later("acme")
    answer = script("""
name_device()
answer = [state("gnu").split()[0]]
found = polycast.plugin.get_backend("gnu")
polycast.install("gnu")
polycast.backends(refresh=True)
answer += [polycast.plugin.get_backend("gnu") is found]
install("acme")
polycast.backends(refresh=True)
answer += [state("gnu"), torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "AutocastPrivateUse1")]
""")
    assert answer == ["generic", True, "ready acme-gnu 1.0", False]
