"""Files, modules and names that comments and docstrings refer to exist."""

import ast
import functools
import io
import pkgutil
import re
import tokenize
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
FOLDERS = ("backends", "benchmarks", "core", "docs", "plugins", "tools")
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".h", ".cpp")
)
FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in (*FOLDERS, "examples", "tests")
    for path in (ROOT / folder).rglob("*.*")
    if path.suffix in (".py", ".h", ".cpp", ".md")
]
OF_USERS = {f"{name}.py" for name in ("file", "model", "policies", "program", "script", "train")}
ELSEWHERE = {*OF_USERS, "Convolution.cpp", "llama.cpp"}
"""Files of users, and of torch's sources."""
OF_TORCH = Path(torch.__file__).parent / "include"
PATH = r"(?<![\w.<*/])[A-Za-z_][\w./-]*\.(?:py|h|cpp|md)\b"
NAME = r"[A-Za-z_][\w.]*\w"


@functools.cache
def comments(source):
    """Return the docstrings and comments of a file; consecutive lines of comments are one text."""
    text = (ROOT / source).read_text(encoding="utf-8")
    if not source.endswith(".py"):
        return [re.sub(r"\s*\n\s*//+ ?", " ", block) for block in re.findall(r"//.*(?:\n\s*//.*)*", text)]
    tree = ast.walk(ast.parse(text))
    docstrings = [
        node.value.value
        for node in tree
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    merged, last = [], -1
    for number, line in lines:
        if number == last + 1:
            merged[-1] += line.replace("#", "", 1)
        else:
            merged.append(line)
        last = number
    return [*docstrings, *merged]


def files_named(name):
    return [file for file in FILES if file == name or file.endswith(f"/{name}")]


def dead_paths(text):
    """Return the paths in a comment that are neither those of a file here, nor of a header of torch or the system."""
    return [
        name
        for name in re.findall(PATH, text)
        if name not in ELSEWHERE and not files_named(name) and not (OF_TORCH / name).exists()
    ]


def dead_names(text):
    """Return the names that a comment says are in a file, and are not.

    Only what cannot be an ordinary word counts as a name: it has a capital after the first letter, `_`, `.` or `()`.
    """
    text = " ".join(text.replace("`", "").split())
    mentions = re.findall(rf"\b({NAME}(?:\(\))?) (?:in|of) ({PATH})", text)
    mentions += [(name, file) for file, name in re.findall(rf"({PATH})'s (?:enumeration )?({NAME}(?:\(\))?)", text)]
    dead = []
    for name, file in mentions:
        last = name.removesuffix("()").split(".")[-1]
        is_name = re.search(r"[_.()]|.[A-Z]|^[A-Z]", name)
        found = [(ROOT / each).read_text(encoding="utf-8") for each in files_named(file)]
        if name != "Defined" and is_name and found and not any(re.search(rf"\b{last}\b", each) for each in found):
            dead.append(f"{name} in {file}")
    return dead


def dead_modules(text):
    """Return the dotted names in polycast, in a comment, that cannot be imported."""
    dead = []
    for name in re.findall(r"(?<![\w./:-])polycast(?:\.[A-Za-z_]\w*)+", text):
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            dead.append(name)
    return dead


@pytest.mark.parametrize("dead", [dead_paths, dead_names, dead_modules], ids=["paths", "names", "modules"])
def test_comments_refer_to_what_exists(dead):
    found = {source: [each for text in comments(source) for each in dead(text)] for source in SOURCES}
    assert {source: pointers for source, pointers in found.items() if pointers} == {}
    assert {source.partition("/")[0] for source in found} == set(FOLDERS)


@pytest.mark.parametrize(
    ("text", "dead", "pointers"),
    [
        ("see recipes/prepack_kinds.py", dead_paths, ["recipes/prepack_kinds.py"]),
        ("see recipes/plan.py and ATen/autocast_mode.h, as in train.py:3", dead_paths, []),
        ("See Plan.prevents() in recipes/plan.py.", dead_names, ["Plan.prevents() in recipes/plan.py"]),
        ("See `Plan.perform` in\nrecipes/plan.py, the same in reference/rules.py.", dead_names, []),
        ("As in engine/state.py's NOT_THERE.", dead_names, ["NOT_THERE in engine/state.py"]),
        ("polycast.engine.choices and polycast.engine.state.machine", dead_modules, ["polycast.engine.choices"]),
    ],
)
def test_dead_pointers_are_found(text, dead, pointers):
    assert dead(text) == pointers


def test_comments_of_both_languages_are_read(tmp_path):
    python, cpp = tmp_path / "a.py", tmp_path / "a.h"
    python.write_text('"""One."""\n\nx = "no"  # two\n# three\n\n# four\n', encoding="utf-8")
    cpp.write_text("// One,\n// two.\nint x;  // three\n", encoding="utf-8")
    assert comments(str(python)) == ["One.", "# two three", "# four"]
    assert comments(str(cpp)) == ["// One, two.", "// three"]
