"""Write files atomically."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced_file(target: Path) -> Iterator[Path]:
    """Yield the path of a new file, which replaces the target when the block ends without an error.

    If the target is a symbolic link, the file that it points to is replaced.

    Raises:
        OSError: the file cannot be written; the error names the target.
    """
    file = Path(os.path.realpath(target))
    try:
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}-") as folder:
            complete = Path(folder, file.name)
            yield complete
            complete.replace(file)
    except OSError as error:
        if error.errno is None:
            raise
        # The error names the temporary file, or none if that could not be written.
        raise OSError(error.errno, error.strerror, str(target)) from error
