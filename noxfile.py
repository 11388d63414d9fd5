"""Run the tests on the table of Pythons and torches in pyproject.toml, and the lowest requirements: `make matrix`."""

import shutil
from pathlib import Path

import nox

PROJECT = nox.project.load_toml("pyproject.toml")
MATRIX = PROJECT["tool"]["polycast"]["matrix"]


@nox.session
@nox.parametrize(
    ["python", "torch"],
    [(row["python"], row["torch"]) for row in MATRIX],
    ids=[f"{row['python']}, {row['torch']}" for row in MATRIX],
)
def tests(session: nox.Session, torch: str) -> None:
    """Run the tests, or those named after `--`, on one Python and one torch."""
    environment = f".venv-matrix-{session.python}"  # of make; `python` is the interpreter that nox found
    chosen = [f"TESTS={' '.join(session.posargs)}"] if session.posargs else []
    try:
        session.run(
            "make", "test-all", "PYTHON=python", f"TORCH={torch}", f"VENV={environment}", *chosen, external=True
        )
    finally:
        shutil.rmtree(environment, ignore_errors=True)  # some 5 GB, with the CUDA libraries of torch


@nox.session(python=MATRIX[0]["python"])
def floors(session: nox.Session) -> None:
    """Run the tests of what uses the requirements on the lowest version of each, and the lowest torch."""
    of_extras = (PROJECT["project"]["optional-dependencies"][extra] for extra in ("report", "files", "cli"))
    declared = [*PROJECT["project"]["dependencies"], *(each for extra in of_extras for each in extra)]
    requirements = [each.partition(";")[0].strip() for each in declared if "[" not in each]
    lowest = [each.replace(">=", "==") for each in requirements if not each.startswith("torch")]
    constraints = Path(session.create_tmp()) / "floors.txt"
    constraints.write_text("\n".join(lowest))
    session.install(MATRIX[0]["torch"], "numpy")
    # The lowest typer uses what later versions of click deprecate.
    session.install("--constraint", str(constraints), ".[all]", "click==8.2.*", "hypothesis", "pytest", "pytest-xdist")
    tests = session.posargs or [
        "tests/plugins/cli",
        "tests/core/engine/test_weight_cache.py",
        "tests/core/registry",
        "tests/core/policy",
    ]
    session.run("pytest", "--installed", "-m", "not slow", *tests)
