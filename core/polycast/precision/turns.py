"""Two runs in lockstep: one in the calling thread, one in a thread of its own, of which one runs at a time."""

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_S = TypeVar("_S")


class Stopped(BaseException):
    """Ends a run where the other one has failed. No ``except Exception`` on the way is to catch it."""


class Turns:
    """Whose turn it is."""

    def __init__(self) -> None:
        self._caller, self._worker = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._over = self._ours_over = False
        self._failure: BaseException | None = None

    def run(self, ours: Callable[[], _T], theirs: Callable[[], _S]) -> tuple[_T, _S]:
        """Run both, `ours` first, each until it gives the turn away or is over.

        Raises:
            BaseException: what one of them raises, after the other has ended too.
        """
        found: list[_S] = []

        def work() -> None:
            try:
                self._wait(self._worker)
                found.append(theirs())
            except Stopped:
                pass
            except BaseException as error:
                self._failure = error
            finally:
                self._over = True
                self._caller.release()

        self._thread = threading.Thread(target=work, name="polycast.compare")
        self._thread.start()
        try:
            result = ours()
        except Stopped:
            pass
        except BaseException:
            self._stopped = True
            raise
        finally:
            self._ours_over = True
            self._worker.release()
            self._thread.join()
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None  # a traceback holds the frames, and they hold what ran
        return result, found[0]

    def is_the_workers(self) -> bool:
        """Say whether this thread is the one of the second run."""
        return threading.current_thread() is self._thread

    def give(self) -> None:
        """Let the other one run, until it gives the turn back or is over."""
        if self.is_the_workers():
            if not self._ours_over:
                self._caller.release()
                self._wait(self._worker)
        else:
            if not self._over:
                self._worker.release()
                self._wait(self._caller)
            if self._failure is not None:
                raise Stopped

    def _wait(self, turn: threading.Semaphore) -> None:
        turn.acquire()
        if self._stopped:
            raise Stopped
