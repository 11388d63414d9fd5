"""Run the tests on each Python and torch of the table in pyproject.toml: `make matrix`."""

import shutil

import nox

MATRIX = nox.project.load_toml("pyproject.toml")["tool"]["polycast"]["matrix"]


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
