"""Tensors of npy: memory, views, copies, casts."""

import copy
import gc
import weakref

import pytest
import torch

from polycast_npy.tensors import array


def test_a_tensor_is_torchs_own():
    x = torch.zeros(2, 3, device="npy")
    assert type(x) is torch.Tensor
    assert x.device == torch.device("npy", 0)
    assert type(torch.nn.Parameter(x)) is torch.nn.Parameter


def test_the_device_has_one_name_in_a_process():
    import polycast_npy

    polycast_npy.register_device()
    assert torch._C._get_privateuse1_backend_name() == "npy"
    assert torch.npy.is_available()
    assert torch.npy.device_count() == 1


def test_views_share_memory_and_version():
    x = torch.zeros(3, 4, device="npy")
    view = x.t()[1:, ::2]
    view.fill_(5)
    assert view.untyped_storage() is x.untyped_storage()
    assert x._version == view._version == 1
    assert x.sum().item() == 30


def test_the_array_of_a_tensor_is_its_memory():
    x = torch.arange(6.0).reshape(2, 3).to("npy")
    array(x.t())[2, 1] = 9
    assert x[1, 2].item() == 9
    assert x.data_ptr() == array(x).ctypes.data


def test_memory_dies_with_the_last_tensor_on_it():
    x = torch.zeros(8, device="npy")
    view, data = x[2:], weakref.ref(x.untyped_storage().npy_data)
    del x
    gc.collect()
    assert view.sum().item() == 0
    del view
    gc.collect()
    assert data() is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int8, torch.int64, torch.bool])
def test_a_copy_there_and_back_is_the_same(dtype):
    x = torch.randn(3, 4).mul(10).to(dtype)
    back = x.t().to("npy").cpu()
    assert back.dtype is dtype
    assert torch.equal(back, x.t())


@pytest.mark.parametrize("source", ["cpu", "npy"])
def test_a_copy_casts(source):
    x = torch.tensor([1.5, -2.0, 70000.0]).to(source)
    assert x.to("npy", torch.float16).cpu().tolist() == [1.5, -2.0, float("inf")]
    assert x.to("npy").to(torch.int32).tolist() == [1, -2, 70000]
    assert x.to("npy").to("cpu", torch.bfloat16).dtype is torch.bfloat16


def test_there_is_no_bfloat16():
    with pytest.raises(TypeError) as caught:
        torch.zeros(2, dtype=torch.bfloat16, device="npy")
    assert str(caught.value) == (
        "npy has no tensors of torch.bfloat16: NumPy has no such dtype. Use torch.float16 or torch.float32."
    )


def test_tensors_of_two_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="two devices, npy:0 and cpu"):
        torch.ones(2, device="npy") * torch.ones(2)
    with pytest.raises(RuntimeError, match=r"Expected all tensors to be on npy, but found one of shape \(2,\) on cpu"):
        array(torch.ones(2))


def test_a_tensor_without_elements():
    x = torch.empty(0, 3, device="npy")
    assert (x + 1).shape == (0, 3)
    assert x.sum().item() == 0
    assert x.cpu().shape == (0, 3)


def test_a_tensor_is_printed():
    assert repr(torch.tensor([1.0, 2.5], device="npy")) == "tensor([1.0000, 2.5000], device='npy:0')"


def test_a_model_is_moved_and_copied():
    model = torch.nn.Linear(3, 2)
    expected = model.weight.detach().clone()
    moved = copy.deepcopy(model.to("npy"))
    assert moved.weight.device.type == "npy"
    assert moved.weight.untyped_storage() is not model.weight.untyped_storage()
    assert torch.equal(moved.to("cpu").weight, expected)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_steps_as_on_the_cpu(make, foreach):
    steps = []
    for device in ("cpu", "npy"):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2).to(device)
        options = {"momentum": 0.9} if make is torch.optim.SGD else {}
        optimizer = make(model.parameters(), lr=0.1, weight_decay=0.01, foreach=foreach, **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3).to(device)).square().mean().backward()
            optimizer.step()
        steps.append(model.weight.detach().cpu())
    torch.testing.assert_close(*steps)


def test_dropout_drops_some_and_their_gradients():
    x = torch.ones(1000, device="npy", requires_grad=True)
    y = torch.nn.functional.dropout(x, 0.5)
    y.sum().backward()
    assert set(y.tolist()) == {0.0, 2.0}
    assert torch.equal(x.grad.cpu(), y.detach().cpu())


def test_batch_norm_keeps_running_statistics():
    norms = []
    for device in ("cpu", "npy"):
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm2d(3).to(device)
        norm(torch.randn(4, 3, 2, 2).to(device))
        norms.append(norm.cpu())
    torch.testing.assert_close(norms[1].state_dict(), norms[0].state_dict())
