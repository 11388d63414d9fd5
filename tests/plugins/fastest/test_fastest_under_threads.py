"""Threads that train, and share models, at once in regions with the recipe "fastest"."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from tests.plugins.models import Defined
from torch import nn
from torch.utils.checkpoint import checkpoint

from polycast import Fastest, WeightCache, autocast
from polycast.engine import state

pytestmark = pytest.mark.usefixtures("engine")
THREADS = 4


def new_model():
    def forward(self, x):
        x = self.first(self.images(x))
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
        return torch.matmul(self.last(x.relu()), x.mT[:, :16])

    torch.manual_seed(0)
    images, first, last = nn.Conv1d(8, 8, 3, padding="same"), nn.Linear(16, 32), nn.Linear(32, 16)
    return Defined(forward, images=images, first=first, last=last)


def train(model, number, recipe, cache=None):
    generator = torch.Generator().manual_seed(number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for at in range(6):
        x = torch.randn(4, 8, 16, generator=generator)
        optimizer.zero_grad()
        with autocast("cpu", recipe=recipe, cache=cache):
            result = checkpoint(model, x, use_reentrant=False) if at % 2 else model(x)
        result.float().square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.fixture
def recipes(profile_of):
    return [Fastest(profile_of(overhead=1e-15, cast=1e-15, bfloat16=ratio)) for ratio in (0.01, 1.0, 1e9)]


@pytest.mark.parametrize("cached", [True, False])
def test_threads_train_as_one_does(recipes, cached):
    model, cache = new_model(), WeightCache() if cached else None
    expected = [train(copy.deepcopy(model), at, recipes[at % len(recipes)]) for at in range(THREADS)]
    together = threading.Barrier(THREADS)

    def run(at):
        own = copy.deepcopy(model)
        together.wait()
        if at == 0:
            state.machine.forget_actions()
        return train(own, at, recipes[at % len(recipes)], cache)

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(run, range(THREADS)))
    for own, alone in zip(found, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(own, alone, strict=True))


def test_threads_share_a_model(recipes):
    model, x = new_model(), torch.randn(4, 8, 16)

    def gradients(_):
        with autocast("cpu", recipe=recipes[2]):
            loss = model(x).float().square().mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    expected = gradients(0)
    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(gradients, range(8 * THREADS)):
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_threads_compute_a_layer_of_an_encoder_as_one_or_not(recipes):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().requires_grad_(False)
    x = torch.randn(3, 7, 16)

    def results(at):
        found = []
        for recipe in (recipes[at % len(recipes)], "none", recipes[2]):
            if at % 5 == 0:
                state.machine.forget_actions()
            with autocast("cpu", recipe=recipe):
                found.append(layer(x))
        return found

    alone = {at: results(at) for at in range(len(recipes))}
    assert torch.equal(alone[2][0], layer(x).bfloat16())
    assert not torch.equal(alone[2][0], alone[2][1])
    with ThreadPoolExecutor(THREADS) as pool:
        for at, found in enumerate(pool.map(results, range(8 * THREADS))):
            assert all(torch.equal(*pair) for pair in zip(found, alone[at % len(recipes)], strict=True))
