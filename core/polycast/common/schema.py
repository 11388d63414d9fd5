"""The schema of a file: a number that grows when older versions of polycast could no longer read it."""


def check_schema(schema: object, newest: int, expected: str) -> None:
    """Raise ValueError if this polycast cannot read a file.

    Args:
        schema: as in the file; None if it has none.
        newest: the newest that this polycast reads. It reads all older ones.
        expected: what such a file has.
    """
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise ValueError(f"{expected}, got {schema!r}")
    if schema > newest:
        raise ValueError(
            f"it has schema {schema}, and this polycast reads schemas up to {newest}: install a newer polycast"
        )
