"""``observe``: seeing what runs, in which dtype, why, and at what cost, without changing it."""

import threading
import time
import weakref
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Literal

from torch import nn

from ..common.versions import versions
from ..engine.choice import choose
from ..engine.low_bit import listeners as low_bit_listeners
from ..engine.recorder import NONFINITE, Recorder
from .compilations import tell_compilations, tell_compilations_no_more
from .counting import facts_of
from .facts import Facts, Run
from .known_modules import KnownModules
from .low_bit_counts import LowBitCounts
from .module_calls import after_modules, before_modules, tell_modules, tell_modules_no_more
from .observation import Observation

_THREADS = ("this", "all")


class observe:
    """See what runs in a block: a context manager, whose value is an :class:`Observation`.

    Casts, kept casts, results and graphs are those of a run that is not observed. What was seen is kept when the block
    raises. Observers may be nested, and each sees all.

    Args:
        model: what ran is told by its modules too, of which it holds none: they may come and go.
        timing: take the time of each cast. On a device that computes asynchronously that is the time to ask for it.
        nonfinite: ``"record"``: look for the first op that turns finite inputs into inf or nan. ``"raise"``: the same,
            and raise FloatingPointError as soon as the module that it ran in is done, of whichever model, or at the end
            of the block. It looks at every value that an op returns: a device waits for that.
        stacks: keep the Python stack of the first call of each op, by module.
        threads: ``"this"``: what this thread runs, with the backward passes that it starts; or ``"all"``.

    Raises:
        TypeError: `model` is not a module, or an option not a bool.
        ValueError: `nonfinite` or `threads` is none of those.
        FloatingPointError: as `nonfinite` says; it names the op and the module.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> with polycast.observe(model) as seen, polycast.autocast("cpu"):
        ...     output = model(torch.ones(2, 4))
        >>> {module.module: module.output_dtypes for module in seen.modules if module.calls}
        {'0': {'bfloat16': 1}, '1': {'bfloat16': 1}}
    """

    _finds_modules = False
    """Whether modules are told apart that are met as they are called."""

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        timing: bool = False,
        nonfinite: Literal["ignore", "record", "raise"] = "ignore",
        stacks: bool = False,
        threads: Literal["this", "all"] = "this",
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}")
        _check_options(timing=timing, stacks=stacks)
        _check_option("nonfinite", nonfinite, NONFINITE)
        _check_option("threads", threads, _THREADS)
        self._model = model  # until the block begins: it may die in there
        self._weak_model = None if model is None else weakref.ref(model)
        self._options = Run(
            model=None if model is None else type(model).__name__,
            threads=threads,
            timing=timing,
            nonfinite=nonfinite,
            stacks=stacks,
        )
        self._running: list[_Observing] = []

    def __enter__(self) -> Observation:
        model, self._model = self._model, None
        if model is None and self._weak_model is not None:
            model = self._weak_model()
        running = _Observing(self._options, model, self._finds_modules)
        running.start()
        self._running.append(running)
        return running.observation

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._running:
            raise RuntimeError("this observer was not entered")
        running = self._running.pop()
        running.stop()
        if error is None:
            running.raise_nonfinite()


class observe_program(observe):
    """See what runs in a program whose models are not known: a model has the name of its class once it is called."""

    _finds_modules = True


class _Observing:
    """One block that is observed."""

    def __init__(self, options: Run, model: nn.Module | None, finds_modules: bool) -> None:
        engine = choose()
        self._run = options
        self._engine_name = engine.name
        self._observer = engine.observer()
        self._recorder: Recorder = self._observer.recorder(
            options.threads == "all", options.timing, NONFINITE.index(options.nonfinite), options.stacks
        )
        self._finds_modules = finds_modules
        self._raises = options.nonfinite == "raise"
        self._tells_modules = model is not None or finds_modules or self._raises
        self._modules = KnownModules(self._recorder)
        if model is not None:
            self._modules.add(model)
        self._low_bit = LowBitCounts()
        self._raised = False
        self._thread = threading.get_ident()
        self._began = time.perf_counter()
        self.observation = Observation(self._facts)

    def start(self) -> None:
        with ExitStack() as begun:  # and ended, if a signal's handler raises in the middle
            tell_compilations()
            begun.callback(tell_compilations_no_more)
            if self._tells_modules:
                tell_modules(self._observer)
                begun.callback(tell_modules_no_more)
            if self._finds_modules:
                before_modules.append(self._modules.meet)
                begun.callback(before_modules.remove, self._modules.meet)
            if self._raises:
                after_modules.append(self._after_module)
                begun.callback(after_modules.remove, self._after_module)
            begun.callback(low_bit_listeners.listen_no_more, self._note_low_bit)
            low_bit_listeners.listen(self._note_low_bit, None if self._run.threads == "all" else threading.get_ident())
            self._began = time.perf_counter()
            begun.callback(self._recorder.stop)
            self._recorder.start()
            self._begun = begun.pop_all()

    def _note_low_bit(self, device_type: str, recipe: str, op: str, reason: str | None) -> None:
        self._low_bit.note(device_type, recipe, op, reason)
        self._observer.note_low_bit(recipe, reason or "")

    def stop(self) -> None:
        self._begun.close()
        self.observation._facts = self._facts()
        self._modules.clear()

    def _facts(self) -> Facts:
        run = Run(
            **{
                **vars(self._run),
                "seconds": time.perf_counter() - self._began,
                "engine": self._engine_name,
                "versions": dict(versions()),
            }
        )
        return replace(facts_of(self._recorder.read(), self._modules.named, run), low_bit=self._low_bit.records())

    def _after_module(self) -> None:
        if self._run.threads == "all" or threading.get_ident() == self._thread:
            self.raise_nonfinite()

    def raise_nonfinite(self) -> None:
        """Raise what ``nonfinite="raise"`` asks for, once."""
        if not self._raises or self._raised or not self._recorder.nonfinite_count():
            return
        self._raised = True
        found = self.observation.nonfinite
        assert found is not None
        module = "outside of the model's modules" if found.module is None else f"in the module {found.module!r}"
        called = "".join(f"\n  {line}" for line in found.stack)
        raise FloatingPointError(
            f"{found.op} {module} turned finite inputs into {found.what} ({found.dtype}, in the {found.phase} pass). "
            f"It was called at:{called}"
        )


def _check_options(**options: object) -> None:
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {value!r}")


def _check_option(name: str, value: object, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, legal))}, got {value!r}")
