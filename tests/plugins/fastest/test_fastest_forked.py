"""The recipe "fastest" in a child of a fork: casts, decisions and gradients that the parent has made serve it, too."""

import os

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import copy, faulthandler, os
import torch
import polycast
from polycast_plugins.fastest.measurement import Measurement

torch.set_num_threads(1)
torch.manual_seed(0)
ratios = {"float32": 1, "bfloat16": 9, "bfloat16 kernel": 0.1}
times = tuple(
    Measurement(op, rows, way, ratio * 1e-11 * rows * size, size)
    for op in ("linear", "matmul", "encoder_layer")
    for way, ratio in ratios.items()
    for size in (2**12, 2**20)
    for rows in (1, 1024)
)
recipe = polycast.Fastest(polycast.DeviceProfile("cpu", "a processor", 1, {}, {}, times, 1e13))
first = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True).eval().requires_grad_(False)
few, many, sequences = torch.randn(4, 64), torch.randn(32, 64), torch.randn(4, 8, 64)


def results(model, cache):
    with torch.no_grad(), polycast.autocast("cpu", recipe=recipe, cache=cache):
        found = [model(few), model(many), model(few), layer(sequences)]
    model.zero_grad()
    with polycast.autocast("cpu", recipe=recipe):
        loss = model(many).float().square().mean()
    loss.backward()
    return [*found, *(parameter.grad.clone() for parameter in model.parameters())]


def equal(one, other):
    return all(map(torch.equal, one, other))


cache = polycast.WeightCache()
expected = results(first, cache)
is_one = torch.equal(expected[3], layer(sequences).bfloat16())
child = os.fork()
if not child:
    faulthandler.dump_traceback_later(60, exit=True)
    right = equal(results(first, cache), expected)
    with torch.no_grad():
        first[0].weight.mul_(2)
    changed = results(first, cache)
    right &= equal(changed, results(copy.deepcopy(first), polycast.WeightCache())) and not equal(changed, expected)
    os._exit(not right)
print(is_one, os.waitpid(child, 0)[1] == 0, equal(results(first, cache), expected))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_a_child_computes_and_trains_as_its_parent(run_program, engine):
    status, printed, errors = run_program(PROGRAM, engine, timeout=120)
    assert (printed, status) == ("True True True\n", 0), errors
