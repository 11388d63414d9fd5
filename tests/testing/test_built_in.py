"""The backends that come with polycast conform: cpu on real tensors, the accelerators on fake ones where absent."""

import pytest
import torch

from polycast.testing import BackendConformance


@pytest.mark.usefixtures("engine")
class TestCpu(BackendConformance):
    backend = "cpu"


@pytest.mark.usefixtures("engine")
class TestCuda(BackendConformance):
    backend = "cuda"
    fake = not torch.cuda.is_available()


@pytest.mark.usefixtures("engine")
class TestXpu(BackendConformance):
    backend = "xpu"
    fake = not torch.xpu.is_available()


@pytest.mark.usefixtures("engine")
class TestMaia(BackendConformance):
    backend = "maia"
    fake = True


@pytest.mark.usefixtures("engine")
class TestMps(BackendConformance):
    backend = "mps"
    fake = not torch.backends.mps.is_available()


@pytest.mark.usefixtures("engine")
class TestMtia(BackendConformance):
    backend = "mtia"
    fake = True
