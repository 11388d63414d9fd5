"""The check of a file that a command will write."""

import re
from pathlib import Path

import pytest

from polycast_plugins.cli import check_output


def test_check_output_leaves_a_writable_file_unchanged(tmp_path):
    (tmp_path / "there.html").write_text("old")
    check_output(tmp_path / "there.html")
    check_output(tmp_path / "new.html")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"there.html": "old"}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "missing/report.html",
            "{0}/missing/report.html cannot be written: {0}/missing does not exist. Create it, or choose",
        ),
        ("file/report.html", "{0}/file/report.html cannot be written: {0}/file is not a folder. Create it, or choose"),
        ("folder", "{0}/folder is a folder: name a file in it, such as {0}/folder/report.html."),
        ("/proc/report.html", "/proc/report.html cannot be written: "),
    ],
)
def test_check_output_refuses_unwritable_paths(tmp_path, path, said):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    if path.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("there is no /proc here, which nobody can make files in")
    with pytest.raises(ValueError, match="^" + re.escape(said.format(tmp_path))):
        check_output(tmp_path / path)
