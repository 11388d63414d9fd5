"""The CPU's backend names the fast dtypes that the processor emulates, and what the speed depends on."""

import platform
from pathlib import Path

import pytest
import torch

import polycast
from polycast_backends.cpu import instructions, policies, processor

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
    assert polycast.plugin.get_backend("cpu").slow_reason(dtype) == expected


def test_a_torch_that_does_not_know_its_processor_says_nothing(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert polycast.plugin.get_backend("cpu").slow_reason(torch.bfloat16) is None


@pytest.mark.parametrize("is_compiled", [False, True])
def test_an_lstm_is_float32_where_the_processor_has_none_in_bfloat16(engine, hand_made, monkeypatch, is_compiled):
    hand_made(
        "cpu",
        default_dtype=torch.bfloat16,
        policies=policies.POLICIES,
        missing_kernels={"aten::mkldnn_rnn_layer": (torch.bfloat16,)},
    )
    layer, x = torch.nn.LSTM(16, 8), torch.randn(5, 3, 16)
    torch._dynamo.reset()
    function = torch.compile(layer, backend="aot_eager") if is_compiled else layer
    expected = layer(x)[0]
    with polycast.autocast("cpu"):
        found = function(x)[0]
        with torch.no_grad():
            used = function(x)[0]
    torch._dynamo.reset()  # it skips the layer, and would skip all modules of torch.nn
    for output in (found, used):
        torch.testing.assert_close(output, expected)  # the dtypes too
    gradients = [torch.autograd.grad(each.square().sum(), layer.weight_ih_l0)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_lstm_runs_in_a_region_on_any_processor(engine, dtype):
    with polycast.autocast("cpu", dtype):
        output = torch.nn.LSTM(16, 8)(torch.randn(5, 3, 16))[0]
    output.sum().backward()
    assert output.dtype is (dtype if instructions.has_lstm(dtype) else torch.float32)


def test_a_backend_that_says_nothing_emulates_nothing(hand_made):
    assert hand_made("xpu").slow_reason(torch.float16) is None


def test_details_name_the_processor_and_its_limits(monkeypatch):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    found = polycast.plugin.get_backend("cpu").device_details()
    assert found["name"]
    assert found["capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["ATEN_CPU_CAPABILITY"] == "avx2"
    assert "ONEDNN_MAX_CPU_ISA" not in found
    assert int(found["cores"]) > 0


@pytest.mark.parametrize(
    ("text", "name", "model"),
    [
        (
            "model name\t: A\ncpu family : 26\nmodel : 2\n\nmodel name : B\nstepping : 9\n",
            "A, family 26, model 2",
            "26 2",
        ),
        ("model name : A 7763\ncpu family : 25\nmodel : 1", "A 7763", "25 1"),
        ("processor : 0\nCPU implementer : 0x41\nCPU part : 0xd40\n\n", None, "0x41 0xd40"),
        ("", None, ""),
    ],
    ids=["without-a-number", "with-a-number", "Arm", "empty"],
)
def test_details_are_of_the_first_processor(text, name, model, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(processor, "Path", lambda path: tmp_path / Path(path).name)
    found = processor.processor_details()
    assert found["model"] == model
    assert found["name"] == (name or processor.platform.processor() or processor.platform.machine())


def test_other_devices_have_a_name(hand_made):
    assert hand_made("xpu").device_details() == {"name": "xpu"} or torch.xpu.is_available()
