"""A guard of polycast's own in Dynamo, by which compiled code runs under the policies that it was compiled for only.

Dynamo guards all code on the autocast state that torch has: what is enabled, and in which dtype. The policies that
regions lay over the tables are not part of it. ``in_force`` says them as a text, which keeps code apart:

- what is compiled from now on has a guard that the text is what it was then;
- what was compiled before has one that there are no policies, for there were none;
- so has what Dynamo loads, where it was saved by a process that had no guard to give it.

The caches on disk are told apart by cache_key.py.

This is put in place when a region with policies is first entered, in the modules that are imported by then, and in the
others as they are imported, before which they compile nothing. They are internals of torch. Where they are not what
they are expected to be, compiled code is kept away from regions with policies.
"""

import functools
from typing import Any

import torch

from ..engine.snapshot import guard_text
from ..torch_internals.patcher import Patch, expect, method_of

_MARK = "polycast_policies"
"""The attribute of a guard manager that has the guard."""
_SHOWN = 200
"""How many characters of the policies those see who have Dynamo log its guards."""


def guard_policies(builder: Any, guard: Any, seen: str) -> None:
    """Make the guard that the policies in force are those that were seen; Dynamo may save it, by this name."""
    _add_guard(builder.guard_manager, seen, guard)


def _add_guard(manager: Any, seen: str, guard: Any = None) -> None:
    from torch._dynamo.guards import get_verbose_code_parts

    shown = seen if len(seen) <= _SHOWN else seen[:_SHOWN] + "..."
    parts = get_verbose_code_parts([f"policies of polycast.autocast == {shown!r}"], guard)
    # One that is checked after all others: another thread may be in the middle of them, in Python, and the list that it
    # walks is not to grow.
    manager.root.add_epilogue_lambda_guard(
        lambda _: guard_text() == seen, parts, None if guard is None else guard.user_stack
    )
    setattr(manager, _MARK, seen)


def _add_missing_guard(manager: Any) -> None:
    """Guard code that was compiled where no guard of ours was in place, so under no policies."""
    if getattr(manager, "root", None) is not None and not hasattr(manager, _MARK):
        _add_guard(manager, "")


def guard_dynamo(patch: Patch) -> None:
    """Guard what Dynamo has compiled, compiles and loads on the policies in force."""
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.guards import CheckFunctionManager, GuardManagerWrapper
    from torch._dynamo.output_graph import OutputGraph, OutputGraphCommon
    from torch._dynamo.source import GlobalStateSource

    eval_frame: Any = torch._C._dynamo.eval_frame
    entries, loaded_entries = eval_frame._debug_get_cache_entry_list, eval_frame._debug_get_precompile_entries
    init_ambient_guards: Any = method_of(OutputGraph, "init_ambient_guards", "self")
    compile_check_fn: Any = method_of(CheckFunctionManager, "compile_check_fn", "self", "builder")
    check: Any = method_of(GuardManagerWrapper, "check", "self", "x")
    compiled_codes = [code for reference in list(input_codes.seen) if (code := reference()) is not None]

    def new_guard() -> Any:
        return GlobalStateSource().make_guard(functools.partial(guard_policies, seen=guard_text()))

    def is_ours(guard: Any) -> bool:
        return guard.inner_create_fn() is guard_policies

    trial: Any = GuardManagerWrapper()
    _add_guard(trial, "never in force")
    expect(not trial.root.check({}), "a guard that fails has no effect")
    expect(is_ours(new_guard()), "a guard does not know what makes it")
    expect(hasattr(OutputGraph, "guards") and hasattr(OutputGraphCommon, "guards"), "a graph has no guards")

    @functools.wraps(init_ambient_guards)
    def init_ambient_guards_and_ours(self: Any) -> None:
        init_ambient_guards(self)
        self.guards.add(new_guard())

    @functools.wraps(compile_check_fn)
    def compile_check_fn_with_ours(self: Any, builder: Any, *args: Any, **kwargs: Any) -> Any:
        # Those who filter guards may have dropped ours, as they may any. But it was never there in what another process
        # has saved, nor in what this one was compiling when the guard was put in place.
        if not any(is_ours(guard) for guard in self.output_graph.guards):
            _add_missing_guard(builder.guard_manager)
        return compile_check_fn(self, builder, *args, **kwargs)

    @functools.wraps(check)
    def check_with_ours(self: Any, x: Any) -> bool:
        # The look-ups of Dynamo do not come here, but functions that are compiled ahead of time do: no code lists them.
        _add_missing_guard(self)
        result: bool = check(self, x)
        return result

    patch.replace(OutputGraph, "init_ambient_guards", init_ambient_guards_and_ours)
    patch.replace(CheckFunctionManager, "compile_check_fn", compile_check_fn_with_ours)
    patch.replace(GuardManagerWrapper, "check", check_with_ours)
    for code in compiled_codes:
        for entry in (*entries(code), *loaded_entries(code)):
            _add_missing_guard(entry.guard_manager)
