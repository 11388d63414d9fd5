"""Attention by one query for each head on the CPU: the native engine computes it by several rows."""

import random

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

import polycast
from polycast.engine.choice import choose_engine

OVERRIDE = {"tanh": "fp32"}
FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture
def native(monkeypatch):
    if choose_engine().name != "native":
        pytest.skip("the reference engine calls torch's kernel as it is")


# Of a width that no kernel of an extension takes.
def tensors(heads, shared, keys, *, batches=2, width=12, requires_grad=False):
    shapes = (batches, heads, 1, width), (batches, shared, keys, width), (batches, shared, keys, width)
    return [torch.randn(shape, requires_grad=requires_grad) for shape in shapes]


def queries_of_fused(call):
    """Return the shapes of the queries that torch's fused kernel was called with."""
    with torch.profiler.profile(record_shapes=True) as seen:
        call()
    return [each.input_shapes[0] for each in seen.events() if each.name == FUSED]


def test_results_are_torchs_up_to_rounding(engine):
    choose = random.Random(0)
    torch.manual_seed(0)
    for _ in range(200):
        shared, group, keys = choose.choice([1, 2, 3, 8]), choose.choice([1, 2, 5]), choose.choice([1, 2, 7, 33, 130])
        query, key, value = tensors(shared * group, shared, keys, batches=choose.choice([1, 3]))
        if choose.random() < 0.5:  # as transformers makes them
            query, key = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (query, key))
        mask = None
        if choose.random() < 0.5:
            mask = torch.rand(query.shape[0], choose.choice([1, shared * group]), 1, keys) < 0.7
            mask[..., 0] = True
        options = {"attn_mask": mask, "scale": choose.choice([None, 0.3]), "enable_gqa": group > 1}
        for dtype in (torch.bfloat16, torch.float16):
            expected = attention(*(each.to(dtype).double() for each in (query, key, value)), **options)
            with torch.no_grad(), polycast.autocast("cpu", dtype):
                found = attention(query, key, value, **options)
            assert found.shape == query.shape
            assert found.dtype == dtype
            assert found.transpose(1, 2).is_contiguous()
            torch.testing.assert_close(found.double(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("heads", "shared", "options", "rows"),
    [
        (8, 2, {}, [2, 2, 4, 12]),
        (8, 2, {"attn_mask": torch.ones(2, 1, 1, 9, dtype=torch.bool)}, [2, 2, 4, 12]),
        (8, 2, {"attn_mask": torch.ones(2, 8, 1, 9, dtype=torch.bool)}, [2, 8, 1, 12]),
        (8, 8, {}, [2, 8, 2, 12]),
        (8, 8, {"is_causal": True}, [2, 8, 1, 12]),
    ],
    ids=["shared heads", "a mask for all heads", "a mask by head", "a head each", "causal"],
)
def test_queries_become_rows_where_that_gives_the_same(native, heads, shared, options, rows):
    given = tensors(heads, shared, 9)

    def call():
        with torch.no_grad(), polycast.autocast("cpu"):
            attention(*given, enable_gqa=heads > shared, **options)

    assert queries_of_fused(call) == [rows]


def compiled_attention(**options):
    torch.compiler.reset()
    return torch.compile(
        lambda *given: attention(*given, enable_gqa=True), backend="aot_eager", fullgraph=True, **options
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_code_that_is_compiled_with_an_override_computes_the_rows_too(native, dynamic):
    compiled = compiled_attention(dynamic=dynamic)
    with torch.no_grad(), polycast.autocast("cpu", policy=OVERRIDE):
        for keys in (9, 10):
            given = tensors(8, 2, keys)
            found, expected = compiled(*given), attention(*given, enable_gqa=True)
            assert found.dtype == torch.bfloat16
            assert torch.equal(found, expected)
            assert queries_of_fused(lambda given=given: compiled(*given)) == [[2, 2, 4, 12]]


def test_compiled_code_that_torchs_regions_share_has_torchs_kernel(native):
    compiled, given = compiled_attention(), tensors(8, 2, 9)
    with torch.no_grad():
        for region in (polycast.autocast("cpu"), torch.autocast("cpu")):
            with region:
                compiled(*given)
                assert queries_of_fused(lambda: compiled(*given)) == [[2, 8, 1, 12]]


def test_compiled_attention_that_is_recorded_stays_as_it_is(native):
    compiled, given = compiled_attention(), tensors(8, 2, 9, requires_grad=True)

    def call():
        with polycast.autocast("cpu", policy=OVERRIDE):
            compiled(*given).float().sum().backward()

    call()
    assert queries_of_fused(call) == [[2, 8, 1, 12]]


def test_the_number_of_batches_may_be_unknown_to_the_compiler(native):
    def function(query):
        keys = query[:, :2].expand(-1, -1, 9, -1)
        return attention(query, keys, keys, enable_gqa=True)

    query = tensors(8, 2, 9, batches=3)[0]
    torch._dynamo.decorators.mark_unbacked(query, 0)
    torch.compiler.reset()
    with torch.no_grad(), polycast.autocast("cpu", policy=OVERRIDE):
        found = torch.compile(function, backend="aot_eager", fullgraph=True)(query)
        torch.testing.assert_close(found, function(query), atol=0.02, rtol=0.02)


def test_exported_programs_have_torchs_strides(native):
    class Model(torch.nn.Module):
        def forward(self, *given):
            return attention(*given).permute(2, 0, 1, 3).contiguous().view(2, -1)

    given = [each.bfloat16().transpose(0, 1).contiguous().transpose(0, 1) for each in tensors(8, 8, 9)]
    with torch.no_grad(), polycast.autocast("cpu", policy=OVERRIDE):
        program = torch.export.export(Model(), tuple(given))
    assert program.module()(*given).shape == (2, 96)


def test_recorded_attention_stays_as_it_is(native):
    given = tensors(8, 2, 9, requires_grad=True)

    def call():
        with polycast.autocast("cpu"):
            attention(*given, enable_gqa=True).float().sum().backward()

    assert queries_of_fused(call) == [[2, 8, 1, 12]]
    assert all(each.grad is not None for each in given)


def test_regions_of_torch_keep_torchs_kernel(native):
    given = [each.bfloat16() for each in tensors(8, 2, 9)]
    with polycast.autocast("cpu"):
        pass  # from here on polycast's kernels serve torch's regions too

    def call():
        with torch.no_grad(), torch.autocast("cpu"):
            attention(*given, enable_gqa=True)

    assert queries_of_fused(call) == [[2, 8, 1, 12]]


def test_heads_that_cannot_be_shared_raise_torchs_error(engine):
    with torch.no_grad(), polycast.autocast("cpu"), pytest.raises(RuntimeError):
        attention(*tensors(8, 3, 9), enable_gqa=True)
    with torch.no_grad(), polycast.autocast("cpu"), pytest.raises(RuntimeError):
        attention(*tensors(8, 2, 9))


@pytest.mark.parametrize(
    ("of_query", "of_key", "of_value"),
    [
        ((1, 8), (3, 2), (3, 2)),
        ((3, 8), (1, 2), (1, 2)),
        ((1, 8), (1, 2), (3, 2)),
        ((1, 1), (1, 1), (1, 8)),
        ((1, 8), (1, 2), (1, 4)),
        ((1, 8), (1, 8), (1, 2)),
    ],
)
def test_batches_and_heads_are_broadcast_as_by_torch(engine, of_query, of_key, of_value):
    given = [torch.randn(*size) for size in ((*of_query, 1, 16), (*of_key, 5, 16), (*of_value, 5, 24))]
    options = {"enable_gqa": of_query[1] > 1}
    expected = attention(*(each.bfloat16().double() for each in given), **options)
    with torch.no_grad(), polycast.autocast("cpu"):
        found = attention(*given, **options)
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, atol=0.02, rtol=0.02)


def test_an_attention_over_no_keys_is_torchs(engine):
    given = tensors(4, 4, 0)
    expected = attention(*(each.bfloat16() for each in given))
    with torch.no_grad(), polycast.autocast("cpu"):
        found = attention(*given)
    torch.testing.assert_close(found, expected, equal_nan=True)
