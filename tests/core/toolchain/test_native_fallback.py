"""Every failure to build the native engine: the reference engine runs instead, with one warning that says what to do.

With POLYCAST_ENGINE=native the same text is an error.
"""

import contextlib
import errno
import importlib
import os
import pwd
import signal
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import filelock
import pytest
import torch

import polycast
from polycast.engine import installation
from polycast.engine.native.engine_library import ENGINE
from polycast.plugin import Availability
from polycast.toolchain import cpp_library, prebuilt
from polycast.toolchain.build import get_or_build
from polycast.toolchain.cpp_library import BuildError


def no_home(monkeypatch, folder):
    """HOME is unset and the user is unknown, as in some containers."""

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def relative_home(monkeypatch, folder):
    monkeypatch.setenv("HOME", "a/folder")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def script(text, mode=0o755):
    """Return a way to fail: a file is the compiler."""

    def use(monkeypatch, folder):
        file = folder / "compiler"
        file.write_bytes(text.encode("latin-1"))
        file.chmod(mode)
        monkeypatch.setenv("CXX", str(file))

    return use


def cache_is_a_file(monkeypatch, folder):
    (folder / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))


def refused(owner, name, error):
    """Return a way to fail: a function raises an error."""

    def refuse(*arguments, **keywords):
        raise error

    return lambda monkeypatch, folder: monkeypatch.setattr(owner, name, refuse)


def no_sources(monkeypatch, folder):
    monkeypatch.setattr(cpp_library.importlib.resources, "files", lambda package: folder)


NO_HOME = r"no home directory is known to cache it in\. Set XDG_CACHE_HOME to a folder of yours, or HOME\."
NO_RUN = r"the C\+\+ compiler '.*compiler' does not run: .*{}.*\. Name another in CXX\."
FAILED = (
    r"the compiler failed with status {}; its output is in .*\.log\. When the cause is fixed, `polycast build` tries"
)
NO_WRITE = r"nothing can be written to .*: .*{}.*\. Set XDG_CACHE_HOME to a folder of yours that has room\."
OTHER_ENCODING = script("#!/bin/sh\necho 'Version fran\xe7aise'\necho 'Fichier pr\xe9compil\xe9' >&2\nexit 1\n")
KILLED = '#!/bin/sh\ncase "$*" in *--version*) exit;; esac\nkill -9 $$\n'
READ_ONLY = OSError(errno.EROFS, "Read-only file system")
FULL = OSError(errno.ENOSPC, "No space left on device")
NO_LOCKS = NotImplementedError("FileSystem does not appear to support flock")
WAYS = {
    "no home": (no_home, NO_HOME),
    "relative home": (relative_home, NO_HOME),
    "open quote": (
        lambda monkeypatch, folder: monkeypatch.setenv("CXX", "'c++ -O1"),
        r"CXX=\"'c\+\+ -O1\" is not a command: No closing quotation\. Correct or unset the variable\.",
    ),
    "not executable": (
        script("", mode=0o644),
        r"no C\+\+ compiler is found, and .*\. Install a .* CXX, which is .* now\.",
    ),
    "no program": (script("of another processor"), NO_RUN.format("Exec format error")),
    "no interpreter": (script("#!/no/such/interpreter\n"), NO_RUN.format("No such file")),
    "other encoding": (OTHER_ENCODING, FAILED.format(1)),
    "killed": (
        script(KILLED),
        r"the compiler was killed, or had no memory or space: status -9\. The next process tries again\.",
    ),
    "cache is a file": (cache_is_a_file, NO_WRITE.format("Not a directory")),
    "read-only": (refused(Path, "mkdir", READ_ONLY), NO_WRITE.format("Read-only file system")),
    "full": (refused(Path, "write_bytes", FULL), NO_WRITE.format("No space left on device")),
    "no locks": (refused(filelock, "FileLock", NO_LOCKS), NO_WRITE.format("does not appear to support flock")),
    "anything else": (refused(prebuilt, "find_compiler", LookupError("no answer")), r"LookupError: no answer\."),
    "no sources": (no_sources, r"its C\+\+ sources are not in .*\. Install polycast with all its files\."),
}


@pytest.fixture(params=WAYS)
def reason(request, compiler, home, monkeypatch, tmp_path):
    """Make the native engine fail, and return the expected reason."""
    way, reason = WAYS[request.param]
    way(monkeypatch, tmp_path)
    return reason


def test_the_reference_engine_runs_with_one_warning(reason, wanted):
    said = "^Regions run on polycast's reference engine, .* caches no weights: the native engine cannot be built: "
    assert wanted("auto").name == "reference"
    with pytest.warns(UserWarning, match=said + reason) as caught:
        polycast.install("cpu")
    assert len(caught) == 1
    assert str(caught[0].message).endswith(". Set POLYCAST_ENGINE=reference to silence this warning.")
    polycast.uninstall("cpu")
    polycast.install("cpu")  # without a second warning


def test_the_reason_is_an_error_if_the_native_engine_is_required(reason, wanted):
    said = "^POLYCAST_ENGINE=native, but the native engine cannot be built: "
    with pytest.raises(RuntimeError, match=said + reason):
        wanted("native")


def test_a_users_timeout_during_a_build_propagates(compiler, home, wanted):
    def handler(number, frame):
        raise TimeoutError("time is up")

    compiler.behave(status=0, also="import signal; os.kill(os.getppid(), signal.SIGINT); signal.pause()")
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(TimeoutError, match="time is up"):
            wanted("auto")
    finally:
        signal.signal(signal.SIGINT, before)
    compiler.behave(status=0)
    assert wanted("auto").name == "native"


def test_the_log_escapes_output_in_another_encoding(compiler, home, monkeypatch, tmp_path):
    OTHER_ENCODING(monkeypatch, tmp_path)
    with pytest.raises(BuildError) as caught:
        get_or_build(home, ENGINE)
    (log,) = home.rglob("*.log")
    assert f"its output is in {log}." in str(caught.value)
    assert log.read_text().endswith("Version fran\\xe7aise\nFichier pr\\xe9compil\\xe9\n")


def test_a_full_disk_is_not_recorded_as_a_failed_build(compiler, home, monkeypatch):
    write_text = Path.write_text

    def run_out(path, *arguments, **keywords):
        write_text(path, "")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    compiler.behave(status=1)
    with monkeypatch.context() as full_disk:
        full_disk.setattr(Path, "write_text", run_out)
        with pytest.raises(BuildError, match="No space left on device"):
            get_or_build(home, ENGINE)
    compiler.behave(status=0)
    assert get_or_build(home, ENGINE).is_file()


def test_the_compiler_does_not_use_the_users_temporary_folder(compiler, home, monkeypatch, wanted):
    monkeypatch.setenv("TMPDIR", "/no/such/folder")
    compiler.behave(status=0, also="assert open(os.path.join(os.environ['TMPDIR'], 'aside'), 'w')")
    assert wanted("auto").name == "native"


@pytest.mark.parametrize("stderr", [None, "closed"])
def test_a_process_without_stderr_can_build(compiler, home, monkeypatch, stderr):
    with open(os.devnull, "w") as closed:
        pass
    monkeypatch.setattr(sys, "stderr", stderr and closed)
    assert get_or_build(home, ENGINE).is_file()


PROGRAM = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, polycast
    with polycast.autocast("cpu"):
        y = torch.ones(2, 2) @ torch.ones(2, 2)
from polycast.engine.choice import choose_engine
messages = [str(each.message) for each in caught if each.filename == "<string>"]
print(polycast.__file__, choose_engine().name, y.dtype, messages)
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_polycast_runs_from_an_archive_and_builds_its_sources(compiler, home, tmp_path, engine):
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as made:
        for package in ("polycast", "polycast_backends.cpu"):
            (folder,) = importlib.import_module(package).__path__
            for path in Path(folder).rglob("*"):
                if path.suffix in (".py", ".pyi") or (path.suffix in (".cpp", ".h") and engine == "native"):
                    made.write(path, Path(*package.split(".")) / path.relative_to(folder))
        made.writestr("polycast-0.1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: polycast\nVersion: 0.1.0\n")
        made.writestr("polycast-0.1.0.dist-info/entry_points.txt", "[polycast.backends]\ncpu = polycast_backends.cpu\n")
    environment = {**os.environ, "PYTHONPATH": str(archive), "POLYCAST_ENGINE": "auto"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file, name, dtype, warned = done.stdout.split(maxsplit=3)
    assert file.startswith(str(archive))
    assert (name, dtype) == (engine, "torch.bfloat16")
    assert warned.count("its C++ sources are not in") == (engine == "reference")
    assert compiler.calls == (engine == "native")


def through_a_stack():
    with contextlib.ExitStack() as stack:
        stack.enter_context(polycast.autocast("cpu"))


def through_a_decorator():
    polycast.autocast("cpu")(lambda: None)()


def through_a_module():
    layer = torch.nn.Linear(1, 1)
    layer.forward = polycast.autocast("cpu")(layer.forward)
    layer(torch.ones(1))


ENTERING = [through_a_stack, through_a_decorator, through_a_module]


@pytest.mark.parametrize("enter", ENTERING, ids=lambda enter: enter.__name__)
def test_the_warning_names_the_users_line(home, monkeypatch, wanted, enter):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("POLYCAST_ENGINE", "auto")
    installation.forget_choice()
    with pytest.warns(UserWarning, match="^Regions run on polycast's reference engine") as caught:
        enter()
    first, last = enter.__code__.co_firstlineno, max(line for *_, line in enter.__code__.co_lines() if line)
    assert caught[0].filename == __file__
    assert first < caught[0].lineno <= last


@pytest.mark.parametrize("reason", ["the compiler failed", "there are no kernels"])
def test_a_region_whose_recipe_is_refused_too_has_one_warning(home, hand_made, monkeypatch, wanted, reason):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(prebuilt, "no_compiler", lambda: BuildError("the compiler failed."))
    refusal = Availability(False, f"{reason}.")
    hand_made("cpu", slow_reason=lambda dtype: "it has no such unit", recipe_availability=lambda recipe: refusal)
    wanted("auto")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with polycast.autocast("cpu", recipe="rounded"):
                pass
    first, second = (str(each.message) for each in caught)
    assert first.count("the compiler failed") == 1
    assert f"cannot be used on cpu: {reason}. The region runs in the fast dtype on polycast's reference engine" in first
    assert second.endswith(f"cannot be used on cpu: {reason}. The region runs in the fast dtype.")
