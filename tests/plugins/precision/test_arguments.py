"""``compare`` and ``tune`` of models whose modules write to their arguments, or to containers of them."""

from collections import deque
from dataclasses import dataclass

import pytest
import torch
from tests.plugins.models import Defined, Does, by_name
from torch import nn

import polycast

IN_FLOAT32 = {"linear": "fp32", "mm": "fp32"}
"""Policies under which the region computes the same as float32, so that an error means a lost write."""


class Calls(nn.Module):
    """Calls a function with an inner module and the input; the forward of the inner module is a function too."""

    def __init__(self, inner, outer):
        super().__init__()
        self.layer, self.inner, self.outer = nn.Linear(4, 4), Does(inner), outer

    def forward(self, x):
        in_fast_dtype = torch.mm(self.layer(x), torch.eye(4))  # even if the modules are not
        return self.outer(self.inner, in_fast_dtype)


@dataclass(slots=True)
class Slots:
    keys: object


def written(inner, h):
    inner(h)
    return h


def filled(inner, h):
    cache = {"k": torch.zeros(3, 4, dtype=h.dtype)}
    inner(h, cache)
    return cache["k"] + len(cache)


def appended(inner, h):
    items = [h]
    inner(items)
    assert len(items) == 3
    return items[1] * items.index("text")


def popped(inner, h):
    queue = [h * 2, h]
    while queue:
        h = h + inner(queue)
    return h


def counted(inner, h):
    counts = {"calls": 0}
    inner(h, counts)
    inner(h, counts)
    return h * counts["calls"]


def queued(inner, h):
    queue = deque([1])
    inner(queue)
    return h * len(queue)


def slotted(inner, h):
    box = Slots(h)
    inner(box)
    return box.keys


def aliased(inner, h):
    h = h * 1
    return inner(h, h[:1])


def write_and_read(h, first):
    h.mul_(2)
    return first + h


MODELS = {
    "in place": (lambda h: h.relu_(), written),
    "copy_": (lambda h: h.copy_(h.flip(0)), written),
    "a cache": (lambda h, cache: (cache["k"][1:].copy_(h[1:]), cache.update(more=h)), filled),
    "a list": (lambda items: items.extend([items[0] * 2, "text"]), appended),
    "a list that gets shorter": (lambda queue: queue.pop(), popped),
    "a dict of numbers": (lambda h, counts: counts.update(calls=counts["calls"] + 1), counted),
    "a deque": (lambda queue: queue.append(1), queued),
    "slots": (lambda box: setattr(box, "keys", box.keys * 2), slotted),
    "a view": (write_and_read, aliased),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_writes_to_arguments_add_no_error_to_any_module(model):
    found = by_name(polycast.compare(nn.Sequential(Calls(*model)), torch.randn(3, 4), policy=IN_FLOAT32))
    errors = {name: (module.own.relative, module.total.relative) for name, module in found.items()}
    assert errors == dict.fromkeys(("", "0", "0.layer", "0.inner"), (0.0, 0.0))


@pytest.mark.parametrize("model", list(MODELS.values())[:-1], ids=list(MODELS)[:-1])
def test_the_own_errors_are_those_of_the_fast_dtype(model):
    comparison = polycast.compare(nn.Sequential(Calls(*model)), torch.randn(3, 4))
    assert max(module.own.relative for module in comparison.modules) < 0.01


def test_a_write_to_overlapping_casts_raises():
    with pytest.raises(RuntimeError, match=r"Does \(run in float32 by polycast.compare\) wrote to.*shares memory with"):
        polycast.compare(Calls(write_and_read, aliased), torch.randn(3, 4))


def test_inputs_are_not_modified():
    model = Does(lambda x, items: (items.append(x), items[0].zero_())[1])
    x, items = torch.ones(2, 4), [torch.ones(2)]
    before = list(items)
    comparison = polycast.compare(model, (x, items))
    assert items == before
    assert items[0].tolist() == [1, 1]
    assert comparison.modules[0].own.relative == 0


def test_a_tensor_and_its_views_are_copied_with_their_overlap():
    def forward(x, first, same):
        x.add_(1)
        return first + same

    x = torch.arange(4.0)
    comparison = polycast.compare(Does(forward), (x, x[:2], x[:2]))
    assert comparison.modules[0].own.relative == comparison.modules[0].total.relative == 0
    assert x.tolist() == [0, 1, 2, 3]


def test_an_exception_in_a_repeated_call_restores_lists():
    given = []

    def inner(items):
        if items[0].dtype is torch.float32 and kept["h"].dtype is not torch.float32:
            raise ZeroDivisionError
        return items[0]

    kept = {}

    def outer(inner, h):
        kept["h"] = h
        given.append(([h], h.dtype))
        return inner(given[-1][0])

    with pytest.raises(ZeroDivisionError):
        polycast.compare(Calls(inner, outer), torch.randn(3, 4))
    assert {dtype for _, dtype in given} == {torch.float32, torch.bfloat16}
    assert all(items[0].dtype is dtype for items, dtype in given)


def test_tune_finds_a_module_that_writes_a_cache():
    def attend(self, x, cache):
        cache["k"][:2].copy_(x[:2])
        return torch.mm(x, self.weight) * 1e-5

    attention = Defined(attend, weight=nn.Parameter(torch.eye(4) * 1e5))  # more than float16 can hold

    def forward(self, x):
        h = self.first(x)
        cache = {"k": torch.zeros(3, 4, dtype=h.dtype)}
        return self.attn(h, cache) + cache["k"] * 10

    model = Defined(forward, first=nn.Linear(4, 4), attn=attention)
    tuned = polycast.tune(model, torch.randn(3, 4), tolerance=0.01, dtype=torch.float16)
    assert tuned.policy.modules == {"attn": "fp32"}
    assert tuned.met
