"""`load_tool`: import a script in tools/, which is no package."""

import importlib.util
from pathlib import Path


def load_tool(name):
    path = Path(__file__).parents[3] / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
