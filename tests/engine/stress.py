"""Threads that enter and leave regions, share caches, change and drop weights, drop generators, and are forked.

`python stress.py STEPS [SEED [FORKS]]` takes so many steps on each of a few threads. Every product is compared with
what the weight holds. It prints how many steps were taken, and exits with 1 where one went wrong.
"""

import gc
import os
import random
import sys
import threading
import time
import traceback

import torch

import polycast

THREADS = 4
X = torch.ones(4, 4, dtype=torch.bfloat16)
torch.set_num_threads(1)


def suspended(cache):
    with polycast.autocast("cpu", cache=cache):
        yield


class Thread:
    """What one thread does: its own weights change, those of all stay as they are."""

    def __init__(self, seed, caches, shared):
        self.random = random.Random(seed)
        self.caches, self.shared = caches, shared
        self.weights = [self.new_weight() for _ in range(6)]
        self.generators = []
        self.steps = 0

    def new_weight(self):
        value = float(self.random.randrange(16))
        return torch.nn.Parameter(torch.full((4, 4), value), requires_grad=self.random.random() < 0.5)

    def cache(self):
        return self.random.choice([None, *self.caches, polycast.WeightCache(max_bytes=64)])

    def use(self, weight):
        mode = self.random.choice([torch.no_grad, torch.enable_grad, torch.inference_mode])
        with mode():
            out = torch.mm(X, weight)
        expected = 4 * weight.detach()[0, 0].item()
        assert out.dtype is torch.get_autocast_dtype("cpu")
        assert torch.all(out.detach() == expected), (out, weight)

    def region(self):
        with polycast.autocast("cpu", cache=self.cache()):
            for _ in range(self.random.randrange(1, 5)):
                self.use(self.random.choice(self.weights + self.shared))
                if self.random.random() < 0.3:
                    self.change()
            if self.random.random() < 0.2:
                with polycast.autocast("cpu", torch.float16, cache=self.cache()):
                    self.use(self.random.choice(self.weights))

    def change(self):
        position = self.random.randrange(len(self.weights))
        weight = self.weights[position]
        how = self.random.randrange(4)
        if how == 0:
            with torch.no_grad():
                weight.fill_(self.random.randrange(16))
        elif how == 1:
            weight.data = torch.full((4, 4), float(self.random.randrange(16)))
        elif how == 2:
            self.weights[position] = self.new_weight()
        elif weight.requires_grad:
            weight.grad = torch.ones(4, 4)
            torch.optim.SGD([weight], lr=1.0, fused=True).step()

    def suspend(self):
        generator = suspended(self.cache())
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
            ]
        )()

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


def fork(caches, shared):
    """Say whether a child that is forked now can use everything, in time."""
    child = os.fork()
    if not child:
        thread = Thread(0, caches, shared)
        try:
            for _ in range(20):
                thread.region()
            polycast.backends()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    end = time.monotonic() + 120
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        time.sleep(0.001)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def main(steps, seed=0, forks=10):
    caches = [polycast.WeightCache(), polycast.WeightCache(max_bytes=5 * 32), polycast.WeightCache(verify=True)]
    shared = [torch.nn.Parameter(torch.full((4, 4), float(value))) for value in range(8)]
    torch.optim.SGD(shared, lr=0.0)  # imports what no child could that is forked meanwhile
    with polycast.autocast("cpu"):
        pass
    errors, threads = [], [Thread(seed + number, caches, shared) for number in range(THREADS)]
    running = [threading.Thread(target=run, args=(thread, steps, errors)) for thread in threads]
    for one in running:
        one.start()
    forked = [fork(caches, shared) for _ in range(forks if hasattr(os, "fork") else 0)]
    for one in running:
        one.join()
    print(sum(thread.steps for thread in threads), "steps,", forked.count(False), "children failed")
    return bool(errors) or False in forked


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
