"""``python -m polycast``: the command ``polycast``."""

import importlib.metadata

if __name__ == "__main__":
    (_script,) = importlib.metadata.entry_points(group="console_scripts", name="polycast")
    _script.load()()
