"""The tests on each Python and torch of the table in pyproject.toml: `make matrix`, or `nox` for single rows of it."""

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
    """Run the tests on one Python and one torch; what stands after `--` is tested in place of all."""
    environment = f".venv-matrix-{session.python}"  # make's own; `python` is the interpreter that nox found
    chosen = [f"TESTS={' '.join(session.posargs)}"] if session.posargs else []
    try:
        session.run(
            "make", "test-all", "PYTHON=python", f"TORCH={torch}", f"VENV={environment}", *chosen, external=True
        )
    finally:
        shutil.rmtree(environment, ignore_errors=True)  # some 5 GB, with the CUDA libraries of torch
