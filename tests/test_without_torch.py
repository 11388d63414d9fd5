"""Without torch, importing polycast and calling the command fail with instructions."""

import os
import subprocess
import sys

import pytest

TEXT = (
    "polycast needs torch 2.11 or newer, and no torch is installed here. Install it: `pip install torch`, or as "
    "https://pytorch.org/get-started/locally/ says for your device.\n"
)
SCRIPT = "import sys\nfrom polycast_plugins.cli import main\nsys.exit(main())\n"


@pytest.fixture
def run(tmp_path):
    """Return a function that runs Python where torch cannot be found, or is as `torch` has it."""

    def run(*arguments, torch="raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"):
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "torch.py").write_text(torch)
        path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)

    return run


def test_the_import_error_says_what_to_install(run):
    done = run("-c", "try:\n    import polycast\nexcept ImportError as error:\n    print(error.name, error)\n    raise")
    assert done.stdout == f"torch {TEXT}"
    assert done.stderr.endswith(f"ModuleNotFoundError: {TEXT}")
    assert "During handling" not in done.stderr


@pytest.mark.parametrize("arguments", [["devices"], ["run", "train.py"], ["--help"]], ids=lambda words: words[0])
@pytest.mark.parametrize("how", ["polycast", "python -m polycast"])
def test_the_command_prints_no_traceback(run, tmp_path, how, arguments):
    script = tmp_path / "polycast"
    script.write_text(SCRIPT)
    done = run(*([str(script)] if how == "polycast" else ["-m", "polycast"]), *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"polycast: {TEXT}")


def test_another_program_can_catch_the_error(run, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("try:\n    import polycast\nexcept ImportError:\n    print('without')\n")
    assert run(str(script), "polycast").stdout == "without\n"


def test_a_missing_dependency_of_torch_is_reported_unchanged(run):
    done = run("-c", "import polycast", torch="import sympy_is_missing")
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'sympy_is_missing'\n")


@pytest.mark.slow
def test_pytest_with_polycasts_options_runs_without_torch(run, tmp_path):
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_nothing.py"))
    assert done.returncode == 0, done.stdout + done.stderr
