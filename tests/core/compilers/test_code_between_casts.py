"""Compiled code that runs on several threads in regions, between casts of weights on several threads."""

import pytest
import torch
from torch import nn

import polycast

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _on_two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.Softmax(-1))


@pytest.fixture
def cast_between():
    """Return a function that calls another between products of a weight that it takes several threads to cast."""
    weight, x = nn.Parameter(torch.randn(600, 400), requires_grad=False), torch.ones(1, 600)
    expected = torch.mm(x.bfloat16(), weight.bfloat16())

    def call(function, *args):
        assert torch.equal(torch.mm(x, weight), expected)
        out = function(*args)
        assert torch.equal(torch.mm(x, weight), expected)
        return out

    return call


X = torch.linspace(-1, 1, 64 * 256).view(64, 256)


@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
def test_inductors_code_computes_what_it_computes_in_torchs_regions(engine, model, cast_between, cached):
    def outcome(function):
        out = function(X)
        gradients = torch.autograd.grad(out.float().square().sum(), model.parameters())
        return [out, *gradients]

    compiled = torch.compile(model, fullgraph=True)
    with torch.autocast("cpu"):
        expected = outcome(compiled)
    torch.compiler.reset()
    with polycast.autocast("cpu", cache=polycast.WeightCache() if cached else None):
        for _ in range(3):
            actual = cast_between(outcome, compiled)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the other casts on no threads of its own
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_code_that_was_compiled_ahead_of_time_computes_what_it_computes_from_torchs_regions(
    engine, model, cast_between, tmp_path
):
    def compiled(region, name):
        with region:
            program = torch.export.export(model, (X,))
            path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / name))
        return torch._inductor.aoti_load_package(path)

    with torch.no_grad():
        expected = compiled(torch.autocast("cpu"), "torch.pt2")(X)
        function = compiled(polycast.autocast("cpu"), "polycast.pt2")
        with polycast.autocast("cpu"):
            for _ in range(3):
                assert torch.equal(cast_between(function, X), expected)
