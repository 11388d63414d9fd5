"""``map_weights``: what it keeps of a model, and where the weights are then."""

import copy
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from polycast import WeightCache, autocast, map_weights

from .conftest import AVAILABLE
from .saved_layers import assert_state, state_of
from .test_saved_caches_in_memory import memory_of

on_linux = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says where memory is")


def train(model, optimizer):
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 8) * (step + 1)).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@on_linux
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_goes_on_with_the_mapped_parameters_and_writes_no_file(path, model, kind):
    twin = copy.deepcopy(model)
    optimizers = [kind(each.parameters(), lr=0.001) for each in (twin, model)]
    for each, optimizer in zip((twin, model), optimizers, strict=True):
        train(each, optimizer)
    before, grads = list(model.parameters()), [each.grad for each in model.parameters()]
    map_weights(model, path)
    content = path.read_bytes()
    assert memory_of(path)["Rss"] > memory_of(path)["Anonymous"] == 0
    assert all(now is was for now, was in zip(model.parameters(), before, strict=True))
    assert all(now.grad is grad for now, grad in zip(model.parameters(), grads, strict=True))
    for expected, found in zip(train(twin, optimizers[0]), train(model, optimizers[1]), strict=True):
        assert torch.equal(expected, found)
    assert memory_of(path)["Anonymous"] > 0
    assert path.read_bytes() == content


def test_the_file_has_the_parameters_and_is_used_again(path, model):
    expected = state_of(model)
    map_weights(model, path)
    assert load_file(path).keys() == expected.keys()
    inode = path.stat().st_ino
    path.chmod(0o444)
    other = copy.deepcopy(model)
    map_weights(other, path)
    map_weights(torch.compile(model), path)
    for each in (model, other):
        assert_state(each, expected)
    assert path.stat().st_ino == inode


def test_a_checkpoint_of_another_library_with_more_tensors_is_used(path, model):
    model[0].bias.data[:] = torch.tensor(float("nan"))
    expected = state_of(model)
    save_file({**expected, "more": torch.ones(3)}, path)
    map_weights(model, path)
    assert_state(model, expected)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.same_memory = nn.Parameter(self.first.weight.data)
        self.transposed = nn.Parameter(self.first.weight.data.t())
        self.register_buffer("row", self.first.weight.data[2])
        self.register_buffer("apart", torch.ones(3))
        flat = torch.randn(40)
        self.head, self.tail = nn.Parameter(flat[4:20]), nn.Parameter(flat[18:].view(2, 11))
        self.words = nn.Parameter(flat.view(torch.int32)[20:22], requires_grad=False)
        self.images = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
        self.columns = nn.Parameter(torch.randn(6, 6)[:, ::2])
        self.expanded = nn.Parameter(torch.randn(1).expand(5))
        self.number, self.empty = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.empty(0, 3))
        for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.bfloat16, torch.uint16, torch.complex64):
            value = torch.randn(5).to(dtype) if dtype.is_floating_point else torch.ones(5, dtype=dtype)
            setattr(self, str(dtype)[6:] + "s", nn.Parameter(value, requires_grad=False))


def test_tied_views_and_layouts_and_dtypes_stay(path):
    torch.manual_seed(0)
    model = Shared()
    expected = state_of(model)
    apart, layouts = model.apart.data_ptr(), [each.stride() for each in model.parameters()]
    map_weights(model, path)
    map_weights(model, path)  # from the file that is there
    assert_state(model, expected)
    assert model.apart.data_ptr() == apart
    assert [each.stride() for each in model.parameters()] == layouts
    with torch.no_grad():
        model.same_memory[2, 1] = 7
        model.tail[0, 0] = 9
    assert model.second.weight is model.first.weight
    assert (model.first.weight[2, 1], model.transposed[1, 2], model.row[1]) == (7, 7, 7)
    assert (model.head[14], model.words.view(torch.float32)[0] == model.tail[0, 2]) == (9, True)
    assert not model.row.requires_grad


def test_threads_map_models_of_equal_weights_from_one_file(path, model):
    models, start = [copy.deepcopy(model) for _ in range(4)], threading.Barrier(4)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda each: (start.wait(), map_weights(each, path)), models))
    assert os.listdir(path.parent) == [path.name]
    for each in models:
        assert_state(each, state_of(model))


def test_a_graph_that_was_recorded_before_has_its_gradients(path):
    weight, x = nn.Parameter(torch.randn(8)), torch.randn(8)
    model = nn.ParameterList([weight])
    loss = (weight * x).sin().sum()
    map_weights(model, path)
    loss.backward()
    assert torch.equal(weight.grad, (weight.detach() * x).cos() * x)


def test_casts_and_prepacked_weights_of_mapped_weights_are_cached(native, path, model):
    cache, x = WeightCache(), torch.ones(2, 8)
    with torch.no_grad(), autocast("cpu", cache=cache):
        expected = model(x)
        map_weights(model, path)
        for _ in range(3):
            assert torch.equal(model(x), expected)
            assert torch.equal(x @ model[0].weight.T, x.bfloat16() @ model[0].weight.T.bfloat16())
        assert cache.stats().misses == 8
        with torch.no_grad():
            model[1].bias += 1
        assert not torch.equal(model(x), expected)
    cache.save(path.parent / "casts", model)
    map_weights(other := copy.deepcopy(model), path.parent / "others")
    assert WeightCache.load(path.parent / "casts", other).stats().entries == 4


def test_copies_and_checkpoints_of_a_mapped_model_have_its_weights_only(path, model):
    map_weights(model, path)
    expected = state_of(model)
    assert_state(copy.deepcopy(model), expected)
    torch.save(model[0].bias, path.parent / "bias.pt")
    assert (path.parent / "bias.pt").stat().st_size < 4096
    model.load_state_dict({name: value + 1 for name, value in expected.items()})
    assert not torch.equal(model[0].bias, expected["0.bias"])


PROGRAM = """
import os, sys
from pathlib import Path

import torch
import polycast

COUNT, SIZE = 2, 4096  # 64 MiB each, which glibc returns at once
def anonymous():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("Anonymous"))

def model():
    return torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(COUNT))).requires_grad_(False)

path, x = sys.argv[1], torch.ones(1, SIZE)
polycast.autocast("cpu", recipe="int8").__enter__()  # loads libraries
torch.nn.functional.linear(x, torch.ones(SIZE, SIZE))
polycast.clear_autocast_cache()
start = anonymous()
copy = model().bfloat16()
of_copy = anonymous() - start
del copy
start = anonymous()
weights = model()
of_weights = anonymous() - start
polycast.map_weights(weights, path)
of_mapped = anonymous() - start
with torch.no_grad():
    expected = weights(x)
of_int8 = anonymous() - start
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    weights[0].weight.zero_()
    os._exit(int(anonymous() - start > of_int8 + 2 * SIZE * SIZE * 4 / 2**20))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
with torch.no_grad():
    assert torch.equal(weights(x), expected)
print(of_copy, of_weights, of_mapped, of_int8)
"""


@on_linux
@pytest.mark.slow
@pytest.mark.skipif(not AVAILABLE, reason="the processor or the compiler offers no int8 here")
@pytest.mark.filterwarnings("ignore")
def test_anonymous_memory_falls_by_the_models_size_and_int8_needs_less_than_a_bfloat16_copy(path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    of_copy, of_weights, of_mapped, of_int8 = map(int, done.stdout.split())
    assert (of_copy >= 60, of_weights >= 120, of_mapped <= 4, of_int8 < 0.75 * of_copy) == (True,) * 4, (
        done.stdout
    )  # MiB
