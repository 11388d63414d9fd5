"""Entering an observation: options, and the observer's C++ that is loaded for it."""

import types
import typing

import pytest
import torch

import polycast
from polycast.engine import choice, installation, native_library
from polycast.toolchain import load
from polycast.toolchain.cpp_library import BuildError, CppLibrary
from polycast_plugins.observe import observer_library, recorder

INVALID = [
    ({"model": 3}, TypeError, "model must be a torch.nn.Module or None, got int"),
    ({"timing": 1}, TypeError, "timing must be a bool, got 1"),
    ({"numerics": 1}, TypeError, "numerics must be a bool, got 1"),
    ({"stacks": "yes"}, TypeError, "stacks must be a bool, got 'yes'"),
    ({"nonfinite": "stop"}, ValueError, "nonfinite must be one of 'ignore', 'record', 'raise', got 'stop'"),
    ({"threads": 4}, ValueError, "threads must be one of 'this', 'all', got 4"),
]


def test_invalid_options_are_refused(subtests):
    for arguments, error, text in INVALID:
        with subtests.test(arguments=arguments), pytest.raises(error, match=f"^{text}$"):
            polycast.observe(**arguments)


def test_leaving_before_entering_is_refused():
    with pytest.raises(RuntimeError, match="this observer was not entered"):
        polycast.observe().__exit__(None, None, None)


@pytest.fixture
def choose_engine(monkeypatch):
    """Return a function that sets POLYCAST_ENGINE and chooses the engine again."""

    def choose(name):
        monkeypatch.setenv("POLYCAST_ENGINE", name)
        installation.forget_choice()
        return choice.choose_engine()

    yield choose
    installation.forget_choice()


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("reference", "POLYCAST_ENGINE=reference. Unset it."),
        ("auto", "the native engine cannot be built: no C++ compiler is found. Install one (c++)."),
    ],
)
def test_the_reference_engine_cannot_be_observed(choose_engine, monkeypatch, setting, reason):
    monkeypatch.setattr(load, "try_build", lambda _: BuildError("no C++ compiler is found. Install one (c++)."))
    choose_engine(setting)
    with pytest.raises(RuntimeError) as raised:
        polycast.observe().__enter__()
    assert str(raised.value) == (
        f"polycast.observe needs the native engine, and this process runs on the reference engine: {reason}"
    )


def fails(*_, **options):
    raise BuildError("no room is left.")


SOURCES = {"binding.cpp": b"// of the next version"}
BROKEN = {
    "not built": (
        load,
        "get_or_build",
        fails,
        r"^polycast\.observe needs C\+\+ that cannot be built: no room is left\.$",
    ),
    "other sources": (CppLibrary, "read_sources", lambda _: SOURCES, r"has changed since .* Restart the program\.$"),
    "other enumerations": (observer_library, "CHAIN_KINDS", ("loss",), "the names of an enumeration differ"),
}


@pytest.mark.parametrize(("owner", "name", "value", "said"), BROKEN.values(), ids=BROKEN)
def test_regions_run_without_the_observer_and_the_error_gives_the_reason(
    choose_engine, monkeypatch, owner, name, value, said
):
    choose_engine("native")
    monkeypatch.setattr(native_library, "_loaded", {})
    monkeypatch.setattr(owner, name, value)
    with polycast.autocast("cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=said):
        polycast.observe().__enter__()


def test_rows_of_counts_have_the_declared_types(engine):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
    observer = polycast.observe(model, nonfinite="record", stacks=True, timing=True)
    with observer, polycast.autocast("cpu"):
        model(torch.ones(2, 4)).log().sum().backward()
        torch.ones(2).log().div(0)
        reading = recorder.read(observer._running[-1]._recorder)
    casts, sources = ([each for row in reading.counts for each in getattr(row, name)] for name in ("casts", "sources"))
    for rows in (reading.counts, casts, sources, reading.chains, reading.regions, [reading.nonfinite]):
        assert rows
        for row in rows:
            for name, hint in typing.get_type_hints(type(row)).items():
                kinds = [typing.get_origin(each) or each for each in typing.get_args(hint) or [hint]]
                if typing.get_origin(hint) is not None and typing.get_origin(hint) is not types.UnionType:
                    kinds = [typing.get_origin(hint)]
                assert isinstance(getattr(row, name), tuple(kinds)), (type(row).__name__, name)
