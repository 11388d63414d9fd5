"""The site in Chromium: every page loads, search works, and nothing is fetched from other hosts."""

from typing import NamedTuple

import pytest

pytestmark = pytest.mark.slow

GROUND = "getComputedStyle(document.body).backgroundColor"
FOUND = "[...document.querySelectorAll('#search-results li a')].map((each) => each.href.split('?')[0] + each.hash)"
BROKEN = "[...document.images].filter((each) => !each.complete || !each.naturalWidth).map((each) => each.src)"
TEXTLESS = "[...document.images].filter((each) => !each.alt).map((each) => each.src)"


class Visit(NamedTuple):
    """A loaded page: console messages, requests, broken images and images without alternative text."""

    console: list[str]
    requests: list[str]
    broken: list[str]
    textless: list[str]


@pytest.fixture(scope="module")
def visits(browser, site, address):
    """Load each page; return the visits by address."""

    def visit(page):
        browser.open(address + page)
        return Visit(browser.console(), browser.requests(), browser.js(BROKEN), browser.js(TEXTLESS))

    pages = (path.relative_to(site) for path in sorted(site.rglob("*.html")))
    return {page.as_posix(): visit(page.as_posix()) for page in pages if "_static" not in page.parts}


def test_pages_load_without_console_messages(visits):
    assert len(visits) > 40
    assert {page: visit.console for page, visit in visits.items() if visit.console} == {}


def test_no_request_leaves_the_machine(visits, address):
    asked = {url for visit in visits.values() for url in visit.requests}
    assert {url for url in asked if not url.startswith(address)} == set()
    assert {address + page for page in visits} <= asked


def test_images_load(visits):
    assert {page: visit.broken for page, visit in visits.items() if visit.broken} == {}


def test_images_have_alternative_text(visits):
    assert {page: visit.textless for page, visit in visits.items() if visit.textless} == {}


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("WeightCache", "reference/cached-weights.html#polycast.WeightCache"),
        ("observe", "reference/observability.html#polycast.observe"),
        ("overflow", "precision.html"),
    ],
)
def test_search_finds_page(browser, address, words, target):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.open(f"{address}search.html?q={words}")
    WebDriverWait(browser.driver, 60).until(lambda _: any(target in link for link in browser.js(FOUND)), words)
    assert [url for url in browser.requests() if not url.startswith(address)] == []


def test_colours_follow_the_system(browser, address):
    light = browser.open(address + "index.html").js(GROUND)
    dark = browser.open(address + "index.html", dark=True).js(GROUND)
    assert light != dark
