"""The hooks on methods and functions that can make aliases: how they are installed and removed."""

import gc

import pytest
import torch
from tests.engines import NATIVE
from torch.optim.optimizer import _global_optimizer_post_hooks

import polycast
from polycast.engine import installation
from polycast.engine.casts import unversioned_writes

pytestmark = NATIVE
HOOKED = ("data", "numpy", "untyped_storage", "data_ptr", "apply_", "map_", "map2_")
BUILTINS = (torch._C._to_dlpack, torch._C._to_dlpack_versioned, torch._C._autograd._get_data_attr)


def changed():
    """Return what the hooks change that Python can see."""
    preserve = torch.autograd.grad_mode._unsafe_preserve_version_counter
    seen = [vars(torch.Tensor).get(name) for name in HOOKED]
    dump = torch._C._dispatch_dump("aten::_fused_adam_").splitlines()
    kernels = [line for line in dump if "ADInplaceOrView" in line]
    after_steps = list(_global_optimizer_post_hooks)
    builtins = [function.__self__ for function in BUILTINS]
    return seen, preserve.__exit__, torch.utils.weakref, builtins, kernels, after_steps


def test_uninstall_removes_the_hooks(monkeypatch):
    monkeypatch.setattr(installation, "caches_alive", ())  # a cache that another test leaves keeps the hooks
    polycast.clear_autocast_cache()
    polycast.uninstall()
    gc.collect()
    before = changed()
    with polycast.autocast("cpu"):
        used = changed()
        assert unversioned_writes._listener is not None
    polycast.uninstall()
    assert unversioned_writes._listener is None  # it holds the engine
    assert all(one != other for one, other in zip(used[1:], before[1:], strict=True))
    assert used[0] == before[0]  # it changes torch's functions in C
    assert changed() == before


def test_a_hook_that_another_library_installs_stays_and_calls_polycasts():
    polycast.install("cpu")
    torchs = vars(torch._C.TensorBase)["data"]
    mine = property(lambda tensor: torchs.__get__(tensor))
    torch.Tensor.data = mine
    try:
        weight = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
        with polycast.autocast("cpu"):
            assert [torch.mm(weight, weight)[0, 0] for _ in range(3)] == [4, 4, 4]
            weight.data.fill_(2)
            assert torch.mm(weight, weight)[0, 0] == 16
        polycast.uninstall()
        assert vars(torch.Tensor)["data"] is mine
        with polycast.autocast("cpu"):
            assert vars(torch.Tensor)["data"] is mine
    finally:
        del torch.Tensor.data
        polycast.uninstall()


def test_a_hook_has_the_name_and_signature_of_torchs_method(subtests):
    for name in HOOKED:
        with subtests.test(name=name):
            polycast.install("cpu")
            hook, torchs = getattr(torch.Tensor, name), vars(torch._C.TensorBase)[name]
            assert hook.__doc__ == torchs.__doc__
            assert getattr(hook, "__name__", name) == torchs.__name__ == name


def test_a_replaced_builtin_function_is_the_same_object_and_raises_torchs_errors():
    polycast.install("cpu")
    assert torch.to_dlpack is torch.utils.dlpack.to_dlpack is torch._C._to_dlpack is BUILTINS[0]
    assert [f.__name__ for f in BUILTINS] == ["_to_dlpack", "_to_dlpack_versioned", "_get_data_attr"]
    assert [f.__module__ for f in BUILTINS] == ["torch._C", "torch._C", "torch._C._autograd"]
    assert "to_dlpack(tensor)" in torch.to_dlpack.__doc__
    for function in BUILTINS:
        with pytest.raises((TypeError, AttributeError)):
            function()
    with pytest.raises(BufferError, match="require gradient"):
        torch.ones(1, requires_grad=True).__dlpack__()
    with pytest.raises(TypeError, match="_to_dlpack"):
        torch.to_dlpack(1)
    assert torch.from_dlpack(torch.to_dlpack(torch.arange(3))).tolist() == [0, 1, 2]
    copied = torch._C._to_dlpack(torch.arange(3), copy=True)
    assert torch.from_dlpack(copied).tolist() == [0, 1, 2]


def test_torch_lists_the_methods_of_tensors_with_and_without_hooks():
    polycast.clear_autocast_cache()
    for change in (polycast.uninstall, lambda: polycast.install("cpu"), polycast.uninstall):
        change()
        assert all(torch.overrides.is_tensor_method_or_property(getattr(torch.Tensor, name)) for name in HOOKED[1:])


def test_hooks_work_on_a_tensor_without_memory():
    polycast.install("cpu")
    sparse = torch.eye(2).to_sparse()
    assert torch.equal(sparse.data.to_dense(), torch.eye(2))
    with pytest.raises(NotImplementedError, match="storage"):
        sparse.untyped_storage()
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.ones(1, requires_grad=True).numpy()
