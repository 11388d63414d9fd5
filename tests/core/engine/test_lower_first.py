"""LOWER_FIRST: the first argument with an eligible tensor is cast to the fast dtype, and no other."""

import pytest
import torch
from torch.nn import functional as F

import polycast
from polycast import CastPolicy

pytestmark = pytest.mark.usefixtures("engine")
FAST = torch.bfloat16
NORMS = {"layer_norm": "lower_first", "group_norm": "lower_first", "batch_norm": "lower_first"}


@pytest.fixture
def casts(define, hand_made):
    """Return a function that calls an op in a region where it has LOWER_FIRST, and returns the dtypes of its inputs."""

    def call(schema, *args):
        seen, name = [], schema.partition("(")[0]
        define(schema, kernel=lambda *args: seen.append(dtypes_of(args)))
        hand_made("cpu", default_dtype=FAST, policies={f"polycast_test::{name}": CastPolicy.LOWER_FIRST})
        with polycast.autocast("cpu"):
            getattr(torch.ops.polycast_test, name)(*args)
        (dtypes,) = seen
        return dtypes

    return call


def dtypes_of(args):
    names = {torch.float32: "f", torch.bfloat16: "b", torch.float16: "h", torch.float64: "d", torch.int64: "i"}
    return "".join(
        names[each.dtype]
        if isinstance(each, torch.Tensor)
        else f"({dtypes_of(each)})"
        if isinstance(each, list)
        else "-"
        for each in args
    )


F32, F64, I64 = torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)
CALLS = [
    ("first(Tensor x, Tensor? w, Tensor? b) -> ()", (F32, F32, None), "bf-"),
    ("first_is_fast(Tensor x, Tensor w) -> ()", (F32.to(FAST), F32), "bf"),
    ("first_is_half(Tensor x, Tensor w) -> ()", (F32.half(), F32), "bf"),
    ("first_is_double(Tensor x, Tensor w, Tensor v) -> ()", (F64, F32, F32), "dbf"),
    ("first_is_integer(Tensor x, Tensor w, Tensor v) -> ()", (I64, F32, F32), "ibf"),
    ("none_is_eligible(Tensor x, Tensor w) -> ()", (I64, F64), "id"),
    ("a_list(Tensor[] x, Tensor w) -> ()", ([F32, F64, F32.half()], F32), "(bdb)f"),
    ("written(Tensor(a!) x, Tensor y, Tensor z) -> ()", (F32, F32, F32), "fbf"),
    ("optional(Tensor? x, Tensor y, Tensor z) -> ()", (None, F32, F32), "-bf"),
]


@pytest.mark.parametrize(("schema", "args", "dtypes"), CALLS, ids=[schema.partition("(")[0] for schema, *_ in CALLS])
def test_the_first_argument_with_an_eligible_tensor_is_cast(casts, schema, args, dtypes):
    assert casts(schema, *args) == dtypes


def test_the_weights_and_statistics_of_norms_stay_float32():
    def norms(x):
        mean, var = torch.zeros(6), torch.ones(6)
        y = F.batch_norm(x, mean, var, w, w, training=True)
        return y, mean, var, F.layer_norm(x, (6,), w, w), F.group_norm(x, 2, w, w)

    x, w = torch.randn(4, 6), torch.randn(6)
    with polycast.autocast("cpu", policy=NORMS):
        found = norms(x)
    torch.testing.assert_close(found, norms(x.to(FAST)), rtol=0, atol=0)


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_a_weight_that_comes_first_is_cast_once_in_a_region(cache):
    weight, rows = torch.nn.Parameter(torch.ones(8, 4)), torch.tensor([0, 1])
    for _ in range(2):
        with torch.no_grad(), polycast.autocast("cpu", cache=cache, policy={"embedding": "lower_first"}):
            assert F.embedding(rows, weight).dtype is FAST
    assert (cache.stats().misses, cache.stats().hits) == (1, 1)


def test_a_dtype_that_the_device_lacks_for_the_op_is_replaced_by_float32(hand_made):
    hand_made("cpu", policies={"aten::exp": CastPolicy.LOWER_FIRST}, missing_kernels={"aten::exp": (torch.float16,)})
    with polycast.autocast("cpu", torch.float16):
        assert torch.exp(torch.ones(2).bfloat16()).dtype is torch.float32
    with polycast.autocast("cpu", torch.bfloat16):
        assert torch.exp(torch.ones(2)).dtype is FAST


def test_explain_says_which_input_is_cast():
    with polycast.autocast("cpu", policy=NORMS):
        explained = polycast.explain("layer_norm", torch.ones(2, 3), [3], torch.ones(3), device_type="cpu")
    assert [each.seen for each in explained.arguments] == [FAST, torch.float32]
    assert "lower_first (region's policy): its first input is cast to bfloat16" in str(explained)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_casts_the_same(backend):
    def function(x, w):
        with polycast.autocast("cpu", policy={"layer_norm": "lower_first"}):
            return F.layer_norm(x, (6,), w)

    x, w = torch.randn(4, 6), torch.randn(6)
    torch.compiler.reset()
    found = torch.compile(function, backend=backend, fullgraph=True)(x, w)
    torch.testing.assert_close(found, function(x, w), rtol=0, atol=0)
