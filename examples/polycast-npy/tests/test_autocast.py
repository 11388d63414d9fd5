"""Autocast on npy: the dtypes of a region, forward and backward, its casts of weights, and what the backend says."""

import sys

import pytest
import torch
from torch.nn import functional as F

import polycast
import polycast_npy
from polycast_npy import device

pytestmark = pytest.mark.usefixtures("engine")


def tensors(*shapes, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype).to("npy") for shape in shapes]


# op: (function, shapes of its inputs, dtype of its result in a region)
REGION = {
    "mm": (torch.mm, [(2, 3), (3, 4)], torch.float16),
    "bmm": (torch.bmm, [(1, 2, 3), (1, 3, 4)], torch.float16),
    "addmm": (torch.addmm, [(4,), (2, 3), (3, 4)], torch.float16),
    "linear": (F.linear, [(2, 3), (4, 3), (4,)], torch.float16),
    "conv2d": (F.conv2d, [(1, 2, 4, 4), (3, 2, 3, 3)], torch.float16),
    "exp": (torch.exp, [(3,)], torch.float32),
    "pow": (lambda x: x**2, [(3,)], torch.float32),
    "gelu": (F.gelu, [(3,)], torch.float32),
    "softmax": (lambda x: x.softmax(0), [(3,)], torch.float32),
    "log_softmax": (lambda x: x.log_softmax(0), [(3,)], torch.float32),
    "layer_norm": (lambda x: F.layer_norm(x, (3,)), [(3,)], torch.float32),
    "sum": (torch.sum, [(3,)], torch.float32),
    "norm": (lambda x: x.norm(), [(3,)], torch.float32),
    "relu": (torch.relu, [(3,)], None),
    "add": (torch.add, [(3,), (3,)], None),
}


@pytest.mark.parametrize("given", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", REGION)
def test_the_dtype_of_a_result_and_of_its_gradients(name, given):
    function, shapes, expected = REGION[name]
    inputs = [x.requires_grad_() for x in tensors(*shapes, dtype=given)]
    with polycast.autocast("npy"):
        result = function(*inputs)
    assert result.dtype is (expected or given)
    result.sum().backward()
    assert [x.grad.dtype for x in inputs] == [given] * len(inputs)


def test_a_mix_of_dtypes_is_promoted():
    (x,), (y,) = tensors((3,)), tensors((3,), dtype=torch.float16)
    with polycast.autocast("npy"):
        assert torch.cat([x, y]).dtype is torch.float32
        assert torch.cat([y, y]).dtype is torch.float16


def test_outside_regions_and_in_disabled_ones_nothing_is_cast():
    x, y = tensors((2, 3), (3, 4))
    assert (x @ y).dtype is torch.float32
    with polycast.autocast("npy"), polycast.autocast("npy", enabled=False):
        assert (x @ y).dtype is torch.float32


def test_results_are_those_of_the_casts_by_hand():
    x, y = tensors((5, 6), (6, 7))
    with polycast.autocast("npy"):
        result = x @ y
    assert torch.equal(result.cpu(), (x.half() @ y.half()).cpu())


def test_torchs_own_region_runs_on_the_same_kernels():
    polycast.install("npy")
    x, y = tensors((2, 3), (3, 4))
    with torch.autocast("npy", dtype=torch.float16):
        assert (x @ y).dtype is torch.float16
        assert x.exp().dtype is torch.float32


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_a_region_casts_a_weight_once():
    model = torch.nn.Linear(3, 3, bias=False).to("npy")
    x = torch.ones(2, 3, device="npy")
    casts = []
    with polycast.autocast("npy"):
        for _ in range(2):
            y = model(x)
            casts.append(y.grad_fn.next_functions[1][0])  # the transposed weight's node
    assert len({node.next_functions[0][0] for node in casts}) == 1


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_cache_serves_parameters_of_npy(frozen):
    cache = polycast.WeightCache()
    model = torch.nn.Linear(3, 3).to("npy").requires_grad_(not frozen)
    x = torch.ones(2, 3, device="npy")
    for _ in range(3):
        with torch.no_grad(), polycast.autocast("npy", cache=cache):
            model(x)
    assert (cache.stats().misses, cache.stats().hits) == (2, 4)
    with torch.no_grad():
        model.weight.mul_(2)
    with torch.no_grad(), polycast.autocast("npy", cache=cache):
        after = model(x)
    assert (cache.stats().misses, cache.stats().hits) == (3, 5)
    assert torch.equal(after.cpu(), model.half()(x.half()).detach().cpu())


def test_a_backward_in_mixed_precision_is_near_the_one_in_float32():
    grads = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(36, 5)
        ).to("npy")
        x = torch.randn(6, 1, 8, 8).to("npy")
        with polycast.autocast("npy", enabled=enabled):
            loss = F.cross_entropy(model(x), torch.arange(6).to("npy") % 5)
        assert loss.dtype is torch.float32
        loss.backward()
        grads.append([p.grad.cpu() for p in model.parameters()])
    for exact, mixed in zip(*grads, strict=True):
        assert mixed.dtype is torch.float32
        torch.testing.assert_close(mixed, exact, rtol=2e-2, atol=2e-3)


def test_the_backend_is_found_by_its_entry_point():
    status = polycast.backends()["npy"]
    assert (status.state, status.distribution, status.default_dtype) == ("ready", "polycast-npy", torch.float16)
    assert polycast.is_autocast_available("npy")
    assert isinstance(polycast.plugin.get_backend("npy"), polycast_npy.NpyBackend)


def test_a_region_in_bfloat16_is_disabled_and_says_why():
    with pytest.warns(polycast.errors.AutocastDisabledWarning, match=r"npy supports torch\.float16"):
        region = polycast.autocast("npy", dtype=torch.bfloat16)
    x, y = tensors((2, 3), (3, 4))
    with region:
        assert (x @ y).dtype is torch.float32


def test_an_old_numpy_makes_the_device_unavailable(monkeypatch):
    monkeypatch.setattr("numpy.__version__", "1.19.5")
    polycast.plugin.refresh("npy")
    answer = polycast.plugin.get_backend("npy").availability()
    assert (answer.available, answer.reason) == (False, "NumPy 1.19.5 is too old: npy needs 1.20 or newer")
    assert not polycast.is_autocast_available("npy")
    monkeypatch.undo()
    polycast.plugin.refresh("npy")
    assert polycast.is_autocast_available("npy")


def test_a_missing_numpy_makes_the_device_unavailable(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    answer = polycast.plugin.get_backend("npy").availability()
    assert not answer.available
    assert answer.reason.startswith("NumPy cannot be imported: ")


def test_another_out_of_tree_device_is_left_in_place(monkeypatch):
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "acme")
    with pytest.raises(RuntimeError) as caught:
        device.register_device()
    assert str(caught.value) == (
        "torch has room for one out-of-tree device in a process, and 'acme' has taken it: 'npy' cannot be registered "
        "too. Use one of the two in each process."
    )
