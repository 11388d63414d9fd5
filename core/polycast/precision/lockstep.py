"""A model's run in float32 and its run in a region, in lockstep: each hands the other one module's output at a time."""

import contextvars
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ..engine.low_bit.listeners import listeners as low_bit_listeners
from ..observer.low_bit_counts import LowBitCounts
from ..region.autocast import autocast
from ..region.cast_arguments import CastArguments
from .calls import Call
from .hooks import Key, Open, Watcher, common, watched
from .survey import Survey
from .turns import Turns
from .untouched import RandomState, Values, isolated
from .values import copied


class Met(NamedTuple):
    """A call where the two runs have met.

    Attributes:
        key, module: which call it is.
        reference_arguments, arguments: what it was given in float32, and in the region; None where it writes to them.
        reference, own, output: what it returned in float32, what the module itself makes of it, and in the region.
    """

    key: Key
    module: torch.nn.Module
    reference_arguments: Any
    arguments: Any
    reference: Any
    own: Any
    output: Any


class Record(Protocol):
    """Who is told of what comes out.

    Attributes:
        low_bit: counts what recipes compute and decline in the region.
    """

    low_bit: LowBitCounts

    def own(self, module: torch.nn.Module, reference: Any, own: Any) -> None:
        """Be told what a call returns in float32, and what the module itself makes of the same arguments."""

    def total(self, call: Met) -> None:
        """Be told what the call returns in the region, too."""

    def parted(self, module: torch.nn.Module) -> None:
        """Be told that the two runs do not call the same in a module."""


@dataclass
class _Waiting:
    """What float32's run holds out: the output of a call, what the module itself makes of it, the generators' state."""

    key: Key
    arguments: Any
    output: Any
    own: Any
    random: list[torch.Tensor]


class _Call(Open):
    """A call that has not returned, with what it takes to repeat it."""

    def __init__(self, key: Key, module: torch.nn.Module, arguments: Any, random: Any, state: Values) -> None:
        super().__init__(key, module)
        self.arguments, self.random, self.state = arguments, random, state
        self.context = contextvars.copy_context()


class Lockstep:
    """The two runs of a model. What is drawn at random, and what forward writes of the model, is each run's own."""

    def __init__(self, model: torch.nn.Module, call: Call, region: autocast, seen: Survey, record: Record) -> None:
        self.region, self.seen, self.record = region, seen, record
        self.state, self.generators = seen.state, RandomState(region.device)
        self.waiting: _Waiting | None = None
        self._model, self._call = model, call
        self._turns = Turns()

    def run(self) -> tuple[Any, Any]:
        """Return what the model returns in float32, and what it returns in the region.

        Raises:
            BaseException: what one of the runs raises. Both are over then.
        """
        default_device = torch.get_default_device()
        caller = threading.get_ident()
        float32, reduced = _Float32(self), _Reduced(self)

        def watcher() -> Watcher | None:
            if self._turns.is_the_workers():
                self._turns.check()
                return reduced
            return float32 if threading.get_ident() == caller else None

        with ExitStack() as stack:
            stack.enter_context(isolated())
            stack.enter_context(self.generators.kept())
            stack.enter_context(self.state.set_aside())
            random, state = self.generators.get(), self.state.cloned()
            note = self.record.low_bit.note
            stack.callback(lambda: low_bit_listeners.remove(note))

            def theirs() -> Any:
                with ExitStack() as stack:
                    stack.enter_context(torch.no_grad())
                    if default_device.type != "cpu":  # it is each thread's own
                        stack.enter_context(default_device)
                    self.state.put(state)
                    self.generators.set(random)
                    stack.enter_context(self.region)
                    low_bit_listeners.add(note, threading.get_ident())
                    return self._call.of_model(self._model)

            stack.enter_context(watched(self._model, watcher))
            return self._turns.run(lambda: self._call.of_model(self._model), theirs)

    def give_turn(self) -> None:
        """Let the other run go on, and find the model's state and the generators as they were."""
        state, random = self.state.current(), self.generators.get()
        self._turns.give()
        self.state.put(state)
        self.generators.set(random)


class _Float32:
    """Watches the run in float32, and repeats each call in the region."""

    def __init__(self, both: Lockstep) -> None:
        self._both = both
        self._open: list[_Call] = []
        self._repeated: _Repeated | None = None

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._repeated is not None:
            return self._repeated.enter(module, args, kwargs)
        both, arguments = self._both, (args, kwargs)
        if both.seen.modules[module].writes_arguments:
            arguments = copied(arguments, module)
        key = self._open[-1].key_inside(module) if self._open else ((id(module), 0),)
        self._open.append(_Call(key, module, arguments, both.generators.get(), both.state.cloned()))
        return None

    def leave(self, module: torch.nn.Module, output: Any) -> None:
        if self._repeated is not None:
            self._repeated.leave(module, output)
            return
        call = self._open.pop()
        while call.module is not module:  # it raised, and a module around it went on
            call = self._open.pop()
        both, own = self._both, self._repeat(call)
        both.record.own(module, output, own)
        both.waiting = _Waiting(call.key, call.arguments, output, own, both.generators.get())
        del own
        try:
            both.give_turn()
        finally:
            both.waiting = None

    def _repeat(self, call: _Call) -> Any:
        """Return what the module itself makes of the same arguments in the region, the modules in it in float32."""
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
    """Watches one call of a module: those that it calls run in float32, as under the rule "fp32"."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._outside = autocast(device_type, enabled=False)
        self._open: list[tuple[torch.nn.Module, CastArguments | None]] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for _module, casts in reversed(self._open):  # of calls that raised
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


class _Reduced:
    """Watches the run in the region, and meets float32's where both return from the same call."""

    def __init__(self, both: Lockstep) -> None:
        self._both = both
        self._open: list[tuple[Open, Any]] = []

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = self._open[-1][0].key_inside(module) if self._open else ((id(module), 0),)
        self._open.append((Open(key, module), (args, kwargs)))

    def leave(self, module: torch.nn.Module, output: Any) -> None:
        call, arguments = self._open.pop()
        while call.module is not module:
            call, arguments = self._open.pop()
        both = self._both
        while both.waiting is not None and both.waiting.key != call.key:
            around = common(both.waiting.key, call.key)
            both.record.parted(self._module_of(around, call))
            if around != call.key:
                return  # float32's run never makes this call, or makes it later: it waits for the call around both
            both.give_turn()
        waiting = both.waiting
        if waiting is not None:
            known = not both.seen.modules[module].writes_arguments
            both.record.total(
                Met(
                    call.key,
                    module,
                    waiting.arguments if known else None,
                    arguments if known else None,
                    waiting.output,
                    waiting.own,
                    output,
                )
            )
            both.generators.set(waiting.random)
            both.waiting = waiting = None
            both.give_turn()

    def _module_of(self, key: Key, call: Open) -> torch.nn.Module:
        return next(each.module for each in (call, *(open for open, _ in self._open)) if each.key == key)
