"""Run regions in processes whose torch lacks one private name each; print the outcomes as JSON.

torch is imported once. Each process is forked before polycast is imported.
"""

import importlib.util
import json
import os
import pkgutil
import sys
import traceback
import warnings
from types import ModuleType

import torch
import torch._dynamo  # checkpoints import it, which takes a while


def names_read():
    """Return the names, looked up in another process, because polycast must not be imported here."""
    return _in_fork(lambda: sorted(_lookup().losses))


def _lookup():
    importlib.import_module("polycast.torch_internals.callers_state")  # imports the other modules with names
    return importlib.import_module("polycast.torch_internals.lookup")


def import_without(name):
    """Import polycast with a name missing from torch during the lookup only, because torch's own code needs it."""
    where, _, attribute = name.rpartition(".")
    owner = pkgutil.resolve_name(where) if where not in sys.modules else sys.modules[where]
    theirs = getattr(owner, attribute)
    (core,) = importlib.util.find_spec("polycast").submodule_search_locations
    packages = {"polycast": core, "polycast.torch_internals": f"{core}/torch_internals"}
    for package, path in packages.items():
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [path]
    delattr(owner, attribute)
    _lookup()
    setattr(owner, attribute, theirs)
    for package in packages:
        del sys.modules[package]
    return importlib.import_module("polycast")


def without(name):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        polycast = import_without(name)
        assert list(sys.modules["polycast.torch_internals.lookup"].missing) == [name]
        _plain(polycast)
        _more(polycast)
    return {"error": None, "warnings": [str(each.message) for each in said]}


def _plain(polycast):
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    for _ in range(2):
        with polycast.autocast("cpu"):
            y = layer(x)
            assert y.dtype is torch.bfloat16
            assert torch.nn.functional.mse_loss(y, y).dtype is torch.float32
            with polycast.autocast("cpu", enabled=False):
                assert torch.mm(x, x.t()).dtype is torch.float32
        assert torch.mm(x, x.t()).dtype is torch.float32
    y.float().sum().backward()
    assert layer.weight.grad.dtype is torch.float32
    assert polycast.autocast("cpu")(layer)(x).dtype is torch.bfloat16


def _more(polycast):
    from torch.utils.checkpoint import checkpoint

    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with polycast.autocast("cpu", policy={"linear": "fp32"}):
        assert layer(x).dtype is torch.float32
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    with polycast.autocast("cpu"), polycast.capture().apply():
        assert layer(x).dtype is torch.bfloat16
    if hasattr(polycast, "Int8"):
        with torch.inference_mode(), polycast.autocast("cpu", recipe=polycast.Int8(min_size=1)):
            assert layer(x).dtype is torch.bfloat16
    with torch.no_grad(), polycast.autocast("cpu", cache=polycast.WeightCache()):
        assert layer(x).dtype is torch.bfloat16
    with (
        polycast.apply_policy(torch.nn.Sequential(layer), polycast.Policy(modules={"0": "fp32"})),
        polycast.autocast("cpu"),
    ):
        assert layer(x).dtype is torch.float32
    if hasattr(polycast, "patch_torch"):
        with polycast.patch_torch(), torch.autocast("cpu"):
            assert layer(x).dtype is torch.bfloat16
    assert polycast.plugin.explain_op("mm", "cpu").policy is not None
    if hasattr(polycast, "out_dtype"):
        a = torch.ones(2, 2, dtype=torch.int8)
        assert polycast.out_dtype(torch.ops.aten.mm.default, torch.int32, a, a).dtype is torch.int32
    polycast.uninstall()
    _plain(polycast)


def _in_fork(function):
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(read)
            try:
                answer = function()
            except BaseException:
                answer = {"error": traceback.format_exc(), "warnings": []}
            with os.fdopen(write, "w") as pipe:
                json.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(process, 0)
    return json.loads(said) if said else {"error": "the process died", "warnings": []}


if __name__ == "__main__":
    assert "polycast" not in sys.modules
    chosen = sys.argv[1:] or names_read()
    answers = {}
    children = []
    # A process for each share, not a thread: a fork would copy the locks of other threads.
    for share in range(2):
        children.append((chosen[share::2], *os.pipe()))
        if os.fork() == 0:
            result = {name: _in_fork(lambda name=name: without(name)) for name in chosen[share::2]}
            with os.fdopen(children[-1][2], "w") as pipe:
                json.dump(result, pipe)
            os._exit(0)
        os.close(children[-1][2])
    for _, read, _ in children:
        with os.fdopen(read) as pipe:
            answers |= json.load(pipe)
    print(json.dumps(answers))
