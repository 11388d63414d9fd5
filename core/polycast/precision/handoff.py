"""Alternate two runs, one in the calling thread and one in a worker thread: each hands control to the other.

An exception of a signal handler, such as KeyboardInterrupt, can occur anywhere in the main thread: while it computes,
and while it waits for the worker. It ends both runs. A thread that waits for control is woken up; in one that computes,
:class:`Stopped` is raised at its next Python instruction.
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
"""Seconds between checks for signals while the caller waits, for platforms where a signal does not end a wait."""
_START = 1.0
"""Seconds to wait for the worker to start after an interrupt, when it is unknown whether it was started."""


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
        """Run `ours` here and `theirs` in the worker, `ours` first, and return both results.

        `theirs` runs in a copy of the caller's :mod:`contextvars` context.

        Raises:
            BaseException: the exception of one of them, after the other has ended too.
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
