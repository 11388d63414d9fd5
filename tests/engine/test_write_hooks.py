"""The hooks on methods of torch.Tensor that can make aliases: how they are installed and removed."""

import gc

import pytest
import torch

import polycast
from polycast.engine import installation

pytestmark = pytest.mark.usefixtures("engine")
HOOKED = ("data", "numpy", "untyped_storage", "data_ptr", "set_")


def attributes():
    others = (torch.utils.swap_tensors, torch.utils.dlpack.to_dlpack, torch.to_dlpack, torch.Tensor.__dlpack__)
    preserve = torch.autograd.grad_mode._unsafe_preserve_version_counter
    return [vars(torch.Tensor).get(name) for name in HOOKED], others, preserve.__exit__


def test_uninstall_removes_the_hooks(monkeypatch):
    monkeypatch.setattr(installation, "caches_alive", ())  # a cache that another test leaves keeps the hooks
    polycast.clear_autocast_cache()
    polycast.uninstall()
    gc.collect()
    before = attributes()
    with polycast.autocast("cpu"):
        used = attributes()
    polycast.uninstall()
    assert used != before
    assert attributes() == before


def test_uninstall_leaves_a_replaced_hook():
    polycast.install("cpu")
    mine = property(lambda tensor: torch._C.TensorBase.data.__get__(tensor))
    torch.Tensor.data = mine
    try:
        polycast.uninstall()
        assert vars(torch.Tensor)["data"] is mine
        with polycast.autocast("cpu"):
            assert vars(torch.Tensor)["data"] is mine
    finally:
        del torch.Tensor.data


@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_has_the_name_and_signature_of_torchs_method(name):
    polycast.install("cpu")
    hook, torchs = vars(torch.Tensor)[name], vars(torch._C.TensorBase)[name]
    assert hook is not torchs
    assert hook.__doc__ == torchs.__doc__
    assert getattr(hook, "__name__", name) == torchs.__name__ == name


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
