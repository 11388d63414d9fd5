"""The notebook runs in a kernel of its own, and prints what it shows."""

import json
import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parent.parent.parent / "examples" / "tour.ipynb"


def printed(notebook):
    """Return what each cell printed."""
    cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    return ["".join("".join(each["text"]) for each in cell["outputs"]) for cell in cells]


def test_the_notebook_prints_what_it_shows(tmp_path, monkeypatch):
    for module in ("nbclient", "ipykernel"):
        pytest.importorskip(module, reason=f"{module} is in the extra 'test'")
    import nbclient
    import nbformat

    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": os.fspath(tmp_path)}}).execute()
    assert printed(notebook) == printed(json.loads(NOTEBOOK.read_text(encoding="utf-8")))
