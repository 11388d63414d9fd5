"""The accessibility and the layout of all pages, in a real browser, and that they fetch nothing."""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NARROW = 400


@pytest.mark.parametrize("page", ["one", "training"], indirect=True)
def test_nothing_is_fetched(page):
    messages = [json.loads(entry["message"])["message"] for entry in page.browser.get_log("performance")]
    asked = {each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"}
    assert {url for url in asked if not url.startswith("data:")} == {page.js("location.href")}


@pytest.mark.parametrize("width", [1280, NARROW])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["one", "two", "trainings"])
def test_axe_finds_no_violations(open_report, chromium, name, dark, width):
    spec = importlib.util.find_spec("axe_core_python")
    if spec is None:
        pytest.skip("axe-core-python, which has axe's rules, is not installed")
    page = open_report(name, width=width, dark=dark)
    page.js("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    page.js("document.getElementById('at')?.dispatchEvent(new Event('input'))")
    chromium.execute_script((Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = chromium.execute_async_script("axe.run().then(arguments[0])")
    assert [
        (rule["id"], [node["html"][:200] + node["failureSummary"] for node in rule["nodes"][:3]])
        for rule in found["violations"]
    ] == []


@pytest.mark.parametrize("page", ["one", "training"], indirect=True)
def test_each_part_has_a_name_for_a_screen_reader_and_headings_skip_no_level(page):
    unnamed = """[...document.querySelectorAll('button, input, select, summary, a, table, section, nav, form')].filter(
        (each) => !(each.textContent.trim() || each.labels?.length || each.getAttribute('aria-label'))
    ).map((each) => each.outerHTML)"""
    assert page.js(unnamed) == []
    headings = [
        int(tag[1]) for tag in page.js("[...document.querySelectorAll('h1,h2,h3')].map((each) => each.tagName)")
    ]
    assert headings[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(headings))


def test_controls_are_reached_by_tab(page):
    controls = "[...document.querySelectorAll('a, button, input, select, summary')].filter((e) => e.checkVisibility())"
    wanted, reached = page.js(f"{controls}.length"), set()
    for _ in range(wanted + 1):
        page.press("\ue004")
        reached.add(page.js("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))
    assert len(reached - {page.js("[...document.querySelectorAll('*')].indexOf(document.body)")}) >= wanted


def test_dtypes_have_a_word_beside_each_colour(page):
    bars = "[...document.querySelectorAll('.bar')]"
    assert page.js(f"{bars}.filter((each) => !each.nextElementSibling.textContent.trim()).length") == 0


@pytest.mark.parametrize("name", ["one", "two", "training", "trainings"])
def test_a_narrow_page_needs_no_scrolling_sideways(open_report, name):
    page = open_report(name, width=NARROW)
    page.js("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert page.js("document.documentElement.scrollWidth <= innerWidth")
    assert page.js("[...document.querySelectorAll('.wide')].every((each) => each.scrollWidth <= each.clientWidth)")


def test_without_script_the_page_is_readable(open_report):
    page = open_report("one", script=False)
    assert not page.one("#filter").is_displayed()
    assert not page.one("#tree").is_displayed()
    rows = page.all("#modules-table tbody tr")
    assert [row.text.split()[0] for row in rows if row.is_displayed()][:3] == ["the", "layers", "layers.0"]
    assert len([row for row in page.all("#ops-table tbody tr") if row.is_displayed()]) == 10
    (link, *_) = page.all(".finding .where a")
    assert page.one(f"[id='{link.get_attribute('href').partition('#')[2]}']").is_displayed()
    first_call = page.one("#ops-table .trace")
    first_call.find_element("css selector", "summary").send_keys(" ")
    assert first_call.find_element("css selector", "code").is_displayed()
    page.open()


def test_print_has_no_controls(page):
    page.open(medium="print")
    assert not any(page.one(selector).is_displayed() for selector in ("nav", "#filter"))
    assert page.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_light_and_dark_differ(page, tmp_path):
    light = page.screenshot(tmp_path / "light.png")
    ground = page.js("getComputedStyle(document.body).backgroundColor")
    dark = page.open(dark=True).screenshot(tmp_path / "dark.png")
    assert page.js("getComputedStyle(document.body).backgroundColor") != ground
    assert light[:4] == dark[:4] == b"\x89PNG"
    assert light != dark
