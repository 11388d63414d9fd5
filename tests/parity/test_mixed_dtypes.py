"""Torch's samples in one dtype and in mixtures: what torch computes keeps its bits, and what it refuses computes."""

import contextlib
import itertools
import random
import zlib
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import polycast
from polycast.engine import installation

PAIRS = (
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.float16, torch.float32, torch.float16),
    (torch.bfloat16, torch.float16, torch.bfloat16),
)
"""Two dtypes to mix, and the fast dtype."""
MOST_TENSORS = 8


def read_exceptions():
    """Return the reason for each variant of an op that still raises."""
    lines = (Path(__file__).parent / "mixed_dtypes_exceptions.txt").read_text().splitlines()
    pairs = (line.partition(": ") for line in lines if line and not line.startswith("#"))
    return {name: reason for names, _, reason in pairs for name in names.split(", ")}


class Call:
    """A call of a function or in-place variant, with some of its float32 tensors in other dtypes."""

    def __init__(self, name, function, is_in_place, leaves, structure, dtypes, fast):
        self.name, self.function, self.is_in_place = name, function, is_in_place
        self.leaves, self.structure, self.dtypes, self.fast = leaves, structure, dtypes, fast

    def outcome(self, region):
        """Return what the call returns and writes, and the gradients; or what it raises."""
        try:
            leaves = [self._made(leaf, self.dtypes.get(at)) for at, leaf in enumerate(self.leaves)]
            seed()
            arguments = [leaf.clone() if self.is_in_place and is_tensor(leaf) else leaf for leaf in leaves]
            given, args, kwargs = tree_unflatten(arguments, self.structure)
            with region:
                found = self.function(given, *args, **kwargs)
            results = [each for each in tree_flatten(found)[0] if is_tensor(each)]
            recorded = [each for each in results if each.grad_fn is not None]
            wanted = [each for each in leaves if is_tensor(each) and each.requires_grad]
            gradients = ()
            if recorded and wanted:
                ones = [torch.ones_like(each) for each in recorded]
                gradients = torch.autograd.grad(recorded, wanted, ones, allow_unused=True)
            written = [each for each in arguments if is_tensor(each)]
            return [None if each is None else bits(each) for each in (*results, *written, *gradients)]
        except Exception as error:
            return repr(error)

    def _made(self, leaf, dtype):
        if not is_tensor(leaf):
            return leaf
        made = leaf.detach().clone()
        made = made if dtype is None else made.to(dtype)
        return made.requires_grad_(leaf.requires_grad)

    def in_float32(self):
        return Call(self.name, self.function, self.is_in_place, self.leaves, self.structure, {}, self.fast)

    def __repr__(self):
        return f"{self.name}({', '.join(str(dtype).removeprefix('torch.') for dtype in self.dtypes.values())})"


def is_tensor(value):
    return isinstance(value, torch.Tensor)


def seed():
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)  # torch's samples use it


def bits(tensor):
    """Return the dtype, shape and a digest of the values of a tensor."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if values.is_floating_point():
        values = values.nan_to_num(nan=0.125)
    digest = zlib.crc32(values.contiguous().view(torch.uint8).numpy().tobytes()) if values.numel() else 0
    return tensor.dtype, tuple(tensor.shape), digest


def calls_of(op, most, mixtures):
    """Return some calls of torch's samples of an op, with the dtypes of `mixtures` for its float32 tensors."""
    seed()
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    calls = []
    for sample in itertools.islice(samples, most):
        leaves, structure = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        positions = [at for at, leaf in enumerate(leaves) if is_tensor(leaf) and leaf.dtype is torch.float32]
        for pattern, fast in mixtures(op, len(positions)):
            dtypes = dict(zip(positions, pattern, strict=True))
            for function in {op.op, op.inplace_variant} - {None}:
                is_in_place = function is op.inplace_variant
                name = op.full_name + "_" * is_in_place
                calls.append(Call(name, function, is_in_place, leaves, structure, dtypes, fast))
    return calls


def mixed(chance):
    """Return a function that chooses dtypes for a number of tensors, each time with the fast dtype."""

    def mixtures(op, count):
        for lower, higher, fast in PAIRS if 0 < count <= MOST_TENSORS else ():
            patterns = {tuple(chance.choice((lower, higher)) for _ in range(count))}
            if higher is torch.float32:  # else there are equal dtypes with both already
                patterns.add((lower,) * count)
            yield from ((pattern, fast) for pattern in patterns)

    return mixtures


def in_one_dtype(op, count):
    dtypes = {torch.float32, torch.bfloat16} & op.supported_dtypes("cpu")
    return [((dtype,) * count, torch.bfloat16) for dtype in dtypes]


def outcomes(calls, engine, monkeypatch):
    """Return the outcomes of calls in regions on an engine."""
    installation.forget_choice()
    monkeypatch.setenv("POLYCAST_ENGINE", engine)
    found = [call.outcome(polycast.autocast("cpu", call.fast)) for call in calls]
    polycast.uninstall()
    installation.forget_choice()
    return found


def check(calls, engines, monkeypatch):
    """Compare the calls under torch.autocast, in a region on each engine and, if torch refuses them, in float32."""
    exceptions = read_exceptions()
    theirs = [call.outcome(torch.autocast("cpu", call.fast)) for call in calls]
    floats = [
        isinstance(each, str) and call.in_float32().outcome(contextlib.nullcontext())
        for call, each in zip(calls, theirs, strict=True)
    ]
    mended = 0
    for engine in engines:
        problems = []
        for call, their, in_float32, ours in zip(
            calls, theirs, floats, outcomes(calls, engine, monkeypatch), strict=True
        ):
            if not isinstance(their, str):
                is_right = ours == their
            elif isinstance(in_float32, str):
                continue  # torch cannot do it in float32 either
            else:
                is_right = not isinstance(ours, str)
                mended += is_right
            if not is_right and call.name not in exceptions:
                problems.append((call, their, ours))
        assert (engine, problems) == (engine, [])
    return mended


def opinfos():
    reason = "torch's samples need the package expecttest"
    found = pytest.importorskip("torch.testing._internal.common_methods_invocations", reason=reason)
    databases = (
        found.op_db,
        found.foreach_unary_op_db,
        found.foreach_binary_op_db,
        found.foreach_pointwise_op_db,
        found.foreach_reduce_op_db,
        found.foreach_other_op_db,
    )
    return [op for op in itertools.chain(*databases) if torch.float32 in op.supported_dtypes("cpu")]


def names_of(op):
    return {op.aten_name, op.name.rpartition(".")[2], op.name.replace(".", "_")}


def without_overloads(ops):
    return {name.partition("::")[2].partition(".")[0] for name in ops}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's samples call what torch has deprecated
def test_ops_of_the_table_keep_their_bits(monkeypatch):
    table = without_overloads(polycast.plugin.get_backend("cpu").policies)
    added = {
        op.removeprefix("aten::") for op in polycast.plugin.get_backend("cpu").added_ops
    }  # torch casts none of them
    ops = [op for op in opinfos() if names_of(op) & table and not names_of(op) & added]
    calls = [call for op in ops for call in calls_of(op, 3, in_one_dtype)]
    theirs = [call.outcome(torch.autocast("cpu", call.fast)) for call in calls]
    assert len(calls) > 200
    for engine in ("native", "reference"):  # in one test, since torch's samples are slow to make
        ours = outcomes(calls, engine, monkeypatch)
        pairs = zip(calls, theirs, ours, strict=True)
        assert (engine, [(call, *both) for call, *both in pairs if both[0] != both[1]]) == (engine, [])


@pytest.mark.filterwarnings("ignore")  # torch's samples call what torch has deprecated
def test_ops_that_are_matched_compute_where_torch_refuses_them(monkeypatch):
    matched = without_overloads(polycast.plugin.get_backend("cpu").matched_ops)
    mixtures = mixed(random.Random(0))
    calls = []
    for op in opinfos():
        names = names_of(op)
        if names & (matched | {f"native_{each}" for each in names & {"batch_norm", "layer_norm", "group_norm"}}):
            calls += calls_of(op, 2, mixtures)
    assert len(calls) > 500
    assert check(calls, ("reference", "native"), monkeypatch) > 150


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's samples call what torch has deprecated
def test_all_ops_compute_where_torch_refuses_them_and_keep_their_bits_elsewhere(monkeypatch):
    mixtures = mixed(random.Random(1))
    calls = [call for op in opinfos() for call in calls_of(op, 1, mixtures)]
    assert check(calls, ("native",), monkeypatch) > 150
