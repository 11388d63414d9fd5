"""The processors on which the CPU's backend has int8 and int4, and the reason on others."""

import platform

import pytest
import torch

import polycast
import polycast_plugins.quantize.cpu.int8
from polycast_plugins.quantize.cpu import CpuKernels


@pytest.fixture(autouse=True)
def ask_anew():
    polycast_plugins.quantize.cpu.int8.int8_availability.cache_clear()
    yield
    polycast_plugins.quantize.cpu.int8.int8_availability.cache_clear()


@pytest.mark.parametrize(
    ("machine", "capability", "lacks"),
    [
        ("x86_64", "DEFAULT", "AVX2, or ATEN_CPU_CAPABILITY forbids it"),
        ("riscv64", "DEFAULT", "dot products of int8"),
        ("ppc64le", "VSX", "dot products of int8"),
    ],
)
@pytest.mark.parametrize("recipe", [polycast.Int8(), polycast.Int4()], ids=["int8", "int4"])
def test_a_processor_without_the_instructions_has_no_kernels(monkeypatch, machine, capability, lacks, recipe):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    extension = CpuKernels()
    reason = f"this CPU has no {lacks}: int8 would be slower than float32"
    assert extension.recipe_availability(recipe) == polycast.plugin.Availability(False, reason)
    assert extension.low_bit_kernels(recipe) == {}


def test_where_the_ops_cannot_be_built_the_reason_is_passed_on(monkeypatch):
    none = polycast.plugin.Availability(False, "no C++ compiler is found")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(polycast_plugins.quantize.cpu.int8, "load_ops", lambda package: none)
    assert polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8()) == none


def test_the_cpu_has_no_float8():
    answer = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Float8())
    assert answer == polycast.plugin.Availability(False, "there are no kernels for float8 on cpu")


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_each_recipe_has_a_kernel_for_each_op(scales):
    recipe = polycast.Int8(scales=scales)
    extension = CpuKernels()
    if not extension.recipe_availability(recipe):
        pytest.skip("no int8 here")
    ops = {"aten::linear", "aten::matmul", "aten::mm", "aten::addmm"}
    ops |= {f"aten::conv{axes}d{overload}" for axes in (1, 2) for overload in ("", ".padding")}
    assert set(extension.low_bit_kernels(recipe)) == ops


@pytest.mark.skipif(not CpuKernels.ops_in_cpp, reason="the CPU has no ops in C++ here")
def test_the_ops_that_int8_loads_are_those_that_polycast_build_compiles(monkeypatch):
    asked = []
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(
        polycast_plugins.quantize.cpu.int8,
        "load_ops",
        lambda package: asked.append(package) or polycast.plugin.Availability(False, "no"),
    )
    polycast_plugins.quantize.cpu.int8.int8_availability()
    assert CpuKernels.ops_in_cpp == tuple(asked)


def test_the_cpus_ops_register_themselves():
    if not polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8()):
        pytest.skip("this CPU or compiler has no int8")
    assert torch.ops.polycast_cpu.best_isa() in torch.ops.polycast_cpu.isas()
