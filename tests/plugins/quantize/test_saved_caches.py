"""A cache that is saved and loaded: its entries are found, and dropped as those that were made here."""

import copy
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.engines import NATIVE
from torch import nn

import polycast
from polycast import Int8, WeightCache, autocast

from .saved_layers import INT8, run

pytestmark = [*NATIVE, pytest.mark.usefixtures("no_grad")]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.columns = nn.Parameter(torch.randn(8, 8))
        self.whole = nn.Parameter(torch.randn(16, 8))

    def forward(self, x):
        return self.linear(x) @ self.columns @ self.whole[8:].t()


@pytest.fixture(params=[None, INT8], ids=["casts", "int8"])
def recipe(request):
    if request.param is not None:
        request.getfixturevalue("int8_kernels")
    return request.param


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def output(path, model, recipe):
    """Save a cache of the model, and return the model's output."""
    cache = WeightCache()
    output = run(model, cache, recipe)
    cache.save(path, model)
    return output


@pytest.fixture
def loaded(output, path, model):
    return WeightCache.load(path, model)


def reloaded(cache, path, model):
    cache.save(path, model)
    return WeightCache.load(path, model)


def test_what_was_saved_is_found(loaded, model, output, recipe):
    before = loaded.stats()
    made = before.entries + before.packings
    assert (before.entries, before.packings) == ((4, 0) if recipe is None else (0, 3))
    assert (before.hits, before.misses) == (0, 0)
    assert torch.equal(run(model, loaded, recipe), output)
    after = loaded.stats()
    assert (after.hits, after.misses) == (made, 0)
    assert (after.bytes, after.packed_bytes) == (before.bytes, before.packed_bytes)


def test_it_is_found_by_another_model_with_the_same_weights(model, output, path, recipe):
    other = copy.deepcopy(model)
    cache = WeightCache.load(path, other)
    assert torch.equal(run(other, cache, recipe), output)
    assert cache.stats().misses == 0


def test_it_is_saved_and_loaded_in_inference_mode_and_regions(model, output, path, recipe):
    with torch.inference_mode(), autocast("cpu", recipe=recipe):
        cache = reloaded(WeightCache.load(path, model), path, model)
    assert torch.equal(run(model, cache, recipe), output)
    assert cache.stats().misses == 0


def test_prepacked_weights_are_found_whatever_the_settings_that_do_not_change_them(int8_kernels, model, path):
    cache = WeightCache()
    run(model, cache, Int8(min_size=1))
    loaded = reloaded(cache, path, model)
    run(model, loaded, Int8(min_size=2))
    assert loaded.stats().misses == 0


def test_a_loaded_cache_is_saved_again(loaded, model, output, path, recipe):
    content = path.read_bytes()
    loaded.save(path, model)
    assert path.read_bytes() == content
    assert torch.equal(run(model, loaded, recipe), output)


WRITES = {
    "in place": lambda weight: weight.mul_(2),
    "through .data": lambda weight: weight.data.mul_(2),
    "another .data": lambda weight: setattr(weight, "data", weight.data * 2),
    "through NumPy": lambda weight: weight.numpy().__imul__(2),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_drops_what_was_loaded(loaded, model, recipe, write):
    for weight in model.parameters():
        write(weight)
    assert torch.equal(run(model, loaded, recipe), run(model, WeightCache(), recipe))
    assert loaded.stats().hits == 0


def test_a_write_before_the_first_region_is_seen(path, model):
    # No region has installed the hooks that see it.
    cache = WeightCache()
    run(model, cache)
    cache.save(path, model)
    del cache
    gc.collect()
    polycast.uninstall()
    loaded = WeightCache.load(path, model)
    model.linear.weight.data.zero_()
    run(model, loaded)
    assert loaded.stats().misses == 1


def test_no_write_reaches_the_file(loaded, model, path, recipe):
    content = path.read_bytes()
    for entry in loaded.entries():
        for tensor in entry.tensors:
            tensor.zero_()
    assert path.read_bytes() == content
    assert loaded.entries() == []  # somebody wrote to them
    run(model, loaded, recipe)
    assert (loaded.stats().hits, loaded.stats().misses) == (0, 4 if recipe is None else 3)


def test_what_was_loaded_dies_with_its_weights(model, output, path):
    other = copy.deepcopy(model)
    cache = WeightCache.load(path, other)
    del other
    gc.collect()
    assert (cache.stats().entries, cache.stats().packings) == (0, 0)


def test_entries_of_another_model_are_left_out(path):
    models, cache = (nn.Linear(8, 8), nn.Linear(8, 4)), WeightCache()
    for model in models:
        run(model, cache)
    assert reloaded(cache, path, models[1]).stats().entries == 2


def test_shared_parameters_are_loaded_once(path):
    model, cache = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}), WeightCache()
    model["b"].weight = model["a"].weight
    run(model["a"], cache), run(model["b"], cache)
    loaded = reloaded(cache, path, model)
    run(model["a"], loaded), run(model["b"], loaded)
    assert (loaded.stats().entries, loaded.stats().misses) == (3, 0)


def test_casts_with_the_strides_of_their_weight_keep_them(path):
    model, cache = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), WeightCache()
    images = torch.randn(1, 3, 8, 8)
    expected = run(model, cache, x=images)
    loaded = reloaded(cache, path, model)
    (of_weight,) = (entry for entry in loaded.entries() if entry.weight is model.weight)
    assert of_weight.tensors[0].stride() == model.weight.stride()
    assert torch.equal(run(model, loaded, x=images), expected)
    assert loaded.stats().misses == 0


def test_weights_that_cannot_be_prepacked_are_not_tried_again(int8_kernels, path):
    model, cache, kernel = nn.Linear(8, 8), WeightCache(), int8_kernels["aten::linear"]
    model.weight[0, 0] = torch.inf
    run(model, cache, INT8)
    assert kernel.prepared == 1
    loaded = reloaded(cache, path, model)
    prepared = kernel.prepared
    run(model, loaded, INT8)
    assert kernel.prepared == prepared


def test_several_dtypes_are_saved(path):
    model, cache = nn.Linear(8, 8), WeightCache()
    for dtype in (torch.bfloat16, torch.float16):
        run(model, cache, dtype=dtype)
    loaded = reloaded(cache, path, model)
    for dtype in (torch.bfloat16, torch.float16):
        run(model, loaded, dtype=dtype)
    assert (loaded.stats().entries, loaded.stats().misses) == (4, 0)


@pytest.mark.parametrize("recipe", [None])  # what autograd records is not computed by a recipe
def test_training_uses_casts_that_were_loaded(loaded, model):
    gradients = []
    for cache in (loaded, None):
        with torch.enable_grad():
            run(model, cache).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    assert loaded.stats().misses == 0
    assert all(map(torch.equal, *gradients))


@pytest.mark.usefixtures("switching_often")
def test_threads_load_at_once(model, output, path, recipe):
    def use(number):
        with torch.no_grad():
            if number % 4 == 0:
                run(model, WeightCache(), recipe)  # it prepacks the same weights, and makes views of them
            cache = WeightCache.load(path, model)
            return torch.equal(run(model, cache, recipe), output), cache.stats().misses

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(use, range(80))) == [(True, 0)] * 80


def test_saving_while_threads_use_the_cache(loaded, model, output, path, recipe):
    ended = threading.Event()

    def use(_):
        with torch.no_grad():
            while not ended.is_set():
                run(model, loaded, recipe)

    with ThreadPoolExecutor(2) as threads:
        users = threads.map(use, range(2))
        for _ in range(5):
            loaded.save(path, model)
        ended.set()
        list(users)
    assert torch.equal(run(model, WeightCache.load(path, model), recipe), output)
