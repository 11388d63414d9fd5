"""A progress bar on stderr, if stderr is a terminal."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """Show a bar and yield a function that advances it by one, and can set its description."""
    state = random.getstate()
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    random.setstate(state)  # importing rich draws a random number
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=total)

        def advance(now: str = what) -> None:
            shown.update(task, advance=1, description=now)

        yield advance
