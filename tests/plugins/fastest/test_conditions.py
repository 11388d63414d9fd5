"""Settings of torch that select its kernels: a profile is of those that it was measured with."""

import contextlib

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import polycast
from polycast_backends.cuda import CudaBackend
from polycast_plugins.fastest.profile import forget
from polycast_plugins.fastest.profile_file import Conditions


@contextlib.contextmanager
def matmuls_of(precision):
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


SETTINGS = {
    "no oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "precision": lambda: matmuls_of("medium"),
}


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_profile_of_other_settings_is_not_used(setting, measured):
    with SETTINGS[setting]():
        unusual = polycast.profile("cpu")
    forget()  # as in another process
    usual = polycast.profile("cpu")
    assert unusual.details.items() > usual.details.items()
    assert measured.count == 2
    for setting_of, expected in ((SETTINGS[setting], unusual), (contextlib.nullcontext, usual)):
        forget()
        with setting_of():
            assert polycast.profile("cpu") == expected
    assert measured.count == 2


def test_the_same_precision_set_again_is_no_other_setting():
    before = Conditions.now(polycast.plugin.get_backend("cpu"))
    with matmuls_of("highest"):
        assert Conditions.now(polycast.plugin.get_backend("cpu")) == before


def test_settings_of_one_device_do_not_change_the_profile_of_another():
    before = Conditions.now(polycast.plugin.get_backend("cpu"))
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert Conditions.now(polycast.plugin.get_backend("cpu")) == before
        assert CudaBackend().device_details().items() >= {("cuDNN attention", "off")}
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert "cuDNN attention" not in CudaBackend().device_details()
