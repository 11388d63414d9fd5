"""The scripts of the report and of the page of a run, in a real browser."""

import pytest

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize("page", ["two"], indirect=True)
def test_changed_ops_can_be_filtered(page):
    page.one("#filter-changed").click()
    assert page.column(0) == ["gelu"]


def test_a_module_opens_and_closes_by_keyboard_and_shows_its_rule(page):
    assert [each.text for each in page.all("#tree .name .by")] == ["rule: norm* = 'fp32'"]
    closed = "[...document.querySelectorAll('#tree details.module:not([open])')].map((each) => each.id)"
    (first, *_) = page.js(closed)
    page.js("arguments[0].focus()", page.one(f"#{first} > summary"))
    for key, is_open in ((" ", True), ("\ue007", False)):  # space and enter
        page.press(key)
        assert page.js("document.getElementById(arguments[0]).open", first) is is_open


def test_arrow_keys_walk_the_modules(page):
    page.js("document.querySelector('#tree summary.line').focus()")
    left, up, right, down = "\ue012", "\ue013", "\ue014", "\ue015"
    for keys, reached in (
        ([down], "layers"),
        ([left, right, right], "0 Block"),
        ([left], "layers"),
        ([up], "TinyGPT"),
    ):
        for key in keys:
            page.press(key)
        assert page.active().startswith(reached)
    page.press(left)
    assert not page.js("document.querySelector('#tree details').open")


def elements(page, selector="*"):
    return page.js("document.querySelectorAll(arguments[0]).length", selector)


def until(page, condition):
    """Wait until something holds in the page, which makes elements as frames are drawn."""
    wait = "const done = arguments[0]; const look = () => (%s ? done() : requestAnimationFrame(look)); look()"
    page.browser.execute_async_script(wait % condition)


def open_all(page):
    page.one("[data-open]").click()
    until(page, "document.querySelectorAll('#tree .module').length > 50")


def test_contents_of_modules_are_made_when_opened(thousands):
    before = elements(thousands)
    assert before < 10_000
    open_all(thousands)
    assert elements(thousands, "#tree details.module:not([open])") == 0
    assert elements(thousands) < before + 20_000
    thousands.all("[data-open]")[1].click()
    assert elements(thousands, "#tree details.module[open]") == 0


def test_open_modules_are_made_near_the_viewport(thousands):
    thousands.js(
        "window.isSeen = (e) => e.getBoundingClientRect().bottom > 0 && e.getBoundingClientRect().top < innerHeight"
    )
    open_all(thousands)
    made = elements(thousands, "#tree .line")
    thousands.js("document.querySelector('#tree').lastElementChild.scrollIntoView({block: 'end'})")
    until(thousands, f"document.querySelectorAll('#tree .line').length > {made}")
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
    assert elements(thousands, "#tree .target") == 1
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
    _, *others = [each.text for each in page.all("#ops-table details[open] li")]
    assert others[-1] == last


def test_modules_that_are_not_printed_are_counted(thousands):
    open_all(thousands)
    thousands.js("dispatchEvent(new Event('beforeprint'))")
    assert 500 <= elements(thousands, "#tree .line") < 1000
    more = "[...document.querySelectorAll('.chunk:empty')].reduce((sum, each) => sum + each.modules.length, 0)"
    assert thousands.js(more) > 0
    assert elements(thousands) < 50_000


def test_finding_opens_its_module(page):
    page.js("document.querySelectorAll('#tree details').forEach((each) => (each.open = false))")
    (link, *_) = page.all(".finding .where a")
    target = page.js("arguments[0].hash.slice(1)", link)
    link.click()
    assert page.one(f"#{target} > .line").is_displayed()


@pytest.mark.parametrize("page", ["trainings"], indirect=True)
def test_the_slider_shows_the_numbers_of_a_step_in_each_chart(page):
    page.js("(() => { const s = document.getElementById('at'); s.value = 60; s.dispatchEvent(new Event('input')) })()")
    assert page.one("#at-step").text == "60"
    texts = {
        each.get_attribute("data-chart"): each.find_element("css selector", ".here").text for each in page.all(".chart")
    }
    assert texts["loss"].split() == ["step", "60:", "nan", "0.1594"]
    assert texts["scale"].split() == ["step", "60:", "32,768,", "skipped", "65,536"]
    assert {each.get_attribute("visibility") for each in page.all(".cursor")} == {"visible"}


@pytest.mark.parametrize("page", ["training"], indirect=True)
def test_the_keyboard_and_the_pointer_choose_a_step(page):
    page.js("document.getElementById('at').focus()")
    page.press("\ue012")  # left
    assert page.one("#at-step").text == "118"
    at = """(() => {
        const plot = document.querySelector('.chart[data-chart=loss] svg'), box = plot.getBoundingClientRect();
        const where = {clientX: box.left + box.width / 2, clientY: box.top + 5};
        plot.dispatchEvent(new PointerEvent('pointermove', where));
        return document.getElementById('at-step').textContent;
    })()"""
    assert page.js(at) in ("59", "60")


@pytest.mark.parametrize("name", ["training", "trainings"])
def test_the_facts_fit_into_a_narrow_page_without_a_number_broken_over_lines(open_report, name):
    page = open_report(name, width=400)
    facts, run = page.one(".facts").rect, page.one("#run").rect
    assert facts["x"] + facts["width"] < run["x"] + run["width"]
    for selector, holds in (
        (".word, .ticks li", "each.offsetHeight < 2 * parseFloat(getComputedStyle(each).fontSize)"),
        (".facts th", "each.scrollWidth <= each.clientWidth"),
        (".ticks", "each.scrollWidth <= each.clientWidth"),
    ):
        assert page.js(f"[...document.querySelectorAll('{selector}')].every((each) => {holds})")


def test_without_script_the_page_shows_charts_and_steps(open_report):
    page = open_report("training", script=False)
    assert not page.one("#at").is_displayed()
    assert len(page.all(".chart .line.only")) == 5
    assert page.one(".chart .values").text.endswith("6 inf or nan, skipped steps marked")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_lines_are_seen_on_their_ground(open_report, dark):
    page = open_report("trainings", dark=dark)
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
