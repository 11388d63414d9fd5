"""The properties of processors, read from texts in place of this system's."""

import platform

import pytest

from polycast_plugins.cli import cpu_info


@pytest.fixture
def say(tmp_path, monkeypatch):
    """Return a function that replaces the text of the system."""
    monkeypatch.setattr(cpu_info, "_CPU_INFO", tmp_path / "cpuinfo")
    return (tmp_path / "cpuinfo").write_text


def test_the_first_processor_counts(say):
    say("processor : 0\nmodel name\t: A: fast\n\nprocessor : 1\nmodel name\t: B\nflags : x y\n")
    assert cpu_info.cpu_info() == {"processor": "0", "model name": "A: fast", "": "", "flags": "x y"}
    assert cpu_info.processor_name() == "A: fast"


def test_without_a_name_the_architecture_is_named(say):
    assert cpu_info.cpu_info() == {}
    say("CPU part : 0xd40\n")
    assert cpu_info.processor_name() == (platform.processor() or platform.machine())
