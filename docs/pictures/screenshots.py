"""Take the screenshots of a report, with chromium: ``python -m docs.pictures.screenshots`` in the repository root."""

import base64
import tempfile
from pathlib import Path

import torch
from selenium import webdriver
from transformers import GPT2Config, GPT2LMHeadModel

import polycast
from polycast_plugins.observe import Observation

DOCS = Path(__file__).parent.parent
_WIDTH = 1160
_SHORTEN = """
const open = (element) => { element.open = true; element.dispatchEvent(new Event("toggle")); };
const lines = (text) =>
  [...document.querySelectorAll("#tree summary.line")].filter((line) => line.textContent.includes(text));
for (const name of ["GPT2Model", "ModuleList", "GPT2Block"]) {
  open(lines(name)[0].parentElement);
  await new Promise((resolve) => setTimeout(resolve, 200));
}
for (const line of lines("GPT2Block").slice(2)) line.parentElement.remove();
const rows = [...document.querySelectorAll("#ops-table tbody tr")];
for (const row of rows.filter((row) => !row.hidden).slice(4)) row.remove();
for (const id of ["casts", "regions", "compiled"]) document.getElementById(id)?.remove();
document.querySelectorAll("#ops .note, footer").forEach((each) => each.remove());
"""


def run() -> Observation:
    """Observe three training steps of a GPT-2 in two micro-batches each."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=12, n_embd=64, n_head=4, vocab_size=256, n_positions=64)
    model, words = GPT2LMHeadModel(config), torch.randint(256, (3, 2, 4, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(step: torch.Tensor) -> None:
        for batch in step:
            with polycast.autocast("cpu"):
                loss = model(batch, labels=batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    train(words[0])  # initializes threads and kernels
    with polycast.observe(model, timing=True, stacks=True) as seen:
        for step in words:
            train(step)
    return seen


def take(page: Path, scheme: str) -> bytes:
    """Return a screenshot of a page in a colour scheme, as PNG."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for switch in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(switch)
    browser = webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        browser.get(page.as_uri())
        browser.execute_async_script(f"const done = arguments[0]; (async () => {{{_SHORTEN} done(); }})();")
        browser.set_window_size(_WIDTH, 1000)
        height = browser.execute_script("return document.documentElement.scrollHeight")
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": _WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        return base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {"optimizeForSpeed": False})["data"])
    finally:
        browser.quit()


def main() -> None:
    """Write both screenshots."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        run().to_html(page)
        for name, scheme in (("report.png", "light"), ("report-dark.png", "dark")):
            (DOCS / name).write_bytes(take(page, scheme))


if __name__ == "__main__":
    main()
