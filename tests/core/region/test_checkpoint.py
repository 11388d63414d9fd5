"""torch.utils.checkpoint recomputes in the region of the forward."""

import contextlib
import functools
import sys

import pytest
import torch
import torch.utils.checkpoint
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointFunction,
    CheckpointPolicy,
    _CheckpointFrame,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import polycast

from .conftest import FP32, in_policy, modes

pytestmark = pytest.mark.usefixtures("engine")


@modes
@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_the_recomputation_has_the_cache_of_the_forward(block, reentrant):
    cache = polycast.WeightCache()
    checkpointed = block.gradients(
        lambda x: checkpoint(block, x, use_reentrant=reentrant), polycast.autocast("cpu", cache=cache)
    )
    assert cache.stats().hits == 2  # the weight and the bias
    torch.testing.assert_close(checkpointed, block.gradients(block, polycast.autocast("cpu")), rtol=0, atol=0)


def keep_products(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


def without_early_stop(block, x):
    with set_checkpoint_early_stop(False):
        return checkpoint(block, x, use_reentrant=False)


def of_snapshot(block, x, reentrant):
    """Wrap the function, which is the remedy for checkpoints of other libraries."""
    return checkpoint(polycast.capture().wrap(block), x, use_reentrant=reentrant)


def sequence(block, x, reentrant):
    return checkpoint_sequential(torch.nn.Sequential(block, torch.nn.Identity()), 2, x, use_reentrant=reentrant)


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, keep_products)
CHECKPOINTS = {
    "a sequence, reentrant": functools.partial(sequence, reentrant=True),
    "a sequence, not reentrant": functools.partial(sequence, reentrant=False),
    "a wrapped module, reentrant": lambda block, x: checkpoint_wrapper(block, CheckpointImpl.REENTRANT)(x),
    "a wrapped module, not reentrant": lambda block, x: checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT)(x),
    "composed": lambda block, x: composable(block)(x),
    "selective": functools.partial(checkpoint, use_reentrant=False, context_fn=SELECTIVE),
    "without an early stop": without_early_stop,
    "a snapshot, reentrant": functools.partial(of_snapshot, reentrant=True),
    "a snapshot, not reentrant": functools.partial(of_snapshot, reentrant=False),
}


@pytest.mark.parametrize("run", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_each_kind_of_checkpoint_is_recomputed_with_its_policies(block, run):
    seen = block.assert_same_gradients(functools.partial(run, block), block, in_policy)
    assert seen == [torch.float32, torch.float32]


@modes
def test_a_checkpoint_of_a_region_of_torchs_stays_torchs(block, reentrant):
    with in_policy():  # which has checkpoints carry regions
        pass
    polycast.uninstall("cpu")
    nesting = []

    def body(x):
        nesting.append(polycast.autocast_nesting("cpu"))
        return block(x)

    block.gradients(lambda x: checkpoint(body, x, use_reentrant=reentrant), torch.autocast("cpu", torch.bfloat16))
    assert (nesting, block.seen) == ([0, 0], [torch.bfloat16, torch.bfloat16])


@modes
def test_uninstalling_restores_torchs_checkpoint_and_pending_recomputations_keep_their_policies(block, reentrant):
    own = {**vars(CheckpointFunction._backward_cls)}, {**vars(_CheckpointFrame)}
    x = torch.ones(1, 8, requires_grad=True)
    with in_policy():
        y = checkpoint(block, x, use_reentrant=reentrant)
    assert ({**vars(CheckpointFunction._backward_cls)}, {**vars(_CheckpointFrame)}) != own
    polycast.uninstall()
    assert ({**vars(CheckpointFunction._backward_cls)}, {**vars(_CheckpointFrame)}) == own
    y.sum().backward()
    assert block.seen == [torch.float32, torch.float32]


@pytest.mark.parametrize("named", ["policy", "cache"])
@pytest.mark.parametrize("again", ["the same region", "its snapshot", "another region"])
@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_after_uninstalling_the_next_region_has_checkpoints_carry_regions_again(block, named, again):
    cache = polycast.WeightCache()
    given = {"policy": {"policy": FP32}, "cache": {"cache": cache}}[named]
    region = polycast.autocast("cpu", **given)
    with region:
        snapshot = polycast.capture()
    polycast.uninstall()
    around = {"the same region": region, "its snapshot": snapshot.apply(), "another region": None}[again]
    block.gradients(lambda x: checkpoint(block, x, use_reentrant=True), around or polycast.autocast("cpu", **given))
    assert block.seen == 2 * [torch.float32 if named == "policy" else torch.bfloat16]
    assert cache.stats().hits == (2 if named == "cache" else 0)


@pytest.mark.parametrize(
    ("stranger", "reason"),
    [
        ((torch.utils.checkpoint, "_CheckpointFrame", None), "cannot import name '_CheckpointFrame'"),
        ((_CheckpointFrame, "__init__", lambda self: None), "<lambda> has no recompute_fn"),
        ((CheckpointFunction, "forward", staticmethod(lambda ctx: None)), "<lambda> has no run_function"),
    ],
)
def test_a_torch_whose_checkpoints_are_not_as_expected_is_told_at_the_region(block, monkeypatch, stranger, reason):
    owner, name, instead = stranger
    if instead is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, instead)
    region, line = in_policy(), sys._getframe().f_lineno + 2
    with pytest.warns(UserWarning, match=rf"{reason}.*recompute with the policy= and cache=.*capture\(\).wrap") as said:
        region.__enter__()
    region.__exit__(None, None, None)
    assert [(warning.filename, warning.lineno) for warning in said] == [(__file__, line)]


@pytest.mark.slow
@modes
@pytest.mark.parametrize("policy", [None, FP32], ids=["", "policy"])
def test_a_checkpoint_in_a_compiled_function(block, reentrant, policy):
    torch.compiler.reset()
    layer, compiler = block.layers[0], torch.compile(backend="aot_eager", fullgraph=True)
    checkpointed = compiler(lambda x: checkpoint(layer, x, use_reentrant=reentrant))
    block.assert_same_gradients(
        checkpointed, compiler(lambda x: layer(x)), lambda: polycast.autocast("cpu", policy=policy)
    )
    torch.compiler.reset()


@modes
def test_a_compiled_function_runs_the_code_of_its_policies_again(block, reentrant):
    torch.compiler.reset()
    compilations = []

    def compiler(graph, inputs):
        compilations.append(polycast.engine.snapshot.overrides_text())
        return graph.forward

    layer = torch.compile(block.layers[0], backend=compiler)
    block.gradients(lambda x: checkpoint(layer, x, use_reentrant=reentrant), in_policy())
    of_policy = [text for text in compilations if text]
    # The reentrant one runs its forward under no_grad, for which Dynamo compiles apart.
    assert len(compilations) == len(of_policy) == (2 if reentrant else 1)
    torch.compiler.reset()


# Dynamo's, of what enters the region again after the break
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
@modes
def test_a_checkpoint_after_a_graph_break_in_a_region_in_compiled_code(block, reentrant):
    torch.compiler.reset()

    @torch.compile(backend="eager")
    def compiled(x):
        with polycast.autocast("cpu", policy={"aten::linear": "fp32"}):
            torch._dynamo.graph_break()
            return checkpoint(block, x, use_reentrant=reentrant)

    block.gradients(compiled, contextlib.nullcontext())
    assert set(block.seen) == {torch.float32}
    torch.compiler.reset()
