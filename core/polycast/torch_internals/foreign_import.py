"""Import the code of another package: what it prints goes to stderr, and what it changes in torch is put back."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..common.announce import announce
from .lookup import torch_name

_default_device: Any = torch_name(
    "torch._GLOBAL_DEVICE_CONTEXT", threading.local(), "a default device that a plugin sets at its import stays"
)
_STATE: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
}
"""Functions that read and set what an import should leave alone."""


@contextmanager
def foreign_import(package: str) -> Iterator[None]:
    """Protect the program from the import in the block, outside of modes; stderr says what the package changed."""
    before = {name: read() for name, (read, _) in _STATE.items()}
    random, seed = torch.get_rng_state(), torch.initial_seed()
    is_alone = sum(not isinstance(each, threading.Timer) for each in threading.enumerate()) == 1  # timers draw nothing
    callers_device = vars(_default_device).pop("device_context", None)
    try:
        with _Stdout(sys.stdout) if sys.stdout is not None else nullcontext():
            yield
    finally:
        changed = []
        if getattr(_default_device, "device_context", None) is not None:
            torch.set_default_device(None)
            changed.append("the default device")
        _default_device.device_context = callers_device
        for name, (read, write) in _STATE.items():
            if read() != before[name]:
                write(before[name])
                changed.append(name)
        # Numbers that another thread drew meanwhile must not be drawn again.
        if torch.initial_seed() != seed or (is_alone and not torch.equal(torch.get_rng_state(), random)):
            torch.set_rng_state(random)
            changed.append("the random numbers")
        if changed:
            announce(f"the import of {package} changed torch, which is put back: {', '.join(changed)}.")


class _Stdout:
    """A stdout of all threads whose text goes to stderr on one thread, in a block; what keeps it prints to stdout."""

    def __init__(self, stdout: Any) -> None:
        self.stdout = stdout
        self.thread: int | None = threading.get_ident()

    def __getattr__(self, name: str) -> Any:  # a package may make a stdout of the file, or close it
        return getattr(self.stdout, name)

    def _for_text(self) -> Any:
        return sys.stderr if threading.get_ident() == self.thread and sys.stderr else self.stdout

    def write(self, text: str) -> Any:
        return self._for_text().write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self._for_text().writelines(lines)

    def flush(self) -> None:
        self._for_text().flush()

    def __enter__(self) -> None:
        setattr(sys, "stdout", self)

    def __exit__(self, *exc_info: object) -> None:
        self.thread = None
        if getattr(sys, "stdout", None) is self:  # else another thread imports, too, or the package has replaced it
            while isinstance(sys.stdout, _Stdout) and sys.stdout.thread is None:
                sys.stdout = sys.stdout.stdout
