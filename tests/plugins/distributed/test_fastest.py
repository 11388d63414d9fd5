"""The recipe "fastest" in two processes: DDP and FSDP2 have the outputs and gradients of one process."""

import json
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
def test_replicated_and_sharded_models_have_the_outputs_and_gradients_of_one_process(
    engine, tmp_path, run_in_two_ranks
):
    results = tmp_path / "results.json"
    run_in_two_ranks(Path(__file__).parent / "fastest.py", results, engine=engine)
    labels = [f"{name} {rows}" for rows in (16, 256) for name in ("replicated", "sharded")]
    assert json.loads(results.read_text(encoding="utf-8")) == {
        **{label: [True] * 2 for label in labels},
        **{f"{label}, outputs": [True] * 6 for label in labels},
    }
