"""``polycast run``: a program runs as with python, on polycast's regions."""

import signal
import subprocess
import sys
import textwrap
import zipfile

import pytest
from tests.plugins.dropin.conftest import ENVIRONMENT

pytestmark = pytest.mark.slow


def call(*command, folder, stdin="", **environment):
    command = [sys.executable, *command]
    return subprocess.run(
        command, cwd=folder, input=stdin, env={**ENVIRONMENT, **environment}, capture_output=True, text=True
    )


@pytest.fixture
def write(tmp_path):

    def write(source, name="program.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return tmp_path

    return write


@pytest.fixture
def same(polycast_run):
    """Return a function that runs a program with python and with polycast, checks that they do the same."""

    def same(folder, *arguments, stdin=""):
        theirs = call(*arguments, folder=folder, stdin=stdin)
        ours = polycast_run("--quiet", *arguments, folder=folder, stdin=stdin)
        assert (ours.returncode, ours.stdout, ours.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)
        return ours

    return same


SELF_PORTRAIT = """
import sys, __main__
print(__name__, __file__, __spec__ and __spec__.name, __package__, __doc__, __annotations__, type(__loader__).__name__)
print(__builtins__, sys.argv, sys.path[0])
print(vars(__main__) is globals(), sys.modules["__main__"] is __main__)
"""


SCRIPTS = ("program.py", "./program.py", "folder/program.py")
ARGUMENTS = ["--flag", "value", "--quiet", "--", "-m"]


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        *((name, [name, *ARGUMENTS], str(ARGUMENTS)[1:]) for name in SCRIPTS),
        ("folder/program.py", ["link.py"], "/folder\n"),
        ("package/program.py", ["-m", "package.program", "--flag"], "package.program"),
        ("package/__main__.py", ["-m", "package"], "package.__main__"),
        ("folder/__main__.py", ["folder", "x"], "__main__.py"),
        ("program.py", ["program.zip", "x"], "program.zip"),
    ],
    ids=["script", "script here", "script elsewhere", "link to a script", "module", "package", "folder", "archive"],
)
def test_a_program_sees_itself_as_under_python(same, write, name, arguments, said):
    folder = write(SELF_PORTRAIT, name)
    (folder / "link.py").symlink_to(folder / name)
    with zipfile.ZipFile(folder / "program.zip", "w") as archive:
        archive.writestr("__main__.py", SELF_PORTRAIT)
    assert said in same(folder, *arguments).stdout


@pytest.mark.parametrize("name", ["folder", "folder/__main__.py"])
def test_a_safe_path_has_no_more_in_it_than_under_python(write, name):
    folder = write("import sys; print(sys.path)", "folder/__main__.py")
    command = ["-m", "polycast", "run", "--quiet"]
    theirs, ours = (call(*way, name, folder=folder, PYTHONSAFEPATH="1") for way in ([], command))
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, theirs.stdout, theirs.stderr)


PICKLING = """
import copy, pickle
class Point:
    x = 1
print(pickle.loads(pickle.dumps(Point())).x, Point.__module__)
"""


@pytest.mark.parametrize(
    ("source", "printed"),
    [("import sys; print(input(), sys.stdin.read())", "one two\n\n"), (PICKLING, "1 __main__\n")],
    ids=["reads the standard input", "pickles its classes"],
)
def test_a_program_prints_what_it_does_under_python(same, write, source, printed):
    assert same(write(source), "program.py", stdin="one\ntwo\n").stdout == printed


def test_a_program_from_the_standard_input_runs_as_with_python(same, tmp_path):
    done = same(tmp_path, "-", "x", stdin=SELF_PORTRAIT + "print(__cached__, __loader__)\n1 / 0")
    assert done.stdout.startswith("__main__ <stdin> None None None {} type\n")


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("raise SystemExit", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('a reason')", 1),
        ("def f():\n    raise ValueError('wrong')\nf()", 1),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('wrong')", 1),
        ("raise ExceptionGroup('several', [ValueError(1)])" if sys.version_info >= (3, 11) else "raise OSError(1)", 1),
        ("if True print('what is this')", 1),
        ("import sys\nsys.excepthook = lambda *error: print('my own', *error[:2])\nraise ValueError('wrong')", 1),
        ("raise EOFError('click has its own idea of these')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("import os; os._exit(3)", 3),
        ("import atexit; atexit.register(print, 'at exit'); 1 / 0", 1),
        ("import threading; threading.Timer(0, print, ['a thread']).start()", 0),
    ],
)
def test_a_program_ends_as_under_python(same, write, source, code):
    assert same(write(source), "program.py").returncode == code


@pytest.mark.parametrize("source", ["1 / 0", "if True print('what is this')"])
def test_a_module_fails_as_under_python(same, write, source):
    assert same(write(source), "-m", "program").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["-m", "no_such"], "No module named no_such"), (["folder"], "can't find '__main__' module in")],
    ids=["module", "main module of a folder"],
)
def test_what_is_missing_is_reported_as_by_python(same, write, arguments, said):
    assert said in same(write("", "folder/other.py"), *arguments).stderr


def test_a_missing_file_is_reported_as_by_python(polycast_run, tmp_path):
    theirs = call("no_such.py", folder=tmp_path)
    ours = polycast_run("no_such.py")
    assert (ours.returncode, theirs.returncode) == (2, 2)
    assert ours.stderr == f"polycast: can't open file '{tmp_path}/no_such.py': [Errno 2] No such file or directory\n"
    assert ours.stderr.partition(": ")[2] == theirs.stderr.partition(": ")[2]


MULTIPROCESSING = """
import multiprocessing, sys, torch

class Work:
    def __call__(self, x):
        with torch.autocast("cpu"):
            is_ours = isinstance(torch.autocast("cpu"), sys.modules["polycast"].autocast)
            return str((x @ x).dtype), is_ours, torch.nn.Linear(2, 2)(x).dtype

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(*pool.map(Work(), [torch.ones(2, 2)])[0])
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_that_multiprocessing_starts_run_on_polycast_too(write, polycast_run, method):
    write(MULTIPROCESSING)
    done = polycast_run("--wrap", "cpu", "program.py", method)
    assert done.stdout == "torch.bfloat16 True torch.bfloat16\n", done.stderr


REGIONS = """
import torch
from torch import autocast
torch.manual_seed(0)
model, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
for _ in range(2):
    with autocast("cpu"):
        model(x)
for _ in range(3):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        print(model(x).dtype)
with torch.autocast("cpu", enabled=False):
    print(model(x).dtype)
"""


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_the_summary_counts_regions(run, engine):
    done = run(REGIONS, POLYCAST_ENGINE=engine)
    assert done.stdout.split() == ["torch.float16"] * 3 + ["torch.float32"]
    assert done.stderr == (f"polycast: {engine} engine, 6 regions (cpu disabled 1, cpu bfloat16 2, cpu float16 3)\n")


@pytest.mark.parametrize(
    ("engine", "said"), [("native", "4 hits, 2 misses, 0.0 MiB"), ("reference", "none on this engine")]
)
def test_with_a_weight_cache_the_regions_under_no_grad_share_their_casts(run, engine, said):
    done = run(REGIONS, "--weight-cache", POLYCAST_ENGINE=engine)
    assert done.stdout.split() == ["torch.float16"] * 3 + ["torch.float32"]
    assert done.stderr.endswith(f", weight cache: {said}\n")


def test_quiet_leaves_the_summary_out(run):
    assert run(REGIONS, "--quiet").stderr == ""


def test_the_summary_of_a_program_without_regions_suggests_wrap(run):
    assert run("print(1)").stderr == (
        "polycast: no region was entered: the program did not use torch.autocast (see polycast run --wrap)\n"
    )


def test_the_summary_is_written_once_and_last(run):
    source = """
    import atexit, os, sys, torch
    atexit.register(print, "mine", file=sys.stderr)
    with torch.autocast("cpu"):
        pass
    if os.fork() == 0:
        sys.exit()
    os.wait()
    1 / 0
    """
    lines = run(source).stderr.splitlines()
    assert lines[-1].startswith("polycast: ")
    assert lines[-3:-1] == ["ZeroDivisionError: division by zero", "mine"]
    assert sum(line.startswith("polycast: ") for line in lines) == 1


WITHOUT_REGIONS = """
import threading, torch
class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
    def forward(self, x):
        if x is None:
            raise ValueError("no input")
        return self.inner(x), x @ x
model, x = Outer(), torch.ones(2, 2)
try:
    model(None)
except ValueError as error:
    print(error)
print(*[y.dtype for y in model(x)], (x @ x).dtype, torch.is_autocast_enabled("cpu"))
with torch.autocast("cpu", enabled=False):
    print(model(x)[0].dtype)
thread = threading.Thread(target=lambda: print(model(x)[0].dtype))
thread.start()
thread.join()
"""


@pytest.mark.parametrize(("wrap", "dtype"), [("cpu", "bfloat16"), ("cpu:float16", "float16"), ("cpu:fp16", "float16")])
def test_wrap_runs_the_outermost_call_of_a_module_in_a_region(run, wrap, dtype):
    done = run(WITHOUT_REGIONS, "--wrap", wrap)
    assert done.stdout.splitlines() == [
        "no input",
        f"torch.{dtype} torch.{dtype} torch.float32 False",
        "torch.float32",
        f"torch.{dtype}",
    ]
    assert done.stderr.endswith(f" engine, 4 regions (cpu disabled 1, cpu {dtype} 3)\n")
