"""The output of `polycast devices`, from docs/figures/devices.json."""

import json
from pathlib import Path

from .svg import Picture

FIGURES = Path(__file__).parent.parent / "figures"
_KINDS = {"ready": "good", "unavailable": "wait", "broken": "bad", "conflict": "bad"}
_COLUMNS = {"device": 24, "state": 160, "default": 280, "supported": 376, "from": 556}


def draw() -> Picture:
    """Draw the table, and below it why devices cannot be used."""
    devices = json.loads((FIGURES / "devices.json").read_text(encoding="utf-8"))
    reasons = [each for each in devices if each["state"] != "missing" and each["reason"]]
    missing = [each["device_type"] for each in devices if each["state"] == "missing"]
    height = 92 + 22 * (len(devices) + len(reasons) + 1) + 24
    states = (f"{each['device_type']} {each['state']}" for each in devices)
    picture = Picture(760, height, "polycast devices", f"The state of each device's backend: {', '.join(states)}.")
    picture.text(24, 32, "$ polycast devices", "mono bold", size=13)
    for name, x in _COLUMNS.items():
        picture.text(x, 62, name, "mono quiet", size=12.5)
    picture.line(24, 72, 736, 72)
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
            picture.text(x, y, words, kind, size=12.5)
        y += 22
    picture.line(24, y - 10, 736, y - 10)
    y += 12
    for each in reasons:
        picture.text(24, y, f"{each['device_type']}: {each['reason']}", "mono quiet", size=12)
        y += 22
    picture.text(24, y, f"{', '.join(missing)}: A plugin is needed", "mono quiet", size=12)
    return picture
