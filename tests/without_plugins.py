"""Hide polycast's plugins from a process: ``pytest -p tests.without_plugins tests/core tests/backends``."""

import importlib.metadata
import sys


class _Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "polycast_plugins":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


_find = importlib.metadata.entry_points


def _without_plugins(**query):
    points = _find(**query)
    return importlib.metadata.EntryPoints(each for each in points if not each.value.startswith("polycast_plugins"))


sys.meta_path.insert(0, _Hidden)
importlib.metadata.entry_points = _without_plugins
