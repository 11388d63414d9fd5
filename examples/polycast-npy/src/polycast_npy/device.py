"""The torch device npy: PrivateUse1, renamed, with kernels in Python."""

import atexit
import threading
import time

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE_TYPE = "npy"
OLDEST_NUMPY = (1, 20)  # the first with numpy.lib.stride_tricks.sliding_window_view

_lock = threading.Lock()
_libraries: list[torch.library.Library] = []


class Runtime:
    """The module ``torch.npy``, which torch and other libraries ask about the device."""

    def is_available(self) -> bool:
        """Return whether the device can be used."""
        return numpy_availability()[0]

    def is_initialized(self) -> bool:
        """Return whether the device is initialized; it always is."""
        return True

    def device_count(self) -> int:
        """Return the number of devices."""
        return 1

    def current_device(self) -> int:
        """Return the index of the current device."""
        return 0

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: random numbers come from the CPU's generator, which torch has seeded."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the fast dtypes of ``torch.autocast("npy")``."""
        return [torch.float16]


def numpy_availability() -> tuple[bool, str]:
    """Return whether NumPy is installed and new enough and, if not, why."""
    try:
        import numpy as np
    except ImportError as error:
        return False, f"NumPy cannot be imported: {error}"
    if tuple(map(int, np.__version__.split(".")[:2])) < OLDEST_NUMPY:
        return False, f"NumPy {np.__version__} is too old: npy needs {'.'.join(map(str, OLDEST_NUMPY))} or newer"
    return True, ""


def register_device() -> None:
    """Register the device ``npy`` with torch; without NumPy, only its name. A second call does nothing.

    Raises:
        RuntimeError: PrivateUse1, of which a process has one, is another device already.

    Example:
        >>> import torch, polycast_npy
        >>> polycast_npy.register_device()
        >>> (torch.ones(2, device="npy") + 1).tolist()
        [2.0, 2.0]
    """
    with _lock:
        name = torch._C._get_privateuse1_backend_name()
        if name == DEVICE_TYPE:
            return
        if name != "privateuseone":
            raise RuntimeError(
                f"torch has room for one out-of-tree device in a process, and {name!r} has taken it: {DEVICE_TYPE!r} "
                "cannot be registered too. Use one of the two in each process."
            )
        if numpy_availability()[0]:
            from .ops import register

            _libraries.append(register())
        _setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=Runtime())
        # torch's autograd runs the backward of a device on a thread of its own. When backward returns, that thread may
        # still wait for the GIL, to let go of what it ran; after the interpreter is gone that would abort the process.
        atexit.register(time.sleep, 0.05)
