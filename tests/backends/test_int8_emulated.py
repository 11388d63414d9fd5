"""The CPU's int8 products by instruction sets that this processor lacks: in an emulator, or by equal instructions."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import polycast_cpu.native

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "multiply_sets.cpp"
SOURCES = Path(polycast_cpu.native.__path__[0])
INCLUDE = Path(torch.__file__).parent / "include"
FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", f"-isystem{INCLUDE}")


def run(compiler, sources, folder, *emulator, flags=()):
    """Compile the program, run it, and return the sets that it compared."""
    program = folder / "program"
    subprocess.run([compiler, *FLAGS, *flags, f"-I{sources}", PROGRAM, "-o", program], check=True)
    done = subprocess.run([*emulator, program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout.split()


@pytest.mark.skipif(
    not shutil.which("aarch64-linux-gnu-g++") or not shutil.which("qemu-aarch64"),
    reason="needs Debian's g++-aarch64-linux-gnu and qemu-user",
)
def test_arms_dot_products_and_i8mm_are_exact(tmp_path):
    emulator = ("qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu")
    assert run("aarch64-linux-gnu-g++", SOURCES, tmp_path, *emulator) == ["dotprod", "i8mm"]


@pytest.mark.skipif(
    not shutil.which("g++") or not torch.cpu.get_capabilities().get("avx512_vnni"), reason="needs g++ and AVX512-VNNI"
)
def test_the_source_for_avx_vnni_is_exact_in_avx512s_encoding(tmp_path):
    sources = tmp_path / "sources"
    shutil.copytree(SOURCES, sources)
    header = sources / "multiply_avx2.h"
    text = header.read_text()
    for own, equal in (("avx2,avxvnni", "avx2,avx512vl,avx512vnni"), ("dpbusd_avx_epi32", "dpbusd_epi32")):
        assert own in text
        text = text.replace(own, equal)
    header.write_text(text)
    assert run("g++", sources, tmp_path) == ["avx2", "avx_vnni"]
