"""The backends that come with polycast conform: cpu on real tensors, the accelerators on fake ones where absent."""

from pathlib import Path

import pytest
import torch

from polycast.testing import BackendConformance

HERE = Path(__file__).parent


@pytest.mark.usefixtures("engine")
class TestCpu(BackendConformance):
    backend = "cpu"


@pytest.mark.usefixtures("engine")
class TestCuda(BackendConformance):
    backend = "cuda"
    fake = not torch.cuda.is_available()
    expected_failures = HERE / "fake_cuda.txt" if fake else None


@pytest.mark.usefixtures("engine")
class TestXpu(BackendConformance):
    backend = "xpu"
    fake = not torch.xpu.is_available()
    expected_failures = HERE / "fake_xpu.txt" if fake else None
