"""WeightCache.load: its memory limit, and how much it compares with digests."""

import os
import threading

import pytest
import torch
from tests.engines import NATIVE
from torch import nn

import polycast
from polycast import WeightCache
from polycast.engine import installation
from polycast_plugins.quantize import contents as digests

from .saved_layers import run

pytestmark = [*NATIVE, pytest.mark.usefixtures("no_grad")]

SIZE = 2 * (8 * 45000 + 45000)  # bytes of the casts


def make():
    return nn.Sequential(nn.Linear(8, 45000))


@pytest.fixture
def model():
    return make()


def test_a_sample_tells_models_apart(saved, model):
    with pytest.raises(ValueError, match=r"the values of '0.weight', '0.bias' are not those that it was made of"):
        WeightCache.load(saved, make(), verify="sample")
    cache = WeightCache.load(saved, model, verify="sample")
    run(model, cache)
    assert (cache.stats().hits, cache.stats().misses) == (2, 0)


def test_only_all_values_show_that_one_was_changed(saved, model):
    model[0].weight[225, 5] += 1
    with pytest.raises(ValueError, match=r"the values of '0.weight' are not those"):
        WeightCache.load(saved, model)
    assert WeightCache.load(saved, model, verify="sample").stats().entries == 2


def test_a_sample_has_both_ends_of_a_tensor_and_at_most_256_kib():
    tensor = torch.zeros(2**20, dtype=torch.uint8)
    (digest,) = digests.sample_digests([tensor])
    seen = []
    for block in range(256):  # of 4 KiB
        tensor[block * 4096 : (block + 1) * 4096] = 1
        seen.append(digests.sample_digests([tensor]) != [digest])
        tensor.zero_()
    assert (seen[0], seen[-1], sum(seen) <= 2 * 64) == (True, True, True)
    for end in (0, -1):
        tensor[end] = 1
        assert digests.sample_digests([tensor]) != [digest]
        tensor.zero_()


def test_small_tensors_are_compared_as_a_whole():
    tensor = torch.zeros(64 * 4096, dtype=torch.uint8)
    digest = digests.sample_digests([tensor])
    for position in range(0, tensor.numel(), 4093):
        tensor[position] = 1
        assert digests.sample_digests([tensor]) != digest
        tensor[position] = 0


def test_a_sample_tells_shapes_and_dtypes_apart():
    tensor = torch.zeros(6)
    others = [tensor.view(2, 3), tensor.view(torch.int32), torch.zeros(0)]
    found = digests.sample_digests([tensor, *others])
    assert len(set(found)) == 4


def test_a_limit_holds_for_what_is_made_later(saved, model):
    cache = WeightCache.load(saved, model, max_bytes=SIZE)
    assert (cache.max_bytes, cache.stats().bytes) == (SIZE, SIZE)
    run(make(), cache)
    run(model, cache)
    assert cache.stats().bytes <= SIZE


def test_a_limit_that_is_too_small(saved, model):
    with pytest.raises(ValueError, match="max_bytes") as caught:
        WeightCache.load(saved, model, max_bytes=SIZE - 1)
    assert str(caught.value) == (
        f"The saved cache {str(saved)!r} has {SIZE} bytes of casts and prepacked weights, more than "
        f"max_bytes={SIZE - 1}: pass at least {SIZE}, or None for no limit."
    )


@pytest.mark.parametrize("verify", [True, None, "none"])
def test_other_choices_of_what_is_verified(saved, model, verify):
    with pytest.raises(ValueError, match=f"verify must be 'all' or 'sample', got {verify!r}"):
        WeightCache.load(saved, model, verify=verify)


def test_a_limit_that_is_no_number(saved, model):
    with pytest.raises(TypeError, match=r"max_bytes must be an int or None, got '1 GB'"):
        WeightCache.load(saved, model, max_bytes="1 GB")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("load", [WeightCache.load, polycast.Calibration.load], ids=["cache", "calibration"])
def test_a_pipe_is_refused_at_once(tmp_path, load, model):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    errors = []

    def run():
        try:
            load(pipe, model)
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert "it is not a regular file: only those can be mapped into memory" in errors[0]


def test_the_reference_engine_checks_a_file_and_warns_that_it_loads_nothing(saved, model, monkeypatch):
    installation.forget_choice()
    monkeypatch.setenv("POLYCAST_ENGINE", "reference")
    with pytest.raises(ValueError, match="are not those that it was made of"):
        WeightCache.load(saved, make())
    with pytest.warns(UserWarning, match="was checked and left: the reference engine caches no weights"):
        assert WeightCache.load(saved, model).entries() == []
