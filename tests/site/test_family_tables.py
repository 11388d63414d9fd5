"""The tables of model families in docs/families.md are up to date, and what they show."""

import json

import pytest

EMPTY = "<!-- table of families -->\n<!-- end -->"


@pytest.fixture
def families(module):
    return module("families")


def score(what, metric, *, note="", skipped="", **by):
    return {"what": what, "metric": metric, "kept": "", "by": by, "skipped": skipped, "note": note}


def times(what, copy, int8, int4):
    sides = {"a bfloat16 copy": copy, "int8": int8, "int4": int4}
    return [
        {"what": f"{what}, {side}", "against": "float32", "measured": value, "times": value and (value, 0.04)}
        for side, value in sides.items()
    ]


def rows(text):
    return [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]


def test_a_family_has_shares_errors_and_times(families, tmp_path, monkeypatch):
    monkeypatch.setattr(families.tables, "FIGURES", tmp_path)
    run = {
        "quick": True,
        "environment": {"date": "2026-01-31", "cpu": "a CPU", "cores": 4, "torch": "2.13"},
        "results": [*times("A, b, 1 token", 0.5, 0.4, 0.6), *times("A, b, 128 tokens", None, 1.2, None)],
        "accuracy": [
            score("A, b, 128 tokens", "share of FLOPs", int8=0.984, int4=0.0, note="attention 2%"),
            score("A, b, 128 tokens", "error relative to bfloat16's", int8=4.31, int4=1.0),
        ],
    }
    (tmp_path / "families.json").write_text(json.dumps(run), encoding="utf-8")
    text = families.updated(EMPTY)
    assert "with fewer repeats (`--quick`)" in text
    assert rows(text)[1::2] == [
        "| A, b | 98% | 0% | 4.3 | - | attention 2% |",
        "| A, b, 1 token | 40 ms | 0.50 | 0.40 | **0.60** |",
    ]
    assert rows(text)[-1] == "| A, b, 128 tokens | 40 ms | - | **1.20** | - |"


def test_without_figures_the_page_says_how_to_measure(families, tmp_path, monkeypatch):
    monkeypatch.setattr(families.tables, "FIGURES", tmp_path)
    assert 'Not measured yet: measure it with `make bench BENCH="--save --only families"`' in families.updated(EMPTY)
