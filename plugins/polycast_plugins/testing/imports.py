"""Check in a fresh process that importing a plugin changes no global state of torch."""

import json
import os
import subprocess
import sys

import pytest

from polycast import backends

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


class ImportChecks(Subject):
    """Importing the plugin."""

    def test_import_leaves_torch_as_it_was(self) -> None:
        """Importing the plugin changes no default, mode or thread count of torch."""
        self.get_backend()
        if not backends()[self.backend].distribution:
            pytest.skip(f"the backend of {self.backend} was registered by hand: there is no plugin to import")
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, self.backend],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
        )
        require(done.returncode == 0, f"a fresh process cannot get the backend of {self.backend}: {done.stderr}")
        changed = [f"{name} from {old} to {new}" for name, old, new in json.loads(done.stdout.splitlines()[-1])]
        require(
            not changed,
            f"importing the plugin of {self.backend} changed torch for the whole process: {'; '.join(changed)}. Leave "
            "that to the user, or do it where it is needed and undo it.",
        )
