"""What tests that compile on several threads need of torch 2.11, which keeps for the process what is a thread's."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _main_thread_compiles_first():
    """Compile something: torch 2.11 crashes where the first thread that compiled has ended and another does."""
    torch.compile(lambda x: x.sin(), backend="eager")(torch.ones(1))


@pytest.fixture(autouse=True)
def _fullgraph_ends_with_its_calls():
    """After each test: Dynamo compiles what compiled code calls, which it does not below fullgraph=True.

    Of threads that call such functions at once, one may put back what another has set, and that stays.
    """
    yield
    eval_frame = torch._C._dynamo.eval_frame
    if hasattr(eval_frame, "set_eval_frame_override"):
        eval_frame.set_eval_frame_override(eval_frame._EvalFrameOverride.NONE)
