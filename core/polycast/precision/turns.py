"""Two runs in lockstep: one in the calling thread, one in a thread of its own, of which one runs at a time.

An exception that a signal handler raises, such as KeyboardInterrupt, can arise anywhere in the main thread: while that
computes, and while it waits for the other thread. It ends both runs. A thread that waits for its turn is woken up; one
that computes has :class:`Stopped` raised in it, at its next Python instruction.
"""

import contextvars
import ctypes
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

_T = TypeVar("_T")
_S = TypeVar("_S")

_POLL = 0.1
"""Seconds after which the caller looks for signals while it waits, for platforms where a signal does not end a wait."""
_START = 1.0
"""Seconds that a thread has to start, where an interrupt makes it unknown whether it was started."""


class Stopped(BaseException):
    """Ends a run where the other one has failed. No ``except Exception`` on the way is to catch it."""


class Turns:
    """The turns of two runs."""

    def __init__(self) -> None:
        # An exception of a signal handler can arise inside of what threading implements in Python, and leave its locks
        # locked. These queues are implemented in C.
        self._caller, self._worker, self._may_end = SimpleQueue[None](), SimpleQueue[None](), SimpleQueue[None]()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._workers_turn = False
        self._began = self._over = self._ours_over = False
        self._failure: BaseException | None = None

    def run(self, ours: Callable[[], _T], theirs: Callable[[], _S]) -> tuple[_T, _S]:
        """Run both, `ours` first, each until it gives the turn away or is over.

        `theirs` runs in a copy of the caller's :mod:`contextvars` context.

        Raises:
            BaseException: what one of them raises, after the other has ended too.
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
            self._ours_over = self._workers_turn = True
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

    def is_the_workers(self) -> bool:
        """Return whether this thread is the one of the second run."""
        return threading.current_thread() is self._thread

    def check(self) -> None:
        """Raise Stopped where the second run is to end."""
        if self._stopped:
            raise Stopped

    def give(self) -> None:
        """Let the other one run, until it gives the turn back or is over."""
        if self.is_the_workers():
            if not self._ours_over:
                self._workers_turn = False
                self._caller.put(None)
                self._worker.get()
            self.check()
        else:
            if not self._over:
                self._workers_turn = True
                self._worker.put(None)
                self._wait_for_worker()
            if self._failure is not None:
                raise Stopped

    def _wait_for_worker(self, timeout: float | None = None) -> None:
        """Wait until the worker gives the turn, or is over."""
        while True:
            try:
                return self._caller.get(timeout=_POLL if timeout is None else timeout)
            except Empty:
                if timeout is not None:
                    return

    def _work(self, run: Callable[[], None]) -> None:
        """Run in the thread, to the end of which all that is raised in it has to have arrived."""
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
        except Stopped:  # `_end_worker` raises it in this thread once at most
            self._end_of_work()

    def _end_of_work(self) -> None:
        self._over = True
        self._caller.put(None)
        self._may_end.get()
        for _ in range(10):  # an exception that another thread has raised in this one arrives in a loop
            pass

    def _end_worker(self) -> BaseException | None:
        """End the second run, wherever it is, and its thread; return what it raised."""
        assert self._thread is not None
        self._stopped = True
        if self._began and self._workers_turn and not self._over:
            # It is not taken back where the run ends before it arrives: Python up to 3.12 would go on looking for it in
            # every thread, at every call.
            identity = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(Stopped))
        self._worker.put(None)
        try:
            if not self._began:
                self._wait_for_worker(_START)
            while self._began and not self._over:
                self._wait_for_worker()
        finally:  # of a second interrupt, which does not wait for what does not end
            for _ in range(2):  # as many times as `_work` waits for it
                self._may_end.put(None)
        if self._began:
            self._thread.join()
        failure, self._failure = self._failure, None  # a traceback holds the frames, and they hold what ran
        return failure
