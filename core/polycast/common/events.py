"""The events of polycast, and `events.Event`: something that others are notified of."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from .atfork import fork_safe_lock

_L = TypeVar("_L")
_P = ParamSpec("_P")


class events:
    """The events of polycast. Each attribute is an :class:`events.Event`, and says what its listeners are called with.

    Attributes:
        recipe_call: the device type, the recipe as text, the op's name in the dispatcher, why the op ran in the
            fast dtype, or None: the recipe computed it, and the distribution whose kernel did, empty if torch's did.
            Compiled code notifies when it runs. With listeners, the engine decides each call anew, which is slower.
        matched_call: the device type and the op's name, when MATCH casts inputs of a call; the native engine notifies
            only in torch's dispatch modes, such as that of fake tensors.
        calibration: the kernel, the op and its arguments in the order of the schema, of a call that a recipe would
            compute. On a thread with listeners, such calls run in float32.
        slow_dtype: the device type and the dtype, when the first region without a recipe is made whose dtype is slow.
            With listeners, polycast does not warn of it.
        own_work: True when this thread begins to work for polycast, with ops that do not belong to the program, such
            as those of a measurement, and False when it ends. Around such work, use ``events.own_work.during()``.
    """

    class Event(Generic[_L]):
        """Something that happens on a thread, and its listeners: functions as a rule. It is true if there are any.

        A listener is called on the thread where the event happens. What it raises, the code gets that notified it.

        Args:
            start: called when the first listener is added.
            stop: called when the last one is removed.
        """

        def __init__(self, start: Callable[[], object] | None = None, stop: Callable[[], object] | None = None) -> None:
            self.start = start
            self.stop = stop
            self._listeners: tuple[tuple[_L, int | None], ...] = ()
            self._lock = fork_safe_lock()

        def add(self, listener: _L, thread: int | None = None) -> None:
            """Add a listener to the events of a thread, by its ident, or of all threads."""
            with self._lock:
                is_first = not self._listeners
                self._listeners = (*self._listeners, (listener, thread))
                if is_first and self.start is not None:
                    self.start()

        def remove(self, listener: _L) -> None:
            """Remove all listeners equal to this one, if there are any."""
            with self._lock:
                others = tuple(each for each in self._listeners if each[0] != listener)
                was_last = bool(self._listeners) and not others
                self._listeners = others
                if was_last and self.stop is not None:
                    self.stop()

        def __bool__(self) -> bool:
            return bool(self._listeners)

        def here(self) -> bool:
            """Return whether there are listeners to events of this thread."""
            return next(iter(self), None) is not None

        def __iter__(self) -> Iterator[_L]:
            """Iterate over the listeners to events of this thread, in the order in which they were added."""
            here = threading.get_ident()
            return iter([listener for listener, thread in self._listeners if thread is None or thread == here])

        def notify(self: "events.Event[Callable[_P, object]]", *args: _P.args, **kwargs: _P.kwargs) -> None:
            """Call the listeners to events of this thread."""
            for listener in self:
                listener(*args, **kwargs)

        @contextmanager
        def during(self: "events.Event[Callable[[bool], object]]") -> Iterator[None]:
            """Call the listeners with True before a block, or a decorated call, and the same with False after it."""
            notified = list(self)
            for listener in notified:
                listener(True)
            try:
                yield
            finally:
                for listener in notified:
                    listener(False)

    recipe_call: Event[Callable[[str, str, str, str | None, str], object]] = Event()
    matched_call: Event[Callable[[str, str], object]] = Event()
    calibration: Event[Callable[[Any, str, Sequence[Any]], object]] = Event()
    slow_dtype: Event[Callable[[str, torch.dtype], object]] = Event()
    own_work: Event[Callable[[bool], object]] = Event()
