"""Writes of weights that change no version: each is seen, or the weight's cast is not cached."""

import inspect
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.core.rounding import Rounded
from tests.engines import NATIVE
from torch import nn

import polycast

from .cached_casts import X, parameter

pytestmark = NATIVE

OPTIMIZERS = {
    name: optimizer
    for name, optimizer in vars(torch.optim).items()
    if isinstance(optimizer, type)
    and issubclass(optimizer, torch.optim.Optimizer)
    and optimizer is not torch.optim.Optimizer
}
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
NOT_COMPILED = ("LBFGS", "SparseAdam")  # one calls a closure, one has sparse gradients: torch does not compile them


def forward(weight, **options):
    with torch.no_grad(), polycast.autocast("cpu", **options):
        return torch.mm(X, weight)


def is_right(out, weight):
    return torch.equal(out, torch.mm(X, weight.detach().bfloat16()))


def set_gradient(name, weight):
    weight.grad = torch.ones(4, 4).to_sparse(1) if name == "SparseAdam" else torch.ones(4, 4)


def made(name, weight, how):
    return OPTIMIZERS[name]([weight], lr=0.5, **({} if how == "plain" else {how: True}))


FOREACH = [name for name, its in OPTIMIZERS.items() if "foreach" in inspect.signature(its).parameters]
VARIANTS = [(name, "plain") for name in OPTIMIZERS] + [(name, "foreach") for name in FOREACH]
VARIANTS += [(name, "fused") for name in FUSED]


@pytest.mark.parametrize(("name", "how"), VARIANTS)
def test_a_step_of_an_optimizer_is_seen(name, how):
    weight, cache = parameter(), polycast.WeightCache()
    optimizer = made(name, weight, how)
    closure = (lambda: torch.ones(())) if name == "LBFGS" else None
    with torch.no_grad(), polycast.autocast("cpu"):  # and by what a region keeps
        for _ in range(3):
            before = weight.detach().clone()
            assert is_right(torch.mm(X, weight), weight)
            assert is_right(torch.mm(X, weight), weight)
            assert is_right(forward(weight, cache=cache), weight)
            set_gradient(name, weight)
            optimizer.step(closure) if closure else optimizer.step()
            assert not torch.equal(weight, before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch's own use of it, as Dynamo imports what it needs
@pytest.mark.parametrize(
    ("name", "how"),
    [(name, "fused") for name in FUSED] + [(name, "plain") for name in OPTIMIZERS if name not in NOT_COMPILED],
)
def test_a_compiled_step_is_seen(name, how):
    weight, cache = parameter(), polycast.WeightCache()
    optimizer = made(name, weight, how)
    forward(weight, cache=cache)
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(2):
        before = weight.detach().clone()
        weight.grad = torch.ones(4, 4)
        step()
        assert not torch.equal(weight, before)
        assert is_right(forward(weight, cache=cache), weight)


def fused_step(weight):
    options = {"lr": 0.5, "momentum": 0.0, "weight_decay": 0.0, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": True}
    torch._fused_sgd_([weight.detach()], [torch.ones(4, 4)], [], **options, **flags)


def test_a_fused_step_drops_the_casts_of_its_own_weights_only():
    trained, frozen, cache = parameter(), parameter(), polycast.WeightCache()
    optimizer = torch.optim.SGD([trained], lr=0.5, fused=True)
    forward(trained, cache=cache), forward(frozen, cache=cache)
    trained.grad = torch.ones(4, 4)
    optimizer.step()
    forward(frozen, cache=cache), forward(trained, cache=cache)
    assert (cache.stats().hits, cache.stats().misses) == (1, 3)


def test_a_fused_step_on_another_thread_is_seen_inside_the_region():
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)

    def step():
        weight.grad = torch.ones(4, 4)
        optimizer.step()

    with ThreadPoolExecutor(1) as other, torch.no_grad(), polycast.autocast("cpu"):
        for _ in range(3):
            assert is_right(torch.mm(X, weight), weight)
            assert is_right(torch.mm(X, weight), weight)
            other.submit(step).result()


def write(shared):
    shared.add_(1)


def write_in_another_process(weight):
    process = multiprocessing.get_context("fork").Process(target=write, args=(weight.data,))
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_memory_that_another_process_writes_is_cast_at_every_use(mode, any_cache):
    weight = parameter()
    with mode(), polycast.autocast("cpu", cache=any_cache):
        torch.mm(X, weight)
        weight.share_memory_()
        for _ in range(2):
            assert is_right(torch.mm(X, weight), weight)
            assert is_right(torch.mm(X, weight), weight)
            write_in_another_process(weight)
        assert weight[0, 0] == 3
        assert is_right(torch.mm(X, weight), weight)
    assert any_cache is None or any_cache.stats().hits == 0


@pytest.mark.parametrize("where", ["cast", "prepacked"])
def test_no_cast_is_cached_of_a_weight_in_a_larger_buffer(where, int8_kernels):
    options = {"recipe": Rounded(min_size=1)} if where == "prepacked" else {}
    buffer, weight, cache = torch.ones(20), parameter(), polycast.WeightCache()
    weight.data = buffer[4:].view(4, 4)  # as an optimizer has it that updates all weights at once
    for _ in range(3):
        assert is_right(forward(weight, cache=cache, **options), weight)
        buffer.add_(1)
    assert (cache.stats().entries, cache.stats().packings, cache.stats().hits) == (0, 0, 0)


def test_a_cast_is_cached_of_the_only_remaining_holder_of_a_buffer():
    weight, cache = parameter(), polycast.WeightCache()
    weight.data = torch.ones(20)[4:].view(4, 4)
    forward(weight, cache=cache), forward(weight, cache=cache)
    assert cache.stats().hits == 1


WRITES = {
    "mul_": lambda weight: weight.mul_(2),
    "data =": lambda weight: setattr(weight, "data", torch.full((4, 4), 2.0)),
    "a fused step without an optimizer": fused_step,
    "_foreach_add_": lambda weight: torch._foreach_add_([weight.detach()], 1.0),
    "_foreach_copy_": lambda weight: torch._foreach_copy_([weight.detach()], [torch.zeros(4, 4)]),
    "out= of a detached": lambda weight: torch.add(torch.ones(4, 4), 1, out=weight.detach()),
    "set_": lambda weight: weight.set_(torch.zeros(4, 4)),
    "resize_": lambda weight: weight.detach().resize_(2, 4).fill_(3),
    "a view": lambda weight: weight.detach()[0].fill_(7),
    "inference mode": lambda weight: torch.inference_mode()(lambda: weight.detach().fill_(5))(),
    "the sign bit": lambda weight: setattr(weight, "data", torch._neg_view(weight.data)),
    "vector_to_parameters": lambda weight: nn.utils.vector_to_parameters(torch.zeros(16), [weight]),
    "fill_ through a tied weight": lambda weight: nn.Parameter(weight.detach()).detach().fill_(9),
}


@pytest.mark.parametrize("change", WRITES.values(), ids=WRITES)
def test_other_writes_are_seen(weight, cache, change):
    with torch.no_grad(), polycast.autocast("cpu"):
        for _ in range(2):
            torch.mm(X, weight), forward(weight, cache=cache)
        change(weight)
        assert is_right(torch.mm(X, weight), weight)
        assert is_right(forward(weight, cache=cache), weight)


def test_writes_are_seen_after_uninstall_where_a_cache_lives():
    weight, cache = parameter(), polycast.WeightCache()
    forward(weight, cache=cache)
    polycast.uninstall()
    weight.grad = torch.ones(4, 4)
    torch.optim.SGD([weight], lr=0.5, fused=True).step()
    assert is_right(forward(weight, cache=cache), weight)
