"""The processors on which the CPU's backend has int8 and int4, and the reason on others."""

import platform

import pytest
import torch

import polycast
from polycast_plugins.quantize.cpu import CpuKernels, int8

from .conftest import AVAILABLE


@pytest.fixture(autouse=True)
def pretend(monkeypatch):
    """Ask anew, and return a function that pretends that the processor is another."""
    int8.int8_availability.cache_clear()

    def pretend(machine, capability):
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)

    yield pretend
    int8.int8_availability.cache_clear()


@pytest.mark.parametrize(
    ("machine", "capability", "lacks"),
    [
        ("x86_64", "DEFAULT", "AVX2, or ATEN_CPU_CAPABILITY forbids it"),
        ("riscv64", "DEFAULT", "dot products of int8"),
        ("ppc64le", "VSX", "dot products of int8"),
    ],
)
@pytest.mark.parametrize("recipe", [polycast.Int8(), polycast.Int4()], ids=["int8", "int4"])
def test_a_processor_without_the_instructions_has_no_kernels(pretend, machine, capability, lacks, recipe):
    pretend(machine, capability)
    extension = CpuKernels()
    reason = f"this CPU has no {lacks}: int8 would be slower than float32"
    assert extension.recipe_availability(recipe) == polycast.plugin.Availability(False, reason)
    assert extension.low_bit_kernels(recipe) == {}


def test_where_the_ops_cannot_be_built_the_reason_is_passed_on(pretend, monkeypatch):
    none = polycast.plugin.Availability(False, "no C++ compiler is found")
    pretend("x86_64", "AVX2")
    monkeypatch.setattr(int8, "load_ops", lambda package: none)
    assert polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8()) == none


@pytest.mark.parametrize(("device", "recipe"), [("cpu", "Float8"), ("cuda", "Int8"), ("xpu", "Int8")])
def test_a_device_has_no_kernels_for_a_recipe_that_no_package_has_some_for(device, recipe):
    answer = polycast.plugin.check(polycast.plugin.get_backend(device), getattr(polycast, recipe)())
    assert answer == polycast.plugin.Availability(False, f"there are no kernels for {recipe.lower()} on {device}")


@pytest.mark.skipif(not AVAILABLE, reason="no int8 here")
@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_each_recipe_has_a_kernel_for_each_op(scales):
    ops = {"aten::linear", "aten::matmul", "aten::mm", "aten::addmm"}
    ops |= {f"aten::conv{axes}d{overload}" for axes in (1, 2) for overload in ("", ".padding")}
    assert set(CpuKernels().low_bit_kernels(polycast.Int8(scales=scales))) == ops


@pytest.mark.skipif(not CpuKernels.ops_in_cpp, reason="the CPU has no ops in C++ here")
def test_the_ops_that_int8_loads_are_those_that_polycast_build_compiles(pretend, monkeypatch):
    asked = []
    pretend("x86_64", "AVX2")
    no = polycast.plugin.Availability(False, "no")
    monkeypatch.setattr(int8, "load_ops", lambda package: asked.append(package) or no)
    int8.int8_availability()
    assert CpuKernels.ops_in_cpp == tuple(asked)
