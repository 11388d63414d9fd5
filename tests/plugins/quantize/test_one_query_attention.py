"""Attention by one query for each head where heads share keys: a kernel of the CPU's extension computes it."""

import itertools
import math

import pytest
import torch
from tests.core.engine.test_one_query import queries_of_fused
from torch.nn.functional import scaled_dot_product_attention as attention

import polycast
from polycast.engine.choice import choose_engine


@pytest.fixture(scope="module", autouse=True)
def _loaded():
    answer = polycast.plugin.load_ops("polycast_plugins.quantize.cpu.native")
    if not answer:
        pytest.skip(f"no ops here: {answer.reason}")
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("the kernel needs AVX2")


@pytest.fixture
def native():
    if choose_engine().name != "native":
        pytest.skip("the reference engine calls torch's kernel")


def tensors(group, keys, *, shared=2, batches=2, width=16, width_of_values=24, dtypes=(torch.float32,) * 3):
    """Return queries, keys and values, the latter two as parts of larger ones."""
    torch.manual_seed(0)
    query = torch.randn(batches, shared * group, 1, width)
    key, value = (torch.randn(batches, shared, keys + 3, each)[:, :, :keys] for each in (width, width_of_values))
    return [each.to(dtype) for each, dtype in zip((query, key, value), dtypes, strict=True)]


def computed(query, key, value, dtype=torch.bfloat16, mask=None, dropout=0.0, is_causal=False, scale=None, shares=True):
    """Return what the op returns: None if it leaves the call to torch."""
    op = torch.ops.polycast.attend_one_query
    return op(query, key, value, mask, dropout, is_causal, scale, shares, dtype)


def exact(query, key, value, scale=None):
    query, key, value = (each.double() for each in (query, key, value))
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    products = query @ key.transpose(2, 3) * (1 / math.sqrt(query.shape[3]) if scale is None else scale)
    return products.softmax(-1) @ value


@pytest.mark.parametrize("keys", [1, 5, 63, 64, 65, 300])
@pytest.mark.parametrize("group", [3, 4, 7, 8])
def test_it_is_rounded_once(keys, group):
    for dtype in (torch.bfloat16, torch.float16):
        for dtypes in itertools.product((torch.float32, dtype), repeat=3):
            for scale in (None, 0.7):
                given = tensors(group, keys, dtypes=dtypes)
                found, expected = computed(*given, dtype, scale=scale), exact(*given, scale)
                assert found.dtype is dtype
                assert found.shape == expected.shape
                step = torch.finfo(dtype).eps / 2
                torch.testing.assert_close(found.double(), expected, rtol=step * 1.01, atol=2e-6)


def test_large_and_small_products_are_exact():
    query, key, value = tensors(4, 200, shared=1, batches=1)
    for scale in (100.0, 1e-6):
        expected = exact(query, key, value, scale)
        torch.testing.assert_close(computed(query, key, value, scale=scale).double(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_reaches_the_result(place):
    given = tensors(4, 70, shared=1, batches=1)
    given[place][0, 0, 0, 0] = math.nan
    expected = exact(*given).isnan()
    assert expected.any()
    assert torch.equal(computed(*given).isnan(), expected)


@pytest.mark.parametrize("keys", [slice(70), slice(64, 100), slice(3, 4), slice(None)])
def test_keys_whose_products_are_minus_infinity_have_no_part(keys):
    query, key, value = tensors(4, 100, shared=1, batches=1)
    key[:, :, keys] = -math.inf
    expected = exact(query.abs(), key, value).nan_to_num(0)  # of no other keys 0, as torch's kernel computes
    torch.testing.assert_close(computed(query.abs(), key, value).double(), expected, rtol=2**-8, atol=2e-6)


def test_neither_threads_nor_other_batches_change_bits():
    given = tensors(4, 300, shared=4)
    threads = torch.get_num_threads()
    found = computed(*given)
    try:
        torch.set_num_threads(1)
        assert torch.equal(computed(*given), found)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(computed(*(each[1:] for each in given)), found[1:])


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"group": 2}, {}),
        ({"width": 12}, {}),
        ({"width_of_values": 12}, {}),
        ({"keys": 0}, {}),
        ({"dtypes": (torch.float16, torch.float32, torch.float32)}, {}),
        ({}, {"is_causal": True}),
        ({}, {"dropout": 0.5}),
        ({}, {"shares": False}),
        ({}, {"mask": torch.ones(2, 1, 1, 9, dtype=torch.bool)}),
        ({}, {"dtype": torch.float32}),
    ],
)
def test_other_calls_are_left_to_torch(changes, options):
    assert computed(*tensors(**{"group": 4, "keys": 9, **changes}), **options) is None


def test_it_is_left_to_torch_where_the_user_disables_fused_kernels():
    given = tensors(4, 9)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert computed(*given) is None


def test_regions_use_it_for_tensors_as_they_are(native):
    given = tensors(4, 9, width_of_values=16, dtypes=(torch.float32, torch.float32, torch.bfloat16))
    found = []

    def call():
        with torch.no_grad(), polycast.autocast("cpu"):
            found.append(attention(*given, enable_gqa=True))

    assert queries_of_fused(call) == []
    assert torch.equal(found[0], computed(*given))


def test_other_regions_and_recorded_calls_do_not(native):
    given = [each.bfloat16() for each in tensors(4, 9, width_of_values=16)]
    recorded = [each.requires_grad_() for each in tensors(4, 9, width_of_values=16)]

    def call():
        with torch.no_grad():
            with torch.autocast("cpu"):
                attention(*given, enable_gqa=True)
            with polycast.autocast("cpu", policy={"scaled_dot_product_attention": "passthrough"}):
                attention(*given, enable_gqa=True)
        with polycast.autocast("cpu"):
            attention(*recorded, enable_gqa=True)

    assert queries_of_fused(call) == [[2, 8, 1, 16], [2, 2, 4, 16], [2, 8, 1, 16]]
