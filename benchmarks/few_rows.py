"""The CPU's kernel for few rows against reading its weights: as fast as memory is as fast as it can be."""

import functools
from collections.abc import Iterator

import torch
from torch import nn

from polycast_plugins.quantize.cpu.few_rows import few_rows_availability, few_rows_kernels

from .timing import Race, Ratio, Several, Side, Skipped

_BYTES = 2**28
"""The most memory of the weights of a race, many times a processor's cache."""
_IN, _OUT = 2048, 5632
_OF_READING = {1: 1.25, 4: 1.75}
"""By rows: 80% of the rate of torch's sum for one."""
_ORDERS = ("rows are dense", "columns are dense")


def _races() -> Iterator[Race | Skipped]:
    available = few_rows_availability()
    for rows in _OF_READING:
        for order in _ORDERS:
            what = f"linear of {_IN} x {_OUT}, {rows} row{'s' * (rows > 1)}, {order}"
            ratios = (
                Ratio(what, "reading the weights", "kernel", "reading", _OF_READING[rows]),
                Ratio(what, "torch's kernel", "kernel", "torch", None),
            )
            yield _race(rows, order, ratios) if available else Skipped(ratios, available.reason)


def _race(rows: int, order: str, ratios: tuple[Ratio, ...]) -> Race:
    """Return a race over weights that lie one after another in memory, each of which is used once in a turn."""
    count = _BYTES // (2 * _IN * _OUT)
    memory = torch.randn(count, _IN * _OUT).bfloat16()
    columns = order == _ORDERS[1]
    weights = [each.view(_IN, _OUT).t() if columns else each.view(_OUT, _IN) for each in memory]
    (simd,) = few_rows_kernels()["aten::linear"].constants
    names = {
        "kernel": torch.ops.polycast_cpu.few_rows_linear.default,
        "linear": nn.functional.linear,
        "parts": memory.view(torch.float32).unbind(),
        "weights": weights,
        "x": torch.randn(rows, _IN),
        "x16": torch.randn(rows, _IN).bfloat16(),
        "dtype": torch.bfloat16,
        "simd": simd,
    }
    sides = {
        "kernel": "for weight in weights: kernel(x, weight, None, weight, dtype, simd)",
        "torch": "for weight in weights: linear(x16, weight)",
        "reading": "for part in parts: part.sum()",
    }
    timed = {name: Side(statement, names, torch.no_grad) for name, statement in sides.items()}
    return Race(sides=timed, ratios=ratios, rounds=20, seconds=0.02, least=True)


races = functools.partial(Several, _races)
