"""The site that `make docs` builds, built once for all tests, and a browser."""

import functools
import http.server
import importlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def module(monkeypatch):
    """Return a function that imports a module of docs/."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"docs.{name}")


@pytest.fixture
def save(module, tmp_path, monkeypatch):
    """Return a function that saves the results of a benchmark where the pages look for them."""
    monkeypatch.setattr(module("tables"), "FIGURES", tmp_path)

    def save(name, *results, cpu="a CPU", **others):
        about = {"date": "2026-01-31", "cpu": cpu, "cores": 4, "torch": "2.13"}
        run = {"quick": False, "environment": about, "variables": {}, "results": list(results), **others}
        (tmp_path / f"{name}.json").write_text(json.dumps(run), encoding="utf-8")

    return save


@pytest.fixture(scope="session")
def build():
    """Return a function that builds a site from a folder of pages and returns the finished process."""
    for module in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(module, reason=f"{module} is in the extra 'docs'")

    def build(pages, site):
        command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "--quiet", str(pages), str(site)]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)

    return build


@pytest.fixture(scope="session")
def site(build, make_once):
    """Return the folder of the site, built as by `make docs`."""

    def make(folder):
        done = build(ROOT / "docs", folder)
        assert done.returncode == 0, done.stdout

    return make_once("site", make)


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address(site):
    """Serve the site locally; return its address.

    The thread ends with the module, since the garbage collector may run on it, and close other tests' regions there.
    """
    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


class Browser:
    """Chromium, with its console messages and its requests."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, address, *, dark=False):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [scheme]})
        self.console(), self.requests()
        for _ in range(3):  # on a loaded machine the browser has shown a page without its contents
            self.driver.get(address)
            if self.js("document.readyState === 'complete' && document.querySelector('main, article') !== null"):
                break
        return self

    def console(self):
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self):
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def js(self, code):
        return self.driver.execute_script(f"return {code}")


@pytest.fixture(scope="session")
def browser(start_chromium):
    return Browser(start_chromium())
