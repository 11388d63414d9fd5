"""``explain`` for a model: the dtypes of its modules, found without computing anything."""

import copy
import inspect
import json
import re
import threading

import pytest
import torch
from tests.plugins.models import Defined, by_name
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import polycast
from polycast import Int8, Policy


def block():
    inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    return Defined(lambda self, x: x + self.inner(self.norm(x)), norm=nn.LayerNorm(16), inner=inner)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(block(), nn.Linear(16, 4))


@pytest.fixture
def x():
    return torch.randn(2, 16)


def dtypes_of_outputs(model, x, **settings):
    """Return the dtypes that the modules of a model really return in a region."""
    names, found = {module: name for name, module in model.named_modules()}, {}

    def note(module, args, output):
        found[names[module]] = (output.dtype,)

    with register_module_forward_hook(note), polycast.autocast("cpu", **settings):
        model(x)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_have_the_dtypes_of_a_real_run(model, x, dtype, engine):
    explained = by_name(polycast.explain(model, x, dtype=dtype))
    real = dtypes_of_outputs(model, x, dtype=dtype)
    assert set(explained) == {"0", "0.norm", "0.inner.0", "0.inner.1", "0.inner.2", "1"}
    assert {name: each.output for name, each in explained.items()} == {name: real[name] for name in explained}
    assert explained["1"].compute == {str(dtype).removeprefix("torch."): 1}
    assert explained["0.norm"].compute == {"float32": 1}


def test_matched_ops_compute_in_the_dtype_of_their_operands(x, engine):
    def forward(self, x):
        to = torch.zeros(2, 16, dtype=torch.bfloat16)
        return torch.lerp(to.index_copy_(0, torch.arange(2), x), x, 0.5)

    model = Defined(forward)
    explained = by_name(polycast.explain(model, x))[""]
    assert explained.compute == {"bfloat16": 1, "float32": 1}
    assert explained.output == (torch.float32,) == dtypes_of_outputs(model, x)[""]


def test_nothing_is_computed_or_changed(model, x, engine):
    model = nn.Sequential(model, nn.Dropout(), nn.BatchNorm1d(4))
    state, seed = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    attributes = {name: set(vars(each)) for name, each in model.named_modules()}
    polycast.explain(model, x)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), seed)
    assert {name: set(vars(each)) for name, each in model.named_modules()} == attributes
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_memory_is_not_needed():
    huge = nn.Linear(2**20, 2**20, device="meta").to_empty(device="meta")
    (found,) = polycast.explain(huge, torch.empty(1, 2**20, device="meta"), device_type="cpu").modules
    assert (found.kind, found.compute, found.output) == ("Linear", {"bfloat16": 1}, (torch.bfloat16,))


def test_attributes_may_be_tensors_of_a_graph(model, x):
    model.last = model(x)
    assert by_name(polycast.explain(model, x))["1"].compute == {"bfloat16": 1}
    assert model.last.grad_fn is not None


def test_an_op_is_explained_with_its_arguments_and_keywords(x):
    images = torch.ones(1, 3, 8, 8)
    with polycast.autocast("cpu"):
        found = polycast.explain("conv2d", images, images, device_type="cpu", policy={"conv2d": "fp32"}, stride=2)
        assert found == polycast.plugin.explain_op("conv2d", "cpu", (images, images), {"stride": 2}, {"conv2d": "fp32"})


def test_rules_apply_to_their_module_and_the_modules_in_it(model, x, engine):
    polycast.apply_policy(model, Policy(modules={"0.inner": "fp32"}))
    explained = by_name(polycast.explain(model, x))
    inside = ("0.inner", "0.inner.0", "0.inner.1", "0.inner.2")
    assert {name: each.rule for name, each in explained.items() if each.rule} == dict.fromkeys(
        inside, "0.inner = 'fp32'"
    )
    assert explained["0.inner.0"].compute == {"float32": 1}
    assert explained["1"].compute == {"bfloat16": 1}


def test_a_rule_for_the_output_is_shown_with_the_dtype_that_is_returned(model, x, engine):
    polycast.apply_policy(model, Policy(modules={"1": {"linear": "lower_precision_fp", "output": "float32"}}))
    explanation = polycast.explain(model, x)
    head = by_name(explanation)["1"]
    assert (head.compute, head.output) == ({"bfloat16": 1}, (torch.float32,))
    assert head.rule == "1 = {'linear': 'lower_precision_fp', 'output': 'float32'}"
    row = rf"^ 1 +Linear +float32 +bfloat16 +float32 +{re.escape(head.rule)}$"
    assert re.search(row, str(explanation), re.MULTILINE)


def test_a_policy_is_explained_without_applying_it(model, x):
    policy = Policy({"gelu": "fp32"}, modules={"1": "off"})
    explained = by_name(polycast.explain(model, x, policy=policy))
    assert explained["1"].output == explained["0.inner.1"].output == (torch.float32,)
    assert polycast.rules_of(model) == {}


def test_the_region_of_the_thread_decides(model, x, engine):
    with polycast.autocast("cpu", torch.float16, policy={"linear": "fp32"}):
        explained = polycast.explain(model, x)
    assert explained.dtype is torch.float16
    assert by_name(explained)["1"].compute == {"float32": 1}


def test_the_ops_whose_inputs_match_casts_are_named(engine, x):
    def average(self, x, y):
        torch.lerp(x, x, 0.5)
        return torch.tensordot(x.lerp(y, 0.5), y, ([1], [1]))

    def forward(self, x):
        return self.inner(x, x.bfloat16()).index_put_((torch.arange(2),), x[0])

    model = Defined(forward, inner=Defined(average))
    explanation = polycast.explain(model, x)
    assert {name: each.matched for name, each in by_name(explanation).items()} == {
        "": {"aten::index_put_": 1},
        "inner": {"aten::lerp.Scalar": 1, "aten::tensordot": 1},
    }
    assert explanation.lines()[1:] == [
        "Cast by MATCH in (model): inputs of index_put_",
        "Cast by MATCH in inner: inputs of lerp.Scalar",
        "Cast by MATCH in inner: inputs of tensordot",
    ]
    assert polycast.explain(model, x, policy={"index_put_": "passthrough"}).modules[0].matched == {}


@pytest.mark.usefixtures("int8_in_python")
def test_ops_of_a_recipe_and_why_others_are_declined(model, x, engine):
    with torch.no_grad():
        explained = by_name(polycast.explain(model, x, recipe=Int8(min_size=512)))
    assert explained["0.inner.0"].compute == {"int8": 1}
    assert explained["1"].compute == {"bfloat16": 1}
    assert explained["1"].declined == {"aten::linear": "the weight is smaller than the recipe's min_size"}
    recorded = by_name(polycast.explain(model, x, recipe=Int8(min_size=0)))["1"]  # the recipe is for inference
    assert (recorded.compute, recorded.declined.keys()) == ({"bfloat16": 1}, {"aten::linear"})


def test_a_module_that_is_called_twice_is_one_row(x):
    linear = nn.Linear(16, 16)
    explained = polycast.explain(nn.Sequential(linear, nn.Tanh(), linear), x)
    assert [(each.name, each.calls) for each in explained.modules] == [("0", 2), ("1", 1)]


def test_compiled_modules_are_explained_without_compiling_them(model, x):
    explained = polycast.explain(torch.compile(model, backend="eager"), x)
    assert by_name(explained)["_orig_mod.1"].compute == {"bfloat16": 1}


def test_modules_of_other_threads_do_not_count(model, x, in_thread):
    threaded = Defined(lambda self, x: (in_thread(lambda: self.model(torch.randn(2, 16))), x)[1], model=model)
    assert polycast.explain(threaded, x).modules == ()


def test_the_table_has_a_line_for_each_module(model, x):
    lines = str(polycast.explain(model, x)).splitlines()
    assert re.fullmatch(r" *1 +Linear +float32 +bfloat16 +bfloat16", lines[-3])
    assert lines[-1] == "In a region of bfloat16 on cpu."
    assert not any("rule" in line for line in lines)


def test_the_explanation_is_plain_data(model, x):
    data = json.loads(json.dumps(polycast.explain(model, x).to_dict()))
    row = {"name": "1", "kind": "Linear", "calls": 1, "rule": "", "weights": ["float32"], "output": ["bfloat16"]}
    assert data["modules"][-1] == {**row, "compute": {"bfloat16": 1}, "declined": {}, "matched": {}}


def locked():
    model = nn.Linear(16, 16)
    model.lock = threading.Lock()
    return model


LINEAR, X = nn.Linear(16, 16), torch.ones(2, 16)
REFUSING = Defined(lambda self, x: -x if self.linear(x).sum() > 0 else x, linear=LINEAR)
USAGE = r"^explain\(\) of a model takes explain\(model, inputs, \*, device_type, .*; got {}$"
REFUSED = [
    ((nn.LazyLinear(4), X), {}, ValueError, "^the model has lazy modules.*: call it once before$"),
    ((torch.jit.ScriptModule(), X), {}, TypeError, "^the model is a ScriptModule"),
    ((locked(), X), {}, TypeError, "^explain runs a copy of the model, which cannot be copied: .*lock"),
    ((REFUSING, X), {}, RuntimeError, r"^the forward of Defined depends on values .*polycast.observe\(model\)$"),
    ((LINEAR, [1]), {}, TypeError, "^inputs must be a tensor, a tuple of arguments or a dict"),
    ((LINEAR,), {}, TypeError, USAGE.format(r"0 positional arguments after the model, and the keywords \[\]")),
    ((LINEAR, X, "cpu"), {"reference": None}, TypeError, USAGE.format(r"2 .*, and the keywords \['reference'\]")),
    (("mm", "cpu", X, X), {}, TypeError, r"^explain\(\) of an op needs the device .*, as device_type='cpu'$"),
    ((3,), {"device_type": "cpu"}, TypeError, None),
]


def test_other_models_and_calls_are_refused(subtests):
    for args, kwargs, error, problem in REFUSED:
        with subtests.test(args=args), pytest.raises(error, match=problem):
            polycast.explain(*args, **kwargs)
    assert not polycast.is_autocast_enabled("cpu")


def test_the_device_is_a_keyword_and_by_default_the_models():
    model, x = nn.Linear(4, 4), torch.ones(1, 4)
    assert polycast.compare(model, x).device_type == polycast.tune(model, x, tolerance=1).evidence.device_type == "cpu"
    for function in (polycast.compare, polycast.tune, polycast.explain):
        assert inspect.signature(function).parameters["device_type"].kind is inspect.Parameter.KEYWORD_ONLY
        with pytest.raises(ValueError, match="^the model is on meta: name the device .*device_type='cpu'$"):
            function(model.to("meta"), x.to("meta"), **{"tolerance": 1} if function is polycast.tune else {})


def test_a_notebook_shows_a_table(model):
    polycast.apply_policy(model, Policy(modules={"1": "fp32"}))
    html = polycast.explain(model, torch.ones(2, 16))._repr_html_()
    row = ["1", "Linear", "float32", "float32", "float32", "1 = &#x27;fp32&#x27;"]
    assert "".join(f"<td>{cell}</td>" for cell in row) in html
    assert "<p>In a region of bfloat16 on cpu.</p>" in html


def test_inputs_in_a_graph_stay_in_it():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True) * 1
    explained = polycast.explain(model, (x,), device_type="cpu")
    assert "Linear" in str(explained)


class Holding(nn.Module):
    """Has weights that `parameters` does not list, and an alias of one that it does."""

    def __init__(self):
        super().__init__()
        captured = torch.randn(16, 16, requires_grad=True)
        self.listed, self.captured = nn.Parameter(torch.randn(16, 16)), lambda x: x @ captured
        self.unlisted = [nn.Parameter(torch.randn(16, 16), requires_grad=False)]
        self.plain = torch.randn(16, 16, requires_grad=True)
        self.register_buffer("alias", self.listed.detach())

    def forward(self, x):
        return self.captured(x @ self.listed @ self.unlisted[0] @ self.plain)


@pytest.mark.parametrize("records", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("make", [block, lambda: block().requires_grad_(False), Holding])
def test_the_casts_in_a_weight_cache_are_kept(native, x, make, records):
    model, cache = make(), polycast.WeightCache()
    with torch.set_grad_enabled(records), polycast.autocast("cpu", cache=cache):
        model(x)
        before = cache.stats()
        polycast.explain(model, x)
        model(x)
    after = cache.stats()
    assert (before.entries, before.misses, before.hits) == (4, 4, 0)
    assert (after.entries, after.misses, after.hits) == (4, 4, 4)
