"""Read files of expected failures."""

from pathlib import Path


def read(path: Path | str | None) -> dict[str, str]:
    """Return the reasons of a file of expected failures, by name.

    Args:
        path: the file; None: no file. Each line is the name of an op or a test, white space and the reason. Empty
            lines and lines that begin with ``#`` are skipped.

    Raises:
        ValueError: a line has no reason, or repeats a name.
    """
    reasons: dict[str, str] = {}
    if path is None:
        return reasons
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, *reason = line.split(maxsplit=1)
        if not reason:
            raise ValueError(
                f"{path}, line {number}: {name!r} has no reason. Write it after the name, on the same line."
            )
        if name in reasons:
            raise ValueError(f"{path}, line {number}: {name!r} is named twice. Remove one of the lines.")
        reasons[name] = reason[0].strip()
    return reasons
