"""Globs over names of modules: matches, errors and running time."""

import re

import pytest

from polycast import Policy
from polycast.policy.globs import compile_glob

LAYERS = ["", "layers", *(f"layers.{i}" for i in range(13)), "layers.10.attn", "layers.11.attn.q", "h1x", "h15", "h07"]
NUMBERS = "would be one character out of a set, and looks like numbers"


def found(glob, names=LAYERS):
    return list(filter(compile_glob(glob), names))


MATCHES = [
    ("layers.[0-11]", [f"layers.{i}" for i in range(12)]),
    ("layers.[10-11]", ["layers.10", "layers.11"]),
    ("layers.[8-10]", ["layers.8", "layers.9", "layers.10"]),
    ("layers.[0-3]", [f"layers.{i}" for i in range(4)]),
    ("layers.1[0-2]", ["layers.10", "layers.11", "layers.12"]),
    ("layers.[10-12].**.q", ["layers.11.attn.q"]),
    ("layers.{0,[11-12]}", ["layers.0", "layers.11", "layers.12"]),
    ("{layers,h}.{10,11.*}.{attn,mlp,q}", ["layers.10.attn", "layers.11.attn.q"]),
    ("{layers.3,}", ["", "layers.3"]),
    ("h[1-20]x", ["h1x"]),
    ("h[1-20]*", ["h1x", "h15", "h07"]),
    ("h[10-20]", ["h15"]),
    ("*[10-20]", ["h15"]),
    ("h?[!5]", ["h1x", "h07"]),
    ("layers.1?", ["layers.10", "layers.11", "layers.12"]),
    ("**.q", ["layers.11.attn.q"]),
    ("", [""]),
    ("nothing", []),
]


def test_matches_of_a_glob(subtests):
    for glob, expected in MATCHES:
        with subtests.test(glob=glob, expected=expected):
            assert found(glob) == expected


def test_a_number_range_matches_whole_numbers():
    assert found("h[10-11]5", ["h15", "h105"]) == []
    assert found("h[1-12]", ["h1", "h112", "h12"]) == ["h1", "h12"]


AMBIGUOUS = [
    ("layers.[0-3,11]", NUMBERS),
    ("layers.[1,3]", NUMBERS),
    ("layers.[13]", NUMBERS),
    ("layers.[!0-11]", NUMBERS),
    ("layers.[11-0]", "the range '11-0' is empty: did you mean '0-11'?"),
    ("{q,k", "a brace is not closed: write '[{]' for the character"),
    ("q}", "a closing brace has no opening one: write '[}]' for the character"),
    ("layers.{q}", "'{q}' has no comma: braces hold alternatives, such as '{q,k}'"),
    ("{a,b}" * 10, "braces expand to more than 1,000 globs: use '*', or several keys"),
    ("{a,{b,c}}", "braces cannot be in braces: list all alternatives in one pair, or in several keys"),
]


def test_an_ambiguous_glob_is_refused(subtests):
    for glob, problem in AMBIGUOUS:
        with subtests.test(glob=glob, problem=problem), pytest.raises(ValueError, match=re.escape(problem)):
            Policy(modules={glob: "fp32"})


@pytest.mark.parametrize(
    ("glob", "name"),
    [("**." * 14 + "x", ".".join("a" * 200)), ("*a" * 18 + "b", "a" * 200), ("*[0-99]" * 30 + "x", "1a" * 200)],
    ids=["parts", "characters", "numbers"],
)
def test_matching_takes_linear_time(glob, name):
    assert found(glob, [name]) == []
