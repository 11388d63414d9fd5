"""The recipe "fastest" in two processes: DDP and FSDP2 have the outputs and gradients of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="torch has no gloo here",
    ),
]


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_replicated_and_sharded_models_have_the_outputs_and_gradients_of_one_process(engine, tmp_path):
    script, results = Path(__file__).parent / "fastest.py", tmp_path / "results.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "POLYCAST_ENGINE": engine}
    done = subprocess.run([*command, str(script), str(results)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    labels = [f"{name} {rows}" for rows in (16, 256) for name in ("replicated", "sharded")]
    assert json.loads(results.read_text(encoding="utf-8")) == {
        **{label: [True] * 2 for label in labels},
        **{f"{label}, outputs": [True] * 6 for label in labels},
    }
