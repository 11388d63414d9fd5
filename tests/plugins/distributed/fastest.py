"""Train and run replicated and sharded models with recipe "fastest", in the processes that the tests start."""

import gc
import json
import sys

import torch
from torch import distributed, nn
from training import WRAP

import polycast
from polycast_plugins.fastest.measurement import Measurement


def recipe(bfloat16=1e9):
    """Return the recipe for a machine where bfloat16 takes a factor of float32's time."""
    measurements = [
        Measurement(op, rows, way, factor * 1e-11 * rows * size, size)
        for op in ("linear", "matmul")
        for way, factor in (("float32", 1), ("bfloat16", bfloat16))
        for size in (2**12, 2**20)
        for rows in (1, 1024)
    ]
    return polycast.Fastest(polycast.DeviceProfile("cpu", "a processor", 1, {}, {}, tuple(measurements), 1e13))


def gradients(model, wrapped, x):
    model.zero_grad()
    with polycast.autocast("cpu", recipe=recipe()):
        loss = wrapped(x).float().pow(2).mean()
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each.clone() for each in found]


def outputs(model, x):
    """Return what a model computes in float32, and in bfloat16 without and with a cache, each twice."""
    found = []
    for bfloat16, cache in ((1e9, None), (1e-9, None), (1e-9, polycast.WeightCache())):
        for _ in range(2):
            with torch.no_grad(), polycast.autocast("cpu", recipe=recipe(bfloat16), cache=cache):
                found.append(model(x))
    return found


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    results = {}
    for rows in (16, 256):  # an activation smaller than the weight, and a larger one
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        model = made()
        expected = gradients(model, model, x)
        for name, wrap in WRAP.items():
            model = made()
            wrapped = wrap(model)
            pairs = zip(outputs(wrapped, x), outputs(made(), x), strict=True)
            results[f"{name} {rows}, outputs"] = [torch.equal(*pair) for pair in pairs]
            results[f"{name} {rows}"] = [
                all(torch.equal(*pair) for pair in zip(gradients(model, wrapped, x), expected, strict=True))
                for _ in range(2)
            ]
    if distributed.get_rank() == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(results, file)
    distributed.destroy_process_group()
    del model, wrapped
    gc.collect()  # sharded models are in cycles, and torch aborts if they outlive the interpreter
