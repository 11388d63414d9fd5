"""Observations as values: saving, loading, adding, subtracting, printing."""

import copy
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import polycast
from polycast_plugins.observe import Observation
from polycast_plugins.observe.facts import Facts, Run, combine
from polycast_plugins.observe.records import Chain, LowBit, Module, Op, Region

SAMPLE = Path(__file__).with_name("sample.json")


def sample():
    """Return the values of a file."""
    return json.loads(SAMPLE.read_text(encoding="utf-8"))


@pytest.fixture
def run(engine):
    """Return a function that observes a model some times."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def observe(count):
        with torch.no_grad(), polycast.observe(net) as seen:
            for _ in range(count):
                with polycast.autocast("cpu"):
                    net(torch.ones(1, 4))
        return seen

    return observe


def calls(seen):
    return {row.op: row.calls for row in seen.ops}


def test_to_dict_is_json_with_a_schema(run):
    said = run(3).to_dict()
    assert json.loads(json.dumps(said)) == said
    assert (said["schema"], said["nonfinite"]) == (1, None)
    (linear,) = [row for row in said["ops"] if row["op"] == "aten::linear"]
    assert (linear["calls"], linear["output_dtypes"]) == (3, {"bfloat16": 3})
    assert [(row["module"], row["entries"]) for row in said["modules"]] == [("", 3), ("0", 3), ("1", 3)]
    devices, packages = {"cpu": ["bfloat16"]}, {"cpu": [f"polycast {polycast.__version__}"]}
    assert {"engine": "native", "devices": devices, "packages": packages}.items() <= said["run"].items()
    assert list(sample()) == list(said)
    for name in ("run", "total"):
        assert list(sample()[name]) == list(said[name])
    for name in ("ops", "modules", "casts", "regions", "findings"):
        assert list(sample()[name][0]) == list(said[name][0])


def test_saved_observation_is_loaded(run, tmp_path):
    seen = run(2)
    seen.save(tmp_path / "seen.json")
    assert Observation.load(tmp_path / "seen.json") == seen
    assert Observation.load(str(SAMPLE)).to_dict() == sample()


ONE_OP = {"kind": "round_trip", "ops": ["a"], "module": None, "dtype": "", "count": 1}
INVALID_FILES = {
    "{": "Expecting property name",
    "[]": 'an observation has "schema": 1, got None',
    '{"schema": 2}': "it has schema 2, and this polycast reads schemas up to 1: install a newer polycast",
    '{"schema": true}': 'an observation has "schema": 1, got True',
    '{"schema": 1}': "it is not an observation: KeyError: 'ops'",
    "[" * 100_000: "",
}


def test_invalid_file_is_refused_by_name(tmp_path, subtests):
    path = tmp_path / "seen.json"
    for text, problem in INVALID_FILES.items():
        path.write_text(text, encoding="utf-8")
        said = f"^{re.escape(str(path))}: .*{re.escape(problem)}"
        with subtests.test(problem=problem), pytest.raises(ValueError, match=said):
            Observation.load(path)


def test_what_a_later_version_wrote_is_ignored():
    said = sample()
    said["ops"][0]["news"] = 1
    assert Observation.from_dict(said) == Observation.load(SAMPLE)
    said["chains"].append({**ONE_OP, "kind": "later"})
    assert "later" not in {finding.kind for finding in Observation.from_dict(said).findings}


def test_runs_add_up(run):
    both = run(2) + run(3)
    assert calls(both) == calls(run(5))
    assert both.run.runs == 2
    assert [module.entries for module in both.modules] == [5, 5, 5]
    assert both.total.casts == run(2).total.casts + run(3).total.casts
    (linear,) = [row for row in both.ops if row.op == "aten::linear"]
    assert [decision.calls for decision in linear.decisions] == [5]


def test_runs_subtract(run):
    more, fewer = run(5) - run(3), run(2) - run(3)
    assert calls(more) == calls(run(2))
    assert (run(2) - run(2)).ops == ()
    assert calls(fewer)["aten::relu"] == -1
    assert "weights_cast_again" in {found.kind for found in more.findings}
    assert "weights_cast_again" not in {found.kind for found in fewer.findings}


@pytest.mark.parametrize("change", [lambda seen: seen + 1, lambda seen: seen - None], ids=["sum", "difference"])
def test_nothing_else_can_be_added(run, change):
    with pytest.raises(TypeError):
        change(run(1))


def test_ops_of_a_recipe_that_different_packages_compute_stay_apart_in_sums():
    ours, theirs = (LowBit("cpu", "int8", "aten::linear", calls=2, package=each) for each in ("polycast", "acme"))
    assert combine([ours, theirs], [ours]) == (replace(ours, calls=4), theirs)


def test_print_shows_a_table_and_findings(run):
    lines = str(run(2)).splitlines()
    assert lines[0].startswith("cpu in bfloat16; ")
    assert any(line.split()[:3] == ["linear", "forward", "2"] for line in lines)
    assert "Findings" in lines
    assert "polycast.WeightCache()" in "".join(lines)


def test_print_shows_the_rules_of_modules():
    names = ["", *(f"layers.{i}" for i in range(5))]
    modules = [Module(module=name, rule="** = 'fp32'" if "layers" in name else "ops") for name in names]
    lines = str(Observation(Facts(modules=tuple(modules)))).splitlines()
    assert "rule ops in the model" in lines
    assert "rule ** = 'fp32' in layers.0, layers.1, layers.2 and 2 more modules" in lines


@pytest.fixture(scope="module")
def large():
    """Return what is seen of a model of some thousand modules, each with a finding."""
    names = [f"layers.{i}.norm" for i in range(2800)]
    consumers = {f"layers.{i}.{name}": 1 for i in range(2) for name in "qkv"}
    chain = Chain("unlisted_float32_op", ("aten::linear", "aten::mul.Tensor", "aten::linear"), "", "bfloat16", 1, 64)
    chains = tuple(replace(chain, module=name, bytes=64 + i, consumers=consumers) for i, name in enumerate(names))
    kinds = tuple(replace(chain, ops=(f"aten::{i}", f"aten::mul{i}", f"aten::{i}")) for i in range(100))
    region = Region("", "cpu", True, "bfloat16", "", 3, 3)
    facts = Facts(
        run=Run(devices={"cpu": ["bfloat16"]}, seconds=1.0),
        ops=tuple(Op(op=f"aten::op_{i}", calls=i + 1, policy="fp32", rule="region's policy") for i in range(300)),
        chains=chains + kinds,
        regions=tuple(replace(region, where=f"file.py:{i}") for i in range(100)),
        low_bit=tuple(LowBit("cpu", "int8", f"aten::{i}", "it is small", 3) for i in range(100)),
    )
    return Observation(facts)


def test_printed_text_is_bounded_and_counts_the_rest_and_similar_findings(large):
    text = str(large)
    assert 2000 < len(text) < 8000
    assert "... and 280 more, inner ops included: see seen.ops or an HTML report" in text
    assert "... and 92 more: see seen.low_bit" in text
    assert text.count("has no policy") == 1
    text = " ".join(text.split())
    assert "- layers.2799.norm: aten::mul.Tensor has no policy and runs in float32, once, between" in text
    assert " The same in layers.2798.norm, layers.2797.norm, layers.2796.norm and 2,896 more places. This obs" in text


def test_excess_findings_are_counted():
    regions = tuple(Region(f"file.py:{i}", f"device{i}", True, "bfloat16", "", 1, 1) for i in range(20))
    text = str(Observation(Facts(regions=regions)))
    assert text.count("\n- file.py:") == 8
    assert "... and 12 more: see seen.findings" in text


def test_printed_text_is_bounded_for_long_names(large):
    name = "x" * 20_000
    facts = large.facts
    seen = Observation(
        replace(
            facts,
            ops=tuple(replace(op, op=name, policy=name, rule_name=name) for op in facts.ops),
            chains=tuple(replace(each, ops=(name,) * 3, module=name + str(i)) for i, each in enumerate(facts.chains)),
            low_bit=tuple(replace(each, op=name) for each in large.low_bit),
        )
    )
    assert len(str(seen)) <= 8100
    assert len(seen._repr_html_()) < 100_000


def test_printed_text_is_ascii(large):
    seen = entered_at("größe\udcc3.py:1")
    for text in (str(seen), repr(seen), *map(str, seen.findings), str(large)):
        text.encode("ascii")
    assert "gr\\xf6\\xdfe\\udcc3.py:1: no op in the region for cpu reached" in str(seen)


def test_notebook_html_is_escaped():
    html = entered_at("<b>.py:1")._repr_html_()
    assert html.startswith("<table>")
    assert "<b>" not in html
    assert "&lt;b&gt;.py:1" in html


def entered_at(where):
    """Return what is seen of a region that was entered at a place."""
    region = {"where": where, "device": "cpu", "enabled": True, "dtype": "bfloat16", "entries": 1, "unused": 1}
    return Observation.from_dict({**sample(), "regions": [region]})


def test_repr_is_short():
    assert repr(Observation.load(SAMPLE)) == "<Observation of 42 calls of 10 ops>"


def test_shares_are_of_the_fast_dtypes(run):
    seen = run(1)
    total = seen.total.compute_dtypes
    assert seen.fast_share == total["bfloat16"] / sum(total.values())
    assert seen.fast_time_share is None


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda seen: pickle.loads(pickle.dumps(seen))])
def test_copies_have_the_counts_so_far(duplicate):
    with polycast.observe(torch.nn.Sequential(torch.nn.ReLU())) as seen:
        torch.ones(2).relu()
        taken = duplicate(seen)
        torch.ones(2).relu()
    assert [[op.calls for op in each.ops if op.op == "aten::relu"] for each in (taken, seen)] == [[1], [2]]
    assert duplicate(seen) == seen


def _of(name, **values):
    return lambda said: said[name][0].update(values)


INVALID = [
    (_of("ops", calls="x"), "calls of a Op cannot be 'x'"),
    (_of("ops", calls=None), "calls of a Op cannot be None"),
    (_of("ops", calls=10**400), "calls of a Op cannot be 1000"),
    (_of("ops", op=3), "op of a Op cannot be 3"),
    (_of("ops", output_dtypes=[1]), "output_dtypes of a Op cannot be"),
    (_of("ops", output_dtypes={"float32": "many"}), "output_dtypes of a Op cannot be"),
    (_of("ops", decisions=3), "decisions of a Op cannot be 3"),
    (lambda said: said.update(ops=["aten::mm"]), "a Op is a mapping, got str"),
    (lambda said: said["run"].update(seconds="a"), "seconds of a Run cannot be 'a'"),
    (lambda said: said["run"].update(devices=[1]), "devices of a Run cannot be"),
    (lambda said: said.update(run=[]), "a Run is a mapping, got list"),
    (lambda said: said["chains"].append(ONE_OP), "not enough values"),
]


def test_file_with_invalid_values_is_refused(subtests):
    for spoil, problem in INVALID:
        said = sample()
        spoil(said)
        refused = pytest.raises(ValueError, match=f"it is not an observation: .*{re.escape(problem)}")
        with subtests.test(problem=problem), refused:
            Observation.from_dict(said)
