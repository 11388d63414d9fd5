"""Draw the pictures of the documentation from docs/figures."""

from pathlib import Path

from . import architecture, devices, report, speed

DOCS = Path(__file__).parent.parent
PICTURES = {
    "architecture.svg": architecture.draw,
    "devices.svg": devices.draw,
    "gpu.svg": speed.draw_gpu,
    "report.svg": report.draw,
    "slower.svg": speed.draw_slower,
    "speed.svg": speed.draw,
    **({"llama.svg": speed.draw_llama} if speed.has_llama() else {}),
}


def main() -> None:
    """Write each picture."""
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(str(draw()), encoding="utf-8")
