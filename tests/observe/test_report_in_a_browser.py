"""The report in a real browser: its script, its accessibility, and that it fetches nothing."""

import base64
import importlib.util
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

import polycast

pytestmark = pytest.mark.slow

NARROW = 400


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return the folder of two reports: one.html, of a run, and two.html, of two."""
    folder = tmp_path_factory.mktemp("reports")
    seen = polycast.Observation.load(Path(__file__).with_name("sample.json"))
    ops = tuple(replace(op, calls=op.calls + 3) if op.op == "aten::gelu" else op for op in seen.ops)
    seen.to_html(folder / "one.html")
    polycast.Observation(replace(seen.facts, ops=ops)).to_html(folder / "two.html", before=seen)
    return folder


@pytest.fixture(scope="module")
def chromium(start_chromium):
    """Return a browser that has no network."""
    browser = start_chromium()
    browser.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1},
    )
    return browser


class Page:
    """A report that is open."""

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
        """Return what the rows of the op table that are shown have in a column."""
        return self.js(
            "[...document.querySelectorAll('#ops-table tbody tr')].filter((row) => !row.hidden)"
            f".map((row) => row.cells[{number}].dataset.value || row.cells[{number}].firstChild.textContent.trim())"
        )

    def screenshot(self, path):
        taken = self.browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(taken["data"]))
        return path.read_bytes()


@pytest.fixture
def page(chromium, pages):
    """Return the report of a run; after the test the console is to have no word in it."""
    yield Page(chromium, pages / "one.html").open()
    assert [entry["message"] for entry in chromium.get_log("browser")] == []


@pytest.fixture(scope="module")
def large(tmp_path_factory, seen_of_thousands):
    """Return the file of the report of 5,600 modules."""
    path = tmp_path_factory.mktemp("large") / "large.html"
    seen_of_thousands.to_html(path)
    return path


@pytest.fixture
def thousands(chromium, large):
    """Return the report of 5,600 modules, likewise."""
    yield Page(chromium, large).open()
    assert [entry["message"] for entry in chromium.get_log("browser")] == []


@pytest.fixture
def two(chromium, pages):
    """Return the report of two runs, likewise."""
    yield Page(chromium, pages / "two.html").open()
    assert [entry["message"] for entry in chromium.get_log("browser")] == []


def header(page, text):
    (found,) = (button for button in page.all("#ops-table thead button") if button.text.strip().startswith(text))
    return found


def test_headers_sort_the_ops(page):
    header(page, "op").click()
    assert page.column(0) == sorted(page.column(0))
    assert page.js("document.querySelector('#ops-table th').getAttribute('aria-sort')") == "ascending"
    header(page, "op").click()
    assert page.column(0) == sorted(page.column(0), reverse=True)
    header(page, "calls").click()
    calls = [int(text) for text in page.column(2)]
    assert calls == sorted(calls, reverse=True)
    assert len(page.all("#ops-table [aria-sort]")) == 1
    assert page.one("#ops-status").text.endswith(" ops shown, sorted by calls, descending.")


def test_headers_sort_by_the_keyboard(page):
    header(page, "op").send_keys("\ue007")  # enter
    assert page.column(0) == sorted(page.column(0))


def test_typed_text_filters_ops(page):
    page.one("#filter-text").send_keys("LINEAR")
    assert page.column(0) == ["linear"]
    assert page.one("#ops-status").text.startswith("1 of 10 ops shown")
    page.one("#filter-text").clear()
    page.one("#filter-text").send_keys("no such op")
    assert page.column(0) == []


@pytest.mark.parametrize(
    ("select", "choice", "column"), [("filter-pass", "backward", "pass"), ("filter-dtype", "float32", "computes in")]
)
def test_selection_filters_ops(page, select, choice, column):
    every = page.column(0)
    (option,) = (option for option in page.all(f"#{select} option") if option.text == choice)
    option.click()
    assert 0 < len(page.column(0)) < len(every)
    cells = page.all(f"#ops-table tbody tr:not([hidden]) td[data-of='{column}']")
    assert all(choice in cell.text for cell in cells)


def test_changed_ops_can_be_filtered(two):
    two.one("#filter-changed").click()
    assert two.column(0) == ["gelu"]


def test_a_module_opens_and_closes_by_keyboard(page):
    closed = "[...document.querySelectorAll('#tree details.module:not([open])')].map((each) => each.id)"
    (first, *_) = page.js(closed)
    summary = page.one(f"#{first} > summary")
    page.js("arguments[0].focus()", summary)
    page.press(" ")
    assert page.js("document.getElementById(arguments[0]).open", first)
    page.press("\ue007")  # enter
    assert not page.js("document.getElementById(arguments[0]).open", first)


def test_arrow_keys_walk_the_modules(page):
    page.js("document.querySelector('#tree summary.line').focus()")
    left, up, right, down = "\ue012", "\ue013", "\ue014", "\ue015"
    page.press(down)
    assert page.active().startswith("layers")
    page.press(left)
    page.press(right)
    page.press(right)
    assert page.active().startswith("0 Block")
    page.press(left)
    assert page.active().startswith("layers")
    page.press(up)
    assert page.active().startswith("TinyGPT")
    page.press(left)
    assert not page.js("document.querySelector('#tree details').open")


def test_all_modules_open_and_close(page):
    opened, closed = page.all("[data-open]")
    opened.click()
    assert page.js("document.querySelectorAll('#tree details.module:not([open])').length") == 0
    closed.click()
    assert page.js("document.querySelectorAll('#tree details.module[open]').length") == 0


def elements(page):
    return page.js("document.querySelectorAll('*').length")


def until(page, condition):
    """Wait until something holds in the page, which makes elements as frames are drawn."""
    wait = "const done = arguments[0]; const look = () => (%s ? done() : requestAnimationFrame(look)); look()"
    page.browser.execute_async_script(wait % condition)


def test_contents_of_modules_are_made_when_opened(thousands):
    before = elements(thousands)
    assert before < 10_000
    opened, closed = thousands.all("[data-open]")
    opened.click()
    until(thousands, "document.querySelectorAll('#tree .module').length > 50")
    assert thousands.js("document.querySelectorAll('#tree details.module:not([open])').length") == 0
    assert elements(thousands) < before + 20_000
    closed.click()
    assert thousands.js("document.querySelectorAll('#tree details.module[open]').length") == 0


def test_open_modules_are_made_near_the_viewport(thousands):
    thousands.js(
        "window.isSeen = (e) => e.getBoundingClientRect().bottom > 0 && e.getBoundingClientRect().top < innerHeight"
    )
    thousands.all("[data-open]")[0].click()
    lines = "document.querySelectorAll('#tree .line').length"
    until(thousands, f"{lines} > 50")
    made = thousands.js(lines)
    thousands.js("document.querySelector('#tree').lastElementChild.scrollIntoView({block: 'end'})")
    until(thousands, f"{lines} > {made}")
    until(thousands, "[...document.querySelectorAll('.chunk:empty')].every((each) => !isSeen(each))")
    assert elements(thousands) < 30_000


def test_found_module_is_opened(thousands):
    thousands.one("#module-find").send_keys("LAYERS.399.mlp linear")
    assert thousands.one("#module-found p").text == "3 of 5,602 modules found."
    assert [each.text for each in thousands.all("#module-found li")] == [
        f"layers.399.mlp.{name} Linear" for name in ("gate", "up", "down")
    ]
    link = thousands.all("#module-found a")[1]
    target = thousands.js("arguments[0].hash.slice(1)", link)
    link.click()
    until(thousands, f"document.getElementById('{target}')")
    assert thousands.one(f"#{target} > .line .label").text == "up"
    assert thousands.one(f"#{target} .own table").is_displayed()
    assert thousands.js("document.querySelectorAll('#tree .target').length") == 1
    thousands.one("#module-find").clear()
    thousands.one("#module-find").send_keys("norm")
    assert thousands.one("#module-found p").text == "800 of 5,602 modules found, the first 20 of which are these."
    assert len(thousands.all("#module-found li")) == 20


def test_keys_reach_modules_that_are_not_made_yet(thousands):
    thousands.js("document.querySelector('#tree summary.line').focus()")
    down, right, end, home = "\ue015", "\ue014", "\ue010", "\ue011"
    for key in (down, right, end):
        thousands.press(key)
    assert thousands.active().startswith("399 Block")
    thousands.press(home)
    assert thousands.active().startswith("Large")


def test_stack_is_made_when_opened(page):
    trace = page.one("#ops-table details[data-stack]")
    last = trace.find_element("css selector", "code").get_attribute("textContent")
    trace.find_element("css selector", "summary").click()
    until(page, "document.querySelector('#ops-table details[open] ol')")
    lines = [each.text for each in page.all("#ops-table details[open] li")]
    assert len(lines) > 1
    assert lines[-1] == last


def test_modules_that_are_not_printed_are_counted(thousands):
    thousands.all("[data-open]")[0].click()
    until(thousands, "document.querySelectorAll('#tree .module').length > 50")
    thousands.js("dispatchEvent(new Event('beforeprint'))")
    assert 500 <= thousands.js("document.querySelectorAll('#tree .line').length") < 1000
    more = "[...document.querySelectorAll('.chunk:empty')].reduce((sum, each) => sum + each.modules.length, 0)"
    assert thousands.js(more) > 0
    assert elements(thousands) < 50_000


def test_finding_opens_its_module(page):
    page.js("document.querySelectorAll('#tree details').forEach((each) => (each.open = false))")
    (link, *_) = page.all(".finding .where a")
    target = page.js("arguments[0].hash.slice(1)", link)
    link.click()
    assert page.one(f"#{target} > .line").is_displayed()


def test_nothing_is_fetched(page):
    messages = [json.loads(entry["message"])["message"] for entry in page.browser.get_log("performance")]
    asked = {each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"}
    assert {url for url in asked if not url.startswith("data:")} == {page.js("location.href")}


@pytest.mark.parametrize("width", [1280, NARROW])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["one", "two"])
def test_axe_finds_no_violations(chromium, pages, name, dark, width):
    spec = importlib.util.find_spec("axe_core_python")
    if spec is None:
        pytest.skip("axe-core-python, which has axe's rules, is not installed")
    page = Page(chromium, pages / f"{name}.html").open(width=width, dark=dark)
    page.js("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    chromium.execute_script((Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = chromium.execute_async_script("axe.run().then(arguments[0])")
    assert [
        (rule["id"], [node["html"][:200] + node["failureSummary"] for node in rule["nodes"][:3]])
        for rule in found["violations"]
    ] == []


def test_each_part_has_a_name_for_a_screen_reader(page):
    unnamed = """[...document.querySelectorAll('button, input, select, summary, a, table, section, nav, form')].filter(
        (each) => !(each.textContent.trim() || each.labels?.length || each.getAttribute('aria-label'))
    ).map((each) => each.outerHTML)"""
    assert page.js(unnamed) == []
    headings = [
        int(text[1]) for text in page.js("[...document.querySelectorAll('h1,h2,h3')].map((each) => each.tagName)")
    ]
    assert headings[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(headings))


def test_controls_are_reached_by_tab(page):
    wanted = page.js(
        "[...document.querySelectorAll('a, button, input, select, summary')].filter((e) => e.checkVisibility()).length"
    )
    reached = set()
    for _ in range(wanted + 1):
        page.press("\ue004")
        reached.add(page.js("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))
    assert len(reached - {page.js("[...document.querySelectorAll('*')].indexOf(document.body)")}) >= wanted


def test_dtypes_have_a_word_beside_each_colour(page):
    alone = (
        "[...document.querySelectorAll('.bar')].filter((each) => !each.nextElementSibling.textContent.trim()).length"
    )
    assert page.js(alone) == 0


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_narrow_page_needs_no_scrolling_sideways(chromium, pages, name):
    page = Page(chromium, pages / f"{name}.html").open(width=NARROW)
    page.js("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert page.js("document.documentElement.scrollWidth <= innerWidth")
    assert page.js("[...document.querySelectorAll('.wide')].every((each) => each.scrollWidth <= each.clientWidth)")


def test_without_script_the_page_is_readable(chromium, pages):
    page = Page(chromium, pages / "one.html").open(script=False)
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
    assert not page.one("nav").is_displayed()
    assert not page.one("#filter").is_displayed()
    assert page.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_light_and_dark_differ(page, tmp_path):
    light = page.screenshot(tmp_path / "light.png")
    ground = page.js("getComputedStyle(document.body).backgroundColor")
    dark = page.open(dark=True).screenshot(tmp_path / "dark.png")
    assert page.js("getComputedStyle(document.body).backgroundColor") != ground
    assert light[:4] == dark[:4] == b"\x89PNG"
    assert light != dark
