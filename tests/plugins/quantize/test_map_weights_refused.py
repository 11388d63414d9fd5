"""Files and parameters that ``map_weights`` refuses, and interrupts: the file and the model stay as they were."""

import copy
import errno
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from polycast import map_weights
from polycast_plugins.quantize import map_weights as module
from polycast_plugins.quantize import tensor_file

from .saved_layers import assert_state, state_of


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda state: state["0.bias"].neg_(), "'0.bias' has other values in it"),
        (lambda state: state.update({"0.bias": torch.zeros(4)}), r"'0.bias' is float32 \[4\] in it, and float32 \[8\]"),
        (lambda state: state.update({"0.bias": state["0.bias"].double()}), "'0.bias' is float64 .*, and float32"),
        (lambda state: state.pop("1.weight"), "it lacks the tensor '1.weight'"),
    ],
    ids=["sign", "shape", "dtype", "name"],
)
def test_a_file_of_other_weights_is_refused_and_stays(path, model, change, why):
    model[0].bias.data.zero_()
    state, before = state_of(model), state_of(model)
    change(state)
    save_file(state, path)
    content, addresses = path.read_bytes(), [each.data_ptr() for each in model.parameters()]
    with pytest.raises(ValueError, match=rf"cannot be mapped from '.*model.casts': {why}.* Remove it to have"):
        map_weights(model, path)
    assert path.read_bytes() == content
    assert [each.data_ptr() for each in model.parameters()] == addresses
    assert_state(model, before)


@pytest.mark.parametrize("keep", [0, 100, -1], ids=["empty", "head", "all but a byte"])
def test_a_damaged_file_is_refused(path, model, keep):
    map_weights(copy.deepcopy(model), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="it is not a complete safetensors file"):
        map_weights(model, path)


def test_paths_that_cannot_be_files(path, model):
    with pytest.raises(IsADirectoryError):
        map_weights(model, path.parent)
    with pytest.raises(FileNotFoundError, match="model.casts'$"):
        map_weights(model, path / path.name)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got \[\]"):
        map_weights([], path)
    assert not path.exists()


REFUSED = {
    "meta": (lambda weight: torch.empty(3, device="meta"), "has no values yet: load them first"),
    "sparse": (lambda weight: weight.to_sparse(), "is no plain tensor but Parameter, torch.sparse_coo"),
    "subclass": (lambda weight: TwoTensor(weight, weight), "is no plain tensor but TwoTensor"),
    "quantized": (lambda weight: torch.quantize_per_tensor(weight, 1, 0, torch.qint8), "is no plain tensor of qint8"),
    "negative": (lambda weight: torch._neg_view(weight), "is no plain tensor of float32"),
    "shared": (lambda weight: weight.share_memory_(), "is in memory that other processes may write"),
}


@pytest.mark.parametrize(("make", "why"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # torch will remove these dtypes
def test_a_parameter_that_cannot_be_mapped_is_named(path, make, why):
    model = nn.Linear(2, 2)
    model.bad = nn.Parameter(make(torch.ones(3)), requires_grad=False)
    with pytest.raises(ValueError, match=f"cannot be mapped: the parameter 'bad' {why}"):
        map_weights(model, path)
    assert not path.exists()


def test_lazy_and_inference_parameters_are_named(path):
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    for each, why in ((nn.LazyLinear(3), "has no values yet"), (model, "was made in inference mode")):
        with pytest.raises(ValueError, match=f"'weight' {why}"):
            map_weights(each, path)


HOLDERS = {
    "state dict": lambda model: model.state_dict(),
    "data": lambda model: model[0].weight.data,
    "array": lambda model: model[0].weight.detach().numpy(),
    "storage": lambda model: model[0].weight.untyped_storage(),
    "attribute": lambda model: vars(model).update(transposed=model[0].weight.detach().t()),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_memory_that_something_else_holds_is_refused(path, model, hold):
    held = hold(model)
    with pytest.raises(ValueError, match=r"something else holds the memory of '0\.weight'.* Delete it first"):
        map_weights(model, path)
    assert not path.exists()
    vars(model).pop("transposed", None)
    del held
    map_weights(model, path)


def test_a_full_disk_leaves_no_file_and_the_model(path, model, monkeypatch):
    def fill(tensor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    expected = state_of(model)
    monkeypatch.setattr(tensor_file, "memory_of", fill)
    with pytest.raises(OSError, match=r"model\.casts'$") as caught:
        map_weights(model, path)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(path.parent) == []
    assert_state(model, expected)


@pytest.mark.parametrize("after", range(4))
def test_an_interrupt_leaves_every_parameter_where_it_was(path, model, monkeypatch, after):
    replace = module._replace

    class Interrupted:
        """A pair that cannot be unpacked."""

        def __iter__(self):
            raise KeyboardInterrupt

    addresses = [each.data_ptr() for each in model.parameters()]
    monkeypatch.setattr(module, "_replace", lambda pairs: replace([*pairs[:after], Interrupted()]))
    with pytest.raises(KeyboardInterrupt):
        map_weights(model, path)
    assert [each.data_ptr() for each in model.parameters()] == addresses
    monkeypatch.undo()
    map_weights(model, path)


def test_a_weight_that_is_written_meanwhile_is_seen(path, model, monkeypatch):
    checked = module._checked

    def write_then(file, blocks):
        found = checked(file, blocks)
        with torch.no_grad():
            model[1].bias.add_(1)
        return found

    monkeypatch.setattr(module, "_checked", write_then)
    with pytest.raises(RuntimeError, match="A weight was written while the weights were mapped"):
        map_weights(model, path)


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_another_process_wrote_meanwhile_is_checked_and_not_replaced(path, model, monkeypatch, has_links):
    other = copy.deepcopy(model)
    memory_of = tensor_file.memory_of

    def write_first(tensor):
        monkeypatch.setattr(tensor_file, "memory_of", memory_of)
        with torch.no_grad():
            other[0].weight.add_(1)
        map_weights(other, path)
        return memory_of(tensor)

    def no_links(source, target):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(tensor_file, "memory_of", write_first)
    with pytest.raises(ValueError, match=r"'0\.weight' has other values in it"):
        map_weights(model, path)
    assert os.listdir(path.parent) == [path.name]
    map_weights(other, path)
