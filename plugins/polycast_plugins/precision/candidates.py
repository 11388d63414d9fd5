"""The candidates of ``tune``, modules, blocks of them or ops, and the policy of a choice of them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch

from polycast import CastPolicy, NoRecipe, Policy, apply_policy, autocast
from polycast.plugin import Recipe, dtype_name, find_op, get_backend

from .calls import DispatchMode, ModelCall, may_come_from_policy, run_eagerly
from .minimal_set import Choice
from .profiling_run import ModelProfile

_FP32 = CastPolicy.FP32.value
_SPECIAL = re.compile(r"[*?\[\]{}]")
_BANNED = re.compile(r"(\S+?)(\.\S+)? is unsafe to autocast on ")


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
        excluded: by the names of modules that are no candidates because of `exclude`, the rules that they keep: each
            match and, unless its rule is a mapping, which leaves the precision open, all modules in it.
        names: the candidates, in the order of their first calls.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        profile: ModelProfile,
        exclude: Mapping[str, Any] = MappingProxyType({}),
        candidates: Iterable[str] | None = None,
    ) -> None:
        """Find the modules; raise ValueError for a glob that matches none, or if nothing is left to choose from."""
        self.called = profile.by_name()
        self._names = {module: each.name for module, each in profile.modules.items()}
        kept = [(rule, each) for glob in exclude for rule, each in self._kept(model, glob, exclude[glob])]
        self.excluded = {name: rule for rule, names in sorted(kept, key=lambda each: -len(each[1])) for name in names}
        if candidates is None:
            self.candidate_of = {name: name for name in self.called if name not in self.excluded}
        else:
            found = [match for glob in candidates for match in self._matches(model, glob, "candidates")]
            blocks = {
                name: match
                for match, inside in sorted(found, key=lambda each: -len(each[1]))
                for name in inside
                if name not in self.excluded
            }
            self.candidate_of = {name: blocks[name] for name in self.called if name in blocks}
        self.names = list(dict.fromkeys(self.candidate_of.values()))
        if not self.names:
            raise _nothing_to_choose(candidates)

    def _kept(self, model: torch.nn.Module, glob: str, rule: Any) -> Iterator[tuple[Any, list[str]]]:
        """Yield the rule for each match of a glob of `exclude`, with the names of the modules that keep it."""
        for match, inside in self._matches(model, glob, "exclude", rule):
            read = Policy(modules={glob: rule}).modules[glob]
            yield read, [match] if isinstance(read, Mapping) else inside

    def _matches(
        self, model: torch.nn.Module, glob: str, argument: str, rule: Any = _FP32
    ) -> Iterator[tuple[str, list[str]]]:
        """Yield each match, and the names of the modules in it that are called."""
        called = self._names
        try:
            with apply_policy(model, Policy(modules={glob: rule})) as applied:
                found = list(applied.rules)
        except ValueError as error:
            text = str(error).removeprefix("policy: ").replace("modules[", f"{argument}[", 1)
            raise ValueError(text) from None
        matches = {}
        for name in found:
            module = model.get_submodule(name)
            inside = [called[each] for each in module.modules() if each in called]
            if inside:
                matches[called.get(module, name)] = inside
        if not matches:
            raise ValueError(f"{argument}[{glob!r}] matches no module that the model calls, only {', '.join(found)}")
        yield from matches.items()

    def in_order_of_calls(self) -> list[Block]:
        """Return all blocks, each after the block that calls it; the first one has the model itself."""
        called = self.called
        keys = {name: (self.candidate_of.get(name), self.excluded.get(name) == _FP32) for name in called}
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


class ModuleCandidates:
    """The modules that a model calls, each without the modules in it, or blocks of them."""

    def __init__(self, blocks: Blocks, dtype: torch.dtype, recipe: Recipe | None = None) -> None:
        self._blocks, self._recipe = blocks, recipe
        self._fast = dtype_name(dtype) if recipe is None else NoRecipe.kind

    def can_leave_recipe(self, name: str) -> bool:
        """Return whether a candidate can leave the recipe for the fast dtype."""
        return self._recipe is not None

    def policy(self, choice: Choice, name: str = "") -> Policy:
        """Return rules for the modules whose precision is not that of their callers.

        Modules without parameters (activations, dropout) compute in the precision of their callers, unless they are in
        the choice themselves. With a recipe, the model has a rule for it, so that the policy also works in regions
        without the recipe.
        """
        rules: dict[str, Any] = {}
        states: dict[str | None, set[str | Recipe]] = {None: {self._fast} if self._recipe is None else set()}
        blocks = self._blocks
        for each in blocks.called.values():
            around = set[str | Recipe]().union(*(states.get(caller, set()) for caller in each.callers))
            candidate = blocks.candidate_of.get(each.name)
            wanted = self._wanted(each.name, candidate, choice)
            if isinstance(wanted, Mapping):
                states[each.name] = around
                rules[glob_of(each.name)] = wanted
                continue
            chosen = each.name in blocks.excluded or candidate in choice.members or candidate in choice.in_fast_dtype
            if chosen or each.has_parameters or not around:
                states[each.name] = {wanted}
                if around != {wanted}:
                    rules[glob_of(each.name)] = wanted
            else:
                states[each.name] = around
        return Policy(modules=rules, name=name)

    def _wanted(self, name: str, candidate: str | None, choice: Choice) -> Any:
        if name in self._blocks.excluded:
            return self._blocks.excluded[name]
        if candidate in choice.members:
            return _FP32
        return self._fast if self._recipe is None or candidate in choice.in_fast_dtype else self._recipe


class OpCandidates:
    """The ops that autocast handles, by their short names."""

    def __init__(self, recipe: Recipe | None = None, excluded: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._excluded = excluded
        self._of_recipe = set() if recipe is None else {_short(each) for each in recipe.overloads}

    def can_leave_recipe(self, name: str) -> bool:
        """Return whether a candidate can leave the recipe for the fast dtype."""
        return name in self._of_recipe

    def policy(self, choice: Choice, name: str = "") -> Policy:
        """Return policies for the chosen ops; recipes do not compute ops that have a policy."""
        kept = dict.fromkeys(choice.in_fast_dtype, CastPolicy.LOWER_PRECISION_FP.value)
        return Policy(ops={**self._excluded, **dict.fromkeys(choice.members, _FP32), **kept}, name=name)


def ops_seen(model: torch.nn.Module, call: ModelCall, region: autocast) -> list[str]:
    """Run a model in a region and return the ops that can be in float32, ops that the table casts down first.

    Of those in the table, the ops that reach autocast count, not the ops that they decompose into. So the model is run
    with all of them banned, then without the op at which it stopped, until it does not stop any more. The other ops are
    those that reach the dispatcher below autocast.
    """
    backend = get_backend(region.device)
    casts_down = CastPolicy.LOWER_PRECISION_FP, CastPolicy.LOWER_FIRST
    lower = [name for name, policy in backend.policies.items() if policy in casts_down]
    banned = dict.fromkeys(name.partition(".")[0] for name in lower)
    found: list[str] = []
    while banned:
        ban = Policy(ops=dict.fromkeys(banned, CastPolicy.BANNED))
        try:
            with run_eagerly(), region, autocast(region.device, region.fast_dtype, policy=ban):
                call.run(model)
        except Exception as error:
            if not may_come_from_policy(error):
                raise
            refused = (match[1] for text in _texts(error) if (match := _BANNED.match(text)))
            stopped_at = next((name for name in refused if name in banned), None)
            if stopped_at is None:
                break
            found.append(stopped_at)
            del banned[stopped_at]
        else:
            break
    below = _Below()
    try:
        with run_eagerly(), region, below:
            call.run(model)
    except Exception as error:
        if not may_come_from_policy(error):
            raise
    known = {name.partition(".")[0] for name in backend.policies} | {"aten::_to_copy"}
    found += [name for name in below.names if name not in known and _can_be_float32(name)]
    return [_short(name) for name in found]


def chosen_ops(
    seen: list[str], exclude: Mapping[str, Any], candidates: Iterable[str] | None
) -> tuple[list[str], dict[str, Any]]:
    """Return the candidates among the ops that a model calls, and the policies that the excluded ones keep."""
    excluded = {name: exclude[glob] for glob in exclude for name in _matching(seen, [glob], "exclude")}
    found = seen if candidates is None else _matching(seen, candidates, "candidates")
    names = [name for name in found if name not in excluded]
    if seen and not names:
        raise _nothing_to_choose(candidates)
    return names, excluded


def _matching(seen: list[str], globs: Iterable[str], argument: str) -> list[str]:
    found = set()
    for glob in globs:
        matches = [name for name in seen if fnmatchcase(name, glob)]
        if not matches:
            raise ValueError(f"{argument}[{glob!r}] matches no op that the model calls; it calls {', '.join(seen)}")
        found.update(matches)
    return [name for name in seen if name in found]


def _short(op: str) -> str:
    """Return the name of an op, given that of an overload in the dispatcher, without the namespace ``aten``."""
    return op.partition(".")[0].removeprefix("aten::")


def glob_of(name: str) -> str:
    """Return the glob that matches the name of one module."""
    escaped = _SPECIAL.sub(r"[\g<0>]", name)
    return f"[c]{escaped[1:]}" if escaped.startswith("class:") else escaped


def _texts(error: BaseException | None) -> Iterator[str]:
    """Yield the texts of an exception and of its causes and contexts."""
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__


class _Below(DispatchMode):  # type: ignore[misc]
    """Records the ops that reach the dispatcher below autocast and autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.name().partition(".")[0]] = None
        return func(*args, **(kwargs or {}))


def _can_be_float32(name: str) -> bool:
    """Return whether an op computes tensors from tensors, and can have the policy "fp32"."""
    try:
        overloads = Policy({name: _FP32}).ops.resolved
    except ValueError:
        return False
    return any(_computes(op) for each in overloads if (op := find_op(each)) is not None)


def _computes(op: Any) -> bool:
    schema = op._schema
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return takes and any("Tensor" in str(each.type) and each.alias_info is None for each in schema.returns)


def _nothing_to_choose(candidates: Iterable[str] | None) -> ValueError:
    """Return the error for a search without candidates."""
    is_empty = candidates is not None and not tuple(candidates)
    why = "candidates= is empty" if is_empty else "exclude= matches all candidates"
    remedy = "Name some, or leave it out" if is_empty else "Leave some of it out"
    return ValueError(f"there is nothing to choose from: {why}. {remedy}.")
