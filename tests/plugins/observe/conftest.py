"""Fixtures for tests of observations."""

import base64
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import polycast
from polycast.engine import installation
from polycast_plugins.observe import Observation, Origin, SkippedStep, StepRecord, counting
from polycast_plugins.observe.facts import Facts, Run, total_of
from polycast_plugins.observe.records import Chain, Counts, Decision, Module, Op


@pytest.fixture(name="engine", params=["native"])  # the id of the parameter selects tests for sanitizers
def _engine(request, monkeypatch):
    """Run a test on the native engine: the reference engine cannot be observed."""
    installation.forget_choice()
    monkeypatch.setenv("POLYCAST_ENGINE", request.param)
    yield request.param
    installation.forget_choice()


@pytest.fixture(autouse=True)
def no_profile(monkeypatch):
    """Observe without the profile of this machine, on which findings depend."""
    monkeypatch.setattr(counting, "_profile_of", lambda device_type: None)


@pytest.fixture
def path(tmp_path):
    """Return the path of the file of a run, which is not there yet."""
    return tmp_path / "run.jsonl"


@pytest.fixture
def findings():
    """Return a function that observes a run and returns the findings of one kind."""

    def findings(kind, run, model=None, **options):
        with polycast.observe(model, **options) as seen:
            run()
        return [found for found in seen.findings if found.kind == kind]

    return findings


@pytest.fixture
def in_region():
    """Return a function that returns another, which makes a call in a region of its own `count` times."""

    def in_region(call, count=1, **arguments):
        def run():
            with torch.no_grad():
                for _ in range(count):
                    with polycast.autocast("cpu", **arguments):
                        call()

        return run

    return in_region


LAYERS = 400
PARTS = {
    "": ("Block", ("aten::add.Tensor",)),
    "attention": ("Attention", ("aten::view", "aten::transpose.int", "aten::scaled_dot_product_attention")),
    "attention.norm": ("RMSNorm", ("aten::pow.Tensor_Scalar", "aten::mean.dim", "aten::rsqrt", "aten::mul.Tensor")),
    **{f"attention.{name}": ("Linear", ("aten::linear",)) for name in ("q", "k", "v", "out")},
    "mlp": ("MLP", ("aten::mul.Tensor",)),
    "mlp.norm": ("RMSNorm", ("aten::pow.Tensor_Scalar", "aten::mean.dim", "aten::rsqrt", "aten::mul.Tensor")),
    **{f"mlp.{name}": ("Linear", ("aten::linear",)) for name in ("gate", "up", "down")},
    "mlp.act": ("SiLU", ("aten::silu",)),
    "mlp.dropout": ("Dropout", ("aten::dropout",)),
}


def _op(name: str, phase: str, number: int) -> Op:
    casts = 3 if name == "aten::linear" else 0
    dtype = "bfloat16" if casts else "float32"
    counts = Counts(
        calls=4,
        input_dtypes={"float32": 8},
        compute_dtypes={dtype: 4},
        output_dtypes={dtype: 4},
        seconds={dtype: 0.0123 + number / 1e6},
        casts=casts,
        cast_bytes=casts * 4096 + number,
    )
    policy, rule = ("lower_precision_fp", "backend's table") if casts else (None, "none")
    stack = tuple(f"site-packages/library/modeling_model.py:{100 * number + i} forward" for i in range(30))
    decisions = (Decision("cpu", policy, rule, "", 4),)
    return Op(**vars(counts), op=name, phase=phase, policy=policy, rule=rule, decisions=decisions, stack=stack)


@pytest.fixture(scope="session")
def seen_of_thousands():
    """Return what is seen of 5,600 modules, with times and stacks, each of which has ops in both passes."""
    ops = {
        part: tuple(_op(name, phase, i) for i, name in enumerate(names) for phase in ("forward", "backward"))
        for part, (_, names) in PARTS.items()
    }
    modules = []
    for layer in range(LAYERS):
        for part, (kind, _) in PARTS.items():
            inside = [op for other in PARTS if other.startswith(part) for op in ops[other]]
            name = f"layers.{layer}.{part}".rstrip(".")
            own, total = total_of(ops[part]), total_of(inside)
            modules.append(Module(**vars(own), module=name, kind=kind, entries=4, total=total, ops=ops[part]))
    of_all = total_of(module.total for module in modules if module.kind == "Block")
    outer = [Module(module=name, kind=kind, total=of_all) for name, kind in (("", "Large"), ("layers", "ModuleList"))]
    chain = Chain(
        "unlisted_float32_op", ("aten::linear", "aten::mul.Tensor", "aten::linear"), None, "bfloat16", 4, 4096
    )
    chains = tuple(
        Chain(chain.kind, chain.ops, module.module, chain.dtype, 4, 4096, {f"{module.module[:-5]}.q": 4})
        for module in modules
        if module.kind == "RMSNorm"
    )
    together = tuple(op for part in PARTS for op in ops[part])
    names = {(op.op, op.phase): op for op in together}
    run = Run(seconds=9.0, engine="native", model="Large", devices={"cpu": ["bfloat16"]}, timing=True, stacks=True)
    return Observation(Facts(run=run, ops=tuple(names.values()), modules=(*outer, *modules), chains=chains))


_ORIGIN = Origin("aten::linear", "forward", "layers.3.up", "inf", "float16", tuple(["train.py:31 step"] * 9))


def _steps(rate, big):
    for step in range(120):
        scale = 2.0**16 / 2 ** max(0, min(step - 59, 6)) if big else 2.0**16
        skip = None
        if big and 60 <= step < 66:
            names = tuple(f"layers.{layer}.attention.projection.weight" for layer in range(6, 0, -1))
            skip = SkippedStep(step, scale, names, 24, 26, _ORIGIN)
        is_observed = step % 10 == 0
        yield StepRecord(
            step,
            loss=math.nan if skip else 3 * math.exp(-rate * step) + 0.01,
            scale=scale,
            skipped=skip is not None,
            seconds=0.01,
            fast_time_share=0.8 + step / 1000 if is_observed else None,
            underflow_share=0.02 if is_observed else None,
            gradient_underflow_share=0.3 * rate if is_observed else None,
            skip=skip,
        )


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return the folder of reports of a run and of two, and of pages of a training run and of two."""
    folder = tmp_path_factory.mktemp("reports")
    seen = Observation.load(Path(__file__).with_name("sample.json"))
    ops = tuple(replace(op, calls=op.calls + 3) if op.op == "aten::gelu" else op for op in seen.ops)
    seen.to_html(folder / "one.html")
    Observation(replace(seen.facts, ops=ops)).to_html(folder / "two.html", before=seen)
    before, after = (polycast.RunHistory(_steps(rate, big)) for rate, big in ((0.02, True), (0.05, False)))
    before.to_html(folder / "training.html")
    after.to_html(folder / "trainings.html", before=before)
    return folder


@pytest.fixture(scope="module")
def chromium(start_chromium):
    """Return a browser without network."""
    browser = start_chromium()
    browser.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1},
    )
    return browser


class Page:
    """An open report."""

    def __init__(self, browser, path):
        self.browser = browser
        self._path = path

    def open(self, *, width=1280, dark=False, script=True, medium=""):
        send = self.browser.execute_cdp_cmd
        send("Emulation.setScriptExecutionDisabled", {"value": not script})
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        send("Emulation.setEmulatedMedia", {"media": medium, "features": [scheme]})
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        send("Emulation.setDeviceMetricsOverride", size)
        for kind in ("browser", "performance"):
            self.browser.get_log(kind)
        self.browser.get(self._path.as_uri())
        return self

    def js(self, code, *arguments):
        return self.browser.execute_script(f"return {code}", *arguments)

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def one(self, selector):
        return self.browser.find_element("css selector", selector)

    def press(self, key):
        self.browser.switch_to.active_element.send_keys(key)

    def active(self):
        return self.js("document.activeElement.textContent.trim()")

    def column(self, number):
        """Return the cells of a column in the visible rows of the op table."""
        return self.js(
            "[...document.querySelectorAll('#ops-table tbody tr')].filter((row) => !row.hidden)"
            f".map((row) => row.cells[{number}].dataset.value || row.cells[{number}].firstChild.textContent.trim())"
        )

    def screenshot(self, path):
        taken = self.browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(taken["data"]))
        return path.read_bytes()


@pytest.fixture
def open_report(chromium, pages):
    """Return a function that opens one of the pages."""
    return lambda name, **settings: Page(chromium, pages / f"{name}.html").open(**settings)


@pytest.fixture
def page(request, chromium, pages):
    """Return the page of the test's parameter, else the report of a run. The test fails if the console is not empty."""
    yield Page(chromium, pages / f"{getattr(request, 'param', 'one')}.html").open()
    assert [entry["message"] for entry in chromium.get_log("browser")] == []


@pytest.fixture(scope="module")
def large(tmp_path_factory, seen_of_thousands):
    """Return the file of the report of 5,600 modules."""
    path = tmp_path_factory.mktemp("large") / "large.html"
    seen_of_thousands.to_html(path)
    return path


@pytest.fixture
def thousands(chromium, large):
    """Return the report of 5,600 modules, in the same way."""
    yield Page(chromium, large).open()
    assert [entry["message"] for entry in chromium.get_log("browser")] == []
