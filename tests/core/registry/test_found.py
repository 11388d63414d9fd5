"""Plugins that work: discovered from metadata, and imported when their device is first used."""

import importlib.metadata
import re

import pytest

VERSION = importlib.metadata.version("polycast")
OWN_EXTENSIONS = [  # none where the core is tested without plugins
    each for each in importlib.metadata.distribution("polycast").entry_points if each.group == "polycast.extensions"
]

NPU = """
torch.utils.rename_privateuse1_backend("npu")


class NpuTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, raw):
        tensor = torch.Tensor._make_wrapper_subclass(cls, raw.shape, dtype=raw.dtype, device="npu")
        tensor.raw = raw
        return tensor

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return cls(op(*(getattr(value, "raw", value) for value in args), **(kwargs or {})))
"""

USE_CPU = """
x = torch.full((2, 2), 1.001)
with polycast.autocast("cpu"):
    product = torch.mm(x, x)
answer = [product.dtype, torch.equal(product, x.bfloat16() @ x.bfloat16()), vars(polycast.backends()["cpu"])]
"""


def ready(device_type, distribution, version="1.0", replaces=()):
    own = [each.value for each in OWN_EXTENSIONS if each.name == device_type]
    return {
        "device_type": device_type,
        "state": "ready",
        "reason": "",
        "default_dtype": "torch.bfloat16",
        "distribution": distribution,
        "version": version,
        "replaces": list(replaces),
        "extensions": [f"polycast {VERSION} ({each})" for each in own],
        "ops_in_cpp": [f"{each}.native" for each in own],
    }


@pytest.mark.slow
def test_ops_of_a_third_partys_device_run_in_its_fast_dtype(run, plugin, engine):
    plugin("acme-npu", "npu", NPU)
    answer = run(
        """
        with polycast.autocast("npu"):
            from acme_npu import NpuTensor
            raw = torch.full((2, 2), 1.001)
            inside = torch.mm(NpuTensor(raw), NpuTensor(raw))
        outside = torch.mm(NpuTensor(raw), NpuTensor(raw))
        answer = [inside.device.type, torch.equal(inside.raw, raw.bfloat16() @ raw.bfloat16()), outside.dtype]
        """,
        POLYCAST_ENGINE=engine,
    )
    assert answer == ["npu", True, "torch.float32"]


@pytest.mark.parametrize("index", ["0", "1"])
def test_an_out_of_tree_device_has_an_index_before_its_plugin_is_imported(run, plugin, index):
    plugin("acme-npu", "npu", NPU)
    assert run(f"answer = polycast.plugin.get_backend('npu:{index}').device_type") == "npu"


@pytest.mark.parametrize("device", ["npu:x", "npu:", "npu:-1"])
def test_a_bad_index_of_an_out_of_tree_device_is_refused_at_the_first_use(run, plugin, device):
    plugin("acme-npu", "npu", NPU)
    answer = run(f"answer = [error_of(polycast.plugin.get_backend, '{device}') for _ in range(2)]")
    assert answer[0] == answer[1]
    kind, text = answer[0]
    assert kind == "RuntimeError"
    assert text.startswith(f"Invalid device string: '{device}'. Did you mean 'npu'? Backends are installed for: cpu,")


def test_the_status_of_a_third_party_names_the_built_in_that_it_replaces_which_is_not_imported(run, plugin):
    plugin("acme-cpu", "cpu", version="2.5")
    built_in = f"polycast {importlib.metadata.version('polycast')} (polycast_backends.cpu)"
    assert run(USE_CPU) == ["torch.bfloat16", True, ready("cpu", "acme-cpu", "2.5", [built_in])]
    assert run("polycast.install('cpu'); answer = 'polycast_backends.cpu' in sys.modules") is False


def test_a_distribution_may_have_an_entry_point_for_each_of_several_devices(run, distribution):
    source = """
import polycast
from polycast_backends.cpu import CpuBackend
class Plugin:
    def __init__(self, device_type):
        self.backend = CpuBackend()
        self.backend.device_type = device_type
    @polycast.plugin.hookimpl
    def polycast_backend(self):
        return self.backend
hpu, ipu = Plugin("hpu"), Plugin("ipu")
"""
    distribution("acme", {"hpu": "acme.plugin:hpu", "ipu": "acme.plugin:ipu"}, {"acme/plugin.py": source})
    statuses = run("answer = dict(polycast.backends())")
    assert (statuses["hpu"], statuses["ipu"]) == (ready("hpu", "acme"), ready("ipu", "acme"))


def test_a_plugin_is_imported_when_its_device_is_first_used(run, plugin):
    plugin("acme-hpu", "hpu")
    plugin("acme-ipu", "ipu")
    answer = run("""
        plugins = ("acme_hpu", "acme_ipu", "polycast_backends.cpu", "polycast_backends.cuda", "polycast_backends.xpu")
        answer = []
        for look in ("xla", "hpu", "cpu"):
            polycast.is_autocast_available(look)
            answer.append([name for name in plugins if name in sys.modules])
    """)
    assert answer == [[], ["acme_hpu"], ["acme_hpu", "polycast_backends.cpu"]]


@pytest.mark.parametrize("kind", ["plugin", "extension"])
def test_what_a_plugin_prints_and_changes_at_import_and_in_its_hook_does_not_reach_the_program(
    run, plugin, extension, kind
):
    at_import = 'print("hello")\ntorch.set_default_dtype(torch.float64)\n'
    hook = """
@polycast.plugin.hookimpl
def polycast_backend():
    print("hello again")
    torch.manual_seed(7)
    return AcmeBackend()
"""
    if kind == "plugin":
        plugin("acme-hpu", "hpu", at_import + hook)
    else:
        plugin("acme-base", "hpu")
        extension("acme-hpu", "hpu", at_import)
    answer = run("""
        import contextlib, io
        out, err = io.StringIO(), io.StringIO()
        torch.manual_seed(3)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            state = polycast.backends()["hpu"].state
        answer = [state, out.getvalue(), err.getvalue(), torch.get_default_dtype(), torch.initial_seed()]
    """)
    said = "the default dtype, the random numbers" if kind == "plugin" else "the default dtype"
    printed = "hello\nhello again\n" if kind == "plugin" else "hello\n"
    line = f"polycast: the import of acme-hpu 1.0 (acme_hpu) changed torch, which is put back: {said}.\n"
    assert answer == ["ready", "", f"{printed}{line}", "torch.float32", 3]


def test_random_numbers_that_a_plugin_draws_at_import_are_drawn_again(run, plugin):
    plugin("acme-hpu", "hpu", "torch.rand(5)")
    answer = run("""
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        answer = [polycast.backends()["hpu"].state, torch.equal(torch.rand(3), expected)]
    """)
    assert answer == ["ready", True]


def test_discovery_of_1000_entry_points_imports_nothing(run, distribution):
    for maker in range(50):
        distribution(f"acme-{maker}", {f"device{maker}x{model}": "acme_absent" for model in range(20)}, {})
    modules, loads, listing = run("""
        import importlib.metadata
        loads = []
        importlib.metadata.EntryPoint.load = lambda entry_point: loads.append(entry_point)
        importlib.metadata.entry_points(group="polycast.backends")
        look_up = polycast.plugin.get_backend  # which imports what looks
        before = set(sys.modules)
        listing = error_of(look_up, "ipu")[1]
        answer = [sorted(set(sys.modules) - before), loads, listing]
    """)
    assert (modules, loads) == ([], [])
    assert len(re.findall(r"device\d+x\d+", listing)) == 1000


def test_eight_threads_load_a_plugin_once_and_read_the_metadata_once(run, plugin):
    slowly = """
        import time
        made = []
        def slowly(self):
            time.sleep(0.05)
            made.append(self)
        AcmeBackend.__init__ = slowly
        """
    plugin("acme-hpu", "hpu", slowly)
    plugin("acme-ipu", "ipu")
    answer = run("""
        import importlib.metadata, threading
        from concurrent.futures import ThreadPoolExecutor
        devices = ["hpu", "hpu", "hpu", "hpu", "ipu", "mtia", "cpu", "xpu"]
        reads, read = [], importlib.metadata.entry_points
        importlib.metadata.entry_points = lambda group: reads.append(group) or read(group=group)
        barrier = threading.Barrier(8)
        def look_up(device):
            barrier.wait(60)
            return polycast.plugin.get_backend(device)
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(look_up, devices))
        made = len(set(found)), len(sys.modules["acme_hpu"].made)
        answer = [[each.device_type for each in found] == devices, *made, sorted(reads)]
    """)
    assert answer == [True, 5, 1, ["polycast.backends", "polycast.extensions"]]
