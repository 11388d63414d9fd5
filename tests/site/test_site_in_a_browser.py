"""The site in a real browser: every page loads, search finds, and nothing is fetched from elsewhere."""

from typing import NamedTuple

import pytest

pytestmark = pytest.mark.slow

GROUND = "getComputedStyle(document.body).backgroundColor"
FOUND = "[...document.querySelectorAll('#search-results li a')].map((each) => each.href.split('?')[0] + each.hash)"
BROKEN = "[...document.images].filter((each) => !each.complete || !each.naturalWidth).map((each) => each.src)"
WORDLESS = "[...document.images].filter((each) => !each.alt).map((each) => each.src)"


class Visit(NamedTuple):
    """What was seen of a page: words in the console, what it asked for, and its pictures that lack something."""

    said: list[str]
    asked: list[str]
    broken: list[str]
    wordless: list[str]


@pytest.fixture(scope="module")
def visits(browser, site, address):
    """Return a visit to each page, by its address in the site."""

    def visit(page):
        browser.open(address + page)
        return Visit(browser.said(), browser.asked(), browser.js(BROKEN), browser.js(WORDLESS))

    pages = (path.relative_to(site) for path in sorted(site.rglob("*.html")))
    return {page.as_posix(): visit(page.as_posix()) for page in pages if "_static" not in page.parts}


def test_every_page_loads_without_a_word_in_the_console(visits):
    assert len(visits) > 40
    assert {page: visit.said for page, visit in visits.items() if visit.said} == {}


def test_no_request_leaves_the_machine(visits, address):
    asked = {url for visit in visits.values() for url in visit.asked}
    assert {url for url in asked if not url.startswith(address)} == set()
    assert {address + page for page in visits} <= asked


def test_every_picture_is_there(visits):
    assert {page: visit.broken for page, visit in visits.items() if visit.broken} == {}


def test_every_picture_has_words(visits):
    assert {page: visit.wordless for page, visit in visits.items() if visit.wordless} == {}


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("WeightCache", "reference/cached-weights.html#polycast.WeightCache"),
        ("observe", "reference/observability.html#polycast.observe"),
        ("overflow", "precision.html"),
    ],
)
def test_search_finds(browser, address, words, target):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.open(f"{address}search.html?q={words}")
    WebDriverWait(browser.driver, 60).until(lambda _: any(target in link for link in browser.js(FOUND)), words)
    assert [url for url in browser.asked() if not url.startswith(address)] == []


def test_light_and_dark_are_those_of_the_system(browser, address):
    light = browser.open(address + "index.html").js(GROUND)
    dark = browser.open(address + "index.html", dark=True).js(GROUND)
    assert light != dark
