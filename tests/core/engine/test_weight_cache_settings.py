"""The arguments of WeightCache: limits, verification, errors."""

import copy
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.engines import NATIVE

import polycast
from polycast.policy import manifests

from .cached_casts import BYTES, X, parameter, use

pytestmark = NATIVE


TAKES = {"weight": lambda weight: weight, "all": torch.t, "part": lambda weight: weight[:, :2]}


@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
def test_verify_finds_a_write_that_is_not_seen(double_unseen, take):
    cache, weight = polycast.WeightCache(verify=True), parameter(1.0)
    use(cache, take(weight))
    use(cache, take(weight))
    double_unseen(weight)
    with pytest.raises(
        polycast.errors.StaleWeightError, match=r"a write at a raw pointer.*Call clear\(\) on the cache"
    ):
        use(cache, take(weight))
    cache.clear()
    assert torch.equal(use(cache, take(weight)), torch.mm(X, take(weight.detach()).bfloat16()))


def test_unused_entries_are_evicted_first():
    cache = polycast.WeightCache(max_bytes=2 * BYTES)
    former, model = [parameter() for _ in range(2)], [parameter() for _ in range(2)]
    for weight in [*former * 9, *model * 6]:
        use(cache, weight)
    before = cache.stats()
    for weight in model:
        use(cache, weight)
    assert cache.stats().hits == before.hits + 2
    assert (before.entries, before.bytes, before.evictions) == (2, 2 * BYTES, 2)


@pytest.mark.parametrize("fits", [7, 4, 1])
def test_a_cache_smaller_than_the_model_has_hits_on_the_part_that_fits(fits):
    cache = polycast.WeightCache(max_bytes=fits * BYTES)
    model = [parameter() for _ in range(8)]
    for weight in 3 * model:
        use(cache, weight)
    assert cache.stats() == polycast.WeightCacheStats(fits, fits * BYTES, 2 * fits, 24 - 2 * fits, 0)


def test_a_cast_larger_than_max_bytes_is_not_cached():
    cache, weight = polycast.WeightCache(max_bytes=BYTES - 1), parameter()
    for _ in range(2):
        assert torch.equal(use(cache, weight), torch.full((4, 4), 4.0, dtype=torch.bfloat16))
    assert cache.stats() == polycast.WeightCacheStats(entries=0, bytes=0, hits=0, misses=2, evictions=0)


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy])
def test_a_cache_belongs_to_its_process(cache, duplicate):
    with pytest.raises(TypeError, match="cannot be copied or pickled: it holds casts of the weights of this process"):
        duplicate(cache)


def test_a_deep_copy_of_a_model_has_an_empty_cache_with_the_same_settings():
    model = torch.nn.Linear(4, 4)
    model.cache = polycast.WeightCache(max_bytes=1000, verify=True)
    use(model.cache, model.weight)
    copied = copy.deepcopy(model).cache
    assert (copied.max_bytes, copied.verify, copied.stats().entries) == (1000, True, 0)
    use(model.cache, model.weight)
    assert model.cache.stats().entries == 1


BAD = [
    ({"max_bytes": -1}, ValueError, "max_bytes must not be negative, got -1; None means no bound"),
    ({"max_bytes": 1.5}, TypeError, "max_bytes must be an int or None, got 1.5"),
    ({"max_bytes": True}, TypeError, "max_bytes must be an int or None, got True"),
    ({"verify": 1}, TypeError, "verify must be a bool, got 1"),
]


def test_bad_arguments_are_refused(subtests):
    for arguments, error, message in BAD:
        refusal = pytest.raises(error, match=f"^{message}$")
        with subtests.test(arguments=arguments, error=error, message=message), refusal:
            polycast.WeightCache(**arguments)


def test_verify_handles_nan():
    cache, weight = polycast.WeightCache(verify=True), parameter(float("nan"))
    use(cache, weight)
    assert torch.all(torch.isnan(use(cache, weight)))


def test_another_cache_adopts_the_entries_of_one(cache):
    other, weight = polycast.WeightCache(), parameter()
    expected = use(cache, weight)
    for entry in cache.entries():
        other.adopt(*entry)
    assert torch.equal(use(other, weight), expected)
    assert (other.stats().hits, other.stats().misses) == (1, 0)


def test_what_saves_a_cache_is_a_plugins(cache, monkeypatch):
    called, model = [], torch.nn.Linear(2, 2)
    plugin = SimpleNamespace(find=lambda table, name: lambda *args: called.append((table, name, args)))
    monkeypatch.setattr(manifests, "manifests", lambda: plugin)
    cache.save(Path("saved"), model)
    assert called == [("methods", "WeightCache.save", (cache, Path("saved"), model))]
    monkeypatch.setattr(manifests, "manifests", manifests.Manifests)
    for call in (lambda: cache.save("saved", model), lambda: polycast.WeightCache.load("saved", model)):
        with pytest.raises(NotImplementedError, match="WeightCache.* is of the plugin 'quantize', which is not inst"):
            call()


@pytest.mark.parametrize("tensors", [[], [torch.ones(3, 3, dtype=torch.bfloat16)], [torch.ones(4, 4)]])
def test_a_cast_that_does_not_fit_its_weight_is_not_adopted(cache, tensors):
    with pytest.raises(ValueError, match=r"tensors must be one of sizes \(4, 4\) and torch.bfloat16, got \["):
        cache.adopt(parameter(), None, torch.bfloat16, tensors)


def test_an_entry_for_which_there_is_no_room_is_not_adopted_and_evicts_no_other():
    first, cache = parameter(), polycast.WeightCache(max_bytes=BYTES)
    cache.adopt(first, None, torch.bfloat16, [X])
    with pytest.raises(ValueError, match=f"or there is no room for it in {BYTES} bytes"):
        cache.adopt(parameter(), None, torch.bfloat16, [X])
    assert [entry.weight is first for entry in cache.entries()] == [True]


def test_threads_that_adopt_an_entry_whose_weight_may_be_written_unseen_do_not_wait_for_each_other(cache):
    weight, ended = parameter(), []
    alias = weight.data

    def adopt():
        with pytest.raises(ValueError, match="cannot be cached: something else holds the weight's memory"):
            cache.adopt(weight, None, torch.bfloat16, [alias.bfloat16()])
        ended.append(None)

    threads = [threading.Thread(target=adopt, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(ended) == 2


def test_a_notebook_shows_the_contents_of_a_cache(cache):
    use(cache, parameter())
    assert "<tr><td>misses</td><td>1</td></tr>" in cache._repr_html_()
