"""The environment variables: valid values, and the errors for others."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polycast.common import env

BLOCK = "device types separated by commas, such as 'cuda,xpu'"
PROVIDER = "device=distribution pairs separated by commas, such as 'xpu=polycast,npu=acme-npu'"

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
names = st.text(st.characters(codec="ascii", categories=("L", "N"), include_characters="-_."), min_size=1)
space = st.sampled_from(("", " ", "\t "))


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for variable in ("DISCOVERY", "BLOCK", "PROVIDER", "ENGINE"):
        monkeypatch.delenv(f"POLYCAST_{variable}", raising=False)


def test_defaults_of_unset_and_of_empty_variables(monkeypatch):
    defaults = (True, frozenset(), {}, "auto")
    assert (env.discovery(), env.blocked(), env.providers(), env.engine()) == defaults
    for variable in ("DISCOVERY", "BLOCK", "PROVIDER", "ENGINE"):
        monkeypatch.setenv(f"POLYCAST_{variable}", "")
    assert (env.discovery(), env.blocked(), env.providers(), env.engine()) == defaults


VALID = [
    *((env.discovery, value, False) for value in ("0", "false", "False")),
    *((env.discovery, value, True) for value in ("1", "true")),
    *((env.blocked, value, set()) for value in ("", "  ")),
    (env.blocked, "cpu", {"cpu"}),
    (env.blocked, " cpu,\txpu ,cpu", {"cpu", "xpu"}),
    *((env.engine, name.upper(), name) for name in env.ENGINES),
]
REPEATED = f"{PROVIDER}, each device once"
INVALID = [
    *((env.discovery, value, "one of 0, 1, false, true") for value in (" 1", "on", "no", "2", "01")),
    *((env.blocked, value, BLOCK) for value in (",", "cpu,", ",cpu", "cpu,,xpu", "cpu, ,xpu")),
    *((env.providers, value, PROVIDER) for value in ("xpu=acme,", ",")),
    *((env.providers, value, REPEATED) for value in ("xpu", "xpu=", "=acme", "xpu=acme,cpu", "=", "xpu= ")),
    *((env.providers, value, REPEATED) for value in ("xpu=acme,xpu=other", "xpu=acme, xpu=acme")),
    *((env.engine, value, f"one of {', '.join(env.ENGINES)}") for value in ("fast", "auto,reference")),
]
VARIABLES = {
    env.discovery: "POLYCAST_DISCOVERY",
    env.blocked: "POLYCAST_BLOCK",
    env.providers: "POLYCAST_PROVIDER",
    env.engine: "POLYCAST_ENGINE",
}


def test_valid_values_are_read(monkeypatch, subtests):
    for read, value, expected in VALID:
        monkeypatch.setenv(VARIABLES[read], value)
        with subtests.test(value=value):
            assert read() == expected


def test_other_values_are_refused_with_what_is_expected(monkeypatch, subtests):
    for read, value, expected in INVALID:
        monkeypatch.setenv(VARIABLES[read], value)
        text = f"{VARIABLES[read]}={value!r} is invalid: expected {expected}. Correct or unset the variable."
        with subtests.test(value=value), pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            read()
        monkeypatch.delenv(VARIABLES[read])


@pytest.mark.slow
@given(pairs=st.dictionaries(names, names), before=space, after=space)
def test_providers_round_trip(pairs, before, after):
    written = ",".join(f"{before}{device}{after}={before}{name}{after}" for device, name in pairs.items())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYCAST_PROVIDER", written)
        assert env.providers() == {device: env.canonical_name(name) for device, name in pairs.items()}


@given(value=texts)
@pytest.mark.parametrize("read", [env.discovery, env.blocked, env.providers, env.engine])
def test_any_text_is_parsed_or_refused_with_the_variable_and_its_value(read, value):
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("DISCOVERY", "BLOCK", "PROVIDER", "ENGINE"):
            patch.setenv(f"POLYCAST_{variable}", value)
        try:
            read()
        except ValueError as error:
            assert re.match(r"POLYCAST_[A-Z]+=", str(error))  # noqa: PT017
            assert f"={value!r} is invalid: expected " in str(error)  # noqa: PT017


@pytest.mark.parametrize("name", ["acme-npu", "Acme_NPU", "acme.npu", "ACME-_.npu"])
def test_spellings_of_a_distribution_have_one_canonical_name(name):
    assert env.canonical_name(name) == "acme-npu"
