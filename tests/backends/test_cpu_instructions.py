"""The fast dtypes that the CPU's backend reports as slow."""

import platform

import pytest
import torch

import polycast

CONVERT = "so ops convert to float32 and back"


@pytest.mark.parametrize(
    ("machine", "there", "dtype", "reason"),
    [
        ("x86_64", {"avx2": True}, torch.bfloat16, f"avx512_bf16, amx_bf16, avx10_2, {CONVERT}"),
        ("AMD64", {"avx512_bf16": False}, torch.float16, f"avx512_fp16, amx_fp16, avx10_2, {CONVERT}"),
        ("x86_64", {"avx512_bf16": True}, torch.bfloat16, None),
        ("x86_64", {"amx_fp16": True}, torch.float16, None),
        ("x86_64", {}, torch.bfloat16, None),
        ("x86_64", {"avx2": True}, torch.float32, None),
        ("aarch64", {"neon": True}, torch.bfloat16, None),
    ],
)
def test_a_dtype_is_emulated_where_the_processor_has_no_instructions_for_it(monkeypatch, machine, there, dtype, reason):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: there, raising=False)
    expected = None if reason is None else f"the processor has none of {reason}"
    assert polycast.get_backend("cpu").slow_reason(dtype) == expected


def test_a_torch_that_does_not_know_its_processor_says_nothing(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert polycast.get_backend("cpu").slow_reason(torch.bfloat16) is None


def test_a_backend_that_says_nothing_emulates_nothing(hand_made):
    assert hand_made("xpu").slow_reason(torch.float16) is None
