"""FSDP2 and DDP in two processes: the dtypes of units, regions in them, and cached casts of weights."""

import inspect
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from polycast_plugins.distributed import MixedPrecision, fully_shard

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples" / "train_fsdp.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="torch has no gloo here",
    ),
]


@pytest.fixture(scope="module", params=["native", "reference"])
def results(request, make_once, run_in_two_ranks):
    """Return the results of cases.py, run once per engine."""

    def make(folder):
        run_in_two_ranks(HERE / "cases.py", folder / "results.json", engine=request.param)

    path = make_once(f"distributed-{request.param}", make) / "results.json"
    return json.loads(path.read_text(encoding="utf-8"))


MISMATCH = "mat1 and mat2 must have the same dtype"
HALF, FAST, FULL = "float16", "bfloat16", "float32"


@pytest.mark.parametrize(
    ("units", "of_root", "of_units", "seen", "error"),
    [
        ("c2 c1 model", True, True, [HALF, HALF, HALF], None),
        ("c2 model*", True, True, [FULL, FULL, HALF], None),
        ("c2 c1 model", True, False, [HALF, HALF, HALF], None),
        ("c2 model*", True, False, [FULL, FULL, HALF], None),
        ("c2 c1 model", False, True, [FULL, HALF, HALF], None),
        ("c2 model*", False, True, [FULL, FULL, HALF], None),
        ("c2 c1 model", False, False, [FULL, FULL], MISMATCH),
        ("c2 model*", False, False, [FULL, FULL, FULL], MISMATCH),
        # the model is not a unit, or the only unit without mixed precision
        ("c2", True, True, [FULL, FULL, HALF], None),
        ("c2", True, False, [FULL, FULL, HALF], None),
        ("c2", False, True, [FULL, FULL, HALF], None),
        ("c2", False, False, [FULL, FULL, FULL], MISMATCH),
        ("c1 c2 model*", True, False, [FULL, HALF, HALF], None),
        ("c1 c2 model*", False, False, [FULL, FULL], MISMATCH),
    ],
)
def test_the_switches_decide_which_units_cast_their_inputs(results, units, of_root, of_units, seen, error):
    result = results[f"inputs {units} {of_root} {of_units}"]
    assert result["seen"] == dict(zip(["root", "c1", "c2"], seen, strict=False))
    if error is None:
        assert (result["error"], result["grads"]) == (None, [FULL])
    else:
        assert result["error"].startswith(error)


def test_a_checkpointed_unit_receives_the_same_when_it_is_recomputed(results):
    *theirs, reentrant, not_reentrant = results["recomputed"]
    assert theirs == [reentrant, not_reentrant]
    assert reentrant == [HALF, HALF]
    # torch 2.11 and 2.12 do not cast the inputs of a unit in backward.
    assert not_reentrant in ([HALF, HALF], [HALF, FULL])
    if not_reentrant == [HALF, FULL]:
        pytest.skip(f"torch {torch.__version__}: FSDP2 casts no inputs in a recomputation that is not reentrant")


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_checkpoint_is_recomputed_with_the_policies_of_the_forward(results, wrap):
    result = results["recomputed_with_policies"][wrap]
    assert (result["same"], result["dtypes"]) == (True, 3 * [[FULL]])
    plain, *checkpointed = result["runs"]
    assert min(checkpointed) > plain == 3


CAST, WITHOUT_INPUTS = [[HALF, HALF], HALF], [[HALF, FULL], HALF]
GATHERED = 2 * [[1024.0 * value for value in range(40)]]
UNDER_RULES = [
    [FAST, FULL, FULL, FAST, FAST, FAST],
    ["0.weight", "0.bias", "1.0.weight", "1.0.bias", "2.weight", "2.bias"],
]
REFUSED = {
    "policy": [
        "TypeError",
        "mixed_precision must be a polycast_plugins.distributed.MixedPrecision or None, got MixedPrecisionPolicy: "
        "build MixedPrecision(param_dtype=...) from it.",
        True,
    ],
    "dtype": [
        "ValueError",
        "param_dtype torch.float64 cannot be used on 'cpu': cpu supports torch.bfloat16, torch.float16. Pass a dtype "
        "that it supports, or None for its default, torch.bfloat16.",
        True,
    ],
    "mesh": ["ValueError", True],
    "twice": ["RuntimeError", "FSDPLinear is sharded already: shard each module once."],
}
EXPECTED = {
    "the_root_is_the_outermost_unit_with_mixed_precision_that_runs": [
        {"c2": HALF},
        {"root": HALF, "c1": HALF, "c2": HALF},
        FULL,
    ],
    "methods_registered_as_forwards_receive_the_same_as_with_torchs_policy": [CAST, CAST, *2 * [WITHOUT_INPUTS]],
    "registered_method_of_the_root": [[HALF, HALF], HALF, FULL],
    "called_twice_in_a_region": [],
    "the_defaults_are_the_dtype_of_the_backend_and_float32_for_reductions": [FAST, FULL, FULL, FULL],
    "outputs_are_cast_on_request": FULL,
    "without_mixed_precision_the_region_decides": [FAST, FULL],
    "only_a_unit_with_parameters_of_its_own_casts_its_inputs": [HALF, FULL],
    "a_shard_frees_its_gathered_weights_and_no_cast_of_them_is_cached": ["Parameter", 0, 0],
    "a_weight_gathered_again_into_the_same_memory_is_cast_again": GATHERED,
    "gathered_again_in_int8": GATHERED,
    "rules_apply_to_modules": {"fsdp": UNDER_RULES, "ddp": UNDER_RULES},
    "invalid_arguments_leave_the_module_unchanged": REFUSED,
    "stale_results_after_collectives": dict.fromkeys(
        ("broadcast", "all_reduce", "all_reduce async", "recv", "all_gather", "scatter"), 0
    ),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_a_case_has_its_result(results, case):
    assert results[case] == EXPECTED[case]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_training_is_bit_for_bit_the_same_with_cached_casts(results, wrap):
    result = results["training"][wrap]
    assert (result["own"], result["users"]) == (True, True)
    assert result["dtypes"] == [FAST, FULL]
    assert result["losses"] == sorted(result["losses"], reverse=True)


@pytest.mark.parametrize("results", ["native"], indirect=True)  # the reference engine caches nothing
def test_casts_are_cached_under_ddp_but_not_of_gathered_weights(results):
    assert [results["training"][wrap]["kept"] for wrap in ("ddp", "fsdp2")] == [[4, 4, 4], [0, 0, 0]]


@pytest.mark.parametrize("results", ["native"], indirect=True)  # the reference engine caches nothing
def test_other_weights_are_cached_with_a_process_group(results):
    assert results["others_are_kept"] == [2, 2]


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_the_recipe_fastest_has_the_outputs_and_gradients_of_one_process(engine, tmp_path, run_in_two_ranks):
    results = tmp_path / "results.json"
    run_in_two_ranks(HERE / "fastest.py", results, engine=engine)
    labels = [f"{name} {rows}" for rows in (16, 256) for name in ("ddp", "fsdp2")]
    assert json.loads(results.read_text(encoding="utf-8")) == {
        **{label: [True] * 2 for label in labels},
        **{f"{label}, outputs": [True] * 6 for label in labels},
    }


def test_sharding_needs_a_process_group():
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError) as raised:
        fully_shard(model, mixed_precision=MixedPrecision())
    assert str(raised.value) == (
        "fully_shard needs a process group, and there is none: call torch.distributed.init_process_group() first, in "
        "each process (torchrun starts them and tells them their ranks), or pass mesh=."
    )
    assert type(model) is nn.Linear


def test_sharding_needs_a_module():
    with pytest.raises(TypeError, match=r"^fully_shard expects a torch\.nn\.Module, got list: shard one module a call"):
        fully_shard([nn.Linear(2, 2)])


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype"])
@pytest.mark.parametrize("value", [torch.int8, "float16"])
def test_a_dtype_must_be_a_floating_point_dtype(name, value):
    with pytest.raises(TypeError, match=f"^{name} must be a floating-point torch.dtype or None, got {value!r}$"):
        MixedPrecision(**{name: value})


@pytest.mark.parametrize("name", ["cast_root_forward_inputs", "cast_forward_inputs"])
def test_a_switch_must_be_a_bool(name):
    with pytest.raises(TypeError, match=f"^{name} must be a bool, got None$"):
        MixedPrecision(**{name: None})


def test_the_signature_of_mixed_precision():
    assert str(inspect.signature(MixedPrecision)).startswith(
        "(param_dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None, "
        "output_dtype: torch.dtype | None = None, cast_root_forward_inputs: bool = True, "
        "cast_forward_inputs: bool = True)"
    )


def test_the_example_learns_the_digits_in_two_processes(run_in_two_ranks):
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    lines = run_in_two_ranks(EXAMPLE, "--epochs", "8", engine="reference").splitlines()
    epochs = [line for line in lines if line.startswith("epoch")]
    assert len(epochs) == 8
    assert float(epochs[-1].split()[-1].rstrip("%")) > 85
