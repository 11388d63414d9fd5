"""Subclasses, sparse, nested and fake tensors are counted without extra calls of overridden methods."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import polycast


def row(seen, op):
    return next(each for each in seen.ops if each.op == op)


@pytest.fixture(autouse=True)
def _no_callback_fails(capfd):
    yield
    assert "Exception in RecordFunction callback" not in capfd.readouterr().err


class Asked(torch.Tensor):
    """A subclass that overrides all that can be, and keeps what it was asked."""

    asked: list[str] = []

    @staticmethod
    def __new__(cls, inner):
        overrides = {"dispatch_sizes_strides_policy": "sizes", "dispatch_device": True, "dispatch_layout": True}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, **overrides)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.asked.append(str(func))
        found = func(*tree_map(lambda value: value.inner if isinstance(value, cls) else value, args), **(kwargs or {}))
        return cls(found) if isinstance(found, torch.Tensor) else found


def test_subclass_sees_no_extra_calls(engine):
    def compute():
        Asked.asked.clear()
        x = Asked(torch.zeros(2, 2))
        torch.mm(x, x).log().sum()
        with polycast.autocast("cpu"):
            torch.relu(x)
            torch.bmm(x[None], x[None])
        return list(Asked.asked)

    plain = compute()
    with polycast.observe(timing=True, nonfinite="record", stacks=True) as seen:
        observed = compute()
    assert observed == plain
    assert (row(seen, "aten::mm").calls, row(seen, "aten::bmm").casts) == (1, 2)
    assert (row(seen, "aten::relu").policy, row(seen, "aten::relu").rule) == (None, "none")
    assert (seen.nonfinite.op, seen.nonfinite.what) == ("aten::log", "inf")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_are_counted(engine):
    with polycast.observe(nonfinite="record") as seen:
        eye = torch.eye(3).to_sparse()
        torch.sparse.mm(eye, torch.ones(3, 3))
        eye.to_sparse_csr() @ torch.ones(3, 3)
        (eye * float("inf")).to_dense()
        eye.div(0.0)
    assert row(seen, "aten::to_sparse").output_dtypes == {"float32": 1}
    assert (seen.nonfinite.op, seen.nonfinite.what) == ("aten::div.Tensor", "inf")


def test_fake_tensors_with_symbolic_sizes_are_counted(engine):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(3, 4), static_shapes=False)
    with polycast.observe(nonfinite="record") as seen:
        fake.relu()
    assert row(seen, "aten::relu").calls == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_nested_tensors_are_counted(engine):
    linear, parts = nn.Linear(3, 3), [torch.ones(2, 3), torch.ones(4, 3)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    strided = torch.nested.nested_tensor(parts)
    with polycast.observe(nonfinite="record") as seen:
        linear(jagged)
        strided.relu()
    assert (row(seen, "aten::linear").calls, row(seen, "aten::relu").calls) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_dtypes_that_torch_does_not_promote_are_counted(engine, dtype):
    x = torch.ones(4)
    with polycast.observe() as seen:
        x.to(dtype).copy_(x)
    assert row(seen, "aten::copy_").input_dtypes == {str(dtype).removeprefix("torch."): 1, "float32": 1}


def test_missing_memory_is_not_read(engine):
    freed, short = torch.ones(4), torch.ones(4)
    freed.untyped_storage().resize_(0)
    short.untyped_storage().resize_(4)
    with polycast.observe(nonfinite="record") as seen:
        torch._efficientzerotensor(3) + torch.tensor([0.0, 1.0, float("inf")])
        freed.resize_(8)
        short.resize_(1)
    assert seen.nonfinite is None


def test_expanded_tensor_is_not_materialized(engine):
    with polycast.observe(nonfinite="record") as seen:
        torch.zeros(1).expand(1 << 40).as_strided((2, 2), (0, 0)).log()
        torch.diagonal(torch.zeros(1, 1).expand(1 << 18, 1 << 18)).unsqueeze(0).expand(1 << 20, -1)[:, :1].log()
    assert seen.nonfinite.count == 2


def test_redefined_op_has_its_new_schema(engine):
    def define(schema, function):
        library = torch.library.Library("polycast_observe_anew", "DEF")
        library.define(f"op{schema}")
        library.impl("op", function, "CompositeExplicitAutograd")
        return library

    first = define("(Tensor a) -> Tensor", lambda a: a + 1)
    with polycast.observe() as before:
        torch._C._jit_get_operation("polycast_observe_anew::op")[0](torch.ones(2))
    first._destroy()
    second = define("(Tensor a, Tensor b) -> (Tensor, Tensor)", lambda a, b: (a + 1, b + 1))
    with polycast.observe() as after:
        torch._C._jit_get_operation("polycast_observe_anew::op")[0](torch.ones(2), torch.ones(2))
    second._destroy()
    ops = [row(seen, "polycast_observe_anew::op") for seen in (before, after)]
    assert [op.input_dtypes for op in ops] == [{"float32": 1}, {"float32": 2}]
    assert [op.output_dtypes for op in ops] == [{"float32": 1}, {"float32": 2}]


def test_casts_of_sparse_tensors_are_counted_by_their_values(engine):
    eye = torch.eye(3).to_sparse()
    with polycast.observe() as seen, polycast.autocast("cpu"):
        product = torch.mm(eye, torch.ones(3, 3))
    assert product.dtype == torch.bfloat16
    assert row(seen, "aten::mm").cast_bytes == 3 * 2 + 9 * 2
