"""The values that a notebook shows as HTML tables, and the reprs of objects at a prompt."""

import re
from html.parser import HTMLParser

import torch
from torch import nn

import polycast


class Tables(HTMLParser):
    """The cells of all tables, by row, and the text outside of them; raises for tags that are not closed."""

    def __init__(self, page):
        super().__init__()
        self.rows, self.captions, self.lines, self._open = [], [], [], []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        tag = self._open[-1] if self._open else ""
        if tag in ("td", "th"):
            self.rows[-1][-1] += data
        elif tag == "caption":
            self.captions.append(data)
        elif tag == "p":
            self.lines.append(data)


def tables(value):
    return Tables(value._repr_html_())


class Half(nn.Linear):
    """A layer whose class has a name that HTML must escape."""


Half.__name__ = Half.__qualname__ = "Half<b>"


def test_a_comparison_is_two_tables_and_its_sentences():
    comparison = polycast.compare(nn.Sequential(Half(4, 4), nn.ReLU()), torch.randn(2, 4), device_type="cpu")
    shown = tables(comparison)
    assert shown.rows[0][:3] == ["module", "class", "calls"]
    assert ["0", "Half<b>", "1"] in [row[:3] for row in shown.rows]
    assert next(row[:2] for row in shown.rows if row[0] == "output") == ["output", "total"]
    assert shown.lines[0] == "float32 against a region of bfloat16 on cpu: relative errors."
    assert shown.lines == str(comparison).split("\n\n")[-1].splitlines()


def test_a_policy_is_a_table_of_its_ops_modules_and_devices():
    softmax = polycast.Policy({"softmax": "fp32"})
    policy = polycast.Policy({"mm": "passthrough"}, {"head.<b>": "int8"}, {"cuda": softmax}, "careful")
    assert tables(policy).rows == [
        ["for", "policy"],
        ["name", "'careful'"],
        ["ops.mm", "'passthrough'"],
        ["modules.head.<b>", "'int8'"],
        ["devices.cuda.ops.softmax", "'fp32'"],
    ]


def test_what_tune_finds_is_the_table_of_the_policy_and_the_evidence():
    tuned = polycast.tune(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), device_type="cpu", tolerance=0.0)
    assert tables(tuned).rows == tables(tuned.policy).rows
    assert tables(tuned).lines == tuned.evidence.lines()


def test_an_explanation_is_a_table_of_the_overloads_and_the_casts():
    x = torch.ones(2, 2)
    with polycast.autocast("cpu"):
        mm, norm = polycast.explain("mm", x, x, device_type="cpu"), polycast.explain("norm", device_type="cpu")
    assert tables(mm).captions == ["aten::mm on cpu, a region of bfloat16"]
    assert tables(mm).rows == [
        ["op", "policy", "rule", "effect"],
        ["aten::mm", "lower_precision_fp", "backend's table", "its inputs are cast to bfloat16"],
    ]
    assert tables(mm).lines == ["self: float32 -> bfloat16", "mat2: float32 -> bfloat16"]
    assert [row[0] for row in tables(norm).rows[1:]] == [norm.op, *(each.op for each in norm.others)]
    assert len(norm.others) > 0


def test_backends_are_a_table_of_every_device():
    found = polycast.backends()
    names = ["device", "state", "default", "distribution", "reason"]
    first, *rows = tables(found).rows
    assert first == names
    shown = [(name, state, reason) for name, state, *_, reason in rows]
    assert shown == [(name, status.state, status.reason) for name, status in found.items()]
    header, _, first, *_ = repr(found).splitlines()
    assert header.split() == names
    assert first.split()[:3] == ["cpu", "ready", "bfloat16"]


def test_the_repr_of_a_backend_names_its_class_device_and_dtype(hand_made):
    assert repr(polycast.plugin.get_backend("cpu")) == "<polycast_backends.cpu.CpuBackend: cpu, default torch.bfloat16>"
    assert re.fullmatch(r"<.*HandMade: ipu, default torch\.float16>", repr(hand_made("ipu")))
    assert repr(polycast.plugin.Backend()) == "<polycast.registry.backend.Backend: ?, default ?>"


def test_the_repr_of_observe_shows_its_options_and_whether_it_observes():
    plain = "nonfinite='ignore', threads='this'"
    assert repr(polycast.observe()) == f"<observe({plain}): not observing>"
    observer = polycast.observe(nn.Linear(2, 2), timing=True, nonfinite="record")
    options = "model=Linear, timing=True, nonfinite='record', threads='this'"
    with observer:
        assert repr(observer) == f"<observe({options}): observing>"
    assert repr(observer) == f"<observe({options}): not observing>"


def test_the_repr_of_patch_torch_shows_whether_torch_is_patched():
    mine, other = polycast.patch_torch(), polycast.patch_torch()
    with mine:
        assert repr(mine) == "<patch_torch: started; torch is patched>"
        assert repr(other) == "<patch_torch: not started; torch is patched>"
    assert repr(mine) == "<patch_torch: not started; torch is not patched>"
