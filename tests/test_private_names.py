"""The modules that use private names of torch themselves, or assign its attributes, are listed."""

import ast
import functools

from .sources import BACKENDS, CORE, PLUGINS, parsed

MAY_READ = {
    "compilers/backward.py": "the configuration that wrap_joint has checked",
    "compilers/guards.py": "names that guard_dynamo has checked",
    "dropin/shim.py": "what Dynamo has while it traces",
    "precision/explain.py": "fake tensors and their errors, used while it explains a model",
    **{
        f"testing/{name}.py": "the conformance suite runs in tests"
        for name in ("kernel_checks", "mixed_dtypes", "op_checks", "recipe_checks", "subject", "torch_policies")
    },
    "quantize/cuda/float8.py": "the recipe is available only if the op has the signature that it knows",
    "out_dtype/operator.py": "a type, for type checkers",
    "cuda/out_dtype_kernels.py": "an op that it has looked for",
    "xpu/out_dtype_kernels.py": "an op that it has looked for",
}
"""The modules that use private names themselves, outside functions that take a Patch, and why."""
MAY_ASSIGN = {"observe/module_calls.py", "testing/subject.py"}
"""The modules that assign attributes of torch without a feature; their docstrings say why."""


def dotted(node):
    if isinstance(node, ast.Name):
        return node.id
    before = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return before and f"{before}.{node.attr}"


@functools.cache
def torch_names(path):
    """Return the names by which a module has objects of torch, with what they are called in torch."""
    found = {"torch": "torch"}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom):
            source = path.parents[node.level - 1].joinpath(*(node.module or "").split(".")).with_suffix(".py")
            known = torch_names(source) if node.level and source.is_file() else {}
            for alias in node.names:
                name = f"{node.module}.{alias.name}" if not node.level else known.get(alias.name, "")
                if name.partition(".")[0] == "torch":
                    found[alias.asname or alias.name] = name
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            name = in_torch(dotted(node.value), found)
            found |= {target.id: name for target in targets if name and isinstance(target, ast.Name)}
    return found


def in_torch(name, names):
    """Return what a dotted name is called in torch; None if it is not of torch."""
    first, dot, others = (name or "").partition(".")
    return f"{names[first]}{dot}{others}" if first in names else None


def private_names(path):
    """Return the private names of torch in the code of a module, with their lines."""
    found = []
    changes_torch = {
        inner
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef) and any(_is_patch(argument) for argument in node.args.args)
        for inner in ast.walk(node)
    }
    for node in ast.walk(parsed(path)):
        if node in changes_torch:
            continue
        if isinstance(node, ast.Attribute):
            name = in_torch(dotted(node), torch_names(path)) or ""
        elif isinstance(node, ast.ImportFrom):
            name = ".".join([node.module or "", *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Import):
            name = node.names[0].name
        else:
            continue
        first, *others = name.split(".")
        if first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in others):
            found.append(f"{name}:{node.lineno}")
    return found


def _is_patch(argument):
    return isinstance(argument.annotation, ast.Name) and argument.annotation.id == "Patch"


def assignments(path):
    """Return the attributes of torch that a module assigns or deletes, with their lines."""
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            name = dotted(node.value)
        elif isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr"):
            name = dotted(node.args[0])
        else:
            continue
        if in_torch(name, torch_names(path)):
            found.append(f"{name}:{node.lineno}")
    return found


MODULES = {
    str(path.relative_to(root)): path
    for root in (CORE, BACKENDS, PLUGINS)
    for path in root.rglob("*.py")
    if path.parent.name != "torch_internals"
}


def test_modules_with_private_names_of_torch_are_listed():
    assert {name for name, path in MODULES.items() if private_names(path)} == set(MAY_READ)


def test_modules_that_assign_attributes_of_torch_are_listed():
    assert {name for name, path in MODULES.items() if assignments(path)} == MAY_ASSIGN


def test_names_under_which_a_module_has_objects_of_torch_are_seen(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "classes.py").write_text("import torch\nOurs = torch.amp.autocast_mode.autocast\n")
    module = tmp_path / "folder" / "module.py"
    module.write_text(
        "import torch\nfrom torch import nn\nfrom ..classes import Ours as Class\njit: object = torch.jit\n"
        "jit._state\nsetattr(Class, '__exit__', None)\nnn.Module.training = True\nOthers._state\n"
    )
    assert private_names(module) == ["torch.jit._state:5"]
    assert sorted(assignments(module)) == ["Class:6", "nn.Module:7"]
