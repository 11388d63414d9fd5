"""Building the native engine: once, atomically, and with a fallback if it fails.

The compiler of these tests is a script that counts its calls and copies a library that is built already.
"""

import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from filelock import FileLock

import polycast
from polycast.engine import choice, installation
from polycast.engine.native.engine_library import ENGINE
from polycast.toolchain import build
from polycast.toolchain.build import get_or_build
from polycast.toolchain.cache_folder import cache_directory
from polycast.toolchain.compiler import checksum
from polycast.toolchain.cpp_library import BuildError, CppLibrary


def test_the_engine_is_built_once_with_a_message(compiler, home, capfd):
    first = get_or_build(home, ENGINE)
    assert capfd.readouterr().err.startswith(
        "polycast: building the native engine, once for this torch, in about half a minute"
    )
    assert get_or_build(home, ENGINE) == first
    assert capfd.readouterr().err == ""
    assert compiler.calls == 1
    assert not list(first.parent.glob("tmp*"))


def test_a_build_is_logged_with_its_path_and_time(compiler, home, logged):
    path = get_or_build(home, ENGINE)
    (_, begin), (_, end) = logged.take()
    assert begin == f"the build of the native engine begins: {path}"
    assert re.fullmatch(rf"the build ended with status 0 after [0-9.]+ s: {re.escape(str(path))}", end)
    get_or_build(home, ENGINE)
    assert logged.take() == []


def test_other_sources_or_another_torch_need_another_build(compiler, home, monkeypatch):
    builds = {get_or_build(home, ENGINE)}
    sources = ENGINE.read_sources()
    for name in ("binding.cpp", "parallel.h"):
        assert name in sources
        with monkeypatch.context() as changed:
            changed.setattr(CppLibrary, "read_sources", lambda _, name=name: {**sources, name: b"// another"})
            builds.add(get_or_build(home, ENGINE))
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.99"))
    builds.add(get_or_build(home, ENGINE))
    assert len(builds) == compiler.calls == 4


DAMAGES = {
    "truncated": lambda library: os.truncate(library, 1000),
    "another": lambda library: library.write_bytes(b"of a build that was killed"),
    "no checksum": lambda library: library.with_suffix(".sha256").unlink(),
    "half a checksum": lambda library: os.truncate(library.with_suffix(".sha256"), 10),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_build_is_built_again(compiler, home, damage):
    library = get_or_build(home, ENGINE)
    damage(library)
    assert get_or_build(home, ENGINE) == library
    assert library.stat().st_size > 1000
    assert compiler.calls == 2


EIGHT = """
import os, sys
from pathlib import Path
from polycast.engine.native.engine_library import ENGINE
from polycast.toolchain.build import get_or_build
for _ in range(8):
    if os.fork() == 0:
        print(get_or_build(Path(sys.argv[1]), ENGINE), flush=True)
        os._exit(0)
sys.exit(sum(os.wait()[1] for _ in range(8)))
"""


@pytest.mark.slow
def test_eight_processes_build_the_engine_once(compiler, home, launch):
    done = launch(EIGHT, home)
    assert done.returncode == 0, done.stderr
    paths = done.stdout.splitlines()
    assert (len(paths), len(set(paths))) == (8, 1)
    assert compiler.calls == 1


def test_threads_try_a_failing_build_once_with_one_warning(compiler, home, monkeypatch):
    compiler.behave(status=3)
    installation.forget_choice()
    monkeypatch.setenv("POLYCAST_ENGINE", "auto")
    both = threading.Barrier(2)

    def lock(path):
        both.wait()
        return FileLock(path)

    monkeypatch.setattr("filelock.FileLock", lock)
    with (
        pytest.warns(UserWarning, match="the native engine cannot be built") as warnings_seen,
        ThreadPoolExecutor(2) as threads,
    ):
        installed = [threads.submit(polycast.install, "cpu") for _ in range(2)]
    assert [each.result() for each in installed] == [None, None]
    assert choice.choose_engine().name == "reference"
    installation.forget_choice()
    assert (len(warnings_seen), compiler.calls) == (1, 1)


@pytest.mark.parametrize("command", ["no-such-compiler", "'c++ -O1", "{} -O1"])
def test_a_build_of_any_compiler_for_this_torch_is_used(compiler, home, monkeypatch, command):
    library = get_or_build(home, ENGINE)
    monkeypatch.setenv("CXX", command.format(compiler.command))
    assert get_or_build(home, ENGINE) == library
    assert compiler.calls == 1


@pytest.mark.parametrize("command", ["{} -O1", "{}", "no-such-compiler"])
def test_a_build_that_does_not_load_is_replaced_if_another_compiler_made_it(
    compiler, home, monkeypatch, wanted, command
):
    other = get_or_build(home, ENGINE)
    other.write_bytes(b"\x7fELF for another libc")
    other.with_suffix(".sha256").write_text(checksum(other))
    monkeypatch.setenv("CXX", command.format(compiler.command))
    if command != "{} -O1":
        engine = wanted("auto")
        assert engine.name == "reference"
        assert re.search(f"{other} does not load: .* Remove it to have it built again", engine.build_failure)
    else:
        assert wanted("auto").name == "native"
        assert compiler.calls == 2


@pytest.mark.parametrize(
    ("status", "also"),
    [
        (137, ""),
        (1, "print('c++: fatal error: Killed signal terminated program cc1plus')"),
        (1, "print('fatal error: error writing to /tmp/x.s: No space left on device')"),
        (1, "print('cc1plus: out of memory allocating 65536 bytes')"),
        (0, "import signal; os.kill(os.getpid(), signal.SIGKILL)"),
    ],
    ids=["status", "driver", "space", "memory", "signal"],
)
def test_a_killed_compiler_is_tried_again_by_the_next_process(compiler, home, status, also):
    compiler.behave(status=status, also=also)
    with pytest.raises(BuildError, match=r"was killed, or had no memory or space.*The next process tries again\."):
        get_or_build(home, ENGINE)
    compiler.behave(status=0)
    assert get_or_build(home, ENGINE).is_file()


def test_waiting_for_another_build_prints_a_message(compiler, home, monkeypatch):
    library = get_or_build(home, ENGINE)
    library.unlink()
    lock = FileLock(library.parent / "lock")
    lock.acquire()
    said = []

    class Stderr:
        def write(self, text):
            said.append(text)
            lock.release(force=True)

        def flush(self):
            pass

    monkeypatch.setattr(build, "_SILENT_WAIT", 0.01)
    monkeypatch.setattr(sys, "stderr", Stderr())
    assert get_or_build(home, ENGINE) == library
    assert said[0] == (
        f"polycast: waiting for another process that builds the native engine; its lock is {library.parent / 'lock'}\n"
    )


def test_a_failed_build_is_tried_again_only_with_retry(compiler, home):
    compiler.behave(status=3)
    with pytest.raises(BuildError, match="the compiler failed with status 3"):
        get_or_build(home, ENGINE)
    with pytest.raises(BuildError, match=r"it failed before; its output is in .*\.log\. `polycast build` tries"):
        get_or_build(home, ENGINE)
    assert compiler.calls == 1
    compiler.behave(status=0)
    assert get_or_build(home, ENGINE, retry=True) == get_or_build(home, ENGINE)
    assert compiler.calls == 2


def test_the_reference_engine_builds_nothing(compiler, home, wanted):
    assert wanted("reference").name == "reference"
    assert compiler.calls == 0
    assert not home.exists()


def test_an_unknown_engine_is_refused_and_installs_nothing(monkeypatch):
    installation.forget_choice()
    monkeypatch.setenv("POLYCAST_ENGINE", "turbo")
    with pytest.raises(ValueError, match=r"^POLYCAST_ENGINE='turbo' is invalid: expected one of auto, native, refer"):
        polycast.install("cpu")
    monkeypatch.delenv("POLYCAST_ENGINE")
    assert not installation.installed


@pytest.mark.parametrize("named", ["", "cache", "../cache", "."])
def test_a_relative_cache_home_is_ignored(monkeypatch, tmp_path, named):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert cache_directory() == tmp_path / ".cache" / "polycast"
