"""The page for runs, in a real browser: its script, accessibility and layout."""

import importlib.util
import itertools
import json
import math
from pathlib import Path

import pytest

import polycast
from polycast.observer.step_record import StepRecord
from polycast.region.scaler_history import Origin, SkippedStep

pytestmark = pytest.mark.slow

NARROW = 400
ORIGIN = Origin("aten::linear", "forward", "layers.3.up", "inf", "float16", tuple(["train.py:31 step"] * 9))


def run(rate, big):
    for step in range(120):
        scale = 2.0**16 / 2 ** max(0, min(step - 59, 6)) if big else 2.0**16
        skip = None
        if big and 60 <= step < 66:
            names = tuple(f"layers.{layer}.attention.projection.weight" for layer in range(6, 0, -1))
            skip = SkippedStep(step, scale, names, 24, 26, ORIGIN)
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
    """Return the folder of two pages: one.html, of a run, and two.html, of two."""
    folder = tmp_path_factory.mktemp("runs")
    before, after = polycast.RunHistory(run(0.02, big=True)), polycast.RunHistory(run(0.05, big=False))
    before.to_html(folder / "one.html")
    after.to_html(folder / "two.html", before=before)
    return folder


def test_the_slider_shows_the_numbers_of_a_step_in_each_chart(two):
    two.js("(() => { const s = document.getElementById('at'); s.value = 60; s.dispatchEvent(new Event('input')) })()")
    assert two.one("#at-step").text == "60"
    texts = {
        each.get_attribute("data-chart"): each.find_element("css selector", ".here").text for each in two.all(".chart")
    }
    assert texts["loss"].split() == ["step", "60:", "nan", "0.1594"]
    assert texts["scale"].split() == ["step", "60:", "32,768,", "skipped", "65,536"]
    assert {each.get_attribute("visibility") for each in two.all(".cursor")} == {"visible"}


def test_the_slider_moves_by_the_keyboard(page):
    page.js("document.getElementById('at').focus()")
    page.press("\ue012")  # left
    assert page.one("#at-step").text == "118"


def test_the_pointer_chooses_a_step(page):
    at = """(() => {
        const plot = document.querySelector('.chart[data-chart=loss] svg'), box = plot.getBoundingClientRect();
        const where = {clientX: box.left + box.width / 2, clientY: box.top + 5};
        plot.dispatchEvent(new PointerEvent('pointermove', where));
        return document.getElementById('at-step').textContent;
    })()"""
    assert page.js(at) in ("59", "60")


def test_nothing_is_fetched(page):
    messages = [json.loads(entry["message"])["message"] for entry in page.browser.get_log("performance")]
    asked = {each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"}
    assert {url for url in asked if not url.startswith("data:")} == {page.js("location.href")}


@pytest.mark.parametrize("width", [1280, NARROW])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_no_violations(open_report, chromium, dark, width):
    spec = importlib.util.find_spec("axe_core_python")
    if spec is None:
        pytest.skip("axe-core-python, which has axe's rules, is not installed")
    page = open_report("two.html", width=width, dark=dark)
    page.js("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    page.js("document.getElementById('at').dispatchEvent(new Event('input'))")
    chromium.execute_script((Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = chromium.execute_async_script("axe.run().then(arguments[0])")
    assert [
        (rule["id"], [node["html"][:200] + node["failureSummary"] for node in rule["nodes"][:3]])
        for rule in found["violations"]
    ] == []


def test_headings_skip_no_level(page):
    levels = [
        int(text[1]) for text in page.js("[...document.querySelectorAll('h1,h2,h3')].map((each) => each.tagName)")
    ]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_narrow_page_needs_no_scrolling_sideways(open_report, name):
    page = open_report(f"{name}.html", width=NARROW)
    page.js("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert page.js("document.documentElement.scrollWidth <= innerWidth")
    assert page.js("[...document.querySelectorAll('.wide')].every((each) => each.scrollWidth <= each.clientWidth)")
    facts = page.one(".facts").rect
    run = page.one("#run").rect
    assert facts["x"] + facts["width"] < run["x"] + run["width"]


@pytest.mark.parametrize("name", ["one", "two"])
def test_no_number_is_broken_over_lines(open_report, name):
    page = open_report(f"{name}.html", width=NARROW)
    assert page.js(
        "[...document.querySelectorAll('.word, .ticks li')].every((each) => each.offsetHeight < 2 * parseFloat("
        "getComputedStyle(each).fontSize))"
    )
    assert page.js("[...document.querySelectorAll('.facts th')].every((each) => each.scrollWidth <= each.clientWidth)")
    assert page.js("[...document.querySelectorAll('.ticks')].every((each) => each.scrollWidth <= each.clientWidth)")


def test_without_script_the_page_shows_charts_and_steps(open_report):
    page = open_report("one.html", script=False)
    assert not page.one("#at").is_displayed()
    assert len(page.all(".chart .line.only")) == 5
    assert page.one(".chart .values").text.endswith("6 inf or nan, skipped steps marked")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_lines_are_seen_on_their_ground(open_report, dark):
    page = open_report("two.html", dark=dark)
    colours = page.js(
        "['.chart .line.before', '.chart .line.after', '.chart .mark', '.chart .nonfinite'].map((each) =>"
        " getComputedStyle(document.querySelector(each)).stroke)"
    )
    ground = page.js("getComputedStyle(document.getElementById('charts')).backgroundColor")
    assert all(contrast(colour, ground) >= 2.2 for colour in colours), (colours, ground)


def contrast(one, other):
    """Return the contrast of two colours, as in WCAG."""

    def luminance(colour):
        parts = [int(text) / 255 for text in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)
