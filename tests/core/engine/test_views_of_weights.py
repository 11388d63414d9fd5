"""Views of weights, such as ``w.T`` and ``w[:2]``, computed as by torch's autocast: results, gradients and writes."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import polycast

from .cached_casts import X, casts_in_region, count_casts

pytestmark = pytest.mark.usefixtures("engine")
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def new_weight(rows=8, frozen=False):
    generator = torch.Generator().manual_seed(2)
    return nn.Parameter(torch.randn(rows, 8, generator=generator), requires_grad=not frozen)


def inputs():
    return torch.linspace(-1, 1, 24).reshape(3, 8)


def attend(x, w):
    query, key, value = (x @ part.T for part in w.chunk(3))
    return torch.softmax(query @ key.T, -1) @ value


PROGRAMS = {
    "t": lambda x, w: x @ w.t(),
    "T twice": lambda x, w: (x @ w.T) @ w.T,
    "mT": lambda x, w: torch.matmul(x, w.mT),
    "weight and view": lambda x, w: linear(linear(x, w), w.T) @ w,
    "one view, two uses": lambda x, w: (lambda view: (x @ view) @ view)(w.T),
    "rows": lambda x, w: linear(x, w[:4]) @ w[4:],
    "columns": lambda x, w: linear(x[:, :4], w[:, :4]),
    "chunk": lambda x, w: torch.cat([linear(x, part) for part in w.chunk(3)], -1),
    "split": lambda x, w: [linear(x, part) for part in w.split([3, 5])][1] @ w[:5],
    "unbind": lambda x, w: torch.stack([torch.einsum("ij,j->i", x, row) for row in w.unbind(0)]),
    "view of a view": lambda x, w: linear(x, w.view(2, 4, 8)[1].T.T[1:]),
    "reshaped": lambda x, w: linear(x[:, :4], w.view(16, 4)),
    "expand": lambda x, w: torch.bmm(x.expand(2, 3, 8), w.expand(2, 8, 8)),
    "attention": attend,
    "convolution": lambda x, w: torch.conv1d(x[None], w.view(8, 8)[:3, :3, None]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_and_gradients_are_torchs_bit_for_bit(name, frozen, mode, any_cache):
    def run(region):
        w, x = new_weight(frozen=frozen), inputs().requires_grad_()
        outputs = []
        for _ in range(2):
            with MODES[mode](), region:
                outputs += [PROGRAMS[name](x, w) for _ in range(3)]
        if mode == "grad":
            sum(output.float().square().sum() for output in outputs).backward()
        return [*outputs, w.grad, x.grad]

    polycast.uninstall()
    of_torch = run(torch.autocast("cpu"))
    ours = run(polycast.autocast("cpu", cache=any_cache))
    for actual, wanted in zip(ours, of_torch, strict=True):
        assert actual is wanted is None or torch.equal(actual, wanted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_a_weight_and_its_transposes_are_cast_once_in_a_region(mode, weight):
    def run():
        with MODES[mode](), polycast.autocast("cpu"):
            for take in 3 * [torch.t, lambda w: w, torch.t, lambda w: w.view(4, 4)]:
                torch.mm(X, take(weight))

    run()
    assert count_casts(run) == 1


def test_in_a_plain_region_a_part_is_cast_at_each_use_as_with_torch(weight, no_grad):
    assert casts_in_region(*(weight[:, :2] for _ in range(3))) == 3


WRITES = {
    "base": lambda w, view: w.mul_(2),
    "view": lambda w, view: view.mul_(2),
    "part of the view": lambda w, view: view[0].mul_(2),
    "sibling": lambda w, view: w[:2].zero_(),
    "detached": lambda w, view: w.detach().add_(1),
    "copy_": lambda w, view: w.copy_(torch.ones_like(w)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("take", [lambda w: w.view(8, 16), lambda w: w[:8]], ids=["all", "part"])
def test_writes_are_seen(take, write, any_cache):
    w = new_weight(16)
    view = take(w)
    with torch.no_grad(), polycast.autocast("cpu", cache=any_cache):
        for _ in range(3):
            before = torch.mm(inputs(), view)
        WRITES[write](w, view)
        for tensor in (view, take(w)):
            after = torch.mm(inputs(), tensor)
            assert torch.equal(after, torch.mm(inputs().bfloat16(), tensor.detach().bfloat16()))
            assert not torch.equal(after, before)


def test_a_view_made_without_grad_behaves_as_with_torch(any_cache):
    def run(region):
        w = new_weight()
        with torch.no_grad():
            view = w.T
        with region:
            product = torch.mm(inputs(), view)  # a leaf, to autograd
            product.float().sum().backward()
            with torch.no_grad():
                w.mul_(2)
                again = torch.mm(inputs(), view)
            with pytest.raises(RuntimeError) as raised:
                torch.mm(inputs(), view)
        return product.tolist(), again.tolist(), w.grad, str(raised.value)

    polycast.uninstall()
    expected = run(torch.autocast("cpu"))
    assert run(polycast.autocast("cpu", cache=any_cache)) == expected
    assert expected[2] is None


def test_a_view_that_requires_grad_gets_its_gradient(cache):
    w = new_weight(frozen=True)
    view = w.T.requires_grad_()
    for _ in range(2):
        with polycast.autocast("cpu", cache=cache):
            torch.mm(torch.ones(3, 8), view).sum().backward()
    assert torch.equal(view.grad, torch.full((8, 8), 6.0))
    assert w.grad is None
