"""Checks of a backend's attributes, answers and import; they use the device if the backend says that it can be used."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from polycast import backends
from polycast.plugin import Availability

from .subject import Subject, require

_SCRIPT = """
import json, sys, torch, polycast

def state():
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    values = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic algorithms, warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill uninitialized memory": torch.utils.deterministic.fill_uninitialized_memory,
        "anomaly detection": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "seed": torch.initial_seed(),
        "random state": hash(bytes(torch.get_rng_state().tolist())),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "cudnn enabled": cudnn.enabled,
        "cudnn benchmark": cudnn.benchmark,
        "cudnn deterministic": cudnn.deterministic,
        "cudnn allow_tf32": cudnn.allow_tf32,
        "cuda matmul allow_tf32": matmul.allow_tf32,
        "mkldnn enabled": torch.backends.mkldnn.enabled,
        "torch.autocast": torch.autocast,
        "torch.amp.autocast": torch.amp.autocast,
        "autocast cache": torch.is_autocast_cache_enabled(),
    }
    for device in torch._C._autocast_supported_devices():
        values["autocast enabled for " + device] = torch.is_autocast_enabled(device)
        values["autocast dtype for " + device] = torch.get_autocast_dtype(device)
    return {name: str(value) for name, value in values.items()}

before = state()
polycast.plugin.get_backend(sys.argv[1])
after = state()
names = [name for name in before if name in after and before[name] != after[name]]
print("\\n" + json.dumps([[name, before[name], after[name]] for name in names]))
"""
_PUT_BACK = " changed torch, which is put back: "
"""Marks the line on stderr in which polycast lists the changes that it has undone."""


class ContractChecks(Subject):
    """The contract of :class:`polycast.plugin.Backend`."""

    def test_contract(self) -> None:
        """The backend has all attributes, of the right types, which polycast checks when it loads or registers one."""
        self.get_backend()

    def test_availability(self) -> None:
        """The availability check is right, and gives a reason if the device cannot be used."""
        answer = answer_of(f"{self.backend}: availability()", self.get_backend().availability)
        require(
            answer or answer.reason.strip(),
            f"{self.backend}: availability() says that the device cannot be used and gives no reason. Give one: "
            'polycast.plugin.Availability(False, "no device is visible")',
        )
        if answer:
            try:
                self.to_device(torch.ones(1))
            except Exception as error:
                raise AssertionError(
                    f"{self.backend}: availability() says that the device can be used, and a tensor cannot be put on "
                    f"it: {type(error).__name__}: {error}. Return Availability(False, reason) where it is absent."
                ) from error

    def test_supported_dtypes(self) -> None:
        """The supported dtypes are floating point, at least one, without duplicates."""
        dtypes = _without_error(f"{self.backend}: supported_dtypes()", self.get_backend().supported_dtypes)
        floating = isinstance(dtypes, Sequence) and all(
            isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in dtypes
        )
        require(
            floating and dtypes and len(set(dtypes)) == len(dtypes),
            f"{self.backend}: supported_dtypes() must return a sequence of different floating-point dtypes, at least "
            f"one; got {dtypes!r}",
        )

    def test_default_dtype(self) -> None:
        """The default dtype is one of the supported ones."""
        backend = self.get_backend()
        supported = backend.supported_dtypes()
        require(
            backend.default_dtype in supported,
            f"{self.backend}: default_dtype {backend.default_dtype} is not in supported_dtypes(): {supported}. Add it "
            "there, or choose another default.",
        )

    def test_dtype_availability(self) -> None:
        """dtype_availability() agrees with supported_dtypes()."""
        backend = self.get_backend()
        supported = backend.supported_dtypes()
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8):
            call = f"{self.backend}: dtype_availability({dtype})"
            answer = answer_of(call, lambda dtype=dtype: backend.dtype_availability(dtype))  # type: ignore[misc]
            require(
                answer.available == (dtype in supported),
                f"{call} says {answer.available}, and supported_dtypes() says {dtype in supported}. Make them agree.",
            )
            require(answer or answer.reason.strip(), f"{call} says no and gives no reason. Give one.")

    def test_is_capturing(self) -> None:
        """is_capturing() is False while no graph is captured."""
        answer = _without_error(f"{self.backend}: is_capturing()", self.get_backend().is_capturing)
        require(
            answer is False,
            f"{self.backend}: is_capturing() must return False while no graph is captured, got {answer!r}. No "
            "casts are cached while it is true.",
        )

    def test_import_leaves_torch_as_it_was(self) -> None:
        """Importing the plugin changes no default, mode or thread count of torch."""
        self.get_backend()
        status = backends()[self.backend]
        if not status.distribution or status.state == "generic":
            why = "is generic" if status.distribution else "was registered by hand"
            pytest.skip(f"the backend of {self.backend} {why}: there is no plugin to import")
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, self.backend],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
        )
        require(done.returncode == 0, f"a fresh process cannot get the backend of {self.backend}: {done.stderr}")
        changed = [f"{name} from {old} to {new}" for name, old, new in json.loads(done.stdout.splitlines()[-1])]
        put_back = [line.partition(_PUT_BACK)[2].rstrip(".") for line in done.stderr.splitlines() if _PUT_BACK in line]
        require(
            not changed and not put_back,
            f"importing the plugin of {self.backend} changed torch for the whole process: "
            f"{'; '.join(changed + put_back)}. Leave that to the user, or do it where it is needed and undo it.",
        )


def _without_error(call: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        raise AssertionError(f"{call} raised {type(error).__name__}: {error}. It must not raise.") from error


def answer_of(call: str, function: Callable[[], Any]) -> Availability:
    """Return the Availability that a backend's check returns; fail if it returns anything else."""
    answer = _without_error(call, function)
    require(isinstance(answer, Availability), f"{call} returned {answer!r}, expected a polycast.plugin.Availability")
    assert isinstance(answer, Availability)
    return answer
