"""torch.utils.checkpoint: what is recomputed in the backward is recomputed in the region of the forward."""

import functools
import inspect

import pytest
import torch
from torch.utils.checkpoint import CheckpointError, CheckpointFunction, checkpoint, checkpoint_sequential

import polycast
from polycast import CastPolicy

pytestmark = pytest.mark.usefixtures("engine")
modes = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
POLICY = {"aten::linear": CastPolicy.FP32}


@pytest.fixture(name="block")
def _block():
    """A layer that keeps the dtype of what it gives, at each time that it runs."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = torch.nn.Linear(8, 8)
            self.seen = []

        def forward(self, x):
            y = self.linear(x)
            self.seen.append(y.dtype)
            return y.relu()

    return Block()


def gradients(run, block, around):
    """Run, and go backward after the region is left; return the gradients of the input and of the weights."""
    block.zero_grad()
    x = torch.linspace(-1, 1, 24).reshape(3, 8).requires_grad_()
    with around:
        loss = run(x).float().pow(2).sum()
    loss.backward()
    return [x.grad, *(parameter.grad.clone() for parameter in block.parameters())]


@modes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_recomputation_is_in_the_region_of_the_forward(block, reentrant, dtype):
    def checkpointed(x):
        return checkpoint(block, x, use_reentrant=reentrant)

    expected = gradients(block, block, polycast.autocast("cpu", dtype=dtype))
    block.seen.clear()
    actual = gradients(checkpointed, block, polycast.autocast("cpu", dtype=dtype))
    assert block.seen == [dtype, dtype]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@modes
def test_a_region_in_what_is_checkpointed_is_entered_again(block, reentrant):
    @polycast.autocast("cpu")
    def body(x):
        return block(x)

    actual = gradients(lambda x: checkpoint(body, x, use_reentrant=reentrant), block, polycast.capture().apply())
    assert block.seen == [torch.bfloat16, torch.bfloat16]
    torch.testing.assert_close(actual, gradients(body, block, polycast.capture().apply()), rtol=0, atol=0)


@modes
def test_a_backward_in_another_region_recomputes_in_that_of_the_forward(block, reentrant):
    x = torch.ones(1, 8, requires_grad=True)
    with polycast.autocast("cpu"):
        y = checkpoint(block, x, use_reentrant=reentrant)
    with polycast.autocast("cpu", dtype=torch.float16):
        y.float().sum().backward()
    assert block.seen == [torch.bfloat16, torch.bfloat16]


@modes
def test_a_sequence_is_recomputed_in_its_region(block, reentrant):
    def checkpointed(x):
        return checkpoint_sequential(torch.nn.Sequential(block, torch.nn.Tanh()), 2, x, use_reentrant=reentrant)

    actual = gradients(checkpointed, block, polycast.autocast("cpu"))
    expected = gradients(lambda x: block(x).tanh(), block, polycast.autocast("cpu"))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert set(block.seen) == {torch.bfloat16}


@modes
def test_a_wrapped_snapshot_takes_the_policy_to_the_recomputation(block, reentrant):
    def checkpointed(x):
        return checkpoint(polycast.capture().wrap(block), x, use_reentrant=reentrant)

    def around():
        return polycast.autocast("cpu", policy=POLICY)

    expected = gradients(block, block, around())
    block.seen.clear()
    actual = gradients(checkpointed, block, around())
    assert block.seen == [torch.float32, torch.float32]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@modes
def test_a_wrapped_snapshot_takes_the_cache_to_the_recomputation(block, reentrant):
    cache = polycast.WeightCache()

    def checkpointed(x):
        return checkpoint(polycast.capture().wrap(block), x, use_reentrant=reentrant)

    actual = gradients(checkpointed, block, polycast.autocast("cpu", cache=cache))
    assert cache.stats().hits == 2  # the weight and the bias
    torch.testing.assert_close(actual, gradients(block, block, polycast.autocast("cpu")), rtol=0, atol=0)


def test_a_wrapped_snapshot_recomputes_as_often_as_the_graph_is_kept(block):
    x = torch.ones(1, 8, requires_grad=True)
    with polycast.autocast("cpu", policy=POLICY):
        y = checkpoint(polycast.capture().wrap(block), x, use_reentrant=False).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert block.seen == 3 * [torch.float32]


def test_torch_says_that_a_policy_was_lost_without_one(block):
    """Its recomputation has other dtypes, which torch sees where it does not run the forward in no_grad."""
    x = torch.ones(1, 8, requires_grad=True)
    with polycast.autocast("cpu", policy=POLICY):
        y = checkpoint(block, x, use_reentrant=False)
    with pytest.raises(CheckpointError, match="different metadata"):
        y.sum().backward()


LOST = r"recomputes Block under other policies.* checkpoint\(polycast.capture\(\).wrap\(function\), ..., use_re"


def test_a_reentrant_one_says_at_its_call_that_a_policy_was_lost(block):
    x = torch.ones(1, 8, requires_grad=True)
    with polycast.autocast("cpu", policy=POLICY):
        line = inspect.currentframe().f_lineno + 1
        y = checkpoint(block, x, use_reentrant=True)
    with pytest.warns(UserWarning, match=LOST) as said:
        y.sum().backward()
    assert [(warning.filename, warning.lineno) for warning in said] == [(__file__, line)]


@pytest.mark.parametrize(("forward", "backward"), [(None, POLICY), (POLICY, {"aten::linear": CastPolicy.PASSTHROUGH})])
def test_a_reentrant_one_says_that_its_backward_has_other_policies(block, forward, backward):
    x = torch.ones(1, 8, requires_grad=True)
    with polycast.autocast("cpu", policy=forward):
        y = checkpoint(block, x, use_reentrant=True)
    with polycast.autocast("cpu", policy=backward), pytest.warns(UserWarning, match=LOST):
        y.sum().backward()


def test_a_reentrant_one_says_nothing_where_its_backward_has_the_same_policies(block):
    x = torch.ones(1, 8, requires_grad=True)
    with polycast.autocast("cpu", policy=POLICY):
        checkpoint(block, x, use_reentrant=True).sum().backward()
    assert block.seen == [torch.float32, torch.float32]


def test_a_reentrant_one_says_nothing_of_a_wrapped_snapshot_with_arguments(block):
    x = torch.ones(1, 8, requires_grad=True)
    with polycast.autocast("cpu", policy=POLICY):
        y = checkpoint(functools.partial(polycast.capture().wrap(block)), x, use_reentrant=True)
    y.sum().backward()


def test_torch_has_its_own_checkpoint_back_after_uninstalling():
    own = vars(CheckpointFunction)["forward"], vars(CheckpointFunction)["backward"]
    with polycast.autocast("cpu", policy=POLICY):
        pass
    assert (vars(CheckpointFunction)["forward"], vars(CheckpointFunction)["backward"]) != own
    polycast.uninstall()
    assert (vars(CheckpointFunction)["forward"], vars(CheckpointFunction)["backward"]) == own


@modes
def test_a_checkpoint_in_a_compiled_function(block, reentrant):
    torch.compiler.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x):
        with polycast.autocast("cpu"):
            return checkpoint(block.linear, x, use_reentrant=reentrant)

    actual = gradients(compiled, block, polycast.capture().apply())
    expected = gradients(block.linear, block, polycast.autocast("cpu"))
    torch.testing.assert_close(actual, expected)
    torch.compiler.reset()
