"""Save caches in blocks, or say why they cannot be saved and leave files as they are."""

import errno
import io
import os
from pathlib import Path

import pytest
import torch
from tests.engines import NATIVE

import polycast
from polycast import WeightCache
from polycast.plugin import Plan
from polycast_plugins.quantize import saving, tensor_file

from .saved_layers import INT8, run

pytestmark = [*NATIVE, pytest.mark.usefixtures("no_grad")]


def test_nothing_to_save(path, model):
    with pytest.raises(ValueError, match=r"There is nothing to save: .* Run the model in a region with this cache"):
        WeightCache().save(path, model)
    assert os.listdir(path.parent) == []


def test_a_file_is_written_in_blocks_of_huge_pages(path, monkeypatch):
    block, writes = 1 << 21, []

    class Raw(io.FileIO):
        def write(self, data):
            writes.append((self.tell(), len(data)))
            return super().write(data)

    tensors = {str(size): torch.randint(256, (size,), dtype=torch.uint8) for size in (3 * block, 64, block + 1, 0, 7)}
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda path, mode, buffering: io.BufferedWriter(Raw(path, mode), buffering))
        tensor_file.write(path, tensors, {})
    assert writes[:-1] == [(number * block, block) for number in range(4)]
    found = tensor_file.TensorFile(path)
    assert all(found.tensor(name).equal(tensor) for name, tensor in tensors.items())


def test_stale_entries_are_not_saved(path, model, cache):
    model[0].weight.add_(1)
    cache.save(path, model)
    assert WeightCache.load(path, model).stats().entries == 3


def test_a_folder_that_is_not_there(tmp_path, model, cache):
    with pytest.raises(FileNotFoundError, match="not/there"):
        cache.save(tmp_path / "not" / "there", model)


def test_a_link_stays_and_the_file_that_it_points_to_is_replaced(tmp_path, model, cache):
    link, file = tmp_path / "link", tmp_path / "files" / "model.casts"
    file.parent.mkdir()
    link.symlink_to(file)
    cache.save(link, model)
    assert link.is_symlink()
    assert os.listdir(file.parent) == [file.name]
    assert WeightCache.load(file, model).stats().entries == 4


def test_the_error_of_a_full_disk_names_the_file(saved, model, cache, monkeypatch):
    class Full(io.FileIO):
        def write(self, data):  # of the last block, which is written when the file is closed
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    content = saved.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda path, mode, buffering: io.BufferedWriter(Full(path, mode), buffering))
        with pytest.raises(OSError, match=r"model\.casts'$") as caught:
            cache.save(saved, model)
    assert caught.value.errno == errno.ENOSPC
    assert saved.read_bytes() == content


def test_an_interrupted_save_leaves_the_old_file(saved, model, cache, monkeypatch):
    content, written = saved.read_bytes(), []

    def interrupt(tensor):
        written.append(tensor)
        if len(written) == 2:
            raise KeyboardInterrupt
        return bytes(tensor.nbytes)

    monkeypatch.setattr(tensor_file, "memory_of", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cache.save(saved, model)
    assert saved.read_bytes() == content
    assert os.listdir(saved.parent) == [saved.name]


def test_a_write_during_a_save_is_seen(path, model, cache, monkeypatch):
    digests = saving.digests

    def write_first(tensors):
        model[1].weight.data.add_(1)
        return digests(tensors)

    monkeypatch.setattr(saving, "digests", write_first)
    with pytest.raises(RuntimeError, match=r"its entry of '1\.weight' is gone"):
        cache.save(path, model)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("make", [lambda w: w.to_mkldnn(), lambda w: w.expand(3, *w.shape)], ids=["mkldnn", "expanded"])
def test_prepacked_weights_that_cannot_be_saved(path, model, int8_kernels, monkeypatch, make):
    kernel = int8_kernels["aten::linear"]
    monkeypatch.setattr(type(kernel), "prepack", lambda self, weight: (make(weight.clone()),))
    monkeypatch.setattr(type(kernel), "run", lambda self, prepared, x, weight, bias: x.bfloat16())
    cache = WeightCache()
    run(model, cache, INT8)
    with pytest.raises(ValueError, match=r"'0\.weight' cannot be saved: .*Int8Linear.* made a tensor of float32, "):
        cache.save(path, model)
    assert os.listdir(path.parent) == []


def test_a_weight_that_the_plan_of_another_plugin_has_prepacked_cannot_be_saved(path, model):
    cache = WeightCache()
    with polycast.autocast("cpu", cache=cache):
        Plan.prepacked(model[0].weight, cache, Plan.new_id(), lambda weight: (weight.detach().to(torch.int8),))
    with pytest.raises(ValueError, match=r"'0\.weight' cannot be saved: it is prepacked by a recipe whose plan is not"):
        cache.save(path, model)
    assert os.listdir(path.parent) == []
