"""The examples run as they are, without a warning of their own, and print what they promise; so does the notebook."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def run(tmp_path):
    """Return a function that runs an example and returns the lines that it printed."""

    def run(name, *arguments, warnings="error"):
        environment = {**os.environ, "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
        # PYTHONWARNINGS goes before -W, which would make an error of the warning that depends on the processor.
        environment["PYTHONWARNINGS"] = f"{warnings},ignore:bfloat16 is slow on,ignore:float16 is slow on"
        command = [sys.executable, str(EXAMPLES / name), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return run


@pytest.fixture(scope="module")
def _launched(start_launcher):
    pytest.importorskip("sklearn", reason="what it trains on comes with scikit-learn")
    return start_launcher("import polycast, sklearn.datasets", {**os.environ, "OMP_NUM_THREADS": "2"})


@pytest.fixture
def run_digits(_launched, tmp_path):
    """Return a function that runs an example in a process that has the imports, and returns what it printed."""
    script = """
import json, runpy, sys, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "b?float16 is slow on")
_, constants, *sys.argv = sys.argv
main = runpy.run_path(sys.argv[0], run_name="example")["main"]
main.__globals__.update(json.loads(constants))
main()
"""

    def run_digits(name, *arguments, **constants):
        done = _launched(script, json.dumps(constants), str(EXAMPLES / name), *arguments, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return run_digits


@pytest.fixture
def train(run_digits):
    return functools.partial(run_digits, "train.py")


def accuracies(lines):
    return [float(accuracy) for line in lines if (accuracy := re.sub(r".*accuracy ([\d.]+)%", r"\1", line))]


def test_the_plain_loop_learns_in_float32(train):
    first, second = accuracies(train("--epochs", "2", "--dtype", "float32"))
    assert 80 < first < second


def test_the_plain_loop_learns_the_same_where_activations_are_recomputed(train):
    arguments = ("--epochs", "2", "--dtype", "bfloat16")
    printed = train(*arguments)
    first, second = accuracies(printed)
    assert 80 < first < second
    assert train(*arguments, "--recompute") == printed


def test_the_plain_loop_learns_the_same_where_it_is_resumed(train):
    arguments = ("--dtype", "float16")
    whole = train(*arguments, "--epochs", "2")
    first, second = accuracies(whole)
    assert 80 < first < second
    stopped = train(*arguments, "--epochs", "1", "--resume", "digits.pt")
    assert stopped + train(*arguments, "--epochs", "2", "--resume", "digits.pt") == whole


def test_the_demo_compares_speed_accuracy_and_dtypes(run_digits):
    lines = run_digits("demo.py", EPOCHS=3, FEATURES=256, ROWS=[1, 64], ROUNDS=1)  # `make demo` runs it as it is
    said = "\n".join(lines)
    ways = ["torch.autocast", "polycast.autocast", "polycast, WeightCache"]
    assert re.findall(r"^(\S.*?)  +[\d.]+  +[\d.]+$", said, re.MULTILINE)[:3] == ways
    accuracy = dict(re.findall(r"^(\S+) +accuracy ([\d.]+)%, loss ", said, re.MULTILINE))
    assert list(accuracy) == ["float32", *ways[:2]]
    assert min(map(float, accuracy.values())) >= 95
    assert "torch.autocast computes with the old one. polycast.autocast computes with the new one." in said
    assert "The 11 output dtypes under polycast.autocast are those under torch.autocast." in lines


def test_a_program_of_torchs_runs_on_polycast_unchanged(run):
    plain = run("unchanged.py", "--epochs", "2")
    assert [line.partition("  loss ")[0] for line in plain] == ["epoch 1", "epoch 2"]
    command = [sys.executable, "-m", "polycast", "run", str(EXAMPLES / "unchanged.py"), "--epochs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.stdout.splitlines() == plain
    assert "64 regions (cpu bfloat16 64)" in done.stderr


def test_a_server_finds_the_casts_of_its_weights_and_casts_them_again_after_an_update(run):
    threads, weights, updates = 3, 4, 3
    served, casts = run("serve.py", "--requests", "80", "--threads", str(threads), "--width", "64")
    assert re.fullmatch(r"80 requests on 3 threads, \d+ a second", served)
    made, found = map(int, re.fullmatch(r"casts of weights: (\d+) made, (\d+) found", casts).groups())
    assert weights * (1 + updates) <= made <= weights * (1 + updates) * threads
    assert made + found == 80 * weights


@pytest.mark.parametrize(
    ("library", "regions"), [("accelerate", 80), ("pytorch_lightning", 80), ("transformers", 24)], ids=str
)
def test_a_trainer_of_another_library_runs_in_regions_of_polycast(run, library, regions):
    if library == "transformers":
        pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    pytest.importorskip(library, reason=f"{library} is in the extra 'test'")
    name = {"accelerate": "accelerate", "pytorch_lightning": "lightning", "transformers": "trainer"}[library]
    *said, last = run(f"with_{name}.py", warnings="ignore")  # these libraries have some of their own
    assert re.match(rf"{regions} regions; \d+% of the [\d.]+ .?FLOPs in matmuls in bfloat16; ", last)
    assert [line for line in said if "loss" in line] != []


def printed(notebook):
    cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    return ["".join("".join(each["text"]) for each in cell["outputs"]) for cell in cells]


def test_the_notebook_prints_what_it_shows(tmp_path, monkeypatch):
    for module in ("nbclient", "ipykernel"):
        pytest.importorskip(module, reason=f"{module} is in the extra 'test'")
    import nbclient
    import nbformat

    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": os.fspath(tmp_path)}}).execute()
    assert printed(notebook) == printed(json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8")))


PASSED = {"hpu": 105, "npu": 90, "xla": 55}
"""Require at least this many checks to pass: one for each op that fake tensors can run, and more."""


@pytest.mark.parametrize("device", PASSED)
def test_an_example_passes_the_conformance_suite(device, run_program, tmp_path, monkeypatch):
    """Both engines are tested by the suite of polycast's own backends."""
    info = tmp_path / f"polycast_{device}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: polycast-{device}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[polycast.backends]\n{device} = polycast_{device}\n")
    example = EXAMPLES / f"polycast-{device}"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [tmp_path, example / "src", *filter(None, sys.path)])))
    script = "import sys, pytest; raise SystemExit(pytest.main(sys.argv[1:]))"
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", example]
    status, printed, errors = run_program(script, "native", *options, imports="torch, polycast, pytest")
    assert status == 0, printed + errors
    assert int(re.search(r"(\d+) passed", printed)[1]) >= PASSED[device], printed


@pytest.mark.parametrize("device", PASSED)
def test_an_example_is_short(device):
    (module,) = (EXAMPLES / f"polycast-{device}" / "src").rglob("*.py")
    assert module.read_text(encoding="utf-8").count("\n") < 60
