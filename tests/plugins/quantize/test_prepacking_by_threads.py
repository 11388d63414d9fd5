"""Several threads that need the same prepacked weight, of which none is cached yet."""

import threading
import types

import pytest
import torch
from torch import nn

import polycast
from polycast.engine.recipes import prepacking

from . import int8_linears

pytestmark = pytest.mark.usefixtures("no_grad")
run = torch.no_grad()(int8_linears.run)  # in threads too


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_a_thread_computes_by_the_recipe_while_another_prepacks_the_weight(linear, in_thread):
    layer, pack, inside = nn.Linear(8, 8), linear.prepack, []

    def prepack(weight):
        if not inside:  # this thread holds an alias of the weight meanwhile
            inside.append(None)
            inside.append(in_thread(lambda: run(layer)))
        return pack(weight)

    linear.prepack = prepack
    outer = run(layer)
    assert torch.equal(inside[1], outer)
    assert (torch.equal(run(layer), outer), linear.prepared, linear.ran) == (True, 2, 3)


def test_a_weight_is_asked_for_again_if_another_thread_has_just_prepacked_it(linear, monkeypatch):
    weight, asked = nn.Parameter(torch.randn(8, 8)), []

    class Machine:
        def prepacked(self, cache, weight, kind, prepack):
            asked.append(kind)
            if len(asked) == 1:
                prepack(weight)  # as by another thread
                return prepacking.WRITTEN_UNSEEN
            return (weight,)

    monkeypatch.setattr(prepacking, "state", types.SimpleNamespace(machine=Machine()))
    assert prepacking.prepacked(polycast.WeightCache(), weight, 7, lambda weight: (weight,)) == (weight,)
    assert asked == [7, 7]


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_a_weight_with_an_alias_is_not_prepacked_although_other_threads_prepack_others(linear):
    layer, other = nn.Linear(8, 8), nn.Linear(8, 8)
    alias = layer.weight.data
    started, may_end, pack = threading.Event(), threading.Event(), linear.prepack

    def prepack(weight):
        started.set()
        may_end.wait(60)
        return pack(weight)

    linear.prepack = prepack
    thread = threading.Thread(target=run, args=(other,))
    thread.start()
    started.wait(60)
    run(layer)
    may_end.set()
    thread.join()
    assert (linear.prepared, alias.shape) == (1, (8, 8))
