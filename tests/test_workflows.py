"""The workflows: what they run is pinned, and what they test is what the tables of pyproject.toml say."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
if not WORKFLOWS:
    pytest.skip("the sdist has no workflows", allow_module_level=True)
CI, RELEASE, WHEELS = (
    (ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8") for name in ("ci", "release", "wheels")
)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_each_action_is_pinned_by_its_hash(workflow):
    used = re.findall(r"uses: (.+)", workflow.read_text(encoding="utf-8"))
    theirs = [action for action in used if not action.startswith("$/")]
    assert [action for action in theirs if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action)] == []


def test_an_action_has_one_version_everywhere():
    text = "\n".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    pinned = {tuple(found) for found in re.findall(r"uses: ([\w/-]+)@(\w+)", text)}
    assert len(pinned) == len({action for action, _ in pinned})


def test_each_target_that_is_run_is_one_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"run: make ([\w-]+)", CI))
    assert targets >= {"test-all", "test-core", "check", "demo", "docs"}
    assert {target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)} == set()


def test_the_platforms_are_those_of_the_table():
    tomllib = pytest.importorskip("tomllib", reason="tomllib is new in Python 3.11")
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["polycast"]["platforms"]
    program = textwrap.dedent(re.search(r"python3 -c '\n(.*?)'\)", CI, re.DOTALL)[1])
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [row for row in table if row["runner"] != "ubuntu-latest"]
    assert {row["platform"].partition(",")[0] for row in table} == {"Linux", "macOS", "Windows"}


def test_what_publishes_has_no_password():
    assert "id-token: write" in RELEASE
    assert "secrets" not in RELEASE
    assert "password:" not in RELEASE


def test_the_issue_templates_ask_for_what_the_doctor_says():
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 3
    assert [path.name for path in forms if "`polycast doctor`" not in path.read_text(encoding="utf-8")] == []


def test_nothing_is_published_that_was_not_installed_in_a_clean_environment():
    assert re.search(r"^  publish:\n(?:    .*\n)*?    needs: \[wheels, try\]$", RELEASE, re.MULTILINE)
    tried = RELEASE.partition("\n  try:\n")[2].partition("\n  publish:\n")[0]
    assert "python -m venv clean" in tried
    assert "actions/checkout" not in tried  # nothing but what was built
    assert 'polycast" doctor' in tried
    assert re.search(r"if: matrix\.kind == 'wheel'\n.*\n +run: echo \"CXX=no-compiler\"", tried)


def test_what_is_published_has_absolute_links():
    builds = re.findall(r"make wheels|pipx run build", WHEELS)
    absolute = re.findall(r"tools/for_index\.py \"\$GITHUB_SERVER_URL/\$GITHUB_REPOSITORY\"", WHEELS)
    assert len(absolute) == len(builds) == 2


def test_the_releases_are_tried_on_the_ends_of_the_table():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = re.findall(r'python = "([\d.]+)", torch = "([^"]+)"', project)
    tried = re.findall(r'python: "([\d.]+)", torch: "([^"]+)"', RELEASE)
    assert set(tried) == {table[0], table[-1]}
