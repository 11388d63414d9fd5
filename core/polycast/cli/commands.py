"""The classes of the commands, whose help shows flags without a type and reflows paragraphs."""

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup


class _FlagsWithoutTypes:
    """A command that shows no type after a flag, where typer shows ``<bool>`` or ``BOOLEAN``."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_FlagsWithoutTypes, TyperCommand):
    """A command."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        if settings.get("help"):
            settings["help"] = re.sub(r"(?<!\n)\n(?!\n)", " ", settings["help"])
        super().__init__(*args, **settings)


class Commands(_FlagsWithoutTypes, TyperGroup):
    """All commands."""
