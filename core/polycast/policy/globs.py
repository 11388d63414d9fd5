"""Globs over the dotted names of modules, such as ``encoder.layers.[0-11].*``."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator

MAX_ALTERNATIVES = 1000
"""The largest number of globs that braces may expand to."""

# A set in brackets, which may begin with a closing bracket, or a single character.
_TOKENS = re.compile(r"\[(?:!?\][^].]*|[^].]+)\]|.", re.DOTALL)
_RANGES = re.compile(r".-.|.", re.DOTALL)

# In what follows, each part of a name has a dot before it, so that parts can be repeated.
_PART = r"\.[^.]*"
_END_OF_PART = r"(?![^.])"


@functools.lru_cache(maxsize=4096)  # a policy checks its keys when it is made, and uses them whenever it is applied
def compile_glob(text: str) -> Callable[[str], bool]:
    """Return a predicate for the names that a glob matches.

    ``*`` matches any characters of a part between dots, ``?`` one of them, ``**`` as a part any number of parts.
    ``[a-f]`` is one character, ``[!a-f]`` one other, ``[0-11]`` a number, bounds included. ``{a,b}`` is either; braces
    may contain dots. A special character in brackets is literal: ``[*]``, ``[[]``. The empty glob is the model itself.

    Raises:
        ValueError: a set in brackets is ambiguous; a range is empty; a brace is not closed, or in another; or the
            braces expand to more than 1,000 globs.
    """
    numbers = itertools.count()
    globs = [_pattern(tokens, numbers) for tokens in _expand_braces(_TOKENS.findall(text))]
    matches = re.compile("|".join(globs), re.DOTALL).fullmatch
    return lambda name: matches(f".{name}" if name else "") is not None


def _expand_braces(tokens: list[str]) -> list[list[str]]:
    """Return the globs without braces that a glob stands for."""
    globs: list[list[str]] = [[]]
    choices: list[list[str]] = []  # in braces: the alternatives so far
    for token in tokens:
        if token == "{":
            if choices:
                raise ValueError("braces cannot be in braces: list all alternatives in one pair, or in several keys")
            choices = [[]]
        elif token == "}":
            if not choices:
                raise ValueError("a closing brace has no opening one: write '[}]' for the character")
            if len(choices) == 1:
                text = f"{{{''.join(choices[0])}}}"
                raise ValueError(f"{text!r} has no comma: braces hold alternatives, such as '{{q,k}}'")
            if len(globs) * len(choices) > MAX_ALTERNATIVES:
                raise ValueError(f"braces expand to more than {MAX_ALTERNATIVES:,} globs: use '*', or several keys")
            globs = [glob + choice for glob in globs for choice in choices]
            choices = []
        elif token == "," and choices:
            choices.append([])
        else:
            for open_end in choices[-1:] or globs:
                open_end.append(token)
    if choices:
        raise ValueError("a brace is not closed: write '[{]' for the character")
    return globs


def _pattern(tokens: list[str], numbers: Iterator[int]) -> str:
    """Return the pattern of a glob without braces, with groups of these numbers."""
    runs = [""]  # of parts, between those that are "**"
    for part in _split(tokens, ".") if tokens else ():
        if part == ["*", "*"]:
            runs.append("")
        else:
            pieces = ["".join(map(_token_pattern, piece)) for piece in _split(part, "*")]
            runs[-1] += r"\." + _join("[^.]", pieces, numbers) + _END_OF_PART
    return _join(_PART, runs, numbers)


def _split(tokens: list[str], separator: str) -> list[list[str]]:
    split: list[list[str]] = [[]]
    for token in tokens:
        if token == separator:
            split.append([])
        else:
            split[-1].append(token)
    return split


def _join(filler: str, pieces: list[str], numbers: Iterator[int]) -> str:
    """Return a pattern for pieces with any number of fillers between them.

    A piece matches in one way at a place, so if the rest matches after any place it does after the first one. A
    lookahead finds that, for matching does not go back into one: its time is bounded by the length of the name times
    that of the glob.
    """
    first, *others = pieces
    pattern = first
    for piece in others[:-1]:
        group = f"skipped{next(numbers)}"
        pattern += f"(?=(?P<{group}>(?:{filler})*?{piece}))(?P={group})"
    return f"{pattern}(?:{filler})*{others[-1]}" if others else pattern


def _token_pattern(text: str) -> str:
    if text == "?":
        return "[^.]"
    if len(text) == 1:
        return re.escape(text)
    inside = text[1:-1]
    number = re.fullmatch(r"([0-9]+)-([0-9]+)", inside)
    if number is not None:
        low, high = map(int, number.groups())
        if low > high:
            raise ValueError(f"the range {inside!r} is empty: did you mean '{high}-{low}'?")
        if len(inside) > len("0-9"):
            return f"(?<![0-9])0*(?:{'|'.join(_number_patterns(low, high))})(?![0-9])"
    elif "," in inside or re.fullmatch(r"!?[0-9]{2,}", inside) or re.search(r"[0-9]{2}-[0-9]|[0-9]-[0-9]{2}", inside):
        raise ValueError(
            f"{text!r} would be one character out of a set, and looks like numbers: write '[0-11]' for a range of "
            "numbers, '{0,2,[8-11]}' for several, '[ab]' for characters"
        )
    negation = "^" if inside.startswith("!") and inside != "!" else ""
    ranges = "".join(map(_range_pattern, _RANGES.findall(inside[len(negation) :])))
    return rf"(?!\.)[{negation}{ranges}]"


def _number_patterns(low: int, high: int) -> Iterator[str]:
    """Yield patterns for the numbers of a range: for 8 to 120, those of 8, 9, 10 to 19, ... 100 to 109, ..."""
    while low <= high:
        digits = 0  # that may be any
        while low and low % 10 ** (digits + 1) == 0 and low + 10 ** (digits + 1) <= high + 1:
            digits += 1
        yield f"{low // 10**digits}[0-9]{{{digits}}}"
        low += 10**digits


def _range_pattern(text: str) -> str:
    if text[0] > text[-1]:
        raise ValueError(f"the range {text!r} is empty: did you mean {text[::-1]!r}?")
    return f"{re.escape(text[0])}-{re.escape(text[-1])}"
