"""The tables are torch's: the ops at each device's Autocast key, as the running torch has them."""

import pytest
import torch
from tests.sources import BUILT_INS

import polycast
from polycast.engine.drift import drift_of
from polycast.engine.installation import kernels_of, torch_ops
from polycast.plugin import find_op
from polycast.policy.schemas import COMPOSED_OPS

COUNTS = {"cpu": 127, "cuda": 119, "maia": 117, "mps": 95, "mtia": 117, "xpu": 117}  # of torch 2.13

# Ops that torch treats and the table leaves to torch's own kernels.
NAMED_TENSORS = {
    *(f"aten::{name}.dimname" for name in ("cumprod", "cumsum", "index_copy")),
    *(f"aten::{name}.Dimname" for name in ("log_softmax", "softmax")),
    *("aten::norm.names_ScalarOpt_dim", "aten::prod.dim_Dimname", "aten::sum.dim_DimnameList"),
}
ADDED_OPS = {"cpu": {"aten::_foreach_mm", "aten::_sparse_addmm"}}
EXCLUDED_OPS = {"cuda": {"aten::_cudnn_rnn"}}


@pytest.mark.parametrize("device_type", BUILT_INS)
def test_the_table_has_the_ops_that_torch_treats_and_what_is_left_to_torch_is_named_with_its_reason(device_type):
    backend, torchs = polycast.plugin.get_backend(device_type), torch_ops(device_type)
    drift, left = drift_of(backend), torchs & (NAMED_TENSORS | EXCLUDED_OPS.get(device_type, set()))
    assert set(backend.added_ops) == {op for op in ADDED_OPS.get(device_type, set()) if find_op(op)}
    assert backend.policies.keys() - backend.added_ops.keys() == torchs - left
    assert not drift, drift
    assert set(drift.excluded_ops) == left
    assert all(drift.excluded_ops.values())


@pytest.mark.parametrize(("device_type", "count"), COUNTS.items())
def test_the_table_has_as_many_ops_as_torch_2_13(device_type, count):
    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"counts are those of torch 2.13, this is {torch.__version__}")
    backend = polycast.plugin.get_backend(device_type)
    assert len(backend.policies.keys() - backend.added_ops.keys()) == count


@pytest.mark.parametrize("device_type", BUILT_INS)
def test_all_of_the_table_and_the_matched_and_composed_ops_are_installed(device_type, engine):

    backend, torchs = polycast.plugin.get_backend(device_type), torch_ops(device_type)
    matched = {op for op in backend.matched_ops if find_op(op)} - torchs
    kernels = kernels_of(device_type)
    assert kernels.ops == {*backend.policies, *COMPOSED_OPS, *matched}
    assert kernels.added == {*backend.added_ops, *COMPOSED_OPS, *matched}
