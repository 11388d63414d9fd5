"""The overhead of counting underflow and overflow in a training step: in every step, and in one of ten."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import polycast
from polycast_plugins.observe import Observation

from .observing import LAYERS, training_step
from .timing import LongSide, Race, Ratio

_WIDTH, _STEPS = 768, 10


class _Counted:
    """Steps of which every `schedule`-th is counted."""

    def __init__(self, model: torch.nn.Module, step: Callable[[], None], schedule: int) -> None:
        self._model, self._step, self._schedule = model, step, schedule
        self._seen: Observation

    @contextmanager
    def observing(self) -> Iterator[None]:
        with polycast.observe(self._model, numerics=True, schedule=self._schedule) as self._seen:
            yield

    def __call__(self) -> None:
        self._step()
        self._seen.step()


def training() -> Race:
    """Return the race of plain and counted steps, and of ten plain steps and ten of which one is counted."""
    model, step = training_step(_WIDTH)
    for _ in range(3):
        step()
    sides, ratios = {}, []
    for steps, name, at_most in ((1, "every step", 1.1), (_STEPS, f"one step in {_STEPS}", 1.01)):
        plain, statement = f"{steps} plain", f"for _ in range({steps}): step()"
        counted = _Counted(model, step, schedule=steps)
        sides[plain] = LongSide(statement, {"step": step}, per=steps)
        sides[name] = LongSide(statement, {"step": counted}, per=steps, around=counted.observing)
        what = f"GPT-2 of {LAYERS} layers, width {_WIDTH}, training, numerics of {name}"
        ratios.append(Ratio(what, "not observed", name, plain, at_most))
    return Race(sides=sides, ratios=ratios, rounds=100, seconds=0.01, most_seconds=120.0, least=True)
