"""The modules that ``tune`` chooses from: single ones, or blocks of them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ..policy.modules import ModuleFinder
from .profiling_run import ModelProfile
from .tune_arguments import nothing_to_choose


@dataclass(frozen=True)
class Block:
    """Modules that have one precision.

    Attributes:
        name: the candidate; None for modules that are in float32, or in the region's own precision, in any case.
        caller: the number of the block that calls it; None for that of the model.
        calls: the number of calls of its first module.
        modules: the names of its modules, in the order of their first calls.
        is_excluded: whether it is in float32 in any case.
    """

    name: str | None
    caller: int | None
    calls: int
    modules: tuple[str, ...]
    is_excluded: bool


class Blocks:
    """Assigns the modules that a model calls to candidates.

    Each match of `candidates` is a candidate, with all modules in it that are not in a match of their own. Other
    modules are in the region's own precision. Without `candidates` each module is one.

    Attributes:
        called: the modules that are called, by name.
        candidate_of: by the name of a module, its candidate.
        excluded: the names of the modules that stay in float32: each match of `exclude`, and all modules in it.
        names: the candidates, in the order of their first calls.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        profile: ModelProfile,
        exclude: Iterable[str] = (),
        candidates: Iterable[str] | None = None,
    ) -> None:
        """Find the modules.

        Raises:
            ValueError: a glob matches no module, or no module that the model calls; or nothing is left to choose from.
        """
        self.called = profile.by_name()
        self._names = {module: each.name for module, each in profile.modules.items()}
        finder = ModuleFinder(model)
        self.excluded = frozenset(
            name for glob in exclude for _, inside in self._matches(finder, glob, "exclude") for name in inside
        )
        if candidates is None:
            self.candidate_of = {name: name for name in self.called if name not in self.excluded}
        else:
            found = [match for glob in candidates for match in self._matches(finder, glob, "candidates")]
            blocks = {
                name: match
                for match, inside in sorted(found, key=lambda each: -len(each[1]))
                for name in inside
                if name not in self.excluded
            }
            self.candidate_of = {name: blocks[name] for name in self.called if name in blocks}
        self.names = list(dict.fromkeys(self.candidate_of.values()))
        if not self.names:
            raise nothing_to_choose(candidates)

    def _matches(self, finder: ModuleFinder, glob: str, argument: str) -> Iterator[tuple[str, list[str]]]:
        """Yield each match, and the names of the modules in it that are called."""
        called = self._names
        try:
            found = finder.find(glob)
        except ValueError as error:
            raise ValueError(str(error).replace("modules[", f"{argument}[", 1)) from None
        matches = {}
        for name, module in found.items():
            inside = [called[each] for each in module.modules() if each in called]
            if inside:
                matches[called.get(module, name)] = inside
        if not matches:
            raise ValueError(f"{argument}[{glob!r}] matches no module that the model calls, only {', '.join(found)}")
        yield from matches.items()

    def in_order_of_calls(self) -> list[Block]:
        """Return all blocks, each after the block that calls it; the first one has the model itself."""
        called = self.called
        keys = {name: (self.candidate_of.get(name), name in self.excluded) for name in called}
        modules: dict[tuple[str | None, bool], list[str]] = {}
        for name, key in keys.items():
            modules.setdefault(key, []).append(name)
        numbers = {key: number for number, key in enumerate(modules)}
        blocks = []
        for (candidate, is_excluded), names in modules.items():
            first = called[names[0]]
            callers = [caller for caller in first.callers if caller is not None]
            around = min(callers, key=lambda caller: called[caller].order, default=None)
            caller = None if around is None else numbers[keys[around]]
            blocks.append(Block(candidate, caller, first.calls, tuple(names), is_excluded))
        return blocks


def candidates_in(names: Iterable[str], candidate_of: Mapping[str, str]) -> list[str]:
    """Return the candidates of some modules, each once."""
    return list(dict.fromkeys(candidate_of[name] for name in names if name in candidate_of))
