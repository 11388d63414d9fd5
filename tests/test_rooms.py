"""The architecture: the folders of the core, the imports between them, and the length of files."""

import ast
from pathlib import Path

import pytest

import polycast

ROOT = Path(polycast.__file__).parent
SOURCES = Path(__file__).parent.parent
GENERATED = {"docs/modules.md", "docs/benchmarks.md"}
FLOORS = [
    {"cli", "testing"},
    {"drop_in"},
    {"distributed", "precision"},
    {"observer"},
    {"region"},
    {"compilers", "out_dtype"},
    {"engine"},
    {"profiling"},
    {"toolchain"},
    {"plugins"},
    {"policy"},
    {"torch_internals"},
    {"common"},
    {"errors"},
]
"""The rooms, from the top. A room imports from those below its floor; none imports from another on its own."""
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
    if path.parent != ROOT or path.stem not in ("__init__", "__main__")
}


def imports(module):
    """Return the modules of polycast that a module imports, anywhere in it."""
    path = MODULES[module]
    package = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = [*package[: len(package) + 1 - node.level], *(node.module or "").split(".")]
            elif (node.module or "").partition(".")[0] == "polycast":
                base = node.module.split(".")[1:]
            else:
                continue
            base = ".".join(part for part in base if part)
            for alias in node.names:
                inside = f"{base}.{alias.name}".lstrip(".")
                found.add(inside if inside in MODULES else base)
        elif isinstance(node, ast.Import):
            found.update(alias.name[len("polycast.") :] for alias in node.names if alias.name.startswith("polycast."))
    return found - {""}


ARROWS = {module: imports(module) for module in MODULES}


def floor(module):
    room = module.partition(".")[0]
    (number,) = (number for number, rooms in enumerate(FLOORS) if room in rooms)
    return number


def test_every_room_has_its_floor():
    assert {module.partition(".")[0] for module in MODULES} == set().union(*FLOORS)


def test_the_list_of_folders_can_be_read_at_a_glance():
    entries = {path.name for path in ROOT.iterdir()} - {"__init__.py", "__main__.py", "py.typed", "__pycache__"}
    assert len(entries) <= 17, entries


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_its_own_room_and_from_those_below(module):
    room = module.partition(".")[0]
    others = {other for other in ARROWS[module] if other.partition(".")[0] != room}
    assert [other for other in sorted(others) if floor(other) <= floor(module)] == []


def test_the_arrows_are_seen():
    assert {"engine.state", "compilers.dynamo", "compilers.export"} <= ARROWS["region.autocast"]
    assert {"plugins.registry", "region.autocast"} <= ARROWS["testing.subject"]


def test_no_modules_import_each_other_on_any_way():
    below = {}

    def visit(module, way):
        assert module not in way, " -> ".join([*way[way.index(module) :], module])
        if module not in below:
            below[module] = [visit(other, [*way, module]) for other in ARROWS[module] if other in ARROWS]

    for module in MODULES:
        visit(module, [])


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()}), ids=lambda path: path.name)
def test_a_room_says_what_it_is_for(folder):
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))


@pytest.mark.parametrize("folder", ["backends", "benchmarks", "core", "docs", "examples", "tests", "tools"])
def test_no_file_has_more_than_350_lines(folder):
    written = {".py", ".h", ".cpp", ".md", ".js", ".css", ".html", ".template"}
    paths = {path.relative_to(SOURCES).as_posix(): path for path in (SOURCES / folder).rglob("*.*")}
    lines = {
        name: path.read_text(encoding="utf-8").count("\n")
        for name, path in paths.items()
        if path.suffix in written and name not in GENERATED
    }
    assert {name: count for name, count in lines.items() if count > 350} == {}
    assert lines
