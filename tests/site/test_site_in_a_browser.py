"""The site in Chromium: every page loads, search works, and nothing is fetched from other hosts."""

import pytest

pytestmark = pytest.mark.slow

GROUND = "getComputedStyle(document.body).backgroundColor"
FOUND = "[...document.querySelectorAll('#search-results li a')].map((each) => each.href.split('?')[0] + each.hash)"
BROKEN = "[...document.images].filter((each) => !each.complete || !each.naturalWidth).map((each) => each.src)"
TEXTLESS = "[...document.images].filter((each) => !each.alt).map((each) => each.src)"


@pytest.fixture(scope="module")
def visits(browser, site, address):
    """Load each page; return by page its console messages, its requests, and its images that are broken or textless."""

    def visit(page):
        browser.open(address + page)
        return browser.console(), browser.requests(), browser.js(BROKEN), browser.js(TEXTLESS)

    pages = (path.relative_to(site) for path in sorted(site.rglob("*.html")))
    return {page.as_posix(): visit(page.as_posix()) for page in pages if "_static" not in page.parts}


def test_pages_load_without_console_messages_and_all_images_load_and_have_alternative_text(visits):
    assert len(visits) > 40
    found = {page: (console, broken, textless) for page, (console, _, broken, textless) in visits.items()}
    assert {page: problems for page, problems in found.items() if any(problems)} == {}


def test_no_request_leaves_the_machine(visits, address):
    asked = {url for _, requests, *_ in visits.values() for url in requests}
    assert {url for url in asked if not url.startswith(address)} == set()
    assert {address + page for page in visits} <= asked


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("WeightCache", "reference/cached-weights.html#polycast.WeightCache"),
        ("observe", "reference/observability.html#polycast.observe"),
        ("overflow", "precision.html"),
        ("bf16", "regions.html"),
        ("fp16", "regions.html"),
        ("fp8", "quantization.html"),
        ("quantization", "quantization.html"),
        ("amp", "coming-from.html"),
    ],
)
def test_search_finds_page(browser, address, words, target):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.open(f"{address}search.html?q={words}")
    WebDriverWait(browser.driver, 60).until(lambda _: any(target in link for link in browser.js(FOUND)), words)
    assert [url for url in browser.requests() if not url.startswith(address)] == []


CUT_OFF = """[...document.querySelectorAll(".highlight pre")]
    .filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.textContent.slice(0, 60))"""
TOO_WIDE = "document.documentElement.scrollWidth - innerWidth"


@pytest.fixture
def resize(browser):
    """Return a function that sets the width of the window."""

    def resize(width):
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    yield resize
    browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("page", ["index", "start", "backends", "precision", "reference/command-line"])
def test_code_fits_the_window(browser, address, resize, page, width):
    resize(width)
    browser.open(f"{address}{page}.html")
    shown = "[document.readyState, document.URL, document.documentElement.outerHTML.slice(0, 500)]"
    assert browser.js("document.querySelectorAll('.highlight pre').length") > 0, browser.js(shown)
    assert browser.js(CUT_OFF) == []
    assert browser.js(TOO_WIDE) <= 0


def test_a_button_copies_code(browser, address):
    from selenium.webdriver.support.ui import WebDriverWait

    permissions = {"origin": address.rstrip("/"), "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    browser.driver.execute_cdp_cmd("Browser.grantPermissions", permissions)
    browser.open(f"{address}start.html")
    assert browser.js("document.querySelectorAll('.highlight').length === document.querySelectorAll('.copy').length")
    assert browser.js("document.querySelector('.copy').getAttribute('aria-label')") == "Copy the code"
    browser.driver.execute_script("window.focus(); document.querySelector('.copy').click()")
    WebDriverWait(browser.driver, 10).until(
        lambda _: browser.js("document.querySelector('.copy').textContent") != "Copy"
    )
    assert browser.js("document.querySelector('.copy').textContent") == "Copied"
    copied = browser.driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    assert copied == 'pip install ".[all]"\npolycast doctor'


def test_colours_follow_the_system(browser, address):
    light = browser.open(address + "index.html").js(GROUND)
    dark = browser.open(address + "index.html", dark=True).js(GROUND)
    assert light != dark
