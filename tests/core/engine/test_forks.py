"""Forks while threads hold locks leave the child usable."""

import os

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")]

HELD = """
import contextlib, os, sys, threading
import polycast

for module in (polycast, polycast.plugin):
    for name in module.__all__:
        getattr(module, name)
observes = os.environ["POLYCAST_ENGINE"] == "native" and hasattr(polycast, "observe")
with polycast.observe() if observes else contextlib.nullcontext():
    with polycast.autocast("cpu"):
        pass
KINDS = type(threading.Lock()), type(threading.RLock())


def locks():
    modules = [module for name, module in sorted(sys.modules.items()) if name.partition(".")[0] == "polycast"]
    return {f"{m.__name__}.{name}": v for m in modules for name, v in vars(m).items() if isinstance(v, KINDS)}


def hold(lock):
    with lock:
        began.set()
        forks.wait()


began, forks, taken = threading.Event(), threading.Event(), []
os.register_at_fork(before=forks.set)  # the last that is registered is the first that is called
for name, lock in locks().items():
    thread = threading.Thread(target=hold, args=(lock,))
    thread.start()
    began.wait()
    child = os.fork()
    if not child:
        os._exit(0 if locks()[name].acquire(blocking=False) else 1)
    if os.waitpid(child, 0)[1]:
        taken.append(name)
    thread.join()
    began.clear()
    forks.clear()
print(len(locks()) > 5, taken)
"""


COMPILING = """
import os, sys, threading, warnings
import polycast

folder, what = sys.argv[1:]
if what == "observer":
    polycast.install("cpu")  # its engine is there
os.environ["XDG_CACHE_HOME"] = folder  # nothing is built yet
os.environ["CXX"] = os.path.join(folder, "compiler")
begun, go_on = os.path.join(folder, "begun"), os.path.join(folder, "go_on")
os.mkfifo(begun), os.mkfifo(go_on)
with open(os.environ["CXX"], "w") as file:
    file.write(f'#!/bin/sh\\ncase "$*" in *--version*) exit;; esac\\necho > {begun}\\nread line < {go_on}\\nexit 1\\n')
os.chmod(os.environ["CXX"], 0o755)


def use():
    try:
        if what == "engine":
            polycast.install("cpu")
        elif what == "observer":
            polycast.observe().__enter__()
        else:
            raise RuntimeError(polycast.plugin.load_ops("polycast_plugins.quantize.cpu.native").reason)
    except RuntimeError as error:
        refusals.append("the compiler failed with status 1" in str(error))


refusals, thread = [], threading.Thread(target=use)
thread.start()
open(begun).read()
child = os.fork()
if not child:
    os._exit(0)
print(os.waitpid(child, 0)[1])
with open(go_on, "w") as file:
    file.write("\\n")
thread.join()
print(refusals)
"""

IMPORTING = """
import contextlib, importlib.abc, os, sys, threading
import torch
import polycast

awaited = sys.argv[1]
begun, go_on = threading.Event(), threading.Event()


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name == awaited:
            begun.set()
            go_on.wait()
            raise ImportError("it is awaited, not needed")


def use():
    weight = torch.nn.Parameter(torch.ones(16, 16))
    with contextlib.suppress(Exception):
        if awaited == "polycast_plugins.fastest.measure":
            polycast.profile("cpu", refresh=True)
        with torch.no_grad(), polycast.autocast("cpu", recipe="int8" if "quantize" in awaited else None):
            torch.nn.functional.linear(torch.ones(1, 16), weight)


assert awaited not in sys.modules
finder = Finder()
sys.meta_path.insert(0, finder)
thread = threading.Thread(target=use)
thread.start()
begun.wait()
os.register_at_fork(before=go_on.set)  # the last that is registered is the first that is called
child = os.fork()
if not child:
    sys.meta_path.remove(finder)
    __import__(awaited)
    os._exit(0)
print(os.waitpid(child, 0)[1])
thread.join()
"""

CASTING = """
import faulthandler, os, sys
from concurrent.futures import ThreadPoolExecutor
import torch
import polycast

where, in_child = sys.argv[1:]
torch.set_num_threads(2)
weight = torch.nn.Parameter(torch.randn(300, 400), requires_grad=False)
x = torch.ones(1, 300)


def product():
    with torch.no_grad(), polycast.autocast("cpu"):
        return torch.mm(x, weight)


def products():
    return product(), torch.mm(x.bfloat16(), weight.detach().bfloat16())


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, row):
        return product()[0] * row


if where == "on a thread":
    with ThreadPoolExecutor(1) as thread:
        out, expected = thread.submit(products).result()
else:
    out, expected = products()
assert torch.equal(out, expected)
if in_child == "workers":
    rows = torch.cat(list(torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context="fork")))
    print(torch.equal(rows, expected * torch.arange(4)[:, None]))
else:
    child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(60, exit=True)
        torch.set_num_threads(int(in_child))
        os._exit(not torch.equal(product(), expected))
    print(os.waitpid(child, 0)[1] == 0)
"""


def test_a_fork_does_not_wait_for_a_compiler(run_program, tmp_path):
    assert run_program(COMPILING, "native", tmp_path, "engine")[1] == "0\n[True]\n"


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_no_lock_of_a_module_is_held_in_a_child_by_a_thread_that_is_not_there(run_program, engine):
    assert run_program(HELD, engine) == (0, "True []\n", "")


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize(
    ("where", "in_child"),
    [
        ("on the main thread", "1"),  # no more: the main thread's OpenMP threads are not in the child, as with torch
        ("on a thread", "2"),
        ("on the main thread", "workers"),  # each of which sets one thread
        ("on a thread", "workers"),
    ],
)
def test_a_child_casts_weights_that_its_parent_has_cast_on_several_threads(run_program, engine, where, in_child):
    assert run_program(CASTING, engine, where, in_child) == (0, "True\n", "")


def test_a_child_imports_what_another_thread_was_importing(run_program):
    assert run_program(IMPORTING, "native", "polycast.engine.native.engine_library", timeout=60)[1] == "0\n"
