"""The weights that a recipe keeps in the fast dtype, whatever becomes of the modules that it names."""

import threading
import weakref
from typing import Any

import torch
from torch.nn.modules import module

from ...common.atfork import hold_during_fork
from ...policy.recipes import Recipe

_lock = threading.RLock()
hold_during_fork(lambda: [_lock])


class _Parameters:
    """Counts how often any module is given a parameter or a module, while it is watched."""

    def __init__(self) -> None:
        self.given = 0
        self._hooks: list[Any] = []

    def watch(self) -> None:
        if self._hooks:
            return
        with _lock:
            if not self._hooks:
                self.given += 1  # what was not seen until now may have been one
                self._hooks = [
                    module.register_module_parameter_registration_hook(self._count),
                    module.register_module_module_registration_hook(self._count),
                ]

    def unwatch(self) -> None:
        with _lock:
            while self._hooks:
                self._hooks.pop().remove()

    def _count(self, *_: object) -> None:
        self.given += 1


parameters = _Parameters()


class Keep:
    """The weights that a recipe keeps in the fast dtype: those that it names, and those of modules that it names."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._given = 0
        self._answers: dict[int, tuple[weakref.ref[torch.Tensor], bool]] = {}
        _all.add(weakref.ref(self, _all.discard))

    def forget(self) -> None:
        """Look again at each weight."""
        self._answers = {}

    def has(self, weight: torch.Tensor) -> bool:
        """Say whether a weight is kept."""
        parameters.watch()
        if self._given != parameters.given:
            self._given = parameters.given
            self.forget()
        known = self._answers.get(id(weight))
        if known is not None and known[0]() is weight:
            return known[1]
        found = any(
            each is weight if isinstance(each, torch.Tensor) else any(own is weight for own in each.parameters())
            for each in self._recipe.keep
        )
        if len(self._answers) > 10_000:
            self._answers = {}
        self._answers[id(weight)] = weakref.ref(weight), found
        return found


_all: "set[weakref.ref[Keep]]" = set()


def forget_all() -> None:
    """Have every one look again at each weight, and refer to none."""
    for each in _all.copy():  # at once: other threads add to it
        keep = each()
        if keep is not None:
            keep.forget()
