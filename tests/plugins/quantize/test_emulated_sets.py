"""The CPU's kernels by instruction sets that this processor lacks: in an emulator, or by equal instructions.

AMX's tiles are plain C++ here (`sets/tiles.h`); the configuration of the real ones is not tested.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import polycast_plugins.quantize.cpu.native

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("program", ["multiply", "int4"])]

PROGRAMS = Path(__file__).parent / "sets"
SOURCES = Path(polycast_plugins.quantize.cpu.native.__path__[0])
INCLUDE = Path(torch.__file__).parent / "include"
FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", f"-isystem{INCLUDE}", f"-I{PROGRAMS}")


def run(compiler, program, sources, folder, *emulator, flags=()):
    """Compile a program, run it, and return the sets that it compared."""
    binary = folder / program
    source = PROGRAMS / f"{program}.cpp"
    subprocess.run([compiler, *FLAGS, *flags, f"-I{sources}", source, "-o", binary], check=True)
    done = subprocess.run([*emulator, binary], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout.split()


@pytest.mark.skipif(
    not shutil.which("aarch64-linux-gnu-g++") or not shutil.which("qemu-aarch64"),
    reason="needs Debian's g++-aarch64-linux-gnu and qemu-user",
)
def test_arms_dot_products_and_i8mm_are_exact(tmp_path, program):
    emulator = ("qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu")
    assert run("aarch64-linux-gnu-g++", program, SOURCES, tmp_path, *emulator) == ["dotprod", "i8mm"]


@pytest.mark.skipif(
    not shutil.which("g++") or not torch.cpu.get_capabilities().get("avx512_vnni"), reason="needs g++ and AVX512-VNNI"
)
def test_avx_vnni_in_avx512s_encoding_and_amx_with_tiles_in_memory_are_exact(tmp_path, program):
    sources = tmp_path / "sources"
    shutil.copytree(SOURCES, sources)
    header = sources / "multiply_avx2.h"
    text = header.read_text()
    for own, equal in (("avx2,avxvnni", "avx2,avx512vl,avx512vnni"), ("dpbusd_avx_epi32", "dpbusd_epi32")):
        assert own in text
        text = text.replace(own, equal)
    header.write_text(text)
    sanitizer = ("-O1", "-fsanitize=address", "-static-libasan")  # tiles read whole blocks of rows
    assert run("g++", program, sources, tmp_path, flags=sanitizer) == ["avx2", "avx_vnni", "vnni", "amx"]
