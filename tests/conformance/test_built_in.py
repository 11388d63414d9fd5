"""The backends that come with polycast conform: cpu on real tensors, the accelerators on fake ones where absent."""

from pathlib import Path

import pytest
import torch

from polycast.testing import BackendConformance


@pytest.mark.usefixtures("engine")
class TestCpu(BackendConformance):
    backend = "cpu"
    expected_failures = Path(__file__).with_name("cpu.txt")


@pytest.mark.usefixtures("engine")
class TestCuda(BackendConformance):
    backend = "cuda"
    fake = not torch.cuda.is_available()


@pytest.mark.usefixtures("engine")
class TestXpu(BackendConformance):
    backend = "xpu"
    fake = not torch.xpu.is_available()
