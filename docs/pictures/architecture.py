"""Draw the path of an op through polycast."""

from .svg import Picture


def draw() -> Picture:
    """Draw the calls when a region is entered and an op runs."""
    picture = Picture(
        860,
        560,
        "The path of an op through polycast",
        "A region finds its backend, which is a plugin, pushes a frame that sets torch's thread-local state, and "
        "installs kernels at torch's Autocast key; an op reaches the kernels at that key, which cast its inputs and "
        "call it again.",
    )

    def group(y: float, height: float, name: str) -> None:
        picture.box(20, y, 820, height, "panel", radius=8)
        picture.text(34, y + 20, name, "quiet", size=12)

    def box(x: float, y: float, name: str, what: str) -> None:
        picture.box(x, y, 180, 48, "ground", radius=6)
        picture.text(x + 90, y + 20, name, "bold", size=13, anchor="middle")
        picture.text(x + 90, y + 38, what, "quiet", size=11.5, anchor="middle")

    picture.text(430, 28, 'with polycast.autocast("xpu"):', "mono", size=14, anchor="middle")
    group(52, 244, "core/polycast")
    picture.arrow((430, 36), (430, 82))
    box(340, 82, "region", "settings; enter and leave")
    box(40, 158, "plugins", "discovery, loading, status")
    box(340, 158, "engine/state", "frames of this thread")
    box(630, 158, "engine/kernels", "at the Autocast keys")
    box(340, 234, "engine/casts", "cached casts")
    box(630, 234, "cast policy", "what is cast, and to what")
    picture.arrow((340, 106), (130, 106), (130, 158))
    picture.text(140, 98, "1: find the backend", "quiet", size=12)
    picture.arrow((430, 130), (430, 158))
    picture.text(440, 148, "2: push a frame", "quiet", size=12)
    picture.arrow((520, 106), (720, 106), (720, 158))
    picture.text(530, 98, "3: install kernels (first time)", "quiet", size=12)
    picture.arrow((720, 206), (720, 234))
    picture.arrow((630, 258), (520, 258))
    group(316, 84, "backends")
    picture.text(320, 364, "cpu, cuda, xpu, mps, mtia, maia,", "quiet", size=12)
    picture.text(320, 380, "and others, and yours", "quiet", size=12)
    picture.box(40, 344, 180, 48, "ground", radius=6)
    picture.text(130, 364, "Backend", "bold", size=13, anchor="middle")
    picture.text(130, 382, "dtype, availability, op table", "quiet", size=11.5, anchor="middle")
    picture.arrow((130, 206), (130, 344))
    picture.text(140, 262, "an entry point,", "quiet", size=12)
    picture.text(140, 278, "imported at first use", "quiet", size=12)
    group(420, 122, "torch")
    box(330, 470, "thread-local state", "enabled, dtype, nesting")
    box(630, 470, "Autocast key", "an op arrives here")
    box(40, 470, "autograd, kernels", "of the device")
    picture.arrow((340, 182), (300, 182), (300, 450), (420, 450), (420, 470))
    picture.text(308, 444, "sets", "quiet", size=12)
    picture.arrow((510, 494), (630, 494))
    picture.text(536, 486, "key active", "quiet", size=12)
    picture.arrow((810, 494), (828, 494), (828, 182), (810, 182))
    picture.text(820, 414, "an op", "quiet", size=12, anchor="end")
    picture.arrow((680, 282), (680, 408), (130, 408), (130, 470))
    picture.text(140, 444, "the op again, inputs cast", "quiet", size=12)
    return picture
