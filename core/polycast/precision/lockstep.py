"""Run a model in float32 and in a region in lockstep: each run hands the other one module's output at a time."""

import contextvars
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.low_bit.listeners import listeners as low_bit_listeners
from ..region.autocast import autocast
from ..region.cast_arguments import CastArguments
from .calls import Call
from .handoff import Handoff
from .hooks import CallKey, OpenCall, Watcher, innermost_common, watched
from .isolation import RandomState, Values, isolated
from .profiling_run import Profile
from .record import MatchedCall, Record
from .values import copied


@dataclass
class _Returned:
    """A call that has returned in float32's run, which waits for the region's run to make it too."""

    key: CallKey
    arguments: Any
    output: Any
    own: Any
    random: list[torch.Tensor]


class _RepeatableCall(OpenCall):
    """A call in float32's run, with everything that is needed to repeat it."""

    def __init__(self, key: CallKey, module: torch.nn.Module, arguments: Any, random: Any, state: Values) -> None:
        super().__init__(key, module)
        self.arguments, self.random, self.state = arguments, random, state
        self.context = contextvars.copy_context()


class Lockstep:
    """Two runs of a model, each with its own random numbers and its own written state of the model."""

    def __init__(self, model: torch.nn.Module, call: Call, region: autocast, profile: Profile, record: Record) -> None:
        self.region, self.profile, self.record = region, profile, record
        self.state, self.generators = profile.state, RandomState(region.device)
        self.waiting: _Returned | None = None
        self._model, self._call = model, call
        self._handoff = Handoff()

    def run(self) -> tuple[Any, Any]:
        """Return the output in float32, and the output in the region.

        Raises:
            BaseException: the exception of one of the runs, after both have ended.
        """
        caller = threading.get_ident()
        in_float32, in_region = _InFloat32(self), _InRegion(self)

        def watcher() -> Watcher | None:
            if self._handoff.in_worker():
                self._handoff.check()
                return in_region
            return in_float32 if threading.get_ident() == caller else None

        with ExitStack() as stack:
            stack.enter_context(isolated())
            stack.enter_context(self.generators.preserved())
            stack.enter_context(self.state.on_clones())
            stack.callback(low_bit_listeners.remove, self.record.low_bit.note)
            theirs = self._region_run(self.state.cloned(), self.generators.get())
            stack.enter_context(watched(self._model, watcher))
            return self._handoff.run(lambda: self._call.of_model(self._model), theirs)

    def _region_run(self, state: Values, random: list[torch.Tensor]) -> Any:
        """Return a function that runs the model in the region, on a thread of its own."""
        default_device = torch.get_default_device()

        def run() -> Any:
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                if default_device.type != "cpu":  # it is thread-local
                    stack.enter_context(default_device)
                self.state.put(state)
                self.generators.set(random)
                stack.enter_context(self.region)
                low_bit_listeners.add(self.record.low_bit.note, threading.get_ident())
                return self._call.of_model(self._model)

        return run

    def hand_over(self) -> None:
        """Let the other run continue, then restore this run's state of the model and of the generators."""
        state, random = self.state.current(), self.generators.get()
        self._handoff.hand_over()
        self.state.put(state)
        self.generators.set(random)


class _InFloat32:
    """Watches the run in float32, and repeats each call in the region."""

    def __init__(self, both: Lockstep) -> None:
        self._both = both
        self._open: list[_RepeatableCall] = []
        self._repeated: _Repeated | None = None

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._repeated is not None:
            return self._repeated.enter(module, args, kwargs)
        both, arguments = self._both, (args, kwargs)
        if both.profile.modules[module].writes_arguments:
            arguments = copied(arguments, module)
        key = self._open[-1].key_inside(module) if self._open else ((id(module), 0),)
        self._open.append(_RepeatableCall(key, module, arguments, both.generators.get(), both.state.cloned()))
        return None

    def leave(self, module: torch.nn.Module, output: Any) -> None:
        if self._repeated is not None:
            self._repeated.leave(module, output)
            return
        call = self._open.pop()
        while call.module is not module:  # it raised, and its caller handled the exception
            call = self._open.pop()
        both, own = self._both, self._repeat(call)
        both.record.add_own(module, output, own)
        both.waiting = _Returned(call.key, call.arguments, output, own, both.generators.get())
        del own
        try:
            both.hand_over()
        finally:
            both.waiting = None

    def _repeat(self, call: _RepeatableCall) -> Any:
        """Repeat a call in the region, with the modules in it in float32, and return its output."""
        both = self._both
        state, random = both.state.current(), both.generators.get()
        both.state.put(call.state)
        both.generators.set(call.random)
        args, kwargs = call.arguments
        self._repeated = _Repeated(both.region.device)
        try:
            with both.region, self._repeated:
                return call.context.run(call.module, *args, **kwargs)
        finally:
            self._repeated = None
            both.state.put(state)
            both.generators.set(random)


class _Repeated:
    """Watches a repeated call: the modules that it calls run in float32, as under the rule "fp32"."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._outside = autocast(device_type, enabled=False)
        self._open: list[tuple[torch.nn.Module, CastArguments | None]] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for _module, casts in reversed(self._open):  # calls that raised
            if casts is not None:
                self._outside.__exit__()
                casts.restore()

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(self._open) != 1:
            self._open.append((module, None))
            return None
        casts = CastArguments(self._device_type, torch.float32)
        self._outside.__enter__()
        self._open.append((module, casts))
        return tuple([casts.of(value) for value in args]), {name: casts.of(value) for name, value in kwargs.items()}

    def leave(self, module: torch.nn.Module, output: Any) -> None:
        while True:
            last, casts = self._open.pop()
            if casts is not None:
                self._outside.__exit__()
                casts.give_back(last, "run in float32 by polycast.compare")
            if last is module:
                break


class _InRegion:
    """Watches the run in the region, and matches its calls with float32's."""

    def __init__(self, both: Lockstep) -> None:
        self._both = both
        self._open: list[tuple[OpenCall, Any]] = []

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = self._open[-1][0].key_inside(module) if self._open else ((id(module), 0),)
        self._open.append((OpenCall(key, module), (args, kwargs)))

    def leave(self, module: torch.nn.Module, output: Any) -> None:
        call, arguments = self._open.pop()
        while call.module is not module:
            call, arguments = self._open.pop()
        both = self._both
        while both.waiting is not None and both.waiting.key != call.key:
            around = innermost_common(both.waiting.key, call.key)
            both.record.add_parted(self._module_of(around, call))
            if around != call.key:
                return  # float32's run makes this call later or never: it waits for the call around both
            both.hand_over()
        other = both.waiting
        if other is None:
            return
        theirs = other.arguments
        if both.profile.modules[module].writes_arguments:
            theirs = arguments = None
        both.record.add_matched(MatchedCall(call.key, module, theirs, arguments, other.output, other.own, output))
        both.generators.set(other.random)
        del theirs, other
        both.waiting = None
        both.hand_over()

    def _module_of(self, key: CallKey, call: OpenCall) -> torch.nn.Module:
        return next(each.module for each in (call, *(open for open, _ in self._open)) if each.key == key)
