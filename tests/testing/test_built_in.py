"""The backends that come with polycast conform: cpu on real tensors, the accelerators on fake ones where absent."""

from pathlib import Path

import pytest
import torch

from polycast.engine.installation import torch_ops
from polycast.testing import BackendConformance

HERE = Path(__file__).parent


@pytest.mark.usefixtures("engine")
class TestCpu(BackendConformance):
    backend = "cpu"
    expected_failures = HERE / "cpu.txt"


@pytest.mark.usefixtures("engine")
class TestCuda(BackendConformance):
    backend = "cuda"
    fake = not torch.cuda.is_available()
    expected_failures = HERE / ("cudnn.txt" if "aten::_cudnn_rnn" in torch_ops("cuda") else "accelerator.txt")


@pytest.mark.usefixtures("engine")
class TestXpu(BackendConformance):
    backend = "xpu"
    fake = not torch.xpu.is_available()
    expected_failures = HERE / "accelerator.txt"


@pytest.mark.usefixtures("engine")
class TestMaia(BackendConformance):
    backend = "maia"
    fake = True


@pytest.mark.usefixtures("engine")
class TestMps(BackendConformance):
    backend = "mps"
    fake = not torch.backends.mps.is_available()
    expected_failures = HERE / "accelerator.txt"


@pytest.mark.usefixtures("engine")
class TestMtia(BackendConformance):
    backend = "mtia"
    fake = True
    expected_failures = HERE / "accelerator.txt"
