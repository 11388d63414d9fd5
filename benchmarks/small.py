"""The cost of a region and of an op, which must not grow with depth, threads or weights."""

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

import polycast
from polycast import CastPolicy

from .timing import Race, Ratio, Several, Side

NOT_GROWING = 1.1
"""A cost that must not grow may differ by this factor, for noise."""


def _region(amp: Any, **arguments: Any) -> Any:
    @contextmanager
    def around() -> Iterator[None]:
        with torch.no_grad(), amp.autocast("cpu", **arguments):
            yield

    return around


def _region_itself() -> Race:
    statement = "with autocast('cpu'): pass"
    sides = {
        "polycast": Side(statement, {"autocast": polycast.autocast}),
        "torch": Side(statement, {"autocast": torch.autocast}, kernels="torch"),
    }
    what = "construct, enter and leave a region"
    return Race(sides=sides, ratios=[Ratio(what, "torch.autocast", "polycast", "torch", 0.5)])


def _op(what: str, at_most: float, statement: str, against: str = "torch's kernel", **names: Any) -> Race:
    names["torch"] = torch
    sides = {
        "polycast": Side(statement, names, _region(polycast)),
        "torch": Side(statement, names, _region(torch), kernels="torch"),
    }
    return Race(sides=sides, ratios=[Ratio(what, against, "polycast", "torch", at_most)])


def _mm_float32() -> Race:
    x = torch.randn(8, 8)
    return _op("8x8 mm, float32 inputs", 1.05, "torch.mm(x, y)", x=x, y=x.clone())


def _mm_bfloat16() -> Race:
    x = torch.randn(8, 8).bfloat16()
    return _op("8x8 mm, bfloat16 inputs", 1.05, "torch.mm(x, y)", x=x, y=x.clone())


def _mm_weight() -> Race:
    names = {"torch": torch, "x": torch.randn(8, 8).bfloat16(), "weight": torch.nn.Parameter(torch.randn(8, 8))}
    statement, cache = "torch.mm(x, weight)", polycast.WeightCache()
    sides = {
        "region": Side(statement, names, _region(polycast)),
        "WeightCache": Side(statement, names, _region(polycast, cache=cache)),
        "torch": Side(statement, names, _region(torch), kernels="torch"),
        "no cast": Side("torch.mm(x, y)", {**names, "y": names["x"].clone()}, torch.no_grad, kernels="torch"),
    }
    against = "torch's kernel"
    ratios = [
        Ratio("8x8 mm, weight cached by the region", against, "region", "torch", 1.05),
        Ratio("8x8 mm, weight cached by a WeightCache", against, "WeightCache", "torch", 1.05),
        Ratio("8x8 mm, weight cached by a WeightCache", "bfloat16, no region", "WeightCache", "no cast", 1.1),
    ]
    return Race(sides=sides, ratios=ratios)


def _relu() -> Race:
    return _op("an op without a policy (relu)", 1.02, "torch.relu(x)", "torch", x=torch.randn(8, 8))


def eager() -> Several:
    """Return the races of a region, and of ops in one."""
    return Several(lambda: (make() for make in (_region_itself, _mm_float32, _mm_bfloat16, _mm_weight, _relu)))


def policy() -> Race:
    """Return the race of a region with a policy and a plain one: alone, in a plain one, in one with another policy."""
    some, others = ({name: CastPolicy.FP32} for name in ("aten::mm", "aten::softmax.int"))
    regions = {"plain": polycast.autocast("cpu"), "policy": polycast.autocast("cpu", policy=some)}
    around = {
        "": nullcontext,
        " in another": _region(polycast),
        " in one with policies": _region(polycast, policy=others),
    }
    sides = {
        name + where: Side("with region: pass", {"region": region}, outer)
        for name, region in regions.items()
        for where, outer in around.items()
    }
    ratios = [
        Ratio("enter and leave a region with policies" + where, "a plain one", "policy" + where, "plain" + where, 1.2)
        for where in around
    ]
    return Race(sides=sides, ratios=ratios)


def depth() -> Race:
    names = {"autocast": polycast.autocast, "torch": torch, "x": torch.randn(8, 8)}

    def nested(count: int) -> Any:
        @contextmanager
        def around() -> Iterator[None]:
            with torch.no_grad(), ExitStack() as regions:
                for _ in range(count):
                    regions.enter_context(polycast.autocast("cpu"))
                yield

        return around

    enter = "with autocast('cpu'): pass"
    sides = {
        "enter 2": Side(enter, names, nested(1)),
        "enter 50": Side(enter, names, nested(49)),
        "mm 1": Side("torch.mm(x, x)", names, nested(1)),
        "mm 50": Side("torch.mm(x, x)", names, nested(50)),
    }
    ratios = [
        Ratio("a region as the 50th", "as the 2nd", "enter 50", "enter 2", NOT_GROWING),
        Ratio("8x8 mm, 50 regions deep", "1 deep", "mm 50", "mm 1", NOT_GROWING),
    ]
    return Race(sides=sides, ratios=ratios)


@contextmanager
def _crowd(count: int) -> Iterator[None]:
    """Start threads that wait inside of regions."""
    leave, inside = threading.Event(), threading.Barrier(count + 1)

    def wait() -> None:
        with polycast.autocast("cpu"):
            inside.wait()
            leave.wait()

    threads = [threading.Thread(target=wait) for _ in range(count)]
    for thread in threads:
        thread.start()
    inside.wait()
    try:
        yield
    finally:
        leave.set()
        for thread in threads:
            thread.join()


def threads() -> Race:
    names = {"autocast": polycast.autocast, "torch": torch, "x": torch.randn(8, 8)}

    def among(others: int) -> Any:
        @contextmanager
        def around() -> Iterator[None]:
            with _crowd(others), torch.no_grad(), polycast.autocast("cpu"):
                yield

        return around

    enter = "with autocast('cpu'): pass"
    sides = {
        "enter 1": Side(enter, names, among(0)),
        "enter 8": Side(enter, names, among(7)),
        "mm 1": Side("torch.mm(x, x)", names, among(0)),
        "mm 8": Side("torch.mm(x, x)", names, among(7)),
    }
    ratios = [
        Ratio("a region, 8 threads in regions", "1 thread", "enter 8", "enter 1", NOT_GROWING),
        Ratio("8x8 mm, 8 threads in regions", "1 thread", "mm 8", "mm 1", NOT_GROWING),
    ]
    return Race(sides=sides, ratios=ratios)


def lookup() -> Race:
    x, used = torch.randn(8, 8).bfloat16(), 10

    def filled(count: int) -> Side:
        weights = [torch.nn.Parameter(torch.ones(8, 8)) for _ in range(count)]
        region = _region(polycast, cache=polycast.WeightCache())
        with region():
            for weight in weights:
                torch.mm(x, weight)
        some = random.Random(0).sample(weights, used)
        # The names keep all weights alive, and with them their casts.
        names = {"mm": torch.mm, "x": x, "some": some, "weights": weights}
        return Side("for weight in some: mm(x, weight)", names, region, per=used)

    polycast.install("cpu")
    sides = {f"{count:,}": filled(count) for count in (10, 1_000, 100_000)}
    against = "10 weights cached"
    ratios = [
        Ratio(f"8x8 mm, {count} weights cached", against, count, "10", NOT_GROWING) for count in ("1,000", "100,000")
    ]
    return Race(sides=sides, ratios=ratios)


def leaving() -> Race:
    def suspended() -> Iterator[None]:
        with polycast.autocast("cpu"):
            yield

    def run(count: int) -> Any:
        def close() -> None:
            generators = [suspended() for _ in range(count)]
            for generator in generators:
                next(generator)
            for generator in generators:
                generator.close()

        return close

    sides = {f"{count:,}": Side("close()", {"close": run(count)}, per=count) for count in (100, 16_000)}
    what = "leaving suspended generators oldest first, of 16,000"
    return Race(sides=sides, ratios=[Ratio(what, "of 100", "16,000", "100", 1.5)], rounds=10)


def out_dtype() -> Race:
    a, b = (torch.randint(-128, 128, (512, 512), dtype=torch.int8) for _ in range(2))
    names = {"mm": torch.ops.aten.mm.default, "int32": torch.int32, "a": a, "b": b}
    sides = {
        "polycast": Side("out_dtype(mm, int32, a, b)", {**names, "out_dtype": polycast.out_dtype}),
        "kernel": Side("int_mm(a, b)", {**names, "int_mm": torch._int_mm}),
        "torch": Side("out_dtype(mm, int32, a, b)", {**names, "out_dtype": torch.ops.higher_order.out_dtype}),
    }
    what = "512x512 int8 mm into int32"
    ratios = [
        Ratio(what, "torch._int_mm", "polycast", "kernel", 1.1),
        Ratio(what, "torch's out_dtype", "polycast", "torch", 1 / 15),
    ]
    return Race(sides=sides, ratios=ratios)
