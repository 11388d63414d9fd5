"""Where a file is to be written: whether it can be, asked before there is anything to write."""

import os
import tempfile
from pathlib import Path


def check_target(path: str | os.PathLike[str], such_as: str = "report.html") -> None:
    """Say now why a file could not be written later; nothing is left behind.

    Raises:
        ValueError: there is no such folder, it cannot be written to, or what is there is no file, or not writable.
    """
    target = Path(path)
    folder = target.parent
    if target.is_dir():
        raise ValueError(f"{target} is a folder: name a file in it, such as {target / such_as}.")
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "is not there"
        raise ValueError(f"{target} cannot be written: {folder} {what}. Make it, or name another.")
    try:
        # Only trying tells: what may be written is not for the mode of a folder alone to say.
        if target.exists():
            with target.open("ab"):
                pass
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{target} cannot be written: {reason}. Name a file that can be.") from error
