"""Digests of values: what does not count, values without a digest, and other processes."""

import os
import subprocess
import sys
import threading
import zlib

import pytest
import torch
from torch import nn

from polycast.precision.calls import ModelCall
from polycast.precision.fingerprint import Fingerprint


def fingerprint(model, metric=None):
    return Fingerprint(model, (ModelCall.of(model, torch.ones(2, 4)),), metric)


def test_the_order_of_sets_in_code_does_not_count():
    one, two = (lambda a, b: a in {"x", "y", "z"}), (lambda a, b: a in {"x", "y", "z"})
    consts = tuple(frozenset(["z", "y", "x"]) if isinstance(c, frozenset) else c for c in two.__code__.co_consts)
    two.__code__ = two.__code__.replace(co_consts=consts)
    digests = [fingerprint(nn.Linear(4, 4), metric).digests(set())["metric"] for metric in (one, two)]
    assert digests[0] == digests[1]


def test_values_without_a_digest_are_listed():
    model = nn.Linear(4, 4)
    model.compressor = zlib.compressobj()
    assert fingerprint(model).unknown == ["model: zlib.Compress in the model itself, compressor"]


def test_threads_and_locks_do_not_count():
    model = nn.Linear(4, 4)
    model.lock, model.thread = threading.Lock(), threading.Thread(target=print)
    assert fingerprint(model).unknown == []


def test_values_that_raise_or_are_nested_too_deeply_have_no_digest():
    class Raises:
        def __reduce__(self):
            raise ValueError("not now")

        __slots__ = ()

    deep = []
    for _ in range(10_000):
        deep = [deep]
    model = nn.Linear(4, 4)
    model.raises, model.deep = Raises(), deep
    unknown = fingerprint(model).unknown
    assert [text.rpartition(", ")[2] for text in unknown] == ["deep", "raises"]


SCRIPT = """
import torch
from torch import nn
from polycast.precision.calls import ModelCall
from polycast.precision.fingerprint import Fingerprint
torch.manual_seed(0)

class Layer(nn.Module):
    names = {"a", "b", "c", "d"}

    def __init__(self):
        super().__init__()
        self.layer, self.labels = nn.Linear(4, 4), {name: 1 for name in self.names}
        self.register_forward_hook(lambda module, args, output: output)
        self.device, self.function = torch.device("cpu"), nn.functional.relu

    def forward(self, x):
        return self.layer(x) if "a" in {"a", "b", "c"} else x

model, x = Layer(), torch.ones(2, 4)
print(sorted((what, *item) for what, each in Fingerprint(model, (ModelCall.of(model, x),), id).digests(set()).items()
    for item in each.items()))
"""


@pytest.mark.slow
def test_a_fingerprint_is_the_same_in_another_process():
    said = [
        subprocess.run(
            [sys.executable, "-c", f"{'x = object()' * n}\n{SCRIPT}"],
            env={**os.environ, "PYTHONHASHSEED": str(n)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for n in range(2)
    ]
    assert said[0] == said[1]
    assert "class __main__.Layer" in said[0]
