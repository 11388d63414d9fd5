"""The device "auto": the accelerator that torch finds, else the CPU."""

import pytest
import torch

import polycast

pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture
def accelerator(monkeypatch):
    """Return a function that sets the accelerator that torch finds."""

    def find(device):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)

    find(None)
    return lambda name: find(torch.device(name))


def test_without_an_accelerator_it_is_the_cpu(accelerator):
    assert polycast.is_autocast_available("auto")
    with polycast.autocast("auto") as region:
        assert region.device == "cpu"
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    assert polycast.plugin.get_backend("auto") is polycast.plugin.get_backend("cpu")


def test_an_accelerator_that_appears_is_found_by_the_next_region(accelerator, hand_made, fake):
    hand_made("xpu")
    assert polycast.autocast("auto").device == "cpu"
    accelerator("xpu")
    with polycast.autocast("auto") as region:
        assert region.device == "xpu"
        assert torch.mm(torch.ones(2, 2, device="xpu"), torch.ones(2, 2, device="xpu")).dtype is torch.float16
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


def test_an_accelerator_that_has_no_backend_is_not_replaced_by_the_cpu(accelerator):
    accelerator("xla")
    with pytest.raises(polycast.errors.BackendNotFoundError, match="'xla'"):
        polycast.autocast("auto")
    assert not polycast.is_autocast_available("auto")


def test_a_device_string_is_not_made_of_it():
    with pytest.raises(RuntimeError, match="^Invalid device string: 'auto:0'"):
        polycast.autocast("auto:0")


def test_others_that_take_a_device_take_it(accelerator):
    with polycast.autocast("auto"):
        assert (polycast.is_autocast_enabled("auto"), polycast.autocast_nesting("auto")) == (True, 1)
        assert polycast.explain("mm", device_type="auto").device_type == "cpu"


def test_compiled_code_takes_it(accelerator):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x):
        with polycast.autocast("auto"):
            return torch.mm(x, x)

    torch.compiler.reset()
    assert function(torch.ones(2, 2)).dtype is torch.bfloat16
