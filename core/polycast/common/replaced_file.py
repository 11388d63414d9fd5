"""Write files atomically."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced_file(target: Path) -> Iterator[Path]:
    """Yield the path of a new file, which replaces the target when the block ends without an error.

    Raises:
        OSError: the file cannot be written; the error names the target.
    """
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
            complete = Path(folder, target.name)
            yield complete
            complete.replace(target)
    except OSError as error:
        if error.filename is None:
            raise
        # The error names the temporary file.
        raise OSError(error.errno, error.strerror, str(target)) from error
