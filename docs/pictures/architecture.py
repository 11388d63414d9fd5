"""Draw the path of an op through polycast."""

from .svg import Picture

_LEFT, _RIGHT, _WIDTH = 36, 324, 192


def draw() -> Picture:
    """Draw the calls when a region is entered and an op runs."""
    picture = Picture(
        540,
        552,
        "The path of an op through polycast",
        "A region finds its backend, which is a plugin, pushes a frame that sets torch's thread-local state, and "
        "installs kernels at torch's Autocast key; an op reaches the kernels at that key, which cast its inputs and "
        "call it again.",
    )

    def group(x: float, y: float, height: float, name: str) -> None:
        picture.box(x, y, 532 - x if x > 200 else 232, height, "panel", radius=8)
        picture.text(x + 12, y + 21, name, "quiet", size=13)

    def box(x: float, y: float, name: str, what: str) -> None:
        picture.box(x, y, _WIDTH, 50, "ground", radius=6)
        picture.text(x + _WIDTH / 2, y + 21, name, "bold", size=14, anchor="middle")
        picture.text(x + _WIDTH / 2, y + 40, what, "quiet", size=13, anchor="middle")

    def step(y: float, words: str, *, back: bool = False) -> None:
        ends = (_LEFT + _WIDTH, y), (_RIGHT, y)
        picture.arrow(*(reversed(ends) if back else ends))
        picture.text(276, y - 6, words, "quiet", size=13, anchor="middle")

    picture.text(_LEFT, 28, 'with polycast.autocast("xpu"):', "mono", size=14)
    group(8, 60, 484, "core/polycast")
    group(312, 128, 92, "backends: cpu, cuda, yours, ...")
    group(312, 236, 308, "torch")
    box(_LEFT, 90, "region", "settings; enter and leave")
    box(_LEFT, 162, "registry", "discovery and loading")
    box(_LEFT, 266, "engine/state", "frames of this thread")
    box(_LEFT, 338, "engine/kernels", "at the Autocast keys")
    box(_LEFT, 412, "cast policy", "what is cast, and to what")
    box(_LEFT, 484, "engine/casts", "cached casts")
    box(_RIGHT, 162, "Backend", "dtypes and op table")
    box(_RIGHT, 266, "thread-local state", "enabled, dtype, nesting")
    box(_RIGHT, 338, "Autocast key", "an op arrives here")
    box(_RIGHT, 484, "autograd, kernels", "of the device")
    picture.arrow((130, 36), (130, 90))
    for y in (187, 291, 363):
        picture.arrow((_LEFT, 115), (22, 115), (22, y), (_LEFT, y))
    step(187, "1: find")
    step(291, "2: set")
    step(354, "3: install")
    step(378, "4: an op", back=True)
    picture.arrow((132, 388), (132, 412))
    picture.arrow((132, 462), (132, 484))
    picture.arrow((420, 316), (420, 338))
    picture.text(430, 332, "key active", "quiet", size=13)
    step(509, "5: again")
    return picture
