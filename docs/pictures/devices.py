"""The output of `polycast devices`, from docs/figures/devices.json."""

import json
import textwrap
from pathlib import Path

from .svg import Picture

FIGURES = Path(__file__).parent.parent / "figures"
_KINDS = {"ready": "good", "unavailable": "wait", "broken": "bad", "conflict": "bad"}
_COLUMNS = {"device": 16, "state": 76, "default": 178, "supported": 258, "from": 410}
_WIDTH, _HEIGHT, _LETTERS = 544, 22, 62


def draw() -> Picture:
    """Draw the table, and below it why devices cannot be used. Those that need a plugin are not listed."""
    found = json.loads((FIGURES / "devices.json").read_text(encoding="utf-8"))
    devices = [each for each in found if each["state"] != "missing"]
    reasons = [f"{each['device_type']}: {each['reason']}" for each in devices if each["reason"]]
    others = ["Other devices need a plugin: polycast devices --all"] if len(devices) < len(found) else []
    lines = [line for each in reasons + others for line in textwrap.wrap(each, _LETTERS, subsequent_indent="  ")]
    states = (f"{each['device_type']} {each['state']}" for each in devices)
    height = 92 + _HEIGHT * (len(devices) + len(lines)) + 24
    picture = Picture(_WIDTH, height, "polycast devices", f"The state of each device's backend: {', '.join(states)}.")
    picture.text(16, 32, "$ polycast devices", "mono bold", size=14)
    for name, x in _COLUMNS.items():
        picture.text(x, 62, name, "mono quiet", size=13.5)
    picture.line(16, 72, _WIDTH - 16, 72)
    y = 92
    for each in devices:
        cells = (
            (each["device_type"], "mono"),
            (each["state"], f"mono {_KINDS.get(each['state'], 'quiet')}"),
            (each["default_dtype"] or "-", "mono"),
            (", ".join(each["supported_dtypes"] or "-"), "mono"),
            (f"{each['distribution'] or '-'} {each['version'] or ''}", "mono"),
        )
        for x, (words, kind) in zip(_COLUMNS.values(), cells, strict=True):
            picture.text(x, y, words, kind, size=13.5)
        y += _HEIGHT
    picture.line(16, y - 10, _WIDTH - 16, y - 10)
    for number, line in enumerate(lines):
        picture.text(16, y + 12 + _HEIGHT * number, line, "mono quiet", size=13)
    return picture
