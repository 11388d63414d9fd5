"""Check whether a file can be written, before there is anything to write."""

import os
import tempfile
from pathlib import Path


def check_output(path: str | os.PathLike[str], such_as: str = "report.html") -> None:
    """Raise now if a file could not be written later. Creates no file.

    Raises:
        ValueError: the folder does not exist or is not writable, or the path is not a writable file.
    """
    target = Path(path)
    folder = target.parent
    if target.is_dir():
        raise ValueError(f"{target} is a folder: name a file in it, such as {target / such_as}.")
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"{target} cannot be written: {folder} {what}. Create it, or choose another.")
    try:
        # A folder's mode does not show whether it is writable, so try.
        if target.exists():
            with target.open("ab"):
                pass
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{target} cannot be written: {reason}. Choose a writable file.") from error
