"""The pictures of the documentation are up to date and accessible."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
LLAMA = ["llama.svg"] if (DOCS / "llama.svg").exists() else []
"""Its benchmark needs llama.cpp, so it may not have been measured."""
PICTURES = ["architecture.svg", "devices.svg", "gpu.svg", *LLAMA, "report.svg", "slower.svg", "speed.svg"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_all_pictures_are_generated(module):
    assert sorted(module("pictures.draw").PICTURES) == sorted(path.name for path in DOCS.glob("*.svg")) == PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_up_to_date(module, name):
    assert (DOCS / name).read_text(encoding="utf-8") == str(module("pictures.draw").PICTURES[name]())


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_legible_in_the_dark_and_in_a_page_of_400_pixels_and_has_a_description(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    (title, description) = (root.find(f"{{http://www.w3.org/2000/svg}}{each}").text for each in ("title", "desc"))
    assert title
    assert len(description) > 40
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|href", text) == []
    width = float(re.search(r'viewBox="0 0 (\d+) ', text)[1])
    assert min(map(float, re.findall(r'font-size="([\d.]+)"', text))) * 400 / width >= 9.5


def test_picture_of_llama_shows_the_saved_times(module, save):
    speed = module("pictures.speed")

    def save_times(seconds):
        rows = [
            {"what": f"{step}, {side}", "sides": [side, "float32"], "times": time and [time, 0.25], "threads": threads}
            for step in speed.ON_LLAMA_CPP
            for side, time in seconds.items()
            for threads in (1, 2)
        ]
        save("llama-cpp", *rows, {"what": "int8, memory", "sides": ["", ""], "times": None, "threads": 1})

    assert not speed.has_llama()
    save_times({"Q8_0": None, "int8": None})
    assert not speed.has_llama()
    save_times({"a bfloat16 copy": 0.125, "Q8_0": 0.05, "int8": 0.025, "Q4_0": None, "int4": 0.02})
    assert speed.has_llama()
    bars = "float32 1.00, bfloat16 copy 0.50, llama.cpp, Q8_0 0.20, polycast, int8 0.10, llama.cpp, Q4_0 left out"
    assert f"decoding a token: {bars}, polycast, int4 0.08" in str(speed.draw_llama())


def test_generated_parts_of_pages_are_up_to_date(module):
    pages = [
        (each, path, path.read_text(encoding="utf-8")) for each in module("__main__").GENERATORS for path in each.PAGES
    ]
    assert len(pages) == 9
    assert [path.name for each, path, page in pages if each.updated(page) != page] == []
    assert all("<!-- end -->" in page for _, _, page in pages)


def test_readme_has_the_current_figures():
    for name in ("gain", "region"):
        assert re.search(rf"<!-- figure of {name}: make docs -->\n.*\*\*\d\.\d\d\*\* of float32's time", README)
    assert "| 2.11 | 3.10 |" in README
    assert re.search(r"!\[Time, where .*float32 \d\.\d\d.*\]\(docs/llama\.svg\)", README)


def test_pictures_of_readme_have_alternative_text():
    words = [each for each, _ in re.findall(r"!\[(.*?)\]\((.*?)\)", README)]
    assert [len(each) >= 40 for each in words] == [True] * 3


@pytest.fixture
def run():
    """Return the saved run of a benchmark of two cases: in the first all ways gain, in the second the region loses."""

    def result(case, way, seconds, spread=None):
        times = seconds and [seconds, 2.0]
        about = {"against": "float32", "sides": [way, "float32"], "threads": 2, "spread": spread}
        return {"what": f"{case}, {way}", "measured": seconds and seconds / 2.0, "times": times, **about}

    again = "float32, in torch.autocast's process"
    return {
        "results": [
            result("a, b", "torch.autocast", 1.2),
            result("a, b", "a plain region", 1.0, [0.5, 0.6]),
            result("a, b", again, 2.2),
            result("c", "torch.autocast", None),
            result("c", "a plain region", 1.98),
            result("c", again, 2.0),
        ]
    }


def test_times_are_relative_to_float32_with_the_end_of_their_spread(module, run):
    speed = module("pictures.speed")
    found = speed.times(run)
    assert found["a, b"]["a plain region"] == pytest.approx((0.5, 0.6))
    assert (found["a, b"]["torch.autocast"], found["a, b"]["float32"]) == ((0.6, None), (1.0, None))
    assert found["c"]["torch.autocast"] is None


def test_a_region_gains_nothing_where_it_takes_as_long_as_float32_or_torch(module, run):
    speed = module("pictures.speed")
    assert speed.without_gain(speed.times(run)) == [(0.99, "c")]
    run["results"][0]["times"][0] = 1.0
    assert [case for _, case in speed.without_gain(speed.times(run))] == ["a, b", "c"]


def test_the_sentence_about_noise_is_computed_from_float32_in_two_processes(module, run):
    figures = module("readme_figures")
    assert "differs by 5% in half of the 2 cases, and by up to 10%" in figures._noise(figures.speed.times(run))


@pytest.mark.parametrize("name", ["gpu.svg", *LLAMA, "slower.svg", "speed.svg"])
def test_a_picture_of_times_names_the_machine_threads_date_and_command(name):
    text = re.sub(r"</text>\n<text.*?>", " ", (DOCS / name).read_text(encoding="utf-8"))
    assert re.search(r"\d+ cores, \d+ threads?, torch 2\.\d+", text)
    assert re.search(r"20\d\d-\d\d-\d\d", text)
    assert re.search(r"make bench BENCH=&quot;--save --only [\w-]+( --threads \d)*&quot;", text)


def test_readme_names_each_backend_in_the_table_of_devices():
    devices = README.partition("## Devices")[2].partition("##")[0]
    rows = [line for line in devices.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    folders = {path.name for path in (ROOT / "backends/polycast_backends").iterdir()}
    assert named == folders - {"__pycache__", "generic"}


def test_readme_is_short_and_has_the_words_that_people_search_for():
    assert len(README.splitlines()) < 150
    assert [word for word in ("GPU", "quantization", "int8", "mixed precision") if word not in README] == []
