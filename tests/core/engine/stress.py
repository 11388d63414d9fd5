"""Threads that enter and leave regions, share, save and load caches, change and drop weights, train, and are forked.

`python stress.py STEPS [SEED [FORKS]]` takes so many steps on each of a few threads. Regions have recipes too, where
the processor computes by them. Every product is compared with what the weight holds. It prints how many steps were
taken, and exits with 1 where one went wrong.
"""

import contextlib
import faulthandler
import gc
import os
import random
import sys
import tempfile
import threading
import traceback

import torch

import polycast
from polycast.engine import state

THREADS = 4
X = torch.ones(4, 4, dtype=torch.bfloat16)
BIAS = torch.nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
PRODUCTS = [
    lambda weight: torch.mm(X, weight),
    lambda weight: torch.matmul(X, weight),
    lambda weight: torch.nn.functional.linear(X, weight),
    lambda weight: torch.addmm(BIAS, X, weight) - 2,
    lambda weight: torch.nn.functional.linear(X, weight, BIAS) - 2,
    lambda weight: torch.mm(X, weight.t()),
    lambda weight: torch.nn.functional.linear(X, weight[:2]),
    lambda weight: torch.matmul(X, weight.chunk(2, dim=1)[1]),
]
HAS_QUANTIZE = hasattr(polycast, "Int8")  # the plugin, which also saves caches
HAS_INT8 = HAS_QUANTIZE and bool(polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8()))
FASTEST = []
if hasattr(polycast, "Fastest"):
    from polycast_plugins.fastest.measurement import Measurement

    FLOAT32 = polycast.DeviceProfile(  # where float32 is the fastest, so that "fastest" records products without Python
        *("cpu", "a processor", 1, {}, {}),
        tuple(
            Measurement(op, rows, way, time * rows, 2**12)
            for op in ("linear", "matmul")
            for way, time in (("float32", 1e-6), ("bfloat16", 3e-6), ("float16", 3e-6))
            for rows in (1, 4, 16)
        ),
        1e10,
    )
    FASTEST.append(polycast.Fastest(profile=FLOAT32))
LARGE = [(4, 9_000), (4, 40_000), (4, 40_000), (4, 40_004)]  # whose casts share memory, one after the other
PACKED = 4128  # bytes that a weight of 4 x 4 is packed into
torch.set_num_threads(1)


def suspended(settings):
    with polycast.autocast("cpu", **settings):
        yield


class Contended:
    """A weight that every thread writes while the others use it. What it held is known where nobody wrote meanwhile."""

    def __init__(self):
        self.lock = threading.Lock()
        self.begun = self.ended = 0
        self.weight, self.value = None, 0.0
        self.write(1.0, replaces=True)

    def write(self, value, replaces, unversioned=False):
        with self.lock, torch.no_grad():
            self.begun += 1
            if replaces:
                self.weight = torch.nn.Parameter(torch.full((4, 4), value), requires_grad=False)
            else:
                (self.weight.data if unversioned else self.weight).fill_(value)
            self.value = value
            self.ended += 1

    def use(self, product):
        ended = self.ended
        idle, weight, value = self.begun == ended, self.weight, self.value
        try:
            with torch.inference_mode():
                right = torch.all(product(weight) == 4 * value).item()
        except polycast.errors.StaleWeightError:
            right = False  # the cache that verifies found a write that is going on
        assert right or not idle or self.begun != ended, (weight, value)


class Thread:
    """The program of one thread, which changes its own weights but not the shared ones."""

    def __init__(self, seed, caches, shared, contended):
        self.random = random.Random(seed)
        self.caches, self.shared, self.contended = caches, shared, contended
        self.weights = [self.new_weight() for _ in range(6)]
        self.large = [self.new_weight(shape) for shape in LARGE]
        self.graphs = []
        self.aliases = []
        self.generators = []
        self.steps = 0
        self.in_autograd = threading.Lock()
        """Held while torch may hold a mutex of autograd's without the GIL: a child would wait for it for ever."""

    def new_weight(self, shape=(4, 4)):
        value = float(self.random.randrange(16))
        return torch.nn.Parameter(torch.full(shape, value), requires_grad=self.random.random() < 0.5)

    def settings(self):
        caches = [None, None, *self.caches, polycast.WeightCache(max_bytes=64)]
        recipes = [None, None, "none", *FASTEST]
        if HAS_INT8:
            recipes += 3 * [polycast.Int8(min_size=1)]
        return {"cache": self.random.choice(caches), "recipe": self.random.choice(recipes)}

    def use(self, weight):
        mode = self.random.choice([torch.no_grad, torch.enable_grad, torch.inference_mode])
        records = weight.requires_grad and mode is torch.enable_grad
        with self.in_autograd if records else contextlib.nullcontext(), mode():
            out = self.random.choice(PRODUCTS)(weight)
        expected = 4 * weight.detach()[0, 0].item()
        assert out.dtype is torch.get_autocast_dtype("cpu")
        assert torch.all(out.detach() == expected), (out, weight)

    def train(self, weight):
        # Of more elements than the weight: "fastest" saves it in the fast dtype.
        x = torch.ones(32, 4, requires_grad=True)
        value = weight.detach()[0, 0].item()
        with self.in_autograd:
            out = self.random.choice([torch.mm, torch.nn.functional.linear])(x, weight)
            of_x, of_weight = torch.autograd.grad(out.sum(), (x, weight))
        assert torch.all(out.detach() == 4 * value), (out, weight)
        assert torch.all(of_x == 4 * value), (of_x, weight)
        assert torch.all(of_weight == 32), of_weight

    def use_large(self):
        weight = self.random.choice(self.large)
        value = weight.detach()[0, 0].item()
        x = torch.ones(1, 4, dtype=torch.get_autocast_dtype("cpu"), requires_grad=True)
        out = torch.mm(x, weight)
        assert torch.all(out.detach() == 4 * value), (out, weight)
        self.graphs.append((x, out[0, -1], value))
        with torch.no_grad():
            weight.fill_(self.random.randrange(16))
        if len(self.graphs) > 3:
            x, out, value = self.graphs.pop(self.random.randrange(3))
            try:
                with self.in_autograd:
                    (gradient,) = torch.autograd.grad(out, x)
            except RuntimeError as error:  # "fastest" saves the weight itself, as float32 does
                if "modified by an inplace operation" not in str(error):
                    raise
            else:
                assert torch.all(gradient == value), (x, value)

    def region(self):
        if self.random.random() < 0.1:
            state.machine.forget_actions()
        with polycast.autocast("cpu", **self.settings()):
            for _ in range(self.random.randrange(1, 5)):
                self.use(self.random.choice(self.weights + self.shared))
                self.train(self.random.choice(self.shared))
                if self.random.random() < 0.3:
                    self.change()
                self.contend()
                if self.random.random() < 0.3:
                    self.use_large()
            if self.random.random() < 0.2:
                with polycast.autocast("cpu", torch.float16, **self.settings()):
                    self.use(self.random.choice(self.weights))

    def contend(self):
        contended = self.random.choice(self.contended)
        contended.use(self.random.choice(PRODUCTS))
        if self.random.random() < 0.2:
            how = self.random.random()
            contended.write(float(self.random.randrange(16)), replaces=how < 0.3, unversioned=how > 0.6)

    def change(self):
        position = self.random.randrange(len(self.weights))
        weight = self.weights[position]
        how = self.random.randrange(6)
        if how == 0:
            with torch.no_grad():
                weight.fill_(self.random.randrange(16))
        elif how == 1:
            weight.data = torch.full((4, 4), float(self.random.randrange(16)))
        elif how == 2:
            self.weights[position] = self.new_weight()
        elif how == 3:
            weight.data.fill_(self.random.randrange(16))
        elif how == 4 and not weight.requires_grad:  # else a region is as stale as torch's
            if len(self.aliases) > 3:
                self.aliases.pop(self.random.randrange(3))
            self.aliases.append(self.random.choice([weight.data, weight.detach().numpy(), weight.detach()]))
            self.random.choice(self.aliases)[:] = self.random.randrange(16)
        elif weight.requires_grad:
            weight.grad = torch.ones(4, 4)
            torch.optim.SGD([weight], lr=1.0, fused=True).step()

    def suspend(self):
        generator = suspended(self.settings())
        next(generator)
        self.use(self.random.choice(self.weights))
        if self.random.random() < 0.5:
            self.generators.append(generator)
        if len(self.generators) > 5:
            self.generators.pop(0)

    def tidy(self):
        self.random.choice(
            [
                gc.collect,
                polycast.clear_autocast_cache,
                lambda: polycast.clear_autocast_cache(all_threads=True),
                self.caches[0].clear,
                self.caches[1].stats,
                *([self.save_and_load] if HAS_QUANTIZE else []),
            ]
        )()

    def save_and_load(self):
        model = torch.nn.ParameterList(self.shared)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "casts")
            try:
                self.caches[0].save(path, model)
                loaded = polycast.WeightCache.load(path, model, verify=self.random.choice(["all", "sample"]))
            except (RuntimeError, ValueError) as error:  # other threads clear the cache, or make views of the weights
                expected = "There is nothing to save", "The cache changed", "something else holds the weight's memory"
                if not any(each in str(error) for each in expected):
                    raise
                return
        with polycast.autocast("cpu", cache=loaded, recipe=self.settings()["recipe"]):
            for weight in self.shared:
                self.use(weight)

    def step(self):
        self.random.choices([self.region, self.change, self.suspend, self.tidy], [6, 2, 2, 1])[0]()
        self.steps += 1

    def end(self):
        while self.generators:
            self.generators.pop()
        gc.collect()


def run(thread, steps, errors):
    try:
        for _ in range(steps):
            thread.step()
        thread.end()
    except BaseException as error:
        errors.append(error)
        raise


def fork(caches, shared, threads):
    """Return whether a child forked now, while no thread is in autograd, can use everything, in time."""
    with contextlib.ExitStack() as stack:
        for each in threads:
            stack.enter_context(each.in_autograd)
        child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(120, exit=True)
        thread = Thread(0, caches, shared, [Contended() for _ in range(2)])
        try:
            for _ in range(20):
                thread.region()
            polycast.backends()
            caches[0].clear()
            polycast.uninstall()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def main(steps, seed=0, forks=10):
    bounded = [polycast.WeightCache(max_bytes=size) for size in (5 * 32, 3 * PACKED + 5 * 32)]
    caches = [polycast.WeightCache(), *bounded, polycast.WeightCache(verify=True)]
    shared = [torch.nn.Parameter(torch.full((4, 4), float(value))) for value in range(8)]
    torch.optim.SGD(shared, lr=0.0)  # imports what no child could that is forked meanwhile
    contended = [Contended() for _ in range(2)]
    first = Thread(seed, caches, shared, contended)
    for _ in range(20):
        first.region()  # the same: what it takes is imported
    errors, threads = [], [Thread(seed + number, caches, shared, contended) for number in range(THREADS)]
    running = [threading.Thread(target=run, args=(thread, steps, errors)) for thread in threads]
    for one in running:
        one.start()
    forked = [fork(caches, shared, threads) for _ in range(forks if hasattr(os, "fork") else 0)]
    for one in running:
        one.join()
    print(sum(thread.steps for thread in threads), "steps,", forked.count(False), "children failed")
    return bool(errors) or False in forked


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
