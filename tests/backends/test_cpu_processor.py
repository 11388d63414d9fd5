"""What the CPU's backend says the speed depends on."""

from pathlib import Path

import pytest
import torch

import polycast
from polycast_backends.cpu import processor


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
