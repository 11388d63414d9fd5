"""``polycast run --report`` and ``--observe``: reports of a program, however it ends, and of its child processes."""

import os
import re
import subprocess
import sys
import textwrap

import pytest
from tests.plugins.dropin.conftest import ENVIRONMENT

pytestmark = pytest.mark.slow

BEFORE = """
import multiprocessing, os, sys, threading, torch
def work(size=2):
    with torch.autocast("cpu"):
        torch.mm(torch.ones(size, size), torch.ones(size, size))
def ranked(rank):
    os.environ["RANK"] = rank
    work()
def start(target, *arguments, name, method="fork"):
    process = multiprocessing.get_context(method).Process(target=target, args=arguments, name=name)
    process.start()
    process.join()
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


def test_the_report_is_named_and_summarized(run, tmp_path):
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


REPORTS = {
    "raises": ("work()\nraise ValueError('wrong')", {}, 1, {"out.html": 1}),
    "exits": ("work()\nsys.exit(7)", {}, 7, {"out.html": 1}),
    "works at exit": ("work()\nimport atexit; atexit.register(work)", {}, 0, {"out.html": 2}),
    "starts a thread": (
        "thread = threading.Thread(target=work); thread.start(); work(); thread.join()",
        *({}, 0, {"out.html": 2}),
    ),
    "starts ranks": (
        "start(ranked, '3', name='worker'); start(work, name='worker'); work()",
        *({}, 0, {"out.html": 1, "out.rank3.html": 1, "out.worker.html": 1}),
    ),
    "a worker of a rank": (
        "work(); start(work, name='loader')",
        *({"RANK": "1"}, 0, {"out.rank1.html": 1, "out.rank1.loader.html": 1}),
    ),
    "a fork without an op": ("work()\nif os.fork() == 0:\n    sys.exit()\nos.wait()", {}, 0, {"out.html": 1}),
    "a rank": ("work()", {"RANK": "0"}, 0, {"out.rank0.html": 1}),
}


@pytest.mark.parametrize("case", REPORTS)
def test_a_program_has_a_report_for_each_process_with_an_op_however_it_ends(run, tmp_path, case):
    program, environment, code, expected = REPORTS[case]
    for name in expected:
        (tmp_path / name).write_text("of an earlier run")
    assert run(program, "--report", "out.html", **environment).returncode == code
    assert reports(tmp_path) == expected


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_each_child_process_has_its_own_report(run, tmp_path, method):
    program = f"""
    if __name__ == "__main__":
        work()
        for _ in range(2):
            start(work, name="the worker/1", method="{method}")
    """
    done = run(program, "--observe", "--report", "out.html")
    found = reports(tmp_path)
    assert list(found.values()) == [1, 1, 1]
    (other,) = found.keys() - {"out.html", "out.the-worker-1.html"}
    assert re.fullmatch(r"out\.the-worker-1\.\d+\.html", other)
    assert done.stderr.count("polycast: observed in the worker/1\n") == 2


def test_a_process_made_by_os_fork_has_its_own_report(run, tmp_path):
    run("work()\nif os.fork() == 0:\n    work(); work(3); sys.exit()\nos.wait()", "--report", "out.html")
    found = reports(tmp_path)
    assert found.pop("out.html") == 1
    ((name, calls),) = found.items()
    assert re.fullmatch(r"out\.process\d+\.html", name)
    assert calls == 2


def test_a_report_into_a_deleted_folder_is_reported_and_keeps_the_status(run, tmp_path):
    (tmp_path / "folder").mkdir()
    done = run("work(); os.rmdir('folder'); sys.exit(3)", "--quiet", "--report", "folder/out.html")
    assert done.returncode == 3
    assert re.fullmatch(r"polycast: the report cannot be written: .*No such file or directory: .*\n", done.stderr)


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
