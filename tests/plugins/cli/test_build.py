"""``polycast build``: where each library is, how long it took to compile, and failures."""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner

import polycast
from polycast.engine.native.engine_library import ENGINE
from polycast.toolchain.build import find_build, get_or_build
from polycast.toolchain.cache_folder import cache_directory
from polycast.toolchain.compiler import compile_library, find_compiler
from polycast.toolchain.cpp_library import BuildError
from polycast.toolchain.prebuilt import no_compiler
from polycast_plugins.cli import app, build
from polycast_plugins.cli.build import common_libraries

WRITES = "open(sys.argv[sys.argv.index('-o') + 1], 'w').write('a library')"
OPS = polycast.plugin.NativeLibrary.of_ops("polycast_plugins.quantize.cpu.native")
OWN = common_libraries()
ALL = [*OWN, OPS]


@pytest.fixture
def cpu(hand_made):
    """Return the CPU's backend, which needs these ops in C++ and no others, on any processor."""
    return hand_made("cpu", ops_in_cpp=[OPS.package])


@pytest.fixture
def compiler(monkeypatch, tmp_path, cpu):
    """Return a function that has a script be the compiler, where nothing is built yet; it writes a library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("polycast.toolchain.load._origins", {})  # of libraries that other tests have loaded
    script = tmp_path / "c++"
    monkeypatch.setenv("CXX", str(script))

    def behave(code):
        script.write_text(f"#!{sys.executable}\nimport os, signal, sys\nif '--version' not in sys.argv:\n    {code}\n")
        script.chmod(0o755)

    behave(WRITES)
    return behave


def run():
    return CliRunner().invoke(app, ["build"])


def test_it_builds_the_engine_and_the_ops_once_and_prints_where_and_how_long(compiler):
    result, again = run(), run()
    libraries = [find_build(cache_directory(), wanted) for wanted in ALL]
    assert {library.read_text() for library in libraries} == {"a library"}
    assert sorted(re.sub(r"\d+\.\d s", "0.0 s", result.stdout).splitlines()) == sorted(
        f"{wanted.description}: compiled here: {library} (0.0 s)"
        for wanted, library in zip(ALL, libraries, strict=True)
    )
    compiled = [f"polycast: compiling {wanted.description} ..." for wanted in ALL]
    assert (result.exit_code, sorted(result.stderr.splitlines())) == (0, sorted(compiled))
    assert (again.exit_code, again.stderr) == (0, "")


def test_the_largest_library_is_compiled_first(compiler, monkeypatch, tmp_path):
    order = tmp_path / "order"
    monkeypatch.setattr("polycast_plugins.cli.build.ThreadPoolExecutor", lambda _: ThreadPoolExecutor(1))
    compiler(f"open({str(order)!r}, 'a').write(sys.argv[sys.argv.index('-o') + 1] + '\\n'); {WRITES}")
    assert run().exit_code == 0
    sizes = {f"{each.name}.so": sum(map(len, each.read_sources().values())) for each in ALL}
    compiled = [sizes[line.rpartition("/")[2]] for line in order.read_text().splitlines()]
    assert compiled == sorted(sizes.values(), reverse=True)


def test_a_terminal_shows_what_is_compiled_and_for_how_long(compiler, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    shown = run().stderr
    assert "compiling the native engine 0:00:0" in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
    assert "polycast: compiling" not in shown


@pytest.mark.slow
def test_the_observer_and_ops_are_loaded_when_they_are_first_used():
    script = """
import polycast, torch
from polycast.toolchain.load import _origins
model, x = torch.nn.Linear(64, 64), torch.ones(2, 64)
def call(**settings):
    with polycast.autocast("cpu", **settings):
        model(x)
    print(*sorted(_origins))
for settings in ({}, {"policy": {"linear": "fp32"}}, {"cache": polycast.WeightCache()}):
    call(**settings)
with polycast.observe(model):
    call()
with torch.no_grad():
    call(recipe="int8")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    loaded = [set(line.split()) for line in done.stdout.splitlines()]
    observer = {each.name for each in OWN if "observer" in each.name}
    assert loaded == [set(), set(), set(), observer, {*observer, OPS.name}], done.stderr


@pytest.mark.skipif((os.cpu_count() or 1) < 2 or not hasattr(os, "mkfifo"), reason="there is one core, or no FIFO")
def test_libraries_are_compiled_in_parallel(compiler, monkeypatch, tmp_path):
    monkeypatch.setattr("polycast_plugins.cli.build._MEMORY", ())
    meeting = tmp_path / "meeting"
    os.mkfifo(meeting)  # whoever opens an end of it waits for the other
    end = f"'w' if '/{ENGINE.name}.so' in str(sys.argv) else 'r' if '/{OPS.name}.so' in str(sys.argv) else None"
    compiler(f"end = {end}; signal.alarm(120); end and open({str(meeting)!r}, end).close(); {WRITES}")
    assert run().exit_code == 0


@pytest.mark.parametrize(
    ("available", "limit", "most"),
    [("99999999", "max", 8), ("99999999", str(5 * 2**30), 2), (str(7 * 2**20), "max", 3), ("9", "1000", 1)],
)
def test_as_many_compilers_run_as_there_are_cores_and_memory_for_them(monkeypatch, tmp_path, available, limit, most):
    contents = f"MemTotal:       99999999 kB\nMemAvailable:   {available} kB\n", f"{limit}\n"
    files = [tmp_path / str(number) for number in range(len(build._MEMORY))]
    for file, content in zip(files, contents, strict=True):
        file.write_text(content)
    there = [(str(file), *rest) for file, (_, *rest) in zip(files, build._MEMORY, strict=True)]
    monkeypatch.setattr(build, "_MEMORY", [*there, (str(tmp_path / "absent"), "", 1)])
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert build._compilers() == most


@pytest.mark.parametrize("fails", ALL, ids=lambda library: library.name)
def test_a_failure_names_its_log_and_does_not_stop_the_other_builds(compiler, fails):
    compiler(f"sys.exit('no room') if '/{fails.name}.so' in str(sys.argv) else {WRITES}")
    result = run()
    (log,) = cache_directory().rglob("*.log")
    assert (
        f"polycast: {fails.description} cannot be built: the compiler failed with status 1; its output is in {log}. "
        f"When the cause is fixed, {fails.retry_hint}."
    ) in result.stderr.splitlines()
    assert {line.partition(":")[0] for line in result.stdout.splitlines()} == {
        each.description for each in ALL if each is not fails
    }
    assert result.exit_code == 1


def test_a_failed_build_is_tried_again(compiler):
    compiler("sys.exit('no room')")
    assert run().exit_code == 1
    compiler(WRITES)
    assert run().exit_code == 0


def test_it_says_once_that_there_is_no_compiler(compiler, cpu, monkeypatch):
    cpu.ops_in_cpp = []
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = run()
    lines = (line.partition(" cannot be built") for line in result.stderr.splitlines() if "..." not in line)
    libraries, _, reasons = zip(*lines, strict=True)
    assert sorted(libraries) == sorted(f"polycast: {each.description}" for each in OWN)
    assert reasons == (f": {no_compiler()}", *[", for the same reason"] * (len(OWN) - 1))
    assert result.exit_code == 1


def test_a_missing_package_is_reported(compiler, cpu):
    cpu.ops_in_cpp = ["acme_npu.native"]
    result = run()
    assert (
        "polycast: the ops of acme_npu.native cannot be built: there is no package acme_npu.native with its C++ "
        "sources: No module named 'acme_npu'."
    ) in result.stderr.splitlines()
    assert result.exit_code == 1


def test_ops_of_an_unavailable_device_are_reported_and_not_built(compiler, cpu, hand_made):
    cpu.ops_in_cpp = []
    absent = polycast.plugin.Availability(False, "there is none")
    hand_made("ipu", ops_in_cpp=[OPS.package], availability=lambda: absent)
    result = run()
    assert result.stdout.splitlines()[len(OWN) :] == [
        "the ops of polycast_plugins.quantize.cpu.native: not compiled: ipu cannot be used now"
    ]
    assert result.exit_code == 0


def test_ops_that_two_backends_share_are_built_once(compiler, hand_made):
    hand_made("ipu", ops_in_cpp=[OPS.package])
    assert len(run().stdout.splitlines()) == len(ALL)


def test_a_compiler_that_the_user_interrupts_is_not_remembered_as_one_that_failed(compiler):
    compiler("signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGINT)")
    with pytest.raises(BuildError, match=r"^the compiler was interrupted\.$"):
        get_or_build(cache_directory(), ENGINE)
    assert list(cache_directory().rglob("*.log")) == []
    assert find_build(cache_directory(), ENGINE) is None


def test_builds_that_wait_for_a_core_are_cancelled_by_an_interrupt(compiler, monkeypatch, tmp_path):
    goes_on, calls = tmp_path / "goes on", tmp_path / "calls"
    os.mkfifo(goes_on)

    class Pool(ThreadPoolExecutor):
        def __init__(self, _):
            super().__init__(1)

        def shutdown(self, wait=True, *, cancel_futures=False):
            super().shutdown(False, cancel_futures=cancel_futures)
            if not goes_on.with_suffix(".already").exists():
                goes_on.with_suffix(".already").touch()
                goes_on.write_text("now")
            super().shutdown(wait)

    monkeypatch.setattr("polycast_plugins.cli.build.ThreadPoolExecutor", Pool)
    compiler(
        f"signal.alarm(120); open({str(calls)!r}, 'a').write('called '); os.kill(os.getppid(), signal.SIGINT); "
        f"open({str(goes_on)!r}).read(); {WRITES}"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in the background
    try:
        assert run().exit_code != 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls.read_text() == "called "


@pytest.mark.usefixtures("compiler", "rediscover")
def test_an_invalid_engine_is_reported(monkeypatch):
    monkeypatch.setenv("POLYCAST_ENGINE", "perhaps")
    result = run()
    assert result.stderr.startswith("polycast: POLYCAST_ENGINE='perhaps' is invalid: expected ")
    assert result.exit_code == 2


def test_a_library_that_cannot_be_imported_does_not_stop_the_other_builds(compiler, cpu, offer):
    cpu.ops_in_cpp = []
    offer("acme", "libraries=('acme_code:LIBRARY',)", "import acme_runtime")
    result = run()
    assert result.stderr.startswith("polycast: acme_code:LIBRARY cannot be imported. The plugin 'acme' ")
    assert {line.partition(":")[0] for line in result.stdout.splitlines()} == {each.description for each in OWN}
    assert result.exit_code == 1


@pytest.mark.parametrize("wanted", [each for each in ALL if each != ENGINE], ids=lambda library: library.name)
def test_clang_compiles_what_gcc_does(wanted, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "clang++ -fsyntax-only")
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("it is not here")
    status, output = compile_library(compiler, wanted, wanted.read_sources(), tmp_path / "library.so")
    assert status == 0, output
