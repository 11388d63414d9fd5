"""The page for runs, in a real browser: its script, accessibility and layout."""

import pytest

pytestmark = pytest.mark.slow

NARROW = 400


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
def test_the_slider_moves_by_the_keyboard(page):
    page.js("document.getElementById('at').focus()")
    page.press("\ue012")  # left
    assert page.one("#at-step").text == "118"


@pytest.mark.parametrize("page", ["training"], indirect=True)
def test_the_pointer_chooses_a_step(page):
    at = """(() => {
        const plot = document.querySelector('.chart[data-chart=loss] svg'), box = plot.getBoundingClientRect();
        const where = {clientX: box.left + box.width / 2, clientY: box.top + 5};
        plot.dispatchEvent(new PointerEvent('pointermove', where));
        return document.getElementById('at-step').textContent;
    })()"""
    assert page.js(at) in ("59", "60")


@pytest.mark.parametrize("name", ["training", "trainings"])
def test_the_facts_fit_into_a_narrow_page(open_report, name):
    page = open_report(name, width=NARROW)
    facts = page.one(".facts").rect
    run = page.one("#run").rect
    assert facts["x"] + facts["width"] < run["x"] + run["width"]


@pytest.mark.parametrize("name", ["training", "trainings"])
def test_no_number_is_broken_over_lines(open_report, name):
    page = open_report(name, width=NARROW)
    assert page.js(
        "[...document.querySelectorAll('.word, .ticks li')].every((each) => each.offsetHeight < 2 * parseFloat("
        "getComputedStyle(each).fontSize))"
    )
    assert page.js("[...document.querySelectorAll('.facts th')].every((each) => each.scrollWidth <= each.clientWidth)")
    assert page.js("[...document.querySelectorAll('.ticks')].every((each) => each.scrollWidth <= each.clientWidth)")


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
