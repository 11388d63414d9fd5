"""Writes through aliases that share no version counter with the weight: .data, arrays, storages, pointers."""

import contextlib
import ctypes
import gc

import numpy as np
import pytest
import torch
from torch import nn

import polycast
from polycast.engine import installation, state

pytestmark = pytest.mark.usefixtures("engine", "int8_kernels")

SIZE = 4
X = torch.ones(SIZE, SIZE, dtype=torch.bfloat16)


def frozen(value=1.0):
    return nn.Parameter(torch.full((SIZE, SIZE), value), requires_grad=False)


def product(weight):
    return torch.nn.functional.linear(X, weight)


def is_right(weight):
    """Say whether what the region computes is of what the weight holds."""
    with torch.no_grad():
        out = product(weight)
        expected = SIZE * weight.detach()[0, 0].float()
    assert torch.equal(out, out[0, 0].expand_as(out))
    return abs(out[0, 0].item() - expected.item()) <= 0.01 * abs(expected.item())


# What keeps something of a weight: each gives a function that makes what a use of the weight is in.
@contextlib.contextmanager
def plain_region():
    with polycast.autocast("cpu"):
        yield lambda: contextlib.nullcontext()


@contextlib.contextmanager
def regions_with_cache():
    cache = polycast.WeightCache()
    yield lambda: polycast.autocast("cpu", cache=cache)


@contextlib.contextmanager
def regions_with_recipe():
    polycast.clear_autocast_cache()
    yield lambda: polycast.autocast("cpu", recipe=polycast.Int8(min_size=1))
    polycast.clear_autocast_cache()


KEEPERS = {
    "a plain region": plain_region,
    "a cache": regions_with_cache,
    "a recipe": regions_with_recipe,
}
keeping = pytest.mark.parametrize("keeper", KEEPERS.values(), ids=KEEPERS)


def add_to_data(weight):
    weight.data += 1


def write_row(weight):
    for row in range(SIZE):
        weight.data[row] = 3.0


def write_in_array(weight):
    weight.detach().numpy()[:] = 3


def write_as_array(weight):
    np.asarray(weight.detach())[:] = 3


def write_by_dlpack(weight):
    np.from_dlpack(weight.detach())  # read-only in NumPy; torch writes it
    torch.from_dlpack(weight.detach()).fill_(3)


def write_by_capsule(weight):
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(weight.detach())).fill_(3)


def write_in_storage(weight):
    weight.untyped_storage().copy_(torch.full((SIZE, SIZE), 3.0).untyped_storage())


def write_in_typed_storage(weight):
    weight.detach().storage()[0 : SIZE * SIZE] = 3.0


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


WRITES = {
    "data += 1": add_to_data,
    "data.add_": lambda weight: weight.data.add_(1),
    "data[i] =": write_row,
    "data.view(-1)": lambda weight: weight.data.view(-1).fill_(3),
    "data of data": lambda weight: weight.data.data.fill_(3),
    "data of detach()": lambda weight: weight.detach().data.fill_(3),
    "data of a view": lambda weight: weight.view(-1).data.fill_(3),
    "foreach": lambda weight: torch._foreach_add_([weight.data], 1.0),
    "out=": lambda weight: torch.add(X.float(), 2, out=weight.data),
    "a parameter of data": lambda weight: nn.Parameter(weight.data, requires_grad=False).fill_(3),
    "set_": lambda weight: torch.empty(0).set_(weight.detach()).fill_(3),
    "numpy()": write_in_array,
    "numpy.asarray": write_as_array,
    "DLPack": write_by_dlpack,
    "a DLPack capsule": write_by_capsule,
    "untyped_storage()": write_in_storage,
    "storage()": write_in_typed_storage,
    "data_ptr()": write_at_pointer,
    "a custom op in Python": write_in_a_custom_op,
    "a preserved version": write_where_versions_are_preserved,
}


@keeping
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_seen(keeper, write):
    weight = frozen()
    with keeper() as region:
        for turn in range(3):
            for _ in range(3):
                with region():
                    assert is_right(weight)
            with torch.no_grad():
                weight.fill_(turn - 5.0)
            for _ in range(3):
                with region():
                    assert is_right(weight)
            write(weight)
            with region():
                assert is_right(weight)


ALIASES = {
    "data": (lambda weight: weight.data, lambda alias, value: alias.fill_(value)),
    "a view of data": (lambda weight: weight.data.view(-1)[2:], lambda alias, value: alias.fill_(value)),
    "detach() of data": (lambda weight: weight.data.detach(), lambda alias, value: alias.fill_(value)),
    "a parameter of data": (lambda weight: nn.Parameter(weight.data), lambda alias, value: alias.data.fill_(value)),
    "an array": (lambda weight: weight.detach().numpy(), lambda alias, value: alias.fill(value)),
    "DLPack": (lambda weight: torch.from_dlpack(weight.detach()), lambda alias, value: alias.fill_(value)),
    "the storage": (
        lambda weight: weight.untyped_storage(),
        lambda alias, value: alias.copy_(torch.full((SIZE, SIZE), value).untyped_storage()),
    ),
    "set_": (lambda weight: torch.empty(0).set_(weight.detach()), lambda alias, value: alias.fill_(value)),
}


@keeping
@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize(("alias_of", "write"), ALIASES.values(), ids=ALIASES)
def test_writes_through_a_live_alias_are_seen(keeper, made, alias_of, write):
    weight = frozen()
    polycast.install("cpu")
    alias = alias_of(weight) if made == "before" else None
    with keeper() as region:
        if made == "after":
            for _ in range(3):
                with region():
                    assert is_right(weight)
            alias = alias_of(weight)
        for turn in range(4):
            write(alias, float(turn + 2))
            if alias.__class__ is torch.Tensor and alias.numel() < weight.numel():
                weight.data.view(-1)[:2] = turn + 2
            for _ in range(3):
                with region():
                    assert is_right(weight)


@pytest.mark.parametrize("alias", ["data", "an array", "the storage"])
def test_writes_through_an_alias_older_than_polycasts_hooks_are_seen_in_a_plain_region(alias):
    alias_of, write = ALIASES[alias]
    polycast.uninstall()
    weight = frozen()
    alias = alias_of(weight)
    with polycast.autocast("cpu"):
        for turn in range(4):
            assert is_right(weight)
            assert is_right(weight)
            write(alias, float(turn + 2))
        assert is_right(weight)


@pytest.mark.parametrize("keeper", [regions_with_cache, regions_with_recipe])
def test_writes_through_an_alias_older_than_polycasts_hooks_are_seen_with_a_cache(keeper):
    polycast.uninstall()
    weight = frozen()
    alias = weight.data
    with keeper() as region:
        for turn in range(4):
            for _ in range(2):
                with region():
                    assert is_right(weight)
            alias.fill_(turn + 2)
            with region():
                assert is_right(weight)


def test_a_plain_region_caches_no_frozen_weight_on_the_memory_of_an_array():
    array = np.ones((SIZE, SIZE), np.float32)
    weight = nn.Parameter(torch.from_numpy(array), requires_grad=False)
    with polycast.autocast("cpu"):
        for _ in range(4):
            assert is_right(weight)
            assert is_right(weight)
            array += 1
        assert is_right(weight)


def test_writes_of_a_weight_are_seen_once_it_is_frozen_inside_a_region():
    weight = nn.Parameter(torch.ones(SIZE, SIZE))
    alias = weight.data
    with polycast.autocast("cpu"):
        product(weight), product(weight)
        alias.fill_(3)  # of which a region of torch's sees nothing either, while the weight requires grad
        del alias
        weight.requires_grad_(False)
        assert is_right(weight)


def test_a_write_is_seen_in_grad_mode_with_a_cache():
    weight = nn.Parameter(torch.ones(SIZE, SIZE))
    alias = weight.data
    with polycast.autocast("cpu", cache=polycast.WeightCache()):
        for turn in range(4):
            assert product(weight)[0, 0] == SIZE * weight[0, 0].item()
            assert product(weight)[0, 0] == SIZE * weight[0, 0].item()
            alias.fill_(turn + 2)
        del alias
        for turn in range(4):
            assert product(weight)[0, 0] == SIZE * weight[0, 0].item()
            assert product(weight)[0, 0] == SIZE * weight[0, 0].item()
            weight.data.fill_(turn + 7)
        assert product(weight)[0, 0] == SIZE * weight[0, 0].item()


def merge_adapter(layer, a, b):
    """Do what PEFT does to merge low-rank matrices into the layer that they adapt."""
    delta = (b @ a).to(layer.weight.dtype)
    layer.weight.data += delta


def test_an_adapter_merged_inside_a_region_takes_effect():
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, bias=False).requires_grad_(False)
    a, b, x = torch.randn(4, 16), torch.randn(16, 4), torch.randn(2, 16)
    with torch.no_grad(), polycast.autocast("cpu"):
        for _ in range(3):
            layer(x)
        with torch.autocast("cpu", enabled=False):
            merge_adapter(layer, a, b)
        merged = layer(x)
    assert torch.equal(merged, layer.bfloat16()(x.bfloat16()))


@pytest.mark.parametrize("call", [torch.compile, None], ids=["compiled", "eager"])
def test_a_write_is_seen_where_compiled_code_looks_a_cast_up(call, engine):
    weight, cache = nn.Parameter(torch.ones(64, 64), requires_grad=False), polycast.WeightCache()
    x = torch.ones(1, 64)

    def forward(x):
        return torch.nn.functional.linear(x, weight)

    torch._dynamo.reset()
    forward = torch.compile(forward, backend="aot_eager", fullgraph=True) if call else forward
    alias = None
    with torch.no_grad():
        for turn in range(6):
            with polycast.autocast("cpu", cache=cache):
                assert forward(x)[0, 0] == 64 * weight[0, 0].item()
                assert forward(x)[0, 0] == 64 * weight[0, 0].item()
            if turn == 3:
                alias = weight.data
            (weight.data if alias is None else alias).add_(1)
    assert cache.stats().hits > 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_write_through_data_in_compiled_code_is_seen(backend, engine):
    if (engine, backend) == ("reference", "eager"):
        pytest.skip("only a function in C++ may stand in for the one that Dynamo writes into such graphs")
    weight, cache = frozen(), polycast.WeightCache()
    polycast.install("cpu")
    torch._dynamo.reset()

    @torch.compile(backend=backend, fullgraph=True)
    def write():
        weight.data.add_(1)

    with torch.no_grad():
        for _ in range(3):
            with polycast.autocast("cpu", cache=cache):
                assert is_right(weight)
                assert is_right(weight)
                write()
                assert is_right(weight)
            with polycast.autocast("cpu"):
                assert is_right(weight)
                assert is_right(weight)
                write()
                assert is_right(weight)


def test_casts_are_cached_again_once_an_alias_is_freed():
    weight, cache = frozen(), polycast.WeightCache()
    alias = weight.data

    def use():
        with torch.no_grad(), polycast.autocast("cpu", cache=cache):
            product(weight)

    use(), use()
    assert (cache.stats().entries, cache.stats().hits) == (0, 0)
    del alias
    use(), use()
    assert (cache.stats().entries, cache.stats().hits) == (1, 1)


def test_casts_are_cached_after_a_storage_object_is_dropped():
    weight, cache = frozen(), polycast.WeightCache()
    weight.untyped_storage()
    for _ in range(3):
        with torch.no_grad(), polycast.autocast("cpu", cache=cache):
            product(weight)
    assert cache.stats().hits == 2


def test_an_alias_of_one_weight_does_not_drop_the_casts_of_others():
    one, other, cache = frozen(), frozen(), polycast.WeightCache()
    for weight in (one, other):
        with torch.no_grad(), polycast.autocast("cpu", cache=cache):
            product(weight)
    one.data.add_(1)
    assert cache.stats().entries == 1
    with torch.no_grad(), polycast.autocast("cpu", cache=cache):
        product(other)
    assert cache.stats().hits == 1


def test_a_kernel_that_reads_the_weight_as_an_array_prepacks_it_once(int8_kernels):
    class ReadsAnArray(type(int8_kernels["aten::linear"])):
        def prepack(self, weight):
            return super().prepack(torch.from_numpy(weight.numpy().copy()))

    int8_kernels["aten::linear"] = ReadsAnArray()
    weight = frozen()
    with regions_with_recipe() as region:
        for _ in range(3):
            with region():
                assert is_right(weight)
    assert int8_kernels["aten::linear"].prepared == 1


def versioned_aliases(weight):
    layer = nn.Linear(SIZE, SIZE, bias=False)
    layer.weight = weight
    return [layer.state_dict(), weight.detach(), weight.view(-1), weight[:2], nn.Parameter(weight)]


def test_a_cache_caches_casts_beside_aliases_that_share_the_version_counter(engine):
    if engine == "reference":
        pytest.skip("Python cannot tell which aliases share the weight's version counter: nothing is kept")
    weight, cache = frozen(), polycast.WeightCache()
    held = versioned_aliases(weight)
    with torch.no_grad():
        for turn in range(3):
            for _ in range(3):
                with polycast.autocast("cpu", cache=cache):
                    assert is_right(weight)
            held[1].fill_(turn + 2)
    assert (cache.stats().misses, cache.stats().hits) == (3, 6)


def test_a_held_state_dict_of_other_memory_is_not_taken_for_an_alias():
    weight, cache = frozen(), polycast.WeightCache()
    polycast.install("cpu")
    held = weight.detach()
    weight.data = torch.full((SIZE, SIZE), 2.0)  # `held` has the version counter still, and not the memory
    alias = weight.data
    for turn in range(4):
        for _ in range(2):
            with polycast.autocast("cpu", cache=cache):
                assert is_right(weight)
        alias.fill_(turn + 3)
    with polycast.autocast("cpu", cache=cache):
        assert is_right(weight)
    assert held[0, 0] == 1


def test_a_recipe_reports_that_something_else_may_write_the_weight(engine, low_bit_counts):
    weight = frozen()
    alias = weight.data
    with (
        torch.no_grad(),
        low_bit_counts() as counts,
        polycast.autocast("cpu", recipe=polycast.Int8(min_size=1)),
    ):
        product(weight)
    assert ["made through .data" in each.declined for each in counts.records()] == [True]
    assert alias.numel() == weight.numel()  # it lives


@keeping
def test_a_cached_frozen_weight_can_be_swapped(keeper):
    weight = frozen()
    with keeper() as region:
        for _ in range(3):
            with region():
                assert is_right(weight)
        torch.utils.swap_tensors(weight, frozen(5.0))
        assert weight[0, 0] == 5
        for _ in range(3):
            with region():
                assert is_right(weight)


HOOKED = ("data", "numpy", "untyped_storage", "data_ptr", "set_")


def attributes():
    others = (torch.utils.swap_tensors, torch.utils.dlpack.to_dlpack, torch.to_dlpack, torch.Tensor.__dlpack__)
    preserve = torch.autograd.grad_mode._unsafe_preserve_version_counter
    return [vars(torch.Tensor).get(name) for name in HOOKED], others, preserve.__exit__


def test_uninstall_removes_the_hooks(monkeypatch):
    monkeypatch.setattr(installation, "caches_alive", ())  # a cache that another test leaves keeps the hooks
    polycast.clear_autocast_cache()
    polycast.uninstall()
    gc.collect()
    before = attributes()
    with polycast.autocast("cpu"):
        used = attributes()
    polycast.uninstall()
    assert used != before
    assert attributes() == before


def test_uninstall_leaves_a_replaced_hook():
    polycast.install("cpu")
    mine = property(lambda tensor: torch._C.TensorBase.data.__get__(tensor))
    torch.Tensor.data = mine
    try:
        polycast.uninstall()
        assert vars(torch.Tensor)["data"] is mine
        with polycast.autocast("cpu"):
            assert vars(torch.Tensor)["data"] is mine
    finally:
        del torch.Tensor.data


@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_has_the_name_and_signature_of_torchs_method(name):
    polycast.install("cpu")
    hook, torchs = vars(torch.Tensor)[name], vars(torch._C.TensorBase)[name]
    assert hook is not torchs
    assert hook.__doc__ == torchs.__doc__
    assert getattr(hook, "__name__", name) == torchs.__name__ == name


def test_torch_lists_the_methods_of_tensors_with_and_without_hooks():
    polycast.clear_autocast_cache()
    for change in (polycast.uninstall, lambda: polycast.install("cpu"), polycast.uninstall):
        change()
        assert all(torch.overrides.is_tensor_method_or_property(getattr(torch.Tensor, name)) for name in HOOKED[1:])


def test_hooks_work_on_a_tensor_without_memory():
    polycast.install("cpu")
    sparse = torch.eye(2).to_sparse()
    assert torch.equal(sparse.data.to_dense(), torch.eye(2))
    with pytest.raises(NotImplementedError, match="storage"):
        sparse.untyped_storage()
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.ones(1, requires_grad=True).numpy()


def test_a_write_of_another_weight_during_prepacking_is_seen():
    def use(weight):
        with torch.no_grad(), polycast.autocast("cpu", cache=cache):
            return is_right(weight)

    def pack(weight):
        written.data.fill_(3)
        return (weight.clone(),)

    cache, written = polycast.WeightCache(), frozen()
    assert use(written)
    state.machine.prepacked(cache, frozen(), 1, pack)
    assert use(written)
