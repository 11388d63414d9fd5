"""The name of this machine's processor, with its generation: a hypervisor may show only "AMD EPYC"."""

import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_GENERATIONS: Mapping[tuple[str, int], Sequence[tuple[range, str]]] = {
    ("AuthenticAMD", 23): (
        (range(0x30), "Zen (Naples)"),
        (range(0x30, 0x40), "Zen 2 (Rome)"),
        (range(0x40, 0x100), "Zen 2"),
    ),
    ("AuthenticAMD", 25): (
        (range(0x10), "Zen 3 (Milan)"),
        (range(0x10, 0x20), "Zen 4 (Genoa)"),
        (range(0x20, 0x60), "Zen 3"),
        (range(0x60, 0xA0), "Zen 4"),
        (range(0xA0, 0xB0), "Zen 4c (Bergamo)"),
    ),
    ("AuthenticAMD", 26): (
        (range(0x10), "Zen 5 (Turin)"),
        (range(0x10, 0x20), "Zen 5c (Turin)"),
        (range(0x20, 0x80), "Zen 5"),
    ),
    ("GenuineIntel", 6): (
        (range(63, 64), "Haswell"),
        (range(79, 80), "Broadwell"),
        (range(85, 86), "Skylake, Cascade Lake or Cooper Lake"),
        (range(106, 107), "Ice Lake"),
        (range(108, 109), "Ice Lake"),
        (range(143, 144), "Sapphire Rapids"),
        (range(151, 152), "Alder Lake"),
        (range(154, 155), "Alder Lake"),
        (range(170, 171), "Meteor Lake"),
        (range(173, 175), "Granite Rapids"),
        (range(175, 176), "Sierra Forest"),
        (range(183, 184), "Raptor Lake"),
        (range(186, 187), "Raptor Lake"),
        (range(207, 208), "Emerald Rapids"),
    ),
}
"""By vendor and family of the CPUID instruction: models, and their name."""
_PARTS = {
    ("0x41", "0xd0c"): "Arm Neoverse N1",
    ("0x41", "0xd40"): "Arm Neoverse V1",
    ("0x41", "0xd49"): "Arm Neoverse N2",
    ("0x41", "0xd4f"): "Arm Neoverse V2",
    ("0x41", "0xd84"): "Arm Neoverse V3",
}
"""By implementer and part of the MIDR register."""


def named(cpuinfo: str) -> str:
    """Return the name and the generation of the first processor in the text of /proc/cpuinfo.

    An unknown generation is given as the numbers of its family and model. Empty if the text names no processor.
    """
    lines = (line.partition(":") for line in cpuinfo.strip().partition("\n\n")[0].splitlines())
    about = {key.strip(): value.strip() for key, _, value in lines}
    part = about.get("CPU implementer", ""), about.get("CPU part", "")
    if part[1]:
        return _PARTS.get(part, f"Arm, implementer {part[0]}, part {part[1]}")
    family, model = about.get("cpu family", ""), about.get("model", "")
    if not (family.isdigit() and model.isdigit()):
        return about.get("model name", "")
    known = _GENERATIONS.get((about.get("vendor_id", ""), int(family)), ())
    names = (name for models, name in known if int(model) in models)
    return f"{about.get('model name', '')}, {next(names, f'family {family}, model {model}')}".removeprefix(", ")


def processor() -> str:
    """Return the name of this machine's processor, with its generation."""
    cpuinfo = Path("/proc/cpuinfo")
    name = named(cpuinfo.read_text(encoding="utf-8")) if cpuinfo.exists() else ""
    if not name and platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        name = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    return name or platform.processor() or platform.machine()
