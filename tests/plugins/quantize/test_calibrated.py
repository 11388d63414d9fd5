"""Recipes with a calibration: the products, on each path to a kernel."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polycast
from polycast import Int8

from .matmul_kinds import INT8
from .matmul_kinds import Int8 as MatmulOfInt8

pytestmark = [
    pytest.mark.skipif(not INT8, reason=f"no int8 here: {INT8.reason}"),
    pytest.mark.usefixtures("engine", "no_grad"),
]

PLAIN = Int8(min_size=0)
NOT_KNOWN = "not calibrated: the calibration does not have the values of this weight"
LARGE = [1, 5]


def with_outliers(rows=16, terms=32):
    x = torch.randn(rows, terms)
    x[:, LARGE] *= 200
    return x


class Model(nn.Module):
    """A linear layer, one of GPT-2's, and weights that are not in modules."""

    def __init__(self):
        super().__init__()
        self.linear, self.mm, self.addmm = (nn.Parameter(torch.randn(size)) for size in ((24, 32), (32, 24), (32, 24)))
        self.experts, self.bias = nn.Parameter(torch.randn(16, 24, 32)), nn.Parameter(torch.randn(24))
        for matrix in (self.linear, self.mm.t(), self.addmm.t(), *self.experts):
            matrix.data[:, LARGE] /= 200

    def forward(self, x):
        return torch.stack(
            (
                F.linear(x, self.linear, self.bias),
                torch.mm(x, self.mm),
                torch.addmm(self.bias, x, self.addmm),
                x @ self.experts[0].t(),
                F.linear(x, self.experts[1]),
            )
        )

    def calls(self, x):
        """Return the ops of forward, with their arguments."""
        return (
            ("linear", (x, self.linear, self.bias)),
            ("mm", (x, self.mm)),
            ("addmm", (self.bias, x, self.addmm, 1, 1)),
            ("matmul", (x, self.experts[0].t())),
            ("linear", (x, self.experts[1], None)),
        )


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def x():
    return with_outliers()


@pytest.fixture
def e(model):
    return polycast.calibrate(model, [with_outliers()], PLAIN)


@pytest.fixture
def equalized(e):
    return Int8(min_size=0, calibration=e)


def run(model, x, recipe, **settings):
    with torch.no_grad(), polycast.autocast("cpu", recipe=recipe, **settings):
        return model(x)


def expected(model, x, e=None):
    """Return the outputs by the kernels, called with the factors."""
    results = []
    for op, args in model.calls(x):
        weight = args[1 + (op == "addmm")].detach()
        factors = None if e is None else e.factors(weight if op == "linear" else weight.t())
        given = () if factors is None else (factors,)
        results.append(MatmulOfInt8().run(op, *args, dtype=torch.bfloat16, factors=given))
    return torch.stack(results)


def errors(result, model, x):
    exact = model(x)
    return [((one - other).norm() / other.norm()).item() for one, other in zip(result.float(), exact, strict=True)]


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_each_op_computes_with_its_weights_factors(model, e, equalized, cached, frozen):
    model.requires_grad_(not frozen)
    for rows in (1, 16, 1, 16):
        x = with_outliers(rows)
        result = run(model, x, equalized, **cached)
        assert torch.equal(result, expected(model, x, e))
        assert max(errors(result, model, x)) < 0.02
        assert min(errors(run(model, x, PLAIN, **cached), model, x)) > 0.1


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine is Python
def test_python_is_asked_once(model, e, equalized, asked, x):
    for _ in range(3):
        assert torch.equal(run(model, x, equalized), expected(model, x, e))
    assert len(asked) == 5


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_recipes_do_not_share_prepacked_weights(model, e, equalized, x):
    other = polycast.calibrate(model, [torch.randn(16, 32) * torch.rand(32) ** 4 * 50], PLAIN)
    assert other != e
    cache = polycast.WeightCache()
    for _ in range(2):
        for recipe, given in ((equalized, e), (PLAIN, None), (Int8(min_size=0, calibration=other), other)):
            assert torch.equal(run(model, x, recipe, cache=cache), expected(model, x, given))
    assert cache.stats().packings == 15


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_equal_calibrations_share_prepacked_weights(model, e, equalized, x):
    cache = polycast.WeightCache()
    for recipe in (equalized, Int8(min_size=0, calibration=pickle.loads(pickle.dumps(e)))):
        run(model, x, recipe, cache=cache)
    assert cache.stats().packings == cache.stats().misses == 5


def test_a_weight_without_factors_is_computed_as_without_a_calibration(equalized, x):
    other = Model()
    assert torch.equal(run(other, x, equalized), expected(other, x))


def test_a_changed_weight_has_no_factors_until_it_is_loaded_again(model, e, equalized, tmp_path, x):
    run(model, x, equalized)
    model.linear.mul_(1.5)
    result = run(model, x, equalized)
    assert torch.equal(result[0], expected(model, x)[0])
    assert torch.equal(result[1:], expected(model, x, e)[1:])
    e.save(tmp_path / "e")
    again = polycast.Calibration.load(tmp_path / "e", model)
    assert torch.equal(run(model, x, Int8(min_size=0, calibration=again)), expected(model, x, again))
    assert again.factors(model.linear) is not None


def test_one_scale_for_all_rows_is_equalized_too(model, x):
    recipe = Int8("tensor", min_size=0)
    e = polycast.calibrate(model, [x], recipe)
    assert max(errors(run(model, x, recipe.with_options(calibration=e)), model, x)) < 0.02
    assert min(errors(run(model, x, recipe), model, x)) > 0.1


def test_threads_compute_alike(model, e, equalized, x):
    run(model, x, equalized)  # a view that another thread makes keeps a weight from being prepacked
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: run(model, x, equalized), range(4)))
    assert [torch.equal(each, expected(model, x, e)) for each in results] == [True] * 4


def test_kernels_that_take_no_factors_compute_without_them(model, equalized, int8_kernels, x):
    layer = nn.Linear(32, 24)
    result = run(layer, x, equalized)
    assert torch.equal(result, run(layer, x, PLAIN))
    with polycast.autocast("cpu"):
        explanation = polycast.explain("linear", x, layer.weight, layer.bias, device_type="cpu", recipe=equalized)
    assert explanation.reason == "not calibrated: the kernel takes no factors"


def test_explain_says_whether_a_weight_is_equalized(model, e, equalized, x):
    def explained(op, *args, recipe=equalized):
        with polycast.autocast("cpu"):
            return polycast.explain(op, *args, device_type="cpu", recipe=recipe)

    strength = next(each.strength for each in e.weights if each.name == "linear")
    found = explained("linear", x, model.linear, None)
    assert (found.declined, found.reason) == (None, f"equalized with strength {strength:g}")
    assert f"the recipe int8 computes it, equalized with strength {strength:g}" in str(found)
    assert explained("mm", x, model.mm).reason.startswith("equalized")
    assert explained("addmm", model.bias, x, model.addmm).reason.startswith("equalized")
    assert explained("linear", x, nn.Parameter(torch.randn(24, 32))).reason == NOT_KNOWN
    assert explained("linear", x, model.linear, recipe=PLAIN).reason == ""
    assert explained("linear", x, nn.Parameter(torch.empty(24, 32, device="meta"))).reason == ""


def test_compiled_code_computes_with_the_factors(engine, model, e, equalized, fresh_dynamo, x):
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for recipe, given in ((equalized, e), (PLAIN, None), (equalized, e)):
        run(compiled, x, recipe)  # while it is compiled, the tracer holds the weights' memory
        assert torch.equal(run(compiled, x, recipe), expected(model, x, given))


def test_a_region_with_a_calibration_may_be_in_compiled_code(model, e, equalized, fresh_dynamo, x):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x):
        with polycast.autocast("cpu", recipe=equalized):
            return model(x)

    function(x)
    assert torch.equal(function(x), expected(model, x, e))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_computes_with_the_factors(model, e, equalized):
    x = with_outliers()
    wanted = expected(model, x, e)
    run(model, x, equalized)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            polycast.clear_autocast_cache()
            code = 0 if torch.equal(run(model, x, equalized), wanted) else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


OTHER_PROCESS = """
import pickle, sys
import torch, torch.nn.functional as F
import polycast
linear, x, recipe, expected = pickle.load(open(sys.argv[1], "rb"))
with torch.no_grad(), polycast.autocast("cpu", recipe=recipe):
    assert torch.equal(F.linear(x, linear), expected)
"""


@pytest.mark.slow
def test_a_pickled_recipe_computes_alike_in_another_process(run_program, engine, model, e, equalized, tmp_path, x):
    result = expected(model, x - 0.0, e)[4]
    weight = nn.Parameter(model.experts[1].clone())
    path = tmp_path / "given"
    path.write_bytes(pickle.dumps((weight, x, equalized, result)))
    assert run_program(OTHER_PROCESS, engine, path) == (0, "", "")
