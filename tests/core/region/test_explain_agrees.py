"""explain_op against the engines: the dtypes that it explains are those that ops see."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polycast
from polycast import CastPolicy
from polycast.plugin import explain_op

SEEN = []


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64]


TENSORS = st.sampled_from(DTYPES).map(lambda dtype: torch.ones(2, dtype=dtype))


@pytest.fixture(scope="module")
def library():
    """An op with every kind of argument, whose kernel notes the dtypes that it sees."""
    made = torch.library.Library("polycast_test", "FRAGMENT")
    made.define("all(Tensor a, Tensor? b, Tensor[] c, Tensor?[] d, float e=1.0, *, ScalarType? dtype=None) -> Tensor")

    def kernel(a, b, c, d, e=1.0, *, dtype=None):
        SEEN[:] = [*(tensor.dtype for tensor in [a, b, *c, *d] if tensor is not None), dtype]
        return a.clone()

    made.impl("all", kernel, "CompositeExplicitAutograd")
    yield made
    made._destroy()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arguments=st.tuples(
        TENSORS,
        st.none() | TENSORS,
        st.lists(TENSORS, min_size=1, max_size=2),
        st.lists(st.none() | TENSORS, min_size=1, max_size=2),
    ),
    dtype=st.sampled_from([{}, {"dtype": None}, {"dtype": torch.float16}]),
    policy=st.sampled_from([each for each in CastPolicy if each.name not in ("BANNED", "FP32_APPEND_DTYPE")]),
    enabled=st.booleans(),
)
def test_the_explained_dtypes_are_those_that_the_kernel_sees(engine, library, arguments, dtype, policy, enabled):
    with polycast.autocast("cpu", enabled=enabled, policy={"polycast_test::all": policy}):
        explained = explain_op("polycast_test::all", "cpu", arguments, dtype)
        torch.ops.polycast_test.all(*arguments, **dtype)
    assert [*(argument.seen for argument in explained.arguments), explained.set_dtype or dtype.get("dtype")] == SEEN
