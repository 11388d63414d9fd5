"""Every op of the CPU's table that torch has sample inputs for: under torch.autocast and polycast the same bits."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import polycast
from polycast.engine import installation


def samples(dtype):
    """Return up to three calls of each op, as (name, function)."""
    opinfos = pytest.importorskip(
        "torch.testing._internal.common_methods_invocations", reason="torch's samples need the package expecttest"
    )
    table = {name.partition("::")[2].partition(".")[0] for name in polycast.plugin.get_backend("cpu").policies}
    calls = []
    for op in opinfos.op_db:
        names = {op.aten_name, op.name.rpartition(".")[2], op.name.replace(".", "_")}
        if names & table and dtype in op.supported_dtypes("cpu"):
            made = zip(range(3), op.sample_inputs("cpu", dtype), strict=False)
            calls += [(op.full_name, lambda op=op, s=s: op(s.input, *s.args, **s.kwargs)) for _, s in made]
    return calls


def outcome(function):
    torch.manual_seed(0)
    try:
        return [leaf for leaf in tree_leaves(function()) if isinstance(leaf, torch.Tensor)]
    except Exception as error:
        return repr(error)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's samples call what torch has deprecated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sampled_ops_give_the_same_bits(dtype, monkeypatch):
    calls = samples(dtype)
    assert len(calls) > 100
    with torch.autocast("cpu"):
        theirs = [outcome(function) for _, function in calls]
    for engine in ("native", "reference"):  # in one test, since torch's samples are slow to make
        installation.forget_choice()
        monkeypatch.setenv("POLYCAST_ENGINE", engine)
        with polycast.autocast("cpu"):
            ours = [outcome(function) for _, function in calls]
        polycast.uninstall()
        different = [
            name
            for (name, _), their, our in zip(calls, theirs, ours, strict=True)
            if not (their == our if isinstance(their, str) else same_bits(their, our))
        ]
        assert (engine, different) == (engine, [])
    installation.forget_choice()


def same_bits(theirs, ours):
    return [t.dtype for t in theirs] == [t.dtype for t in ours] and all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else torch.equal(a, b)
        for a, b in zip(theirs, ours, strict=True)
    )
