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


def refusal(variable, value, expected):
    text = f"{variable}={value!r} is invalid: expected {expected}. Correct or unset the variable."
    return f"^{re.escape(text)}$"


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for variable in ("DISCOVERY", "BLOCK", "PROVIDER", "ENGINE"):
        monkeypatch.delenv(f"POLYCAST_{variable}", raising=False)


def test_defaults_of_unset_variables():
    assert (env.discovery(), env.blocked(), env.providers(), env.engine()) == (True, frozenset(), {}, "auto")


def test_an_empty_variable_is_unset(monkeypatch):
    for variable in ("DISCOVERY", "BLOCK", "PROVIDER", "ENGINE"):
        monkeypatch.setenv(f"POLYCAST_{variable}", "")
    assert (env.discovery(), env.blocked(), env.providers(), env.engine()) == (True, frozenset(), {}, "auto")


@pytest.mark.parametrize(
    ("value", "expected"), [("0", False), ("1", True), ("false", False), ("true", True), ("False", False)]
)
def test_discovery_accepts_booleans(monkeypatch, value, expected):
    monkeypatch.setenv("POLYCAST_DISCOVERY", value)
    assert env.discovery() is expected


@pytest.mark.parametrize("value", [" 1", "on", "no", "2", "01"])
def test_discovery_refuses_other_values(monkeypatch, value):
    monkeypatch.setenv("POLYCAST_DISCOVERY", value)
    with pytest.raises(ValueError, match=refusal("POLYCAST_DISCOVERY", value, "one of 0, 1, false, true")):
        env.discovery()


@pytest.mark.parametrize(
    ("value", "expected"), [("", set()), ("  ", set()), ("cpu", {"cpu"}), (" cpu,\txpu ,cpu", {"cpu", "xpu"})]
)
def test_blocked_accepts_names_separated_by_commas(monkeypatch, value, expected):
    monkeypatch.setenv("POLYCAST_BLOCK", value)
    assert env.blocked() == expected


@pytest.mark.parametrize("value", [",", "cpu,", ",cpu", "cpu,,xpu", "cpu, ,xpu"])
def test_blocked_refuses_an_empty_name(monkeypatch, value):
    monkeypatch.setenv("POLYCAST_BLOCK", value)
    with pytest.raises(ValueError, match=refusal("POLYCAST_BLOCK", value, BLOCK)):
        env.blocked()


@pytest.mark.parametrize("value", ["xpu", "xpu=", "=acme", "xpu=acme,", "xpu=acme,cpu", "=", "xpu= ", ","])
def test_providers_refuse_values_other_than_pairs(monkeypatch, value):
    monkeypatch.setenv("POLYCAST_PROVIDER", value)
    with pytest.raises(ValueError, match="^POLYCAST_PROVIDER=" + re.escape(f"{value!r} is invalid: expected device=")):
        env.providers()


@pytest.mark.parametrize("value", ["xpu=acme,xpu=other", "xpu=acme, xpu=acme"])
def test_providers_refuse_a_repeated_device(monkeypatch, value):
    monkeypatch.setenv("POLYCAST_PROVIDER", value)
    with pytest.raises(ValueError, match=refusal("POLYCAST_PROVIDER", value, f"{PROVIDER}, each device once")):
        env.providers()


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


@pytest.mark.parametrize("name", env.ENGINES)
def test_engine_accepts_the_names_of_engines(monkeypatch, name):
    monkeypatch.setenv("POLYCAST_ENGINE", name.upper())
    assert env.engine() == name


@pytest.mark.parametrize("value", ["fast", "auto,reference"])
def test_engine_refuses_other_names(monkeypatch, value):
    monkeypatch.setenv("POLYCAST_ENGINE", value)
    with pytest.raises(ValueError, match=refusal("POLYCAST_ENGINE", value, f"one of {', '.join(env.ENGINES)}")):
        env.engine()


@pytest.mark.parametrize("name", ["acme-npu", "Acme_NPU", "acme.npu", "ACME-_.npu"])
def test_spellings_of_a_distribution_have_one_canonical_name(name):
    assert env.canonical_name(name) == "acme-npu"


@given(name=names)
def test_canonical_name_is_idempotent(name):
    assert env.canonical_name(env.canonical_name(name)) == env.canonical_name(name)
