"""The names of processors in figures."""

from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (
            "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n",
            "AMD EPYC, Zen 4 (Genoa)",
        ),
        ("vendor_id : GenuineIntel\ncpu family : 6\nmodel : 143\nmodel name : Xeon", "Xeon, Sapphire Rapids"),
        ("vendor_id : HygonGenuine\ncpu family : 24\nmodel : 1\nmodel name : C86", "C86, family 24, model 1"),
        ("BogoMIPS : 50\nCPU implementer : 0x41\nCPU part : 0xd40\n\nCPU part : 0xd0c", "Arm Neoverse V1"),
        ("CPU implementer : 0x99\nCPU part : 0x001", "Arm, implementer 0x99, part 0x001"),
        ("isa : rv64", ""),
    ],
    ids=["amd", "intel", "unknown", "arm", "unknown-arm", "none"],
)
def test_a_processor_is_named_with_its_generation(cpuinfo, name, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
    assert pytest.importorskip("benchmarks.processor").named(cpuinfo) == name
