"""`observe`: record which ops run, in which dtype, why, and at what cost."""

import functools
import threading
import time
import weakref
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Literal, TypeVar

from torch import nn

from polycast.plugin import events

from . import module_calls
from .counting import facts_of
from .facts import DATE, Facts, RecipeCounts, Run
from .grad_scaler import RecordingGradScaler
from .grad_scaler import listeners as scaler_listeners
from .module_calls import KnownModules, compiling
from .observation import Observation
from .observer_library import load_backend_of_accelerator, load_observer
from .packages import machine
from .recorder import NONFINITE, Reading, read
from .records import Origin
from .steps import Schedule, SkippedStep, Steps

_THREADS = ("this", "all")
_L = TypeVar("_L")


class observe:
    """Observe a block: a context manager, whose value is an :class:`~polycast_plugins.observe.Observation`.

    Observing changes no result, cast, cached cast or graph. It needs the native engine. The observation is kept if the
    block raises. Observers can be nested; each sees everything.

    Args:
        model: count by module of this model too. Modules are held weakly.
        timing: measure the time of casts and ops. On an asynchronous device that is the time to launch them.
        nonfinite: ``"record"``: find the first op that turns finite inputs into inf or nan. ``"raise"``: also raise
            FloatingPointError when the module in which it ran returns, or at the end of the block. Both read every
            output of every op, and so synchronize with the device.
        stacks: keep the Python stack of the first call of each op in each module.
        threads: ``"this"``: this thread, and the backward passes that it starts; ``"all"``: all threads.
        numerics: count the magnitudes of what ops compute and cast in regions and backward passes, and how much of it
            underflows and overflows: ``Observation.numerics``.
        schedule: observe only some steps of a program that calls ``Observation.step()`` after each one: the result of
            ``torch.profiler.schedule``, or an int n for every n-th step, beginning with the first. None: all.

    Raises:
        TypeError: `model` is not a module, an option is not a bool, or `schedule` is not a schedule.
        ValueError: `nonfinite` or `threads` has another value than these, or `schedule` selects no step.
        RuntimeError: on entering, the process runs on the reference engine, or the C++ cannot be built.
        FloatingPointError: see `nonfinite`; it names the op and the module.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> with polycast.observe(model) as seen, polycast.autocast("cpu"):
        ...     output = model(torch.ones(2, 4))
        >>> {module.module: module.output_dtypes for module in seen.modules if module.calls}
        {'0': {'bfloat16': 1}, '1': {'bfloat16': 1}}
    """

    _finds_modules = False

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        timing: bool = False,
        nonfinite: Literal["ignore", "record", "raise"] = "ignore",
        stacks: bool = False,
        threads: Literal["this", "all"] = "this",
        numerics: bool = False,
        schedule: Schedule | int | None = None,
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}")
        check_bools(timing=timing, stacks=stacks, numerics=numerics)
        check_option("nonfinite", nonfinite, NONFINITE)
        check_option("threads", threads, _THREADS)
        Steps(schedule)  # raises if it is not one
        self._schedule = schedule
        self._model = model  # held until the block is entered
        self._weak_model = None if model is None else weakref.ref(model)
        self._options = Run(
            model=None if model is None else type(model).__name__,
            threads=threads,
            timing=timing,
            nonfinite=nonfinite,
            stacks=stacks,
            numerics=numerics,
        )
        self._running: list[_Observing] = []

    def __enter__(self) -> Observation:
        model, self._model = self._model, None
        if model is None and self._weak_model is not None:
            model = self._weak_model()
        running = _Observing(self._options, model, self._finds_modules, Steps(self._schedule))
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
            running.steps.warn_if_unobserved()
            running.raise_nonfinite()

    def __repr__(self) -> str:
        run = self._options
        more = {"model": run.model, "timing": run.timing, "stacks": run.stacks, "numerics": run.numerics}
        texts = [f"{name}={value}" for name, value in more.items() if value]
        texts += [f"nonfinite={run.nonfinite!r}", f"threads={run.threads!r}"]
        return f"<observe({', '.join(texts)}): {'observing' if self._running else 'not observing'}>"


class observe_program(observe):
    """Observe a program whose models are unknown: each is named after its class when it is first called."""

    _finds_modules = True


class observe_step(observe):
    """Observe a step of a training run. Its records are made when they are read, because that may take longer."""

    _last: Reading | None = None

    @property
    def reading(self) -> Reading | None:
        """The counts of the block so far, or of the last block."""
        return self._running[-1].read() if self._running else self._last

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._running:
            self._last = self._running.pop().stop(lazy=True)


class _Observing:
    """The observation of one block."""

    def __init__(self, options: Run, model: nn.Module | None, finds_modules: bool, steps: Steps) -> None:
        self.steps = steps
        self._run = options
        self._observer = load_observer()
        self._recorder = self._observer.Recorder(
            options.threads == "all",
            options.timing,
            NONFINITE.index(options.nonfinite),
            options.stacks,
            options.numerics,
        )
        self._thread = None if options.threads == "all" else threading.get_ident()
        self._finds_modules = finds_modules
        self._raises = options.nonfinite == "raise"
        self._needs_modules = model is not None or finds_modules or self._raises
        self._modules = KnownModules(self._recorder)
        if model is not None:
            self._modules.add(model)
        self._recipe_counts = RecipeCounts()
        self._raised = False
        self._nonfinite_before = 0
        """The number of ops that had produced inf or nan by the end of the scaler's last step."""
        self._seconds = 0.0
        self._date = time.strftime(DATE, time.gmtime())
        self._began: float | None = None
        """When the observed step, or the block, began; None in a step that is not observed."""
        self._observed: ExitStack | None = None
        self.observation = Observation(self._facts, self._step)

    def start(self) -> None:
        if self.steps.is_observed:
            self._resume()

    def _step(self) -> None:
        if self._thread not in (None, threading.get_ident()):
            raise RuntimeError(
                "step() was called on another thread than the one that is observed: call it there, or observe all "
                'threads, with threads="all"'
            )
        self.steps.next()
        if self.steps.is_observed and self._observed is None:
            self._resume()
        elif not self.steps.is_observed:
            self._pause()

    def _pause(self) -> None:
        observed, self._observed = self._observed, None
        if observed is not None:
            observed.close()
        if self._began is not None:
            self._seconds, self._began = self._seconds + time.perf_counter() - self._began, None

    def _resume(self) -> None:
        with ExitStack() as started:  # undone if a signal handler raises in the middle

            def listen(event: events.Event[_L], listener: _L, thread: int | None = self._thread) -> None:
                started.callback(event.remove, listener)
                event.add(listener, thread)

            # new functions for each observer: remove() removes all equal listeners
            listen(compiling, lambda begins: self._observer.note_uncounted(begins), None)  # also in backward passes
            listen(events.own_work, lambda begins: self._observer.note_uncounted(begins))
            if self._needs_modules:
                listen(module_calls.observations, self)
            if self._finds_modules:
                listen(module_calls.before, self._modules.add_called)
            if self._raises:
                listen(module_calls.after, self.raise_nonfinite)
            listen(events.recipe_call, self._note_recipe)
            if self._run.nonfinite != "ignore" or self._run.numerics:
                load_backend_of_accelerator()  # so that it can be asked whether it captures a graph
            if self._run.nonfinite != "ignore":
                listen(scaler_listeners, self)
            self._began = time.perf_counter()
            started.callback(self._recorder.stop)
            self._recorder.start()
            self._observed = started.pop_all()

    def _note_recipe(self, device_type: str, recipe: str, op: str, reason: str | None, package: str) -> None:
        self._recipe_counts.note(device_type, recipe, op, reason, package)
        self._observer.note_recipe(recipe, reason or "")

    def origin(self, scaler: RecordingGradScaler) -> Origin | None:
        """Return the first op that produced inf or nan, if it is of this step: later ones are not kept."""
        if self._nonfinite_before or not self._recorder.nonfinite_count():
            return None
        return self.read().first_nonfinite()

    def updated(self, scaler: RecordingGradScaler, scale: float | None, skip: SkippedStep | None) -> None:
        """Note how many such ops there were by the end of the step."""
        self._nonfinite_before = self._recorder.nonfinite_count()

    def stop(self, *, lazy: bool = False) -> Reading:
        self._pause()
        reading = self.read()
        find = functools.cache(functools.partial(facts_of, reading, self._run_so_far(), self._recipe_counts.records()))
        self.observation._end(find if lazy else find())
        self._modules.clear()
        return reading

    def _facts(self) -> Facts:
        return facts_of(self.read(), self._run_so_far(), self._recipe_counts.records())

    def read(self) -> Reading:
        """Return the counts so far."""
        self._modules.note_rules()
        return read(self._recorder, self._modules.named)

    def _run_so_far(self) -> Run:
        return replace(
            self._run,
            seconds=self._seconds + (0.0 if self._began is None else time.perf_counter() - self._began),
            steps=self.steps.ended,
            observed_steps=self.steps.observed,
            engine="native",
            date=self._date,
            **machine(),
        )

    def raise_nonfinite(self) -> None:
        """Raise FloatingPointError once, if asked for, if there is inf or nan."""
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


def check_bools(**options: object) -> None:
    """Raise TypeError unless all options are bools."""
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {value!r}")


def check_option(name: str, value: object, legal: tuple[str, ...]) -> None:
    """Raise ValueError unless an option has a legal value."""
    if value not in legal:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, legal))}, got {value!r}")
