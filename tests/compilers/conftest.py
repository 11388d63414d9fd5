"""Fixtures for compiled code, and workarounds for older versions of torch."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _main_thread_compiles_first():
    """Compile something: torch 2.11 crashes where the first thread that compiled has ended and another does."""
    torch.compile(lambda x: x.sin(), backend="eager")(torch.ones(1))


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Reset Dynamo, and let it compile the callees of compiled code, which it does not below fullgraph=True.

    Of threads that call such functions at once, one may put back what another has set, and that stays.
    """
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    eval_frame = torch._C._dynamo.eval_frame
    if hasattr(eval_frame, "set_eval_frame_override"):
        eval_frame.set_eval_frame_override(eval_frame._EvalFrameOverride.NONE)


@pytest.fixture
def data():
    """An input and a layer for it."""
    torch.manual_seed(0)
    return torch.randn(3, 8), torch.nn.Linear(8, 8)
