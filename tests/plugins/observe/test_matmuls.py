"""Matmuls: their floating-point operations, and the share that a recipe computed."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from tests.plugins.models import Defined
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import polycast
from polycast_plugins.observe import Facts, Observation, matmul_lines

RECIPE = polycast.Int8(min_size=1)


def r(*size):
    return torch.randn(size)


def attention():
    """Run attention as products, which torch counts on a CPU."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(r(2, 3, 5, 8), r(2, 3, 7, 8), r(2, 3, 7, 4))


X, W, B = r(3, 4, 8), r(8, 5), r(5, 8)
OPS = {
    "mm": lambda: torch.mm(r(3, 8), W),
    "mm out": lambda: torch.mm(r(3, 8), W, out=torch.empty(3, 5)),
    "addmm": lambda: torch.addmm(r(5), r(3, 8), W),
    "bmm": lambda: torch.bmm(r(2, 3, 8), r(2, 8, 5)),
    "baddbmm": lambda: torch.baddbmm(r(1, 1, 5), r(2, 3, 8), r(2, 8, 5)),
    "linear": lambda: F.linear(X, B, r(5)),
    "linear of a matrix": lambda: F.linear(r(3, 8), B),
    "linear of nothing": lambda: F.linear(r(0, 8), B),
    "matmul": lambda: X @ W,
    "matmul of batches that are broadcast": lambda: r(2, 1, 3, 8) @ r(4, 8, 5),
    "matmul of batches": lambda: r(2, 3, 8) @ r(2, 8, 5),
    "einsum": lambda: torch.einsum("bik,kj->bij", X, W),
    "einsum of batches": lambda: torch.einsum("bik,bkj->bij", r(2, 3, 8), r(2, 8, 5)),
    "tensordot": lambda: torch.tensordot(X, W, 1),
    "multi_dot": lambda: torch.linalg.multi_dot([r(3, 8), W, r(5, 2)]),
    "conv1d": lambda: F.conv1d(r(2, 4, 9), r(6, 4, 3), stride=2),
    "conv2d": lambda: F.conv2d(r(2, 4, 9, 7), r(6, 4, 3, 2), r(6), padding=1, dilation=2),
    "conv2d of one image": lambda: F.conv2d(r(4, 9, 7), r(6, 4, 3, 2)),
    "conv2d same": lambda: F.conv2d(r(2, 4, 9, 7), r(6, 4, 3, 3), padding="same"),
    "conv2d in groups": lambda: F.conv2d(r(2, 4, 9, 7), r(6, 2, 3, 2), groups=2),
    "conv3d": lambda: F.conv3d(r(2, 4, 5, 6, 7), r(6, 4, 3, 2, 1)),
    "conv_transpose2d": lambda: F.conv_transpose2d(r(2, 4, 5, 7), r(4, 6, 3, 2), stride=2),
    "attention": attention,
    "a cell": lambda: nn.LSTMCell(8, 5)(r(3, 8)),
}
"""Calls that torch counts too."""


def counted(function, region=None):
    """Return the operations that are seen, of a run in a region or outside."""
    with polycast.observe() as seen, contextlib.nullcontext() if region is None else polycast.autocast("cpu", region):
        function()
    return sum(each.flops for each in seen.matmuls)


def expected(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("region", [None, torch.bfloat16], ids=["outside", "inside"])
def test_forward_has_the_flops_that_torch_counts(region, subtests):
    for op in OPS:
        with subtests.test(op=op):
            assert counted(OPS[op], region) == expected(OPS[op])


LAYERS = {
    "linear": (lambda: nn.Linear(8, 5), (3, 8)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 9, 7)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3), (2, 4, 5, 7)),
}


@pytest.mark.parametrize(("make", "size"), LAYERS.values(), ids=LAYERS)
def test_backward_has_the_flops_that_torch_counts(make, size):
    def run():
        layer, x = make(), r(*size).requires_grad_()
        layer(x).square().sum().backward()

    assert counted(run) == expected(run)


def test_flops_of_backward_pass_are_separate():
    layer = nn.Linear(8, 5)
    with polycast.observe(layer) as seen:
        layer(r(3, 8).requires_grad_()).sum().backward()
    assert {(each.phase, each.op): each.flops for each in seen.matmuls} == {
        ("forward", "aten::linear"): 2 * 3 * 8 * 5,
        ("backward", "aten::mm"): 2 * 2 * 3 * 8 * 5,
    }


@pytest.mark.parametrize("size", [(7, 3, 8), (7, 8)], ids=["batch", "one"])
def test_recurrent_layers_have_flops(size, no_grad):
    layer, x = nn.LSTM(8, 6, num_layers=2, bidirectional=True), r(*size)
    weights = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    flops = 2 * weights * x.numel() / 8
    assert [counted(lambda: layer(x)), counted(lambda: layer(x), torch.bfloat16)] == [flops, flops]


def test_fused_attention_has_the_flops_of_its_parts(no_grad):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x = r(2, 5, 8)
    fused = [counted(lambda: model(x)), counted(lambda: model(x), torch.bfloat16)]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        unfused = counted(lambda: model(x))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert fused == [unfused, unfused]


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped products")
def test_grouped_products_have_flops():
    ends = torch.tensor([8, 24], dtype=torch.int32)
    for one, other, flops in (
        ((24, 16), (2, 16, 8), 2 * 24 * 16 * 8),
        ((2, 16, 8), (8, 24), 2 * 16 * 8 * 24),
        ((16, 24), (24, 8), 2 * 16 * 24 * 8),
    ):
        assert counted(lambda: torch._grouped_mm(r(*one).bfloat16(), r(*other).bfloat16(), offs=ends)) == flops  # noqa: B023


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
def test_other_tensors_and_other_ops_have_no_flops():
    nested = torch.nested.nested_tensor([r(3, 8), r(2, 8)])
    assert counted(lambda: torch.mm(r(3, 8).to_sparse(), W)) == 0
    assert counted(lambda: torch.mm(r(3, 8).to_sparse_csr(), W)) == 0
    assert counted(lambda: F.linear(nested, B)) == 0
    with polycast.observe() as seen:
        torch.mm(torch.ones(3, 4, dtype=torch.long), torch.ones(4, 5, dtype=torch.long))
        F.layer_norm(r(3, 8), (8,)).relu().softmax(-1).sum()
    assert seen.matmuls == ()


def test_products_in_place_and_with_vectors_have_flops():
    assert counted(lambda: r(3, 5).addmm_(r(3, 8), W)) == 2 * 3 * 8 * 5
    assert counted(lambda: torch.mv(r(3, 8), r(8))) == counted(lambda: r(3, 8) @ r(8)) == 2 * 3 * 8


def test_call_after_one_that_raised_is_counted():
    with polycast.observe() as seen:
        with pytest.raises(RuntimeError):
            F.linear(r(3, 8), r(5, 7))
        with pytest.raises(RuntimeError):
            torch.einsum("ik,kj->ij", r(3, 8), r(7, 5))
        torch.mm(r(3, 8), W)
    assert sum(each.flops for each in seen.matmuls if each.op == "aten::mm") == 240


@pytest.fixture
def model(engine, int8_kernels, no_grad):
    def forward(self, x):
        y = self.first(x)
        return self.head(torch.bmm(y[None], x.T[None])[0] @ y)

    return Defined(forward, first=nn.Linear(8, 8), head=nn.Linear(8, 4)).eval()


def seen_of(model, recipe=RECIPE, x=None, **region):
    with polycast.observe(model) as seen, polycast.autocast("cpu", recipe=recipe, **region):
        model(r(3, 8) if x is None else x)
    return seen


def test_each_matmul_has_the_outcome_of_the_recipe(model):
    outcomes = {(each.module, each.op): (each.recipe, each.declined) for each in seen_of(model).matmuls}
    of_no_weight = outcomes["", "aten::matmul"]
    assert outcomes == {
        ("first", "aten::linear"): ("int8", ""),
        ("", "aten::bmm"): ("int8", "the recipe is not for it"),
        ("", "aten::matmul"): of_no_weight,
        ("head", "aten::linear"): ("int8", ""),
    }
    assert of_no_weight[0] == "int8"
    assert of_no_weight[1].startswith("its weight is not a cacheable parameter")
    (each,) = seen_of(model.first, policy={"linear": "fp32"}).matmuls
    assert (each.recipe, each.declined) == ("int8", "the region's policy names it")


def html_of(seen, folder):
    seen.to_html(folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


def test_share_of_the_flops_is_shown_with_the_large_other_matmuls(model, tmp_path):
    seen = seen_of(model)
    of_linears, others = 2 * 3 * 8 * 8 + 2 * 3 * 8 * 4, 2 * 3 * 8 * 3 + 2 * 3 * 3 * 8
    assert seen.recipe_share == seen.to_dict()["recipe_share"] == of_linears / (of_linears + others)
    assert "int8: 67% of the 864 FLOPs in matmuls" in str(seen)
    assert "17% not: bmm in the model: the recipe is not for it" in str(seen)
    assert "int8: 67% of the 864 FLOPs in matmuls<br>" in html_of(seen, tmp_path)


def test_without_a_recipe_there_is_no_share(model, tmp_path):
    assert Observation(Facts()).recipe_share is None
    seen = seen_of(model, recipe="none")
    assert seen.recipe_share is None
    assert {(each.recipe, each.declined) for each in seen.matmuls} == {("", "")}
    assert list(matmul_lines(seen.matmuls)) == []
    assert "In a recipe" not in html_of(seen, tmp_path)


def test_ops_outside_of_the_recipe_count(model):
    with polycast.observe(model) as seen:
        with polycast.autocast("cpu", recipe=RECIPE):
            model.first(r(3, 8))
        with polycast.autocast("cpu"):
            model.first(r(3, 8))
        model.first(r(6, 8))
    assert seen.recipe_share == 0.25
    assert list(matmul_lines(seen.matmuls)) == [
        "int8: 25% of the 1.54 kFLOPs in matmuls",
        "50% not: linear in first: it runs outside of autocast",
        "25% not: linear in first: no recipe is active",
    ]


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped products")
def test_ops_without_policy_are_named(model):
    offsets = torch.tensor([8, 16], dtype=torch.int32)
    experts = Defined(lambda self, x: torch._grouped_mm(x, r(2, 8, 8).bfloat16(), offs=offsets))
    seen = seen_of(experts, x=r(16, 8).bfloat16())
    assert list(matmul_lines(seen.matmuls))[1:] == ["100% not: _grouped_mm in the model: autocast has no policy for it"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_has_a_share(model, backend):
    compiled = torch.compile(model.first, backend=backend, fullgraph=True)
    with polycast.autocast("cpu", recipe=RECIPE):
        compiled(r(3, 8))
    seen = seen_of(compiled)
    assert (seen.recipe_share, sum(each.flops for each in seen.matmuls)) == (1.0, 2 * 3 * 8 * 8)


def test_matmuls_of_other_threads_count_if_observed(model, in_thread):
    with polycast.observe(model, threads="all") as all_threads, polycast.observe(model) as this:
        in_thread(lambda: model.first(r(3, 8)))
    assert sum(each.flops for each in all_threads.matmuls) == 2 * 3 * 8 * 8
    assert this.matmuls == ()


def test_counts_add_up_subtract_and_can_be_saved(model, tmp_path):
    one, other = seen_of(model), seen_of(model, recipe="none")
    both = one + other
    assert sum(each.flops for each in both.matmuls) == sum(each.flops for each in (*one.matmuls, *other.matmuls))
    assert both.recipe_share == one.recipe_share / 2
    assert (both - other).matmuls == one.matmuls
    one.save(tmp_path / "seen.json")
    assert Observation.load(tmp_path / "seen.json") == one
