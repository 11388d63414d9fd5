"""Where a loaded cache is: on pages of its file, which processes share, and of which writes make copies."""

import gc
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from polycast import WeightCache, autocast

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says where memory is"),
    pytest.mark.usefixtures("native", "no_grad"),
]
SIZE = 512
FILE = 2 * SIZE * SIZE  # bytes of the cast

LOAD = f"""
import json, os, signal, sys, torch
from pathlib import Path
from polycast import WeightCache
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_saved_caches_in_memory import memory_of, model_of, run

torch.set_num_threads(1)
torch.set_grad_enabled(False)
folder = Path(sys.argv[1])

def load():
    model = model_of(folder / "weights.pt")
    cache = WeightCache.load(folder / "model.casts", model)
    run(model, cache)
    assert cache.stats().misses == 0
    return model, cache
"""
SHARED = """
processes = []
for _ in range(2):
    (wait, go_on), (read, write) = os.pipe(), os.pipe()
    if os.fork() == 0:
        signal.alarm(300)
        kept = load()
        os.write(write, b"ready")
        os.read(wait, 1)
        found = memory_of(folder / "model.casts")
        os.write(write, json.dumps([found[name] for name in ("Rss", "Pss", "Anonymous")]).encode())
        os._exit(0)
    os.close(write)
    processes.append((read, go_on))
assert [os.read(read, 5) for read, _ in processes] == [b"ready"] * 2
found = []
for read, go_on in processes:  # both run until both have said that they are ready
    os.write(go_on, b"!")
    found.append(json.loads(os.read(read, 1000)))
print(json.dumps(found))
"""
FORKED = """
model, cache = load()
expected = run(model, cache)
if os.fork() == 0:
    signal.alarm(300)
    again = WeightCache.load(folder / "model.casts", model)
    same = torch.equal(run(model, cache), expected) and torch.equal(run(model, again), expected)
    misses = cache.stats().misses + again.stats().misses
    os._exit(0 if same and misses == 0 else 1)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def memory_of(path):
    """Return the bytes of this process's mappings of a file, by the names of smaps."""
    totals, is_of_file = {}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("Rss", "Pss", "Anonymous", "Private_Dirty"):
            totals[name] = totals.get(name, 0) + is_of_file * int(rest.split()[0]) * 1024
        elif "-" in name.split(" ")[0]:
            is_of_file = line.endswith(str(path))
    return totals


def model_of(weights):
    """Return a model on the pages of a file."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False)).requires_grad_(False)
    model.load_state_dict(torch.load(weights, mmap=True), assign=True)
    return model


def run(model, cache):
    with autocast("cpu", cache=cache):
        return model(torch.ones(1, SIZE))


@pytest.fixture
def folder(tmp_path):
    model, cache = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False)), WeightCache()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    run(model, cache)
    cache.save(tmp_path / "model.casts", model)
    return tmp_path


def test_it_is_on_pages_of_its_file(folder):
    path, model = folder / "model.casts", model_of(folder / "weights.pt")
    cache = WeightCache.load(path, model)
    run(model, cache)
    used = memory_of(path)
    assert used["Rss"] >= FILE
    assert used["Anonymous"] == 0
    assert memory_of(folder / "weights.pt")["Anonymous"] == 0
    del cache
    gc.collect()
    assert memory_of(path)["Rss"] == 0


def test_a_write_copies_pages(folder):
    path = folder / "model.casts"
    content = path.read_bytes()
    model = model_of(folder / "weights.pt")
    cache = WeightCache.load(path, model)
    (entry,) = cache.entries()
    entry.tensors[0][:8].zero_()
    assert 0 < memory_of(path)["Anonymous"] < FILE
    assert path.read_bytes() == content


def test_a_save_over_a_loaded_file_leaves_what_was_loaded(folder):
    path, model = folder / "model.casts", model_of(folder / "weights.pt")
    cache = WeightCache.load(path, model)
    expected = run(model, cache)
    other, cache_of_other = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False)), WeightCache()
    run(other, cache_of_other)
    cache_of_other.save(path, other)
    assert torch.equal(run(model, cache), expected)
    assert torch.equal(run(other, WeightCache.load(path, other)), run(other, cache_of_other))


@pytest.mark.slow
def test_processes_share_it(run_program, folder):
    status, printed, errors = run_program(LOAD + SHARED, "native", folder, imports="torch, polycast, pytest")
    assert status == 0, errors
    (resident, proportional, _), _ = found = json.loads(printed)
    assert proportional < 0.75 * resident  # two map the pages
    assert all(resident >= FILE and anonymous == 0 for resident, _, anonymous in found)


@pytest.mark.slow
def test_a_forked_child_uses_it_and_loads_it(run_program, folder):
    done = run_program(LOAD + FORKED, "native", folder, imports="torch, polycast, pytest")
    assert done == (0, "", "")
