"""Run tests on each code path of the CPU's kernels."""

import pytest
import torch

import polycast_backends.cpu.out_dtype_kernels


@pytest.fixture(params=["as it is here", "without int8 instructions", "without oneDNN"])
def cpu(request, monkeypatch):
    if request.param == "without int8 instructions":
        monkeypatch.setattr(polycast_backends.cpu.out_dtype_kernels, "_multiplies_int8", lambda: False)
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(before and request.param != "without oneDNN")
    yield
    torch._C._set_mkldnn_enabled(before)
