"""The site in a real browser: every page loads, search finds, and nothing is fetched from elsewhere."""

import pytest

GROUND = "getComputedStyle(document.body).backgroundColor"


def pages(site):
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if "_static" not in path.parts)


def test_every_page_loads_without_a_word_in_the_console(browser, site, address):
    wrong = {page: said for page in pages(site) if (said := browser.open(address + page).said())}
    assert wrong == {}


def test_no_request_leaves_the_machine(browser, site, address):
    asked = {url for page in pages(site) for url in browser.open(address + page).asked()}
    assert {url for url in asked if not url.startswith(address)} == set()
    assert {address + page for page in pages(site)} <= asked


def test_every_picture_is_there(browser, site, address):
    broken = "[...document.images].filter((each) => !each.complete || !each.naturalWidth).map((each) => each.src)"
    assert {page: browser.js(broken) for page in pages(site) if browser.open(address + page).js(broken)} == {}


def test_every_picture_has_a_text(browser, site, address):
    mute = "[...document.images].filter((each) => !each.alt).map((each) => each.src)"
    assert {page: browser.js(mute) for page in pages(site) if browser.open(address + page).js(mute)} == {}


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("WeightCache", "reference/weights.html#polycast.WeightCache"),
        ("observe", "reference/observing.html#polycast.observe"),
        ("overflow", "precision.html"),
    ],
)
def test_search_finds(browser, address, words, target):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.open(f"{address}search.html?q={words}")
    found = "[...document.querySelectorAll('#search-results li a')].map((each) => each.href.split('?')[0] + each.hash)"
    WebDriverWait(browser.driver, 20).until(
        lambda _: any(target in link for link in browser.js(found)), f"{words} is not found: {browser.js(found)}"
    )
    assert [url for url in browser.asked() if not url.startswith(address)] == []


def test_light_and_dark_are_those_of_the_system(browser, address):
    light = browser.open(address + "index.html").js(GROUND)
    dark = browser.open(address + "index.html", dark=True).js(GROUND)
    assert light != dark
