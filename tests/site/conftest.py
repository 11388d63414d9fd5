"""The site that `make docs` makes, built once, and a browser that looks at it."""

import functools
import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def build():
    """Return a function that builds the site of a folder of pages, and returns how the generator ended."""
    for module in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(module, reason=f"{module} is in the extra 'docs'")

    def build(pages, site):
        command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "--quiet", str(pages), str(site)]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)

    return build


@pytest.fixture(scope="session")
def site(build, tmp_path_factory):
    """Return the folder of the site, built as `make docs` does it."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "docs", folder)
    assert done.returncode == 0, done.stdout
    return folder


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files, and says nothing."""

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="session")
def address(site):
    """Return the address that the site is served at, on this machine alone."""
    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


class Browser:
    """A real browser, what its console said, and what it asked for."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, address, *, dark=False):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [scheme]})
        self.said(), self.asked()
        self.driver.get(address)
        return self

    def said(self):
        """Return what the console has said since it was asked last."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def asked(self):
        """Return the addresses that were asked for since then."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def js(self, code):
        return self.driver.execute_script(f"return {code}")


@pytest.fixture(scope="session")
def browser(start_chromium):
    """Return chromium."""
    return Browser(start_chromium())
