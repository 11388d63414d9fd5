"""The two sides of a comparison, each a model in a region or outside, and how they alternate.

One runs in the calling thread, the other in a worker thread, and each hands control to the other. An exception of a
signal handler, such as KeyboardInterrupt, can occur anywhere in the main thread: while it computes, and while it waits
for the worker. It ends both runs. A thread that waits for control is woken up; in one that computes, :class:`Stopped`
is raised at its next Python instruction.
"""

import contextvars
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

from polycast import ModuleRules, Policy, apply_policy, autocast
from polycast.plugin import Recipe, dtype_name

from .calls import COMPILED_CALL, run_eagerly, set_stance
from .gradients import ParameterGradients
from .isolation import ModelState
from .profiling_run import ModelProfile

_COMPILED = "_orig_mod"
"""The attribute of a compiled model that is the model."""
_T = TypeVar("_T")
_S = TypeVar("_S")

_POLL = 0.1
"""Seconds between checks for signals while the caller waits, for platforms where a signal does not end a wait."""
_START = 1.0
"""Seconds to wait for the worker to start after an interrupt, when it is unknown whether it was started."""


class Side:
    """A run of a model, in a region, or in a disabled one outside all regions.

    Attributes:
        policy: the rules for modules.
        compiled: whether compiled code runs as such.
        gradients: the gradients of the parameters of the model and the loss.
        names, by_name: the modules whose calls are watched.
    """

    profile: ModelProfile

    def __init__(
        self,
        model: torch.nn.Module,
        region: autocast,
        is_enabled: bool,
        policy: Policy,
        recipe: Recipe | None = None,
        compiled: bool = False,
        loss: object = None,
    ) -> None:
        self.model, self.region, self.is_enabled, self.policy = model, region, is_enabled, policy
        self.recipe, self.compiled = recipe, compiled
        self.names: Mapping[torch.nn.Module, str] = {}
        self.by_name: Mapping[str, torch.nn.Module] = {}
        self.gradients = ParameterGradients(model, loss)

    @property
    def state(self) -> ModelState:
        """The state that the forward writes."""
        return self.profile.state

    def text(self) -> str:
        """Return the run as text."""
        recipe = "" if self.recipe is None else f" and {self.recipe.short}"
        fast = f"a region of {dtype_name(self.region.fast_dtype)}{recipe} on {self.region.device}"
        return (fast if self.is_enabled else "float32") + (", compiled" if self.compiled else "")


class Sides:
    """Both sides, of which one is active: its rules for modules apply, and its code is compiled or not.

    The calls of `others` are watched, besides those of the modules of the models.
    """

    def __init__(self, reference: Side, tested: Side, others: Mapping[str, torch.nn.Module]) -> None:
        self.reference, self.tested = reference, tested
        self.have_one_model = reference.model is tested.model
        is_compiled = reference.compiled or tested.compiled
        found = [
            dict(_visible(side.model, is_compiled))
            if is_compiled or not self.have_one_model
            else {module: name for name, module in side.model.named_modules()}
            for side in (reference, tested)
        ]
        common = set(found[0].values()) & set(found[1].values())
        for side, names in zip((reference, tested), found, strict=True):
            watched = {module: name for module, name in names.items() if name in common or not is_compiled}
            side.names = {**watched, **{module: name for name, module in others.items()}}
            side.by_name = {name: module for module, name in side.names.items()}
        self._rules_differ = (
            self.have_one_model and reference.is_enabled and tested.is_enabled and reference.policy != tested.policy
        )
        self._stances_differ = reference.compiled != tested.compiled
        self._rules: dict[Side, ModuleRules] = {}
        self.active = tested

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the models under their rules for a block, which begins with the reference as the active side."""
        with ExitStack() as stack:
            if self.have_one_model and not self._rules_differ:
                policy = (self.tested if self.tested.is_enabled else self.reference).policy
                stack.enter_context(apply_policy(self.tested.model, policy))
            else:
                for side in (self.reference, self.tested):
                    self._rules[side] = stack.enter_context(apply_policy(side.model, side.policy))
                    if self._rules_differ and side is self.reference:
                        self._rules[side].suspend()
            if self._stances_differ or not self.tested.compiled:
                stack.enter_context(run_eagerly())
            self.active = self.tested
            self.activate(self.reference)
            yield

    def activate(self, side: Side) -> None:
        """Make a side the active one."""
        if side is self.active:
            return
        if self._rules_differ:
            self._rules[self.active].suspend()
            self._rules[side].resume()
        if self._stances_differ:
            set_stance("default" if side.compiled else "force_eager")
        self.active = side

    @contextmanager
    def activated(self, side: Side) -> Iterator[None]:
        """Make a side the active one for a block."""
        before = self.active
        self.activate(side)
        try:
            yield
        finally:
            self.activate(before)


def _visible(model: torch.nn.Module, is_compiled: bool) -> Iterator[tuple[torch.nn.Module, str]]:
    """Yield modules whose calls can be matched with those of another model, or of compiled code, with their names.

    A compiled model counts as the model in it, and has its name. In compiled code no calls of modules are visible.
    """
    inside = set[torch.nn.Module]()
    for name, module in model.named_modules():
        inner = getattr(module, _COMPILED, None)
        if isinstance(inner, torch.nn.Module):
            inside.update(inner.modules() if is_compiled else [inner])
        elif is_compiled and getattr(module, COMPILED_CALL, None) is not None:
            inside.update(each for each in module.modules() if each is not module)
        if module not in inside:
            yield module, ".".join(part for part in name.split(".") if part != _COMPILED)


class Stopped(BaseException):
    """Ends a run after the other one has failed. A BaseException, so that the model does not catch it."""


class Handoff:
    """Two runs of which one has control at a time."""

    def __init__(self) -> None:
        # Queues in C: an exception of a signal handler inside of threading's Python code could leave its locks locked.
        self._caller, self._worker, self._may_end = SimpleQueue[None](), SimpleQueue[None](), SimpleQueue[None]()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._worker_has_control = False
        self._began = self._over = self._caller_over = False
        self._failure: BaseException | None = None

    def run(self, ours: Callable[[], _T], theirs: Callable[[], _S]) -> tuple[_T, _S]:
        """Run `ours` here and `theirs` in the worker, `ours` first, and return both results, or raise what one raised.

        `theirs` runs in a copy of the caller's :mod:`contextvars` context.
        """
        result: list[_T] = []
        found: list[_S] = []
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=self._work, args=(lambda: found.append(context.run(theirs)),), name="polycast.compare"
        )
        try:
            self._thread.start()
            result.append(ours())
            self._caller_over = self._worker_has_control = True
            self._worker.put(None)
            while not self._over:
                self._wait_for_worker()
            failure = self._end_worker()
        except BaseException as error:
            failure = self._end_worker()
            if type(error) is not Stopped:
                raise
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame
        return result[0], found[0]

    def in_worker(self) -> bool:
        """Return whether this thread is the worker."""
        return threading.current_thread() is self._thread

    def check(self) -> None:
        """Raise Stopped if the worker must end."""
        if self._stopped:
            raise Stopped

    def hand_over(self) -> None:
        """Let the other run continue, until it hands control back or ends."""
        if self.in_worker():
            if not self._caller_over:
                self._worker_has_control = False
                self._caller.put(None)
                self._worker.get()
            self.check()
        else:
            if not self._over:
                self._worker_has_control = True
                self._worker.put(None)
                self._wait_for_worker()
            if self._failure is not None:
                raise Stopped

    def _wait_for_worker(self, timeout: float | None = None) -> None:
        while True:
            try:
                return self._caller.get(timeout=_POLL if timeout is None else timeout)
            except Empty:
                if timeout is not None:
                    return

    def _work(self, run: Callable[[], None]) -> None:
        """Run the worker; before it ends, exceptions raised in it by the caller must have arrived."""
        try:
            try:
                self._began = True
                self._worker.get()
                self.check()
                run()
            except Stopped:
                pass
            except BaseException as error:
                self._failure = error
            self._end_of_work()
        except Stopped:  # `_end_worker` raises it at most once
            self._end_of_work()

    def _end_of_work(self) -> None:
        self._over = True
        self._caller.put(None)
        self._may_end.get()
        for _ in range(10):  # a pending exception arrives in a loop
            pass

    def _end_worker(self) -> BaseException | None:
        """End the worker at any point, and return its exception."""
        assert self._thread is not None
        self._stopped = True
        if self._began and self._worker_has_control and not self._over:
            # Not cancelled if the run ends before it arrives: Python up to 3.12 would then look for it in every thread,
            # at every call.
            identity = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(Stopped))
        self._worker.put(None)
        try:
            if not self._began:
                self._wait_for_worker(_START)
            while self._began and not self._over:
                self._wait_for_worker()
        finally:  # a second interrupt does not wait for a worker that does not end
            for _ in range(2):  # `_work` waits at most twice
                self._may_end.put(None)
        if self._began:
            self._thread.join()
        failure, self._failure = self._failure, None  # its traceback would keep the model's values alive
        return failure
