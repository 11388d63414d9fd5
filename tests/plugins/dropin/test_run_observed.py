"""``polycast run --report`` and ``--observe``: reports of a program, however it ends, and of its child processes."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.plugins.dropin.conftest import ENVIRONMENT
from typer.testing import CliRunner

from polycast_plugins.cli import app

pytestmark = pytest.mark.slow

BEFORE = """
import multiprocessing, os, sys, threading, torch
def work(size=2):
    with torch.autocast("cpu"):
        torch.mm(torch.ones(size, size), torch.ones(size, size))
def ranked(rank):
    os.environ["RANK"] = rank
    work()
"""


def reports(folder):
    """Return by the name of each report how often it says that mm was called."""
    found = {}
    for path in folder.glob("*.html"):
        calls = re.search(
            r'<th scope="row">mm.*?<td data-of="calls" class="n" data-value="(\d+)"', path.read_text(), re.S
        )
        found[path.name] = int(calls[1]) if calls else 0
    return found


def test_an_unchanged_program_has_a_report(run, tmp_path):
    done = run("work(); os.chdir('/')", "--report", "out.html", POLYCAST_ENGINE="native")
    assert reports(tmp_path) == {"out.html": 1}
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"polycast: report in {tmp_path}/out.html: ")
    assert lines[0].endswith(" casts of 16 bytes; no findings")
    assert lines[1:] == ["polycast: native engine, 1 region (cpu bfloat16 1)"]


def test_quiet_omits_the_lines_and_writes_the_report(run, tmp_path):
    assert run("work()", "--quiet", "--report", "out.html").stderr == ""
    assert reports(tmp_path) == {"out.html": 1}


def test_observe_shows_a_table_on_stderr(run, tmp_path):
    done = run("work(); print('mine')", "--observe")
    assert done.stdout == "mine\n"
    assert done.stderr.startswith("polycast: observed in the program\ncpu in bfloat16; ")
    assert re.search(r"^ *mm +forward +1 +[\d.]+ [mu]?s +lower_precision_fp ", done.stderr, re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".html"] == []


@pytest.mark.parametrize(("columns", "fit"), [("60", True), ("80", True), ("0", False), ("", False)])
def test_the_table_fits_a_terminal(run, columns, fit):
    done = run("work()", "--observe", "--quiet", COLUMNS=columns)
    longest = max(map(len, done.stderr.splitlines()))
    assert (longest <= int(columns or 0)) == fit
    assert ("left out to fit the width: " in done.stderr) == fit


@pytest.mark.parametrize(
    ("end", "code"),
    [("raise ValueError('wrong')", 1), ("sys.exit(7)", 7), ("import atexit; atexit.register(work)", 0)],
)
def test_a_program_has_a_report_however_it_ends(run, tmp_path, end, code):
    assert run(f"work()\n{end}", "--report", "out.html").returncode == code
    assert reports(tmp_path) == {"out.html": 2 if "atexit" in end else 1}


def test_a_report_covers_all_threads(run, tmp_path):
    run("thread = threading.Thread(target=work); thread.start(); work(); thread.join()", "--report", "out.html")
    assert reports(tmp_path) == {"out.html": 2}


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_each_child_process_has_its_own_report(run, tmp_path, method):
    program = f"""
    if __name__ == "__main__":
        work()
        for _ in range(2):
            process = multiprocessing.get_context("{method}").Process(target=work, name="the worker/1")
            process.start()
            process.join()
    """
    done = run(program, "--observe", "--report", "out.html")
    found = reports(tmp_path)
    assert list(found.values()) == [1, 1, 1]
    (other,) = found.keys() - {"out.html", "out.the-worker-1.html"}
    assert re.fullmatch(r"out\.the-worker-1\.\d+\.html", other)
    assert done.stderr.count("polycast: observed in the worker/1\n") == 2


def test_reports_of_ranks_are_named_by_rank(run, tmp_path):
    program = """
    if __name__ == "__main__":
        context = multiprocessing.get_context("fork")
        for target, arguments in [(ranked, ("3",)), (work, ())]:
            process = context.Process(target=target, args=arguments, name="worker")
            process.start()
            process.join()
        work()
    """
    run(program, "--report", "out.html")
    assert set(reports(tmp_path)) == {"out.html", "out.rank3.html", "out.worker.html"}


def test_a_worker_of_a_rank_has_another_name(run, tmp_path):
    program = """
    if __name__ == "__main__":
        work()
        process = multiprocessing.get_context("fork").Process(target=work, name="loader")
        process.start()
        process.join()
    """
    run(program, "--report", "out.html", RANK="1")
    assert set(reports(tmp_path)) == {"out.rank1.html", "out.rank1.loader.html"}


def test_a_process_made_by_os_fork_has_its_own_report(run, tmp_path):
    run("work()\nif os.fork() == 0:\n    work(); work(3); sys.exit()\nos.wait()", "--report", "out.html")
    found = reports(tmp_path)
    assert found.pop("out.html") == 1
    ((name, calls),) = found.items()
    assert re.fullmatch(r"out\.process\d+\.html", name)
    assert calls == 2


def test_a_process_without_an_op_writes_no_report(run, tmp_path):
    run("work()\nif os.fork() == 0:\n    sys.exit()\nos.wait()", "--report", "out.html")
    assert list(reports(tmp_path)) == ["out.html"]


def test_a_report_of_an_earlier_run_is_overwritten(run, tmp_path):
    (tmp_path / "out.rank0.html").write_text("old")
    run("work()", "--report", "out.html", RANK="0")
    assert reports(tmp_path) == {"out.rank0.html": 1}


def test_a_report_into_a_deleted_folder_is_reported_and_keeps_the_status(run, tmp_path):
    (tmp_path / "folder").mkdir()
    done = run("work(); os.rmdir('folder'); sys.exit(3)", "--quiet", "--report", "folder/out.html")
    assert done.returncode == 3
    assert re.fullmatch(r"polycast: the report cannot be written: .*No such file or directory: .*\n", done.stderr)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ("missing/out.html", "polycast: --report: missing/out.html cannot be written: missing does not exist."),
        (".", "polycast: --report: . is a folder: name a file in it, such as report.html.\n"),
        ("/proc/out.html", "polycast: --report: /proc/out.html cannot be written: "),
        ("", "polycast: --report: . is a folder"),
    ],
)
def test_a_report_that_cannot_be_written_is_refused_before_the_program_runs(tmp_path, monkeypatch, report, said):
    if report.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("there is no /proc here, which nobody can make files in")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text("print('it ran')")
    done = CliRunner().invoke(app, ["run", "--report", report, "program.py"])  # would raise Ready
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(said)


@pytest.mark.parametrize("option", ["--observe", "--report=out.html"])
def test_a_program_that_cannot_be_observed_is_refused_before_it_runs(run, tmp_path, option):
    done = run("print('it ran')", option, CXX="no-such-compiler", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "polycast: " in done.stderr
    assert "cannot be built" in done.stderr
    done = run("print('it ran')", option, POLYCAST_ENGINE="reference")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "polycast: polycast.observe needs the native engine, and this process runs on the reference engine: "
        "POLYCAST_ENGINE=reference. Unset it.\n"
    )


def test_a_report_has_the_modules_of_an_unchanged_program(run, tmp_path):
    run("net = torch.nn.Sequential(torch.nn.ReLU())\nnet(torch.ones(2))", "--report", "out.html")
    assert re.search(r'<section id="modules".*Sequential.*ReLU', (tmp_path / "out.html").read_text(), re.S)


def test_a_program_whose_name_is_not_unicode_has_a_report(run, tmp_path):
    (tmp_path / os.fsdecode(b"w\xe9.py")).write_text("import torch\ntorch.ones(2).relu()\nopen('<b>', 'w')")
    run(f"import runpy; runpy.run_path({os.fsdecode(b'w')!r} + chr(0xdce9) + '.py'); work()", "--report", "out.html")
    assert reports(tmp_path) == {"out.html": 1}


def test_each_worker_of_torchrun_has_a_report(tmp_path):
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            import torch
            torch.distributed.init_process_group("gloo")
            net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
            with torch.autocast("cpu"):
                net(torch.ones(2, 4)).float().sum().backward()
            torch.distributed.destroy_process_group()
            """
        )
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    program = [sys.executable, "-m", "polycast", "run", "--quiet", "--report", "out.html", "program.py"]
    done = subprocess.run([*torchrun, *program], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(reports(tmp_path)) == {"out.rank0.html", "out.rank1.html"}
    for report in tmp_path.glob("*.html"):
        assert "DistributedDataParallel.module" in report.read_text()
