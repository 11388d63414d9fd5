"""The cache of builds: only trusted files are loaded, and leftovers are removed."""

import os
import re
import signal

import pytest

from polycast.engine.native.engine_library import ENGINE
from polycast.toolchain import load
from polycast.toolchain.build import get_or_build
from polycast.toolchain.cache_folder import UntrustedCacheError
from polycast.toolchain.compiler import checksum

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has other owners and permissions")
only_root = pytest.mark.skipif(
    hasattr(os, "geteuid") and os.geteuid() != 0, reason="only root can give a file to another user"
)
SOMEBODY = 12345
REMEDY = (
    ", so what is in it may be somebody else's. Remove {}, which polycast then creates again, or set "
    "XDG_CACHE_HOME to a "
)


@pytest.fixture
def umask():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture(params=["cache", "torch", "compiler"])
def folder(request, compiler, home):
    """One of the folders of a build."""
    library = get_or_build(home, ENGINE)
    library.write_bytes(b"of somebody else")
    library.with_suffix(".sha256").write_text(checksum(library))
    return {"cache": home, "torch": library.parent.parent, "compiler": library.parent}[request.param]


def everybodys(folder):
    folder.chmod(0o777)
    return rf"{folder} can be written by others \(drwxrwxrwx\)"


def groups(folder):
    folder.chmod(0o770)
    return rf"{folder} can be written by others \(drwxrwx---\)"


def somebodys(folder):
    os.chown(folder, SOMEBODY, -1)
    return rf"{folder} belongs to another user \(uid {SOMEBODY}\)"


WAYS = [everybodys, groups, pytest.param(somebodys, marks=only_root)]


def test_permissions_of_the_cache(compiler, home, umask):
    library = get_or_build(home, ENGINE)
    assert [oct(path.stat().st_mode & 0o777) for path in (home, library.parent.parent, library.parent)] == ["0o700"] * 3
    assert [oct(file.stat().st_mode & 0o022) for file in (library, library.with_suffix(".sha256"))] == ["0o0"] * 2


@pytest.mark.parametrize("give", WAYS)
def test_a_folder_that_others_can_write_is_refused(folder, give, compiler, home):
    with pytest.raises(UntrustedCacheError, match=give(folder) + REMEDY.format(home)):
        get_or_build(home, ENGINE)
    assert compiler.calls == 1


def test_a_folder_that_others_can_write_is_refused_without_a_compiler(folder, home, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UntrustedCacheError, match=everybodys(folder) + REMEDY.format(home)):
        get_or_build(home, ENGINE)


def test_with_an_untrusted_cache_the_engine_is_built_for_this_process(compiler, home, monkeypatch, tmp_path, wanted):
    place = get_or_build(home, ENGINE).parent
    said = everybodys(place)
    elsewhere = tmp_path / "temporary"
    elsewhere.mkdir()
    monkeypatch.setattr(load.tempfile, "tempdir", str(elsewhere))
    message = (
        f"^polycast built the native engine for this process alone, as each process will: {said}{REMEDY.format(home)}"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        assert wanted("auto").name == "native"
    assert len(caught) == 1
    assert compiler.calls == 2
    assert list(elsewhere.iterdir()) == []


def test_both_reasons_are_given_if_that_build_fails(compiler, home, wanted):
    said = everybodys(get_or_build(home, ENGINE).parent)
    compiler.behave(status=1)
    message = f"{said}{REMEDY.format(home)}.* It cannot be built elsewhere either: the compiler failed with status 1"
    engine = wanted("auto")
    assert engine.name == "reference"
    assert re.match(message, engine.build_failure)


@pytest.mark.parametrize("give", [lambda file: file.chmod(0o666), pytest.param(somebodys, marks=only_root)])
@pytest.mark.parametrize("suffix", [".so", ".sha256"])
def test_a_file_that_others_can_write_is_replaced(compiler, home, suffix, give):
    library = get_or_build(home, ENGINE)
    give(library.with_suffix(suffix))
    assert get_or_build(home, ENGINE) == library
    assert compiler.calls == 2
    status = library.with_suffix(suffix).stat()
    assert (status.st_uid, status.st_mode & 0o022) == (os.geteuid(), 0)


def test_a_parent_folder_that_everybody_can_write_is_refused(compiler, home):
    home.parent.chmod(0o777)
    with pytest.raises(UntrustedCacheError, match=rf"{home.parent} can be written by everybody \(drwxrwxrwx\)"):
        get_or_build(home, ENGINE)


def test_a_sticky_parent_folder_is_trusted(compiler, home):
    home.parent.chmod(0o1777)
    assert get_or_build(home, ENGINE).is_file()


def test_a_cache_that_is_a_link_is_trusted(compiler, home, tmp_path):
    (tmp_path / "large disk").mkdir(mode=0o700)
    home.symlink_to(tmp_path / "large disk", target_is_directory=True)
    assert get_or_build(home, ENGINE).resolve().is_relative_to(tmp_path / "large disk")


@only_root
def test_a_link_of_another_user_is_refused(compiler, home, tmp_path):
    (tmp_path / "large disk").mkdir(mode=0o700)
    home.symlink_to(tmp_path / "large disk", target_is_directory=True)
    os.lchown(home, SOMEBODY, -1)
    with pytest.raises(UntrustedCacheError, match=rf"{home} belongs to another user \(uid {SOMEBODY}\)"):
        get_or_build(home, ENGINE)


@only_root
def test_a_build_of_root_is_trusted(compiler, home, monkeypatch):
    library = get_or_build(home, ENGINE)
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    assert get_or_build(home, ENGINE) == library
    assert compiler.calls == 1


KILLED = """
import sys
from pathlib import Path
from polycast.engine.native.engine_library import ENGINE
from polycast.toolchain.build import get_or_build
get_or_build(Path(sys.argv[1]), ENGINE)
"""


@pytest.mark.slow
def test_a_build_removes_the_leftovers_of_a_killed_one(compiler, home, launch):
    compiler.behave(status=0, also="open(sys.argv[sys.argv.index('-o') + 1], 'w'); os.kill(os.getppid(), 9)")
    assert launch(KILLED, home).returncode == -signal.SIGKILL
    left = [path for path in home.rglob("*") if path.suffix == ".so"]
    assert len(left) == 1
    compiler.behave(status=0)
    library = get_or_build(home, ENGINE)
    assert [path for path in library.parent.iterdir() if path.is_dir()] == []
    assert [path for path in home.rglob("*") if path.suffix == ".so"] == [library]
