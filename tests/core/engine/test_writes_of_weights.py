"""Single writes that change no version: through .data, arrays, storages and pointers, and by ops that count none."""

import ctypes

import numpy as np
import pytest
import torch
from tests.engines import NATIVE
from torch import nn

from .each_cache import ALIASES, CACHES, SIZE, X, frozen, sparse_rows, with_each_cache

from_name = {
    "numpy": torch.Tensor.numpy,
    "data": torch._C.TensorBase.data.__get__,
    "graphs": torch._C._autograd._get_data_attr,
}
"""Looked up before polycast's first region, as is ``to_dlpack``."""

pytestmark = [
    *NATIVE,
    pytest.mark.usefixtures("int8_kernels"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
]


def add_to_data(weight):
    weight.data += 1


def write_by_dlpack(weight):
    np.from_dlpack(weight.detach())  # read-only in NumPy; torch writes it
    torch.from_dlpack(weight.detach()).fill_(3)


def write_at_pointer(weight):
    threes = torch.full((SIZE, SIZE), 3.0)
    ctypes.memmove(weight.data_ptr(), threes.data_ptr(), threes.nbytes)


def write_in_a_custom_op(weight):
    with torch.library._scoped_library("polycast_test", "FRAGMENT") as library:
        library.define("write_(Tensor(a!) x) -> ()")
        library.impl("write_", lambda x: x.detach().numpy().fill(3), "CPU")
        torch.ops.polycast_test.write_(weight.detach())


def write_where_versions_are_preserved(weight):
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.fill_(3)


def write_as_statistics(weight):
    for row in weight.detach():
        nn.functional.batch_norm(torch.full((2, SIZE), 3.0), row, torch.ones(SIZE), training=True, momentum=1.0)


def fill_alias(weight, alias_of, fill):
    fill(alias_of(weight), 3.0)


WRITES = {
    "data += 1": add_to_data,
    "data.add_": lambda weight: weight.data.add_(1),
    "data[i] =": lambda weight: [weight.data.__setitem__(row, 3.0) for row in range(SIZE)],
    "data of data": lambda weight: weight.data.data.fill_(3),
    "data of detach()": lambda weight: weight.detach().data.fill_(3),
    "data of a view": lambda weight: weight.view(-1).data.fill_(3),
    "foreach": lambda weight: torch._foreach_add_([weight.data], 1.0),
    "out=": lambda weight: torch.add(X.float(), 2, out=weight.data),
    "numpy.asarray": lambda weight: np.asarray(weight.detach()).fill(3),
    "DLPack": write_by_dlpack,
    "storage()": lambda weight: weight.detach().storage().__setitem__(slice(SIZE * SIZE), 3.0),
    "data_ptr()": write_at_pointer,
    "a custom op in Python": write_in_a_custom_op,
    "a preserved version": write_where_versions_are_preserved,
    "data as graphs read it": lambda weight: from_name["graphs"](weight).fill_(3),
    "apply_": lambda weight: weight.detach().apply_(lambda value: 3.0),
    "map_": lambda weight: weight.detach().map_(weight.detach(), lambda *values: 3.0),
    "map2_": lambda weight: weight.detach().map2_(weight.detach(), weight.detach(), lambda *values: 3.0),
    "kron(out=)": lambda weight: torch.kron(torch.ones(2, 2), torch.full((2, 2), 3.0), out=weight.detach()),
    "statistics of a batch norm": write_as_statistics,
    "gradients unscaled": lambda weight: torch._amp_foreach_non_finite_check_and_unscale_(
        [weight.detach()], torch.zeros(1), torch.full((1,), 3.0)
    ),
    "unsafe_split": lambda weight: torch._foreach_add_(torch.unsafe_split(weight.detach(), 2), 1.0),
    "unsafe_split_with_sizes": lambda weight: torch._foreach_add_(
        torch.unsafe_split_with_sizes(weight.detach(), [SIZE]), 1.0
    ),
    "unsafe_chunk": lambda weight: torch._foreach_add_(torch.unsafe_chunk(weight.detach(), 2), 1.0),
    "the op of set_": lambda weight: torch.ops.aten.set_.source_Tensor(torch.empty(0), weight.detach()).fill_(3),
    "a compressed sparse tensor as a whole": lambda weight: sparse_rows(weight).mul_(3),
    **{name: lambda weight, way=way: fill_alias(weight, *way) for name, way in ALIASES.items()},
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_seen(write, subtests):
    for name, regions in CACHES.items():
        weight = frozen()
        with subtests.test(name), regions() as check:
            for turn in range(3):
                check(weight)
                with torch.no_grad():
                    weight.fill_(turn - 5.0)
                check(weight)
                write(weight)
                check(weight, 1)


@with_each_cache
def test_a_write_that_raises_halfway_is_seen(regions):
    weight, values = frozen(), iter([3.0] * SIZE)
    with regions() as check:
        check(weight)
        with pytest.raises(StopIteration):
            weight.detach().apply_(lambda value: next(values))
        assert (weight[0, -1], weight[1, 0]) == (3, 1)
        check(weight, 1)


@with_each_cache
@pytest.mark.parametrize("name", ["numpy", "data"])
def test_a_write_through_a_method_looked_up_before_is_seen(regions, name):
    weight = frozen()
    with regions() as check:
        check(weight)
        from_name[name](weight.detach())[:] = 3
        check(weight, 1)
