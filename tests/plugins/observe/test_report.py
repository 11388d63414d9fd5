"""The contents of a report of one run and of two."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import polycast
from polycast_plugins.observe import Observation
from polycast_plugins.observe.facts import Facts, Run
from polycast_plugins.observe.records import Counts, Module, Op
from polycast_plugins.observe.report import render
from polycast_plugins.observe.report.page import page_of

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>\'"&{{ 7 * 7 }}'
VOID = {"meta", "link", "input", "br", "img"}


@pytest.fixture(scope="module")
def sample():
    return Observation.load(Path(__file__).with_name("sample.json"))


class Reader(HTMLParser):
    """Reads a page: its words, its elements with their attributes, and which of them are open."""

    def __init__(self, text):
        super().__init__()
        self.words, self.elements, self.open, self.data = [], [], [], {}
        self.feed(text)
        self.close()
        self.text = " ".join(self.words)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.elements and self.elements[-1] == ("script", {"type": "application/json", "id": "data"}):
            self.data = self.data or json.loads(data)
        if not {"script", "style"} & set(self.open):
            self.words += data.split()


def page(seen, before=None):
    text = render(page_of(seen.facts, None if before is None else before.facts))
    read = Reader(text)
    assert read.open == []
    return read


def changed(seen, **fields):
    """Return the observation with the linear of the forward pass changed."""
    ops = tuple(replace(op, **fields) if (op.op, op.phase) == ("aten::linear", "forward") else op for op in seen.ops)
    return Observation(replace(seen.facts, ops=ops))


def test_run_is_summarized_with_what_was_fast_first(sample):
    text = page(sample).text
    assert re.search(r"The run In the fast dtype \d+% of the time in ops Device", text)
    for said in (
        "Device cpu (AMD EPYC, family 25, model 17); 2 threads Fast dtype bfloat16 cpu bfloat16 is emulated ",
        "Engine native Versions polycast 0.1.0, ",
        "; cpu by polycast 0.1.0, acme-cpu 1.0",
        "Run 2026-05-01 09:30 UTC: python train.py",
    ):
        assert said in text
    forward, backward = (sum(op.calls for op in sample.ops if op.phase == phase) for phase in ("forward", "backward"))
    assert re.search(rf"Forward [^C]* Op calls {forward} ", text)
    assert re.search(rf"Backward [^C]* Op calls {backward} ", text)
    headline = r"\d+% of the time in ops in bfloat16; 18 casts of 319\.5 KB; findings: nonfinite, slow dtype, .+"
    assert re.fullmatch(headline, sample.headline)


def test_each_finding_has_its_remedy_with_its_code_marked(sample):
    text = page(sample).text
    for finding in sample.findings:
        assert " ".join(finding.what.split()) in text
    for found in page_of(sample.facts).found:
        assert " ".join(found.remedy.replace("`", " ").split()) in text
    assert "`" not in text
    assert "<code>polycast.autocast(..., cache=polycast.WeightCache())</code>" in render(page_of(sample.facts))


def test_finding_links_to_its_module(sample):
    read = page(sample)
    targets = {attributes["href"][1:] for tag, attributes in read.elements if tag == "a"}
    assert targets <= {attributes.get("id") for _, attributes in read.elements}  # those of modules: without script
    rows = {row.name: row.id for row in page_of(sample.facts).modules}
    assert {rows["head"], rows["layers.0"]} <= targets


def test_findings_with_one_remedy_are_grouped():
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1)) for _ in range(3)))
    with polycast.observe(net) as seen, polycast.autocast("cpu"):
        net(torch.ones(1, 4))
    found = page_of(seen.facts).found
    assert len({(each.kind, each.remedy) for each in found}) == len(found)
    assert sum(len(each.places) for each in found) == len(seen.findings)


def test_modules_are_a_tree_with_shares_of_the_enclosing_module(sample):
    first, second, third, fourth, *_ = page_of(sample.facts).modules
    assert [(row.name, row.depth) for row in (first, second, third)] == [("", 0), ("layers", 1), ("layers.0", 2)]
    assert (first.kind, fourth.depth) == ("TinyGPT", 3)
    assert [row.bytes for row in (first, second, third)] == [(1.0,), (180224 / 311296,), (1.0,)]


def test_modules_show_their_rules(sample):
    read = page(sample)
    rules = [read.data["words"][of[6]] for (*_, (of,)) in read.data["modules"]]
    assert list(filter(None, rules)) == ["norm* = 'fp32'"]
    assert read.text.count(" rule: ") == read.text.count("LayerNorm rule: norm* = 'fp32'") == 1  # without script


@pytest.mark.slow
def test_modules_nested_deeper_than_the_python_stack_are_rendered():
    names = [".".join(["m"] * depth) for depth in range(1500)]
    modules = tuple(Module(module=name, kind="Deep", entries=1, calls=1, total=Counts(calls=1)) for name in names)
    read = page(Observation(Facts(modules=modules)))
    assert [module[0] for module in read.data["modules"]] == list(range(1500))


def test_ops_are_in_the_order_of_their_times_or_of_their_calls(sample):
    times = [row.of[0].time for row in page_of(sample.facts).ops]
    untimed = replace(sample.facts, ops=tuple(replace(op, seconds={}) for op in sample.ops))
    calls = [row.of[0].calls for row in page_of(untimed).ops]
    assert (times, calls) == (sorted(times, reverse=True), sorted(calls, reverse=True))


def test_inner_ops_are_marked():
    with polycast.observe() as seen, polycast.autocast("cpu"):
        torch.einsum("ij,jk->ik", torch.ones(2, 2), torch.ones(2, 2))
    inner = {row.op: row.inner for row in page_of(seen.facts).ops}
    assert not inner["aten::einsum"]
    assert inner["aten::permute"]


def test_two_runs_are_side_by_side(sample):
    after = changed(sample, calls=11, casts=2)
    text = page(Observation(replace(after.facts, ops=(*after.ops, Op(op="acme::new", calls=3)))), before=sample).text
    assert "TinyGPT, before and after" in text
    assert re.search(r"linear (first call .+? )?forward before: 8 after: 11 ", text)
    assert "acme::new forward before: none after: 3 " in text


def test_equal_values_of_two_runs_are_shown_once_and_times_are_not_compared(sample):
    assert "before:" not in page(sample, before=sample).text
    other = changed(sample, cast_seconds=9.0, seconds={"bfloat16": 9.0}, stack=("elsewhere.py:1 f",))
    for after in (sample, other):
        assert not any(row.changed for row in page_of(after.facts, before=sample.facts).ops)


def test_findings_of_one_run_are_marked(sample):
    after = Observation(replace(sample.facts, nonfinite=None))
    gone = {each.kind: each.state for each in page_of(after.facts, before=sample.facts).found}
    assert (gone["nonfinite"], gone["weights_cast_again"]) == ("gone", "")
    assert {each.kind: each.state for each in page_of(sample.facts, before=after.facts).found}["nonfinite"] == "new"
    assert "Nonfinite only before" in page(after, before=sample).text


@pytest.mark.parametrize("name", [HOSTILE, "x" * 20_000, "ünï‮cödé\n"], ids=["hostile", "long", "unicode"])
def test_names_are_escaped(sample, name):
    facts = replace(
        sample.facts,
        run=replace(sample.run, model=name),
        ops=tuple(replace(op, op=name, policy=name, rule=name, rule_name=name, stack=(name,)) for op in sample.ops),
        modules=tuple(replace(module, module=f"m{i}.{name}", kind=name) for i, module in enumerate(sample.modules)),
        casts=tuple(replace(cast, op=name, module=name, source=name) for cast in sample.casts),
        regions=tuple(replace(region, where=name, device=name, reason=name) for region in sample.regions),
        compiled=tuple(replace(each, region=name, module=name) for each in sample.compiled),
        chains=tuple(replace(chain, ops=tuple(name for _ in chain.ops), module=name) for chain in sample.facts.chains),
        nonfinite=replace(sample.nonfinite, op=name, module=name, stack=(name,)),
    )
    read = page(Observation(facts))
    assert [tag for tag, _ in read.elements if tag == "img"] == []
    kinds = [attributes.get("type") for tag, attributes in read.elements if tag == "script"]
    assert kinds == ["application/json", None]  # data, which does not run, and the page's own
    assert not any(key.startswith("on") for _, attributes in read.elements for key in attributes)
    assert " ".join(name.split()) in read.text


def test_the_page_loads_nothing(sample):
    read = page(sample)
    addresses = {given[key] for _, given in read.elements for key in ("src", "href", "action") if key in given}
    assert {address for address in addresses if not address.startswith("#")} == {"data:,"}
    (policy,) = (given["content"] for _, given in read.elements if given.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ")
    assert "script-src 'sha256-" in policy


def test_empty_observation_has_a_page():
    text = page(Observation(Facts(run=Run()))).text
    for said in ("Nothing that costs time or accuracy was found.", "No op ran.", "no op had floating-point tensors"):
        assert said in text


def test_the_page_of_thousands_of_modules_stays_small(seen_of_thousands):
    text = render(page_of(seen_of_thousands.facts))
    read = Reader(text)
    assert len(seen_of_thousands.modules) > 5600
    assert len(text.encode()) < 1_000_000
    assert len(read.elements) < 8_000
    assert "Unlisted float32 op 800 places" in read.text
    assert "and 750 more, in seen.findings" in read.text  # without script
    assert "The first 200 of 5,602 modules;" in read.text
    data = read.data  # shared values once
    assert len(data["modules"]) == len(seen_of_thousands.modules)
    assert len(data["ops"]) < 100
    for name in ("words", "lines", "ops"):
        assert len({json.dumps(each) for each in data[name]}) == len(data[name])
    assert [data["words"][number] for number in data["modules"][2][1:3]] == ["0", "Block"]
    stacks = {op.stack for op in seen_of_thousands.ops}
    assert {tuple(data["lines"][line] for line in stack) for stack in data["stacks"]} == stacks


@pytest.mark.slow
def test_the_page_of_two_runs_of_thousands_of_modules_stays_small(seen_of_thousands):
    text = render(page_of((seen_of_thousands + seen_of_thousands).facts, before=seen_of_thousands.facts))
    assert len(text.encode()) < 3_000_000
    assert len(Reader(text).elements) < 12_000


def test_to_html_writes_the_page(sample, tmp_path):
    sample.to_html(tmp_path / "one.html")
    sample.to_html(str(tmp_path / "two.html"), before=sample)
    assert (tmp_path / "one.html").read_text(encoding="utf-8").startswith("<!doctype html>\n")
    assert "before and after" in (tmp_path / "two.html").read_text(encoding="utf-8")
    with pytest.raises(TypeError, match=r"^before must be an Observation or None, got dict$"):
        sample.to_html(tmp_path / "three.html", before={})
    assert {path.name for path in tmp_path.iterdir()} == {"one.html", "two.html"}
