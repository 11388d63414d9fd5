"""patch_torch: what torch's names mean while it is in force, that they are torch's own after it, and what goes on."""

import contextlib
import copy
import inspect
import pickle
import re
import subprocess
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
from torch.amp import autocast_mode
from torch.utils.checkpoint import checkpoint

import polycast
from polycast.interop import patch

THEIRS = {
    (module, name): getattr(sys.modules[module], name)
    for module, names in {
        "torch": ["autocast"],
        "torch.amp": ["autocast", "custom_bwd", "custom_fwd", "is_autocast_available"],
        "torch.amp.autocast_mode": [
            *["autocast", "autocast_decorator", "custom_bwd", "custom_fwd", "is_autocast_available"],
        ],
        "torch.cpu.amp": ["autocast"],
        "torch.cpu.amp.autocast_mode": ["autocast"],
        "torch.cuda.amp": ["autocast"],
        "torch.cuda.amp.autocast_mode": ["autocast"],
    }.items()
    for name in names
}
TORCHS = torch.autocast
X = torch.ones(2, 2)


@pytest.fixture
def patched():
    with polycast.patch_torch() as it:
        yield it


def names_now():
    return {(module, name): getattr(sys.modules[module], name) for module, name in THEIRS}


def public_names_of(objects):
    """Return module and name of everything public in torch that is one of the objects."""
    identities = set(map(id, objects))
    return {
        (module_name, name)
        for module_name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and f"{module_name}.".startswith("torch.") and "._" not in module_name
        for name, value in list(vars(module).items())
        if id(value) in identities
    }


def test_it_replaces_every_public_name_and_gives_back_the_same_objects():
    with polycast.patch_torch():
        inside = names_now()
        left = public_names_of(THEIRS.values())
    assert [name for name, value in inside.items() if value is THEIRS[name]] == []
    assert left == set()
    assert {name for name, value in names_now().items() if value is not THEIRS[name]} == set()
    assert public_names_of(inside.values()) == set()


def test_the_names_that_the_tests_know_are_all_that_this_torch_has():
    functions = {"autocast_decorator", "custom_bwd", "custom_fwd", "is_autocast_available"}
    classes = {value for name, value in THEIRS.items() if name[1] == "autocast"}
    objects = classes | {getattr(autocast_mode, name) for name in functions}
    assert public_names_of(objects) == set(THEIRS)


@pytest.mark.usefixtures("patched")
def test_one_name_is_as_good_as_another():
    assert torch.autocast is torch.amp.autocast is torch.amp.autocast_mode.autocast
    assert torch.cpu.amp.autocast is torch.cpu.amp.autocast_mode.autocast


@pytest.mark.usefixtures("patched", "engine")
def test_a_region_is_polycasts():
    region = torch.autocast("cpu")
    assert isinstance(region, polycast.autocast)
    with region as entered:
        assert entered is region
        assert polycast.autocast_nesting("cpu") == 1
        assert torch.cat([torch.ones(1).half(), torch.ones(1).bfloat16()]).dtype is torch.float32  # torch's raises
        assert (X @ X).dtype is torch.bfloat16


@pytest.mark.usefixtures("patched")
def test_a_region_takes_torchs_arguments_in_torchs_order():
    assert inspect.signature(torch.autocast).parameters.keys() == inspect.signature(TORCHS).parameters.keys()
    with torch.autocast("cpu", torch.float16, False, False):
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()


@pytest.mark.usefixtures("patched", "engine")
def test_a_region_decorates_what_polycasts_does():
    @torch.autocast("cpu")
    def products(x):
        yield x @ x

    assert next(products(X)).dtype is torch.bfloat16

    decorated = torch.amp.autocast_mode.autocast_decorator(torch.autocast("cpu"), lambda x: x @ x)
    assert decorated(X).dtype is torch.bfloat16


@pytest.mark.usefixtures("patched", "engine")
def test_a_region_nested_in_itself_is_left():
    region = torch.autocast("cpu")
    with region, region:
        pass
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.usefixtures("patched")
def test_a_region_that_was_not_entered_cannot_be_left():
    with pytest.raises(RuntimeError, match=r"^autocast\('cpu', .+ cannot be left on thread"):
        torch.autocast("cpu").__exit__(None, None, None)


@pytest.mark.usefixtures("patched")
def test_a_warning_names_the_line_of_the_program():
    with pytest.warns(polycast.AutocastDisabledWarning) as record:
        torch.autocast("cpu", torch.int8)
    assert record[0].filename == __file__


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(
    ("arguments", "kind"),
    [((3,), ValueError), (("not a real device",), RuntimeError), (("cpu", "bfloat16"), TypeError), ((), TypeError)],
)
def test_bad_arguments_are_refused(arguments, kind):
    with pytest.raises(kind):
        torch.autocast(*arguments)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("module", "device", "dtype"), [("cpu", "cpu", "bfloat16"), ("cuda", "cuda", "float16")])
def test_the_deprecated_classes_warn_and_default_as_torchs(module, device, dtype, patched):
    cls = getattr(torch, module).amp.autocast
    with pytest.warns(FutureWarning, match=rf"`torch\.{module}\.amp\.autocast\(args\.\.\.\)` is deprecated") as record:
        region = cls(enabled=False)
    assert record[0].filename == __file__
    assert isinstance(region, polycast.autocast)
    assert isinstance(region, torch.autocast)
    assert issubclass(cls, torch.autocast)
    assert (region.device, region.fast_dtype) == (device, getattr(torch, dtype))
    patched.stop()
    try:
        assert inspect.signature(cls) == inspect.signature(getattr(torch, module).amp.autocast)
    finally:
        patched.start()


@pytest.mark.usefixtures("patched", "engine")
@pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast:FutureWarning")
def test_a_deprecated_class_runs_polycasts_region():
    with torch.cpu.amp.autocast(True, torch.float16):
        assert polycast.autocast_nesting("cpu") == 1
        assert (X @ X).dtype is torch.float16
    with pytest.raises(TypeError):
        torch.cpu.amp.autocast("cpu", device_type="cpu")


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("module", [torch.amp, torch.cuda.amp])
def test_custom_fwd_and_custom_bwd_are_polycasts(module, patched):
    device = {"device_type": "cpu"} if module is torch.amp else {}
    warns = pytest.warns(FutureWarning) if module is torch.cuda.amp else contextlib.nullcontext()
    with warns:

        class Square(torch.autograd.Function):
            @staticmethod
            @module.custom_fwd(**device) if device else module.custom_fwd
            def forward(x):
                return x * x

            @staticmethod
            def setup_context(ctx, inputs, output):
                ctx.save_for_backward(*inputs)

            @staticmethod
            @module.custom_bwd(**device) if device else module.custom_bwd
            def backward(ctx, grad):
                return 2 * ctx.saved_tensors[0] * grad

    x = torch.full((1,), 3.0, requires_grad=True)
    Square.apply(x).backward()  # torch's own raise AttributeError with setup_context
    assert x.grad.item() == 6.0


@pytest.mark.usefixtures("patched")
def test_is_autocast_available_says_whether_the_device_can_be_used(hand_made):
    hand_made("maia", availability=lambda: polycast.Availability(False, "it is not plugged in"))
    assert torch.amp.is_autocast_available("maia") is False
    assert torch.amp.is_autocast_available("cpu") is True
    assert torch.amp.is_autocast_available("hpu") is torch._C._is_autocast_available("hpu")
    assert torch.amp.is_autocast_available("meta") is False


@pytest.mark.usefixtures("patched")
def test_where_no_backend_serves_the_device_the_region_is_torchs():
    region = torch.autocast("hpu", torch.bfloat16)
    assert isinstance(region, torch.autocast)
    with region:
        assert torch.is_autocast_enabled("hpu")
        assert torch.get_autocast_dtype("hpu") is torch.bfloat16
        assert polycast.autocast_nesting("hpu") == 0
    assert not torch.is_autocast_enabled("hpu")
    assert region(lambda: torch.is_autocast_enabled("hpu"))() is True
    assert "autocast object" in repr(region)


@pytest.mark.usefixtures("patched")
def test_where_torch_has_no_autocast_either_it_says_what_torch_says():
    with pytest.raises(RuntimeError) as theirs:
        TORCHS("meta", torch.bfloat16)
    with pytest.raises(RuntimeError, match=re.escape(str(theirs.value))):
        torch.autocast("meta", torch.bfloat16)


@pytest.mark.usefixtures("patched")
def test_custom_fwd_is_torchs_where_no_backend_serves_the_device():
    decorated = torch.amp.custom_fwd(lambda ctx: None, device_type="hpu")
    assert decorated.__code__.co_filename == autocast_mode.__file__


@pytest.mark.usefixtures("patched")
def test_a_blocked_device_is_torchs(monkeypatch):
    monkeypatch.setenv("POLYCAST_BLOCK", "xpu")
    monkeypatch.setattr(polycast.registry.registry, "_discovered", None)
    monkeypatch.setattr(polycast.registry.registry, "ready", {})
    with torch.autocast("xpu", enabled=False):
        assert polycast.autocast_nesting("xpu") == 0


def test_a_broken_backend_is_not_passed_over_in_silence(patched, monkeypatch):
    def broken(self):
        raise polycast.BackendBrokenError("the plugin is broken")

    monkeypatch.setattr("polycast.discovery.Slot.backend", broken)
    monkeypatch.setattr(polycast.registry.registry, "_discovered", None)
    monkeypatch.setattr(polycast.registry.registry, "ready", {})
    with pytest.raises(polycast.BackendBrokenError, match="the plugin is broken"):
        torch.autocast("cpu")


@pytest.mark.usefixtures("patched")
def test_every_region_that_torchs_names_made_is_an_instance_of_torchs_class():
    assert isinstance(torch.autocast("cpu"), torch.autocast)
    assert isinstance(TORCHS("cpu"), torch.autocast)
    assert isinstance(torch.autocast("cpu"), TORCHS)
    assert not isinstance(contextlib.nullcontext(), torch.autocast)
    assert issubclass(TORCHS, torch.autocast)
    assert not issubclass(dict, torch.autocast)


@pytest.mark.usefixtures("engine")
def test_a_subclass_made_while_patched_is_a_region_of_its_own_kind():
    with polycast.patch_torch():

        class Half(torch.autocast):
            def __init__(self, device_type):
                super().__init__(device_type, dtype=torch.float16)

            def __enter__(self):
                self.seen = torch.is_autocast_enabled(self.device)
                return super().__enter__()

        with Half("cpu") as region:
            assert (X @ X).dtype is torch.float16
        assert region.seen is False
        assert isinstance(region, (Half, torch.autocast, polycast.autocast))
        assert not isinstance(torch.autocast("cpu"), Half)
        assert Half != torch.autocast
        assert Half("cpu")(lambda: X @ X)().dtype is torch.float16
        with Half("hpu"):
            assert torch.get_autocast_dtype("hpu") is torch.float16
    with Half("cpu"):  # and it goes on after the patch
        assert (X @ X).dtype is torch.float16
    assert isinstance(Half("cpu"), torch.autocast)


def test_a_subclass_may_be_abstract(patched):
    class Abstract(torch.autocast, ABC):
        @abstractmethod
        def name(self): ...

    with pytest.raises(TypeError, match="abstract"):
        Abstract("cpu")


@pytest.mark.usefixtures("engine")
def test_a_subclass_made_before_works_while_patched():
    class Half(torch.autocast):
        def __init__(self, device_type):
            super().__init__(device_type, dtype=torch.float16)

    before = Half("cpu")
    with polycast.patch_torch():
        for region in (before, Half("cpu")):
            with region:
                assert (X @ X).dtype is torch.float16
            assert isinstance(region, torch.autocast)
            assert region(lambda: X @ X)().dtype is torch.float16
    assert not torch.is_autocast_enabled("cpu")


def test_a_name_that_was_imported_before_is_torchs(patched):
    assert THEIRS["torch", "autocast"] is TORCHS
    with TORCHS("cpu"):
        assert polycast.autocast_nesting("cpu") == 0
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.usefixtures("engine")
def test_a_name_that_was_imported_while_patched_goes_on_working():
    with polycast.patch_torch():
        from torch import autocast
    with autocast("cpu"):
        assert polycast.autocast_nesting("cpu") == 1


def test_a_region_may_span_the_end_of_the_patch_and_its_beginning():
    patching = polycast.patch_torch()
    with TORCHS("cpu"):
        patching.start()
    ours = torch.autocast("cpu")
    with ours:
        patching.stop()
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_entered_twice_it_ends_with_the_outermost():
    one, other = polycast.patch_torch(), polycast.patch_torch()
    with one:
        inside = torch.autocast
        with one, other:
            assert torch.autocast is inside
        assert torch.autocast is inside
    assert torch.autocast is TORCHS


def test_two_may_end_in_the_order_in_which_they_began():
    one, other = polycast.patch_torch(), polycast.patch_torch()
    one.start()
    other.start()
    one.stop()
    assert torch.autocast is not TORCHS
    other.stop()
    assert torch.autocast is TORCHS


def test_it_ends_where_an_error_leaves_the_block():
    with pytest.raises(ZeroDivisionError), polycast.patch_torch():
        _ = 1 / 0
    assert names_now() == THEIRS
    assert torch.autocast is TORCHS


@pytest.mark.parametrize("elsewhere", [False, True])
def test_stop_without_start_is_refused(elsewhere):
    with polycast.patch_torch() if elsewhere else contextlib.nullcontext():
        before = torch.autocast
        with pytest.raises(RuntimeError) as caught:
            polycast.patch_torch().stop()
        assert torch.autocast is before
    assert str(caught.value) == (
        "patch_torch: stop() without start(): this object does not patch torch now. Call stop() on the object that "
        "start() was called on, once for each start()."
    )


def test_an_error_while_patching_leaves_nothing_patched(monkeypatch):
    class Sealed(ModuleType):
        def __setattr__(self, name, value):
            raise AttributeError(f"{name} is sealed")

    sealed = Sealed("torch.sealed")
    vars(sealed)["autocast"] = TORCHS
    monkeypatch.setitem(sys.modules, "torch.sealed", sealed)
    patching = polycast.patch_torch()
    with pytest.raises(AttributeError, match="autocast is sealed"):
        patching.start()
    assert {name for name, value in names_now().items() if value is not THEIRS[name]} == set()
    with pytest.raises(RuntimeError, match="without start"):
        patching.stop()
    monkeypatch.undo()
    with polycast.patch_torch():
        assert torch.autocast is not TORCHS


def test_an_alias_in_a_module_of_torchs_that_came_later_is_found(monkeypatch):
    later = ModuleType("torch.later")
    later.region = TORCHS
    monkeypatch.setitem(sys.modules, "torch.later", later)
    with polycast.patch_torch():
        assert later.region is torch.autocast
    assert later.region is TORCHS


def test_threads_may_patch_at_the_same_time():
    start = threading.Barrier(8)

    def work(_):
        start.wait()
        seen = []
        for _ in range(50):
            with polycast.patch_torch():
                seen.append(torch.autocast is not TORCHS and isinstance(torch.autocast("cpu"), polycast.autocast))
        return all(seen)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))
    assert torch.autocast is TORCHS
    assert patch._patches == 0


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("device", ["cpu", "hpu"])
def test_a_region_can_be_copied_and_pickled(device):
    for region in (torch.autocast(device, torch.float16), torch.autocast(device, torch.float16, False)):
        for again in (copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
            assert type(again) is torch.autocast
            with again:
                assert torch.get_autocast_dtype(device) is torch.float16
                assert torch.is_autocast_enabled(device) is region._enabled


# What torch itself does with its autocast


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backward_patched", [True, False])
@pytest.mark.parametrize("forward_patched", [True, False])
def test_checkpoints_are_recomputed_in_the_region_of_their_forward(reentrant, forward_patched, backward_patched):
    def patching(wanted):
        return polycast.patch_torch() if wanted else contextlib.nullcontext()

    dtypes = []

    def run(x):
        hidden = net[0](x)
        dtypes.append(hidden.dtype)
        return net[2](net[1](hidden))

    net, x = model(), torch.ones(3, 4, requires_grad=True)
    with patching(forward_patched), torch.autocast("cpu"):
        out = checkpoint(run, x, use_reentrant=reentrant)
    with patching(backward_patched):
        out.float().sum().backward()
    assert dtypes == [torch.bfloat16, torch.bfloat16]
    plain, y = model(), torch.ones(3, 4, requires_grad=True)
    with polycast.autocast("cpu"):
        out = plain(y)
    out.float().sum().backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.usefixtures("patched", "engine")
def test_data_parallel_runs_in_the_region():
    with torch.autocast("cpu"):
        assert torch.nn.DataParallel(model())(torch.ones(3, 4)).dtype is torch.bfloat16


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def in_region(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x


def in_deprecated_region(x):
    with torch.cpu.amp.autocast():
        return x @ x


def in_region_given(x, region):
    with region:
        return x @ x


@pytest.mark.usefixtures("dynamo", "engine")
@pytest.mark.parametrize("function", [in_region, in_deprecated_region])
@pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast:FutureWarning")
def test_torch_compile_takes_the_regions_of_a_function_into_its_graph_with_and_without_the_patch(function):
    for patching in (contextlib.nullcontext(), polycast.patch_torch(), contextlib.nullcontext()):
        with patching:
            assert torch.compile(function, backend="aot_eager", fullgraph=True)(X).dtype is torch.bfloat16
            assert not torch.is_autocast_enabled("cpu")


@pytest.mark.usefixtures("dynamo", "engine")
def test_torch_compile_takes_a_region_that_was_made_outside():
    compiled = torch.compile(in_region_given, backend="aot_eager", fullgraph=True)
    with polycast.patch_torch():
        assert compiled(X, torch.autocast("cpu", torch.float16)).dtype is torch.float16
        assert compiled(X, torch.autocast("cpu", enabled=False)).dtype is torch.float32


@pytest.mark.usefixtures("dynamo", "engine")
def test_torch_compile_takes_names_that_were_imported_before():
    theirs = THEIRS["torch", "autocast"]

    def function(x):
        with theirs("cpu"):
            return x @ x

    with polycast.patch_torch():
        assert torch.compile(function, backend="aot_eager", fullgraph=True)(X).dtype is torch.bfloat16


@pytest.mark.usefixtures("dynamo", "engine")
def test_a_compiled_model_runs_and_trains_in_a_region():
    net = model()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with polycast.patch_torch():
        with torch.autocast("cpu"):
            out = compiled(torch.ones(3, 4))
        out.float().sum().backward()
    assert out.dtype is torch.bfloat16
    assert net[0].weight.grad.dtype is torch.float32


def test_torch_compile_that_is_imported_while_patched_knows_torchs_classes_later():
    script = """
import sys, torch, polycast, warnings
warnings.simplefilter("ignore")
from torch.cuda.amp import autocast as imported_before
assert "torch._dynamo.variables.torch" not in sys.modules
def main(x):
    with torch.autocast("cpu"):
        return x @ x
def deprecated(x):
    with torch.cpu.amp.autocast():
        return x @ x
def other_device(x):
    with imported_before():
        return x @ x
def dtypes():
    torch._dynamo.reset()
    compiled = [torch.compile(f, backend="eager", fullgraph=True) for f in (main, deprecated)]
    compiled.append(torch.compile(other_device, backend="eager"))  # the graph may break at a class of before
    return [str(f(torch.ones(2, 2)).dtype)[6:] for f in compiled]
with polycast.patch_torch():
    print(*dtypes())
print(*dtypes())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["bfloat16 bfloat16 float32"] * 2, done.stderr


def test_torch_jit_scripts_a_region_with_and_without_the_patch():
    def function(x):
        with torch.autocast("cpu"):
            return x @ x

    for patching in (polycast.patch_torch(), contextlib.nullcontext(), polycast.patch_torch()):
        with patching, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit as a whole is deprecated
            assert torch.jit.script(function)(X).dtype is torch.bfloat16


@pytest.mark.usefixtures("patched", "engine")
def test_torch_jit_traces_the_casts_of_a_region():
    with warnings.catch_warnings(), torch.autocast("cpu", cache_enabled=False):
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(model().eval(), torch.ones(3, 4))
    assert traced(torch.ones(3, 4)).dtype is torch.bfloat16


@pytest.mark.usefixtures("patched", "engine", "dynamo")
@pytest.mark.parametrize("strict", [True, False])
def test_torch_export_keeps_what_a_region_does(strict):
    class Net(torch.nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ x

    exported = torch.export.export(Net(), (X,), strict=strict)
    assert exported.module()(X).dtype is torch.bfloat16
