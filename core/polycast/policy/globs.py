"""Globs over the dotted names of modules, such as ``encoder.layers.[0-11].*``.

Matching does not backtrack: it advances a set of positions, so its time is bounded by the number of names times the
length of the glob.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

MAX_ALTERNATIVES = 1000
"""The largest number of globs that braces may expand to."""

# A set in brackets, which may begin with a closing bracket, or a single character.
_TOKENS = re.compile(r"\[(?:!?\][^].]*|[^].]+)\]|.", re.DOTALL)
_RANGES = re.compile(r".-.|.", re.DOTALL)
_MAX_LEADING_ZEROS = 8
_SPECIAL = re.compile(r"[*?\[\]{}]")


class _Characters(NamedTuple):
    """Matches one character in one of the ranges or, if negated, in none of them."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool = False

    def ends(self, text: str, at: int) -> Iterator[int]:
        if at < len(text) and any(low <= text[at] <= high for low, high in self.ranges) is not self.negated:
            yield at + 1


class _Number(NamedTuple):
    """Matches a whole number in a range, bounds included, with no digits beside it."""

    low: int
    high: int

    def ends(self, text: str, at: int) -> Iterator[int]:
        end = at
        while end < len(text) and text[end] in "0123456789":
            end += 1
        is_whole = at < end and not (at > 0 and text[at - 1] in "0123456789")
        # int() refuses thousands of digits.
        short = end - at <= len(str(self.high)) + _MAX_LEADING_ZEROS
        if is_whole and short and self.low <= int(text[at:end]) <= self.high:
            yield end


class _Any:
    """Matches any number of characters."""

    def ends(self, text: str, at: int) -> Iterable[int]:
        return range(at, len(text) + 1)


_ANY = _Any()
_ONE = _Characters((), negated=True)
_DEEP = "**"
"""The part that matches any number of parts."""

_Token: TypeAlias = _Characters | _Number | _Any
_Part: TypeAlias = str | tuple[_Token, ...]
"""A name, ``"**"`` or a pattern. An asterisk in a name is escaped, so no name is taken for ``"**"``."""


class Glob:
    """A glob over names of modules.

    ``*`` matches any characters of a part between dots, ``?`` one of them, ``**`` as a part any number of parts.
    ``[a-f]`` is one character, ``[!a-f]`` one other, ``[0-11]`` a number, bounds included. ``{a,b}`` is either; braces
    may contain dots and other braces. A special character in brackets is literal: ``[*]``, ``[[]``. The empty glob is
    the model itself.

    Raises:
        ValueError: a set in brackets is ambiguous; a range is empty; a brace is not closed; or the braces expand to
            more than 1,000 globs.
    """

    def __init__(self, text: str) -> None:
        tokens = _TOKENS.findall(text)
        try:
            alternatives, _ = _expand_braces(tokens, 0, nested=False)
        except RecursionError:
            raise ValueError("its braces are nested too deeply") from None
        self._alternatives = [_parse_parts(alternative) for alternative in alternatives]

    def find(self, names: "Names") -> list[str]:
        """Return the names that match, in the order of the model."""
        found = {node for parts in self._alternatives for node in _walk(parts, names.root)}
        return [node.name for node in sorted(found, key=lambda node: node.order) if node.order >= 0]


class _Node:
    """A name in the tree of names; its children have one more part."""

    __slots__ = ("children", "name", "order")

    def __init__(self, name: str) -> None:
        self.name = name
        self.order = -1  # until a module has this name
        self.children: dict[str, _Node] = {}


class Names:
    """The names of a model's modules, as a tree of their parts."""

    def __init__(self, names: Iterable[str]) -> None:
        self.root = _Node("")
        for order, name in enumerate(names):
            node = self.root
            for part in name.split(".") if name else ():
                if part not in node.children:
                    node.children[part] = _Node(f"{node.name}.{part}" if node.name else part)
                node = node.children[part]
            node.order = order


def escape(name: str) -> str:
    """Return the glob that matches one name."""
    escaped = _SPECIAL.sub(r"[\g<0>]", name)
    return f"[c]{escaped[1:]}" if escaped.startswith("class:") else escaped


def _walk(parts: list[_Part], root: _Node) -> Iterator[_Node]:
    todo = [(root, 0)]
    seen: set[tuple[_Node, int]] = set()
    while todo:
        node, at = here = todo.pop()
        if here in seen:
            continue
        seen.add(here)
        if at == len(parts):
            yield node
            continue
        part = parts[at]
        if part == _DEEP:
            todo.append((node, at + 1))
            todo += [(child, at) for child in node.children.values()]
        elif isinstance(part, str):
            if part in node.children:
                todo.append((node.children[part], at + 1))
        else:
            todo += [(child, at + 1) for name, child in node.children.items() if _matches(part, name)]


def _matches(tokens: tuple[_Token, ...], text: str) -> bool:
    positions = {0}
    for token in tokens:
        if token is _ANY:
            positions = set(token.ends(text, min(positions)))
        else:
            positions = {end for at in positions for end in token.ends(text, at)}
        if not positions:
            return False
    return len(text) in positions


def _expand_braces(tokens: list[str], at: int, *, nested: bool) -> tuple[list[list[str]], int]:
    """Return the alternatives of the tokens from a position, and the position of the closing brace or the end."""
    done: list[list[str]] = []
    current: list[list[str]] = [[]]
    begin = at - 1
    while at < len(tokens):
        token = tokens[at]
        if token == "{":
            inner, at = _expand_braces(tokens, at + 1, nested=True)
            if len(current) * len(inner) > MAX_ALTERNATIVES:
                raise ValueError(f"braces expand to more than {MAX_ALTERNATIVES:,} globs: use '*', or several keys")
            current = [before + after for before in current for after in inner]
        elif token == "}":
            if not nested:
                raise ValueError("a closing brace has no opening one: write '[}]' for the character")
            if not done:
                text = "".join(tokens[begin : at + 1])
                raise ValueError(f"{text!r} has no comma: braces hold alternatives, such as '{{q,k}}'")
            return done + current, at
        elif token == "," and nested:
            done, current = done + current, [[]]
        else:
            for alternative in current:
                alternative.append(token)
        at += 1
    if nested:
        raise ValueError("a brace is not closed: write '[{]' for the character")
    return done + current, at


def _parse_parts(tokens: list[str]) -> list[_Part]:
    if not tokens:
        return []
    parts: list[_Part] = []
    part: list[str] = []
    for token in [*tokens, "."]:
        if token != ".":
            part.append(token)
            continue
        parts.append(_DEEP if part == ["*", "*"] else _parse_part(part))
        part = []
    return parts


def _parse_part(tokens: list[str]) -> _Part:
    read: list[_Token] = []
    for token in map(_parse_token, tokens):
        if not (token is _ANY and read and read[-1] is _ANY):
            read.append(token)
    literal = ""
    for token in read:
        if not isinstance(token, _Characters) or token.negated or len(token.ranges) != 1:
            return tuple(read)
        low, high = token.ranges[0]
        if low != high:
            return tuple(read)
        literal += low
    # An escaped "**" is matched character by character.
    return tuple(read) if literal == _DEEP else literal


def _parse_token(text: str) -> _Token:
    if text == "*":
        return _ANY
    if text == "?":
        return _ONE
    if len(text) == 1:
        return _Characters(((text, text),))
    inside = text[1:-1]
    number = re.fullmatch(r"([0-9]+)-([0-9]+)", inside)
    if number is not None:
        low, high = map(int, number.groups())
        if low > high:
            raise ValueError(f"the range {inside!r} is empty: did you mean '{high}-{low}'?")
        if len(inside) > len("0-9"):
            return _Number(low, high)
    elif "," in inside or re.fullmatch(r"!?[0-9]{2,}", inside) or re.search(r"[0-9]{2}-[0-9]|[0-9]-[0-9]{2}", inside):
        raise ValueError(
            f"{text!r} would be one character out of a set, and looks like numbers: write '[0-11]' for a range of "
            "numbers, '{0,2,[8-11]}' for several, '[ab]' for characters"
        )
    negated = inside.startswith("!") and inside != "!"
    ranges = tuple(_parse_range(each) for each in _RANGES.findall(inside[negated:]))
    return _Characters(ranges, negated)


def _parse_range(text: str) -> tuple[str, str]:
    if text[0] > text[-1]:
        raise ValueError(f"the range {text!r} is empty: did you mean {text[::-1]!r}?")
    return text[0], text[-1]
