"""Guard compiled code on the overrides of regions, so that it runs only under those that it was compiled for.

Dynamo guards all code on torch's autocast state: what is enabled, and in which dtype. Overrides are not part of it.
``overrides_text(with_caches=True)`` returns them as a text:

- code that is compiled from now on gets a guard that the text is the same;
- code compiled before gets a guard that it is empty, because there were no overrides;
- so does code that Dynamo loads, if the process that saved it had no guard to give it.

cache_key.py does the same for the caches on disk.

The first region with an override installs this, in the modules that are imported by then, and in the others as they are
imported, before which they compile nothing.

In a torch that cannot be given the guard, compiled functions run eagerly instead. The compiler's stance becomes
``force_eager``, in the whole process, until ``uninstall()``. Entering a region with an override or a cache sets it
again, so that the end of somebody else's stance does not lift it. A compiled function that is running when this starts
goes on as it was compiled, because torch lets nobody change the stance inside of it.
"""

import functools
import sys
from typing import Any

import torch

from ..engine.snapshot import overrides_text
from ..engine.state import ready
from ..errors import warn_user
from ..torch_internals import changes
from ..torch_internals.patcher import Patch, expect, method_of

_MARK = "polycast_policies"
"""An attribute of guard managers that have the guard."""
_SHOWN = 200
"""The number of characters of the text in Dynamo's logs."""
_replaced: list[Any] = []
"""The stance that was set first, which knows the one before it; empty while none is set."""


def guard_policies(builder: Any, guard: Any, seen: str) -> None:
    """Add the guard that the overrides are those that were seen; Dynamo may save it, by this name."""
    _add_guard(builder.guard_manager, seen, guard)


def _add_guard(manager: Any, seen: str, guard: Any = None) -> None:
    from torch._dynamo.guards import get_verbose_code_parts

    shown = seen if len(seen) <= _SHOWN else seen[:_SHOWN] + "..."
    parts = get_verbose_code_parts([f"policies of polycast.autocast == {shown!r}"], guard)
    # After all others: another thread may be walking the list of those, which must not grow then.
    manager.root.add_epilogue_lambda_guard(
        lambda _: overrides_text(with_caches=True) == seen, parts, None if guard is None else guard.user_stack
    )
    setattr(manager, _MARK, seen)


def _new_guard() -> Any:
    from torch._dynamo.source import GlobalStateSource

    return GlobalStateSource().make_guard(functools.partial(guard_policies, seen=overrides_text(with_caches=True)))


def _is_ours(guard: Any) -> bool:
    return guard.inner_create_fn() is guard_policies


def _add_missing_guard(manager: Any) -> None:
    """Guard code that was compiled before the guard was installed, so without overrides."""
    if getattr(manager, "root", None) is not None and not hasattr(manager, _MARK):
        _add_guard(manager, "")


def guard_dynamo(patch: Patch) -> None:
    """Guard the code that Dynamo has compiled, compiles and loads on the overrides."""
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.guards import CheckFunctionManager, GuardManagerWrapper
    from torch._dynamo.output_graph import OutputGraph, OutputGraphCommon

    eval_frame: Any = torch._C._dynamo.eval_frame
    entries, loaded_entries = eval_frame._debug_get_cache_entry_list, eval_frame._debug_get_precompile_entries
    init_ambient_guards: Any = method_of(OutputGraph, "init_ambient_guards", "self")
    compile_check_fn: Any = method_of(CheckFunctionManager, "compile_check_fn", "self", "builder")
    check: Any = method_of(GuardManagerWrapper, "check", "self", "x")
    compiled_codes = [code for reference in list(input_codes.seen) if (code := reference()) is not None]

    trial: Any = GuardManagerWrapper()
    _add_guard(trial, "never active")
    expect(not trial.root.check({}), "a guard that fails has no effect")
    expect(_is_ours(_new_guard()), "a guard does not know what makes it")
    expect(hasattr(OutputGraph, "guards") and hasattr(OutputGraphCommon, "guards"), "a graph has no guards")

    @functools.wraps(init_ambient_guards)
    def init_ambient_guards_and_ours(self: Any) -> None:
        init_ambient_guards(self)
        self.guards.add(_new_guard())

    @functools.wraps(compile_check_fn)
    def compile_check_fn_with_ours(self: Any, builder: Any, *args: Any, **kwargs: Any) -> Any:
        # A filter of guards may have dropped ours. But code that another process saved never had it, nor code that was
        # being compiled when the guard was installed.
        if not any(_is_ours(guard) for guard in self.output_graph.guards):
            _add_missing_guard(builder.guard_manager)
        return compile_check_fn(self, builder, *args, **kwargs)

    @functools.wraps(check)
    def check_with_ours(self: Any, x: Any) -> bool:
        # Dynamo's look-ups do not call this, but functions compiled ahead of time do, which no code object lists.
        _add_missing_guard(self)
        result: bool = check(self, x)
        return result

    patch.replace(OutputGraph, "init_ambient_guards", init_ambient_guards_and_ours)
    patch.replace(CheckFunctionManager, "compile_check_fn", compile_check_fn_with_ours)
    patch.replace(GuardManagerWrapper, "check", check_with_ours)
    for code in compiled_codes:
        for entry in (*entries(code), *loaded_entries(code)):
            _add_missing_guard(entry.guard_manager)


def run_eagerly(reason: str) -> None:
    """Run compiled functions eagerly from now on, and warn, with the reason."""
    if _replaced:
        return
    keep_eager()
    # so that later entries with an override call prepare(), which calls keep_eager()
    ready.intersection_update([key for key in ready if isinstance(key, str)])
    warn_user(
        f"polycast cannot make the compiler of this torch ({torch.__version__}) distinguish policies ({reason}). "
        + changes.GUARDS.lost
    )


def keep_eager() -> None:
    """Set the stance, if somebody has set another one since."""
    if _stance() != "force_eager" or not _replaced:
        ours = torch.compiler.set_stance("force_eager")
        if not _replaced:
            _replaced.append(ours)


def stop_eager() -> None:
    """Restore the stance that was set before, if one is set."""
    if not _replaced:
        return
    first = _replaced.pop()
    if _stance() == "force_eager":
        first.__exit__(None, None, None)


def _stance() -> str:
    """Return the stance of the compiler, which torch has no function for."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    stance: str = getattr(getattr(module, "_stance", None), "stance", "default")
    return stance
