"""Files of saved caches that are refused: the message says why."""

import copy
import json

import pytest
import torch
from torch import nn

import polycast
from polycast import Int8, WeightCache
from polycast.policy import recipe_settings
from polycast_plugins.quantize import loading, tensor_file
from polycast_plugins.quantize.contents import digest_of_text, versions

from .saved_layers import INT8, run

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def saved_int8(path, model, int8_kernels):
    cache = WeightCache()
    run(model, cache, INT8)
    cache.save(path, model)
    return path


def refused(path, model):
    with pytest.raises(ValueError, match=r"^The saved cache '.*model\.casts' cannot be used: .*") as caught:
        WeightCache.load(path, model)
    text = str(caught.value)
    assert text.endswith(". Save a new one: run the model in a region with a WeightCache, and call its save().")
    return text.partition("cannot be used: ")[2].partition(". Save a new one")[0]


LAYOUT = "[8, 8] with strides [8, 1]"
CHANGES = {
    "one element": (
        lambda model: model[0].weight[7, 7].add_(1e-6),
        "the values of '0.weight' are not those that it was made of",
    ),
    "all weights": (
        lambda model: torch._foreach_add_([*model.parameters()], 1),
        "the values of '0.weight', '0.bias', '1.weight' and 1 more are not those that it was made of",
    ),
    "a parameter is gone": (lambda model: model.pop(1), "the model has no parameter '1.weight'"),
    "shape": (
        lambda model: model.__setitem__(1, nn.Linear(8, 4)),
        f"the parameter '1.weight' is float32 [4, 8] with strides [8, 1], and was float32 {LAYOUT}",
    ),
    "dtype": (
        lambda model: model[1].bfloat16(),
        f"the parameter '1.weight' is bfloat16 {LAYOUT}, and was float32 {LAYOUT}",
    ),
    "strides": (
        lambda model: setattr(model[0].weight, "data", model[0].weight.data.t().contiguous().t()),
        f"the parameter '0.weight' is float32 [8, 8] with strides [1, 8], and was float32 {LAYOUT}",
    ),
    "no values": (
        lambda model: model.to("meta"),
        "the parameter '0.weight' has no values yet: it is on the device 'meta'",
    ),
}


@pytest.mark.parametrize(("change", "why"), CHANGES.values(), ids=CHANGES)
def test_another_model(saved, model, change, why):
    change(model)
    assert refused(saved, model) == why


@pytest.mark.parametrize("package", ["polycast", "torch"])
def test_another_version(saved, model, package, monkeypatch):
    here = versions()
    monkeypatch.setattr(loading, "versions", lambda: {**here, package: "9.9"})
    assert refused(saved, model) == f"it was saved with {package} {here[package]}, and this is {package} 9.9"


def test_a_kernel_of_another_class(saved_int8, model, int8_kernels, other_cpu):
    kernels = {"aten::linear": type("Other", (type(int8_kernels["aten::linear"]),), {})()}
    other_cpu(low_bit_kernels=lambda recipe: kernels)
    why = refused(saved_int8, model)
    assert why.startswith(f"the kernel of aten::linear with the recipe {INT8!r} was ")
    assert "Int8Linear ('rows'), and is " in why
    assert why.endswith("Other ('rows')")


def test_another_instruction_set(saved_int8, model, int8_kernels, monkeypatch):
    monkeypatch.setattr(int8_kernels["aten::linear"], "constants", (3,))
    polycast.plugin.refresh("cpu")  # as in another process
    assert refused(saved_int8, model).endswith("Int8Linear ('rows'), 3")


def test_a_kernel_that_prepacks_differently(saved_int8, model, int8_kernels, monkeypatch):
    of_int8 = type(int8_kernels["aten::linear"])
    prepack = of_int8.prepack
    monkeypatch.setattr(of_int8, "prepack", lambda self, weight: prepack(self, weight * 2))
    assert refused(saved_int8, model) == (
        "the backend prepacks '0.weight' for aten::linear with the recipe Int8(min_size=1) differently here"
    )


def test_a_recipe_without_kernels_here(saved_int8, model, other_cpu):
    other_cpu(recipe_availability=lambda recipe: polycast.plugin.Availability(False, "this processor is too old"))
    assert refused(saved_int8, model) == (
        "it has weights for aten::linear with the recipe Int8(min_size=1), and here this processor is too old"
    )


def test_a_recipe_that_is_not_known(saved_int8, model):
    rewrite(saved_int8, lambda content: content["packings"][0].update(recipe="int2 3 4 5"))
    assert refused(saved_int8, model).startswith("it has weights for the recipe 'int2 3 4 5', which is not known here")


class Factors:
    """A fake calibration, with a digest only."""

    def __init__(self, digest):
        self.digest = digest

    def prepack_arguments(self, weight, levels):
        return (torch.full((weight.shape[1],), 2.0),)


def test_a_calibration_that_this_process_does_not_have(path, model, int8_kernels, monkeypatch):
    monkeypatch.setattr(recipe_settings, "objects", {})
    recipe, cache = Int8(min_size=1, calibration=Factors("abc")), WeightCache()
    run(model, cache, recipe)
    cache.save(path, model)
    recipe_settings.objects.clear()
    assert refused(path, model) == (
        "it has weights for the recipe Int8(min_size=1, calibration=<ObjectDigest abc>), whose calibration this "
        "process does not have: make the recipe first, such as Int8(calibration=Calibration.load(path))"
    )


def test_prepacked_weights_of_a_calibration_serve_no_other(path, model, int8_kernels, monkeypatch):
    monkeypatch.setattr(recipe_settings, "objects", {})
    recipes, cache = [Int8(min_size=1, calibration=Factors(each)) for each in ("abc", "def")], WeightCache()
    run(model, cache, recipes[0])
    cache.save(path, model)
    loaded = WeightCache.load(path, model)
    run(model, loaded, recipes[0])
    assert loaded.stats().misses == 0
    for recipe in (recipes[1], INT8):
        run(model, loaded, recipe)
    assert loaded.stats().misses == 4


def rewrite(path, change):
    """Change the table of contents of a file, and its digest."""
    file = tensor_file.TensorFile(path)
    content = json.loads(file.metadata["polycast.WeightCache"])
    tensors = {part["name"]: file.tensor(part["name"]) for entry in content["entries"] for part in entry["tensors"]}
    change(content)
    text = json.dumps(content)
    metadata = {"polycast.WeightCache": text, "polycast.WeightCache.digest": digest_of_text(text)}
    tensor_file.write(path, tensors, metadata)


def test_another_schema(saved, model):
    rewrite(saved, lambda content: content.update(schema=1))
    assert refused(saved, model) == "it has schema 1, and this polycast reads schema 2"


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1, -64])
def test_a_truncated_file(saved, model, size):
    saved.write_bytes(saved.read_bytes()[:size])
    assert refused(saved, model).startswith("it is not a complete safetensors file")


def test_each_damaged_byte_is_seen(saved_int8, model):
    # Of the digits of offsets, shapes and names too, and of the padding.
    content = saved_int8.read_bytes()
    for position in range(0, len(content), 41):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        saved_int8.write_bytes(damaged)
        try:
            cache = WeightCache.load(saved_int8, model)
        except ValueError:
            continue
        assert torch.equal(run(model, cache, INT8), run(model, WeightCache(), INT8))
        assert content[position : position + 1].isspace()


def test_a_file_of_something_else(path, model):
    tensor_file.write(path, dict(model.state_dict()), {})
    assert refused(path, model) == "it was not saved by WeightCache.save"


def test_no_file(path, model):
    with pytest.raises(FileNotFoundError, match=r"model\.casts"):
        WeightCache.load(path, model)


def test_weights_that_something_else_may_write(native, saved, model):
    alias = model[0].weight.data
    assert refused(saved, model).startswith("what was made of '0.weight' cannot be cached: something else holds")
    del alias
    WeightCache.load(saved, model)


def test_weights_that_were_made_in_inference_mode(native, saved, model):
    with torch.inference_mode():
        other = copy.deepcopy(model)
    why = "the parameter '0.weight' was made in inference mode, in which torch counts no writes"
    assert refused(saved, other) == why


def test_arguments_of_other_types(path, model, cache):
    for call in (WeightCache.load, cache.save):
        for wrong in (None, 3, "linear"):
            with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got"):
                call(path, wrong)
        with pytest.raises(TypeError):
            call(3.5, model)


def test_a_write_during_a_load_is_seen(native, saved, model, monkeypatch):
    digests, before = loading.digests, run(model, None)

    def write_afterwards(tensors):
        found = digests(tensors)
        model[1].bias.data.add_(1)
        return found

    monkeypatch.setattr(loading, "digests", write_afterwards)
    cache = WeightCache.load(saved, model)
    assert torch.equal(run(model, cache), run(model, None))
    assert not torch.equal(run(model, None), before)
