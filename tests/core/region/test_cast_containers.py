"""Lists, dicts and other containers as arguments of a module under the rule "fp32"."""

import threading
from collections import ChainMap, OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

Pair = namedtuple("Pair", "one two")


def reduced(*values, **kwargs):
    return torch.tensor(values, dtype=torch.bfloat16, **kwargs)


class Output(OrderedDict):
    """A mapping with attributes, as models of transformers return and take."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        setattr(self, key, value)


class Shared(UserDict):
    """A mapping whose copies share its items."""

    def __init__(self, items):
        self.data = items

    def __copy__(self):
        return Shared(self.data)


CONTAINERS = {
    "list": (lambda x: [x, 1], 0),
    "dict": (lambda x: {"x": x, "y": 1}, "x"),
    "OrderedDict": (lambda x: OrderedDict(x=x), "x"),
    "a mapping with attributes": (lambda x: Output(x=x), "x"),
    "UserDict": (lambda x: UserDict(x=x), "x"),
    "ChainMap": (lambda x: ChainMap({"x": x}), "x"),
    "a mapping whose copies share its items": (lambda x: Shared({"x": x}), "x"),
}
containers = pytest.mark.parametrize(("make", "key"), CONTAINERS.values(), ids=CONTAINERS)


@containers
def test_a_mutable_container_stays_itself_and_keeps_its_items(make, key, call):
    x = reduced(-1, 2)
    container = make(x)

    def forward(given):
        assert given is container
        assert given[key].dtype is getattr(given, "x", given[key]).dtype is torch.float32
        given[key].relu_()
        return given

    assert call(forward, container) is container
    assert container[key] is x
    assert x.tolist() == [0, 2]
    assert getattr(container, "x", x) is x


@containers
def test_what_a_module_changes_in_a_container_stays_changed(make, key, call):
    x = reduced(1, 2)
    container = make(x)

    def forward(given, h):
        given[key] = given[key] * 2
        if isinstance(given, list):
            given += [h, (h, "pair")]
            del given[1]
        else:
            given.update(h=h, pair=(h, "pair"))
            given.pop("y", None)

    h = reduced(3, 4)
    call(forward, container, h)
    values = list(container.values() if key == "x" else container)
    assert [values[0].dtype, values[0].tolist()] == [torch.float32, [2, 4]]
    assert values[1] is h
    assert values[2][0] is h
    assert len(values) == 3


def test_a_list_without_tensors_can_be_appended_to(call):
    x, seen = reduced(1, 2), []
    call(lambda x, seen: seen.extend([x, x * 2]), x, seen)
    assert seen[0] is x
    assert seen[1].dtype is torch.float32


def test_lists_in_tuples_and_dicts_and_in_themselves_are_entered(call):
    x = reduced(1, 2)
    inner = [x]
    inner.append(inner)
    pair = Pair(inner, {"deep": [x]})

    def forward(pair, same):
        assert pair is same
        pair.one[0].add_(1)
        assert pair.two["deep"][0] is pair.one[0]
        pair.two["deep"].append(pair.one[0])

    call(forward, pair, pair)
    assert [inner[0] is x, inner[1] is inner, *(each is x for each in pair.two["deep"])] == [True] * 4
    assert x.tolist() == [2, 3]


def test_a_tuple_in_a_list_comes_back_itself(call):
    layers = [(reduced(1), reduced(2)), Pair(reduced(3), None)]
    before = list(layers)

    def forward(layers):
        assert {each.dtype for each in layers[0]} == {layers[1].one.dtype} == {torch.float32}
        layers[0][0].zero_()
        layers.reverse()

    call(forward, layers)
    assert layers[0] is before[1]
    assert layers[1] is before[0]
    assert before[0][0].tolist() == [0]


def test_a_set_of_tensors_keeps_its_elements(call):
    x = reduced(1, 2)
    given = {x}

    def forward(given):
        (each,) = given
        each.add_(1)
        given.add("more")
        return each.dtype

    assert call(forward, given) is torch.float32
    assert given == {x, "more"}
    assert x.tolist() == [2, 3]


@pytest.mark.parametrize(
    "make", [immutable_list, lambda x: immutable_dict({0: x[0]}), lambda x: MappingProxyType({0: x[0]}), tuple]
)
def test_a_frozen_container_is_given_as_a_copy(make, call):
    x = reduced(-1, 2)
    container = make([x])
    assert call(lambda given: given[0].relu_().dtype, container) is torch.float32
    assert container[0] is x
    assert x.tolist() == [0, 2]


def test_what_a_generator_yields_is_cast_and_written_back(call):
    x = reduced(-1, 2)

    def forward(items):
        for item in items:
            assert item.dtype is torch.float32
            item.relu_()

    call(forward, (each for each in [x]))
    assert x.tolist() == [0, 2]


@dataclass
class Cache:
    keys: torch.Tensor

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration


def test_an_object_of_another_class_is_given_itself(call):
    cache, queue = Cache(reduced(1)), deque([reduced(1)])

    def forward(cache, queue):
        assert {cache.keys.dtype, queue[0].dtype} == {torch.bfloat16}
        cache.keys.add_(1)
        cache.keys = torch.cat([cache.keys, torch.ones(1)])
        queue.append(cache)

    call(forward, cache, queue)
    assert cache.keys.tolist() == [2, 1]
    assert queue[1] is cache


def test_the_cache_of_transformers_is_filled(call):
    DynamicCache = pytest.importorskip("transformers").DynamicCache

    def attend(k, v, cache):
        keys, values = cache.update(k, v, 0)
        return keys.dtype, values.dtype

    cache, (k, v) = DynamicCache(), torch.randn(2, 1, 2, 3, 4).bfloat16()
    cache.update(k, v, 0)
    assert call(attend, k, v, cache) == (torch.float32, torch.float32)
    assert cache.get_seq_length() == 6
    assert torch.equal(cache.layers[0].keys[:, :, 3:], k.float())


def test_an_exception_takes_the_casts_out_and_keeps_the_writes(call):
    x = reduced(-1, 2)
    container = [x]
    with pytest.raises(ZeroDivisionError):
        call(lambda container: container[0].relu_() / (1 // 0), container)
    assert container[0] is x
    assert x.tolist() == [0, 2]


def test_a_container_that_threads_share_has_casts_until_the_last_is_done(in_thread, call):
    x = reduced(1, 2)
    shared, dtypes = [x], []

    def forward(shared, inner=lambda: None):
        dtypes.append(shared[0].dtype)
        in_thread(inner)
        dtypes.append(shared[0].dtype)

    first_done, second_in = threading.Event(), threading.Event()

    def first(shared):
        assert second_in.wait(30)

    def second(shared):
        second_in.set()
        assert first_done.wait(30)
        dtypes.append(shared[0].dtype)

    other = threading.Thread(target=lambda: (call(first, shared), first_done.set()))
    other.start()
    call(second, shared)
    other.join()
    call(forward, shared, lambda: call(forward, shared))
    assert dtypes == [torch.float32] * 5
    assert shared[0] is x


def test_what_a_function_with_cast_inputs_changes_in_a_container_stays_changed(call_function):
    x = reduced(1, 2, requires_grad=True)
    seen, options, kept = [x], {"old": x, "kept": x}, []

    def forward(x, seen, options):
        kept.append(seen)
        seen += [x, x.dtype]
        del options["old"]
        options["new"] = x * 2
        return x * 1

    call_function(forward, x, seen, options)
    assert seen[0] is seen[1] is x
    assert seen[2] is torch.float32
    assert list(options) == ["kept", "new"]
    assert options["kept"] is x
    assert kept[0][0].dtype is torch.float32  # for the backward


def test_the_maps_of_a_chain_keep_their_items(call):
    x, y, hidden = reduced(-1, 2), reduced(3), reduced(4)
    first, second = {"x": x}, MappingProxyType({"x": hidden, "y": y})
    third = {"y": reduced(5), "z": [y]}
    chain = ChainMap(first, second, third)

    def forward(given):
        assert given is chain
        assert {given["x"].dtype, given["y"].dtype, given["z"][0].dtype} == {torch.float32}
        given["x"].relu_()
        given["new"] = given["y"]

    call(forward, chain)
    assert list(first) == ["x", "new"]
    assert first["x"] is x
    assert first["new"] is y
    assert chain.maps[1] is second
    assert third["z"][0] is y
    assert third["y"].dtype is torch.bfloat16
    assert x.tolist() == [0, 2]


@containers
def test_a_function_with_cast_inputs_leaves_the_items_of_a_container(make, key, call_function):
    def twice(given):
        assert given[key].dtype is torch.float32
        return given[key] * 2

    x = reduced(1, 2)
    given = make(x)
    call_function(twice, given)
    assert given[key] is x


def test_a_chain_of_maps_with_another_constructor_keeps_its_items(call_function):
    class Named(ChainMap):
        def __init__(self, name, *maps):
            super().__init__(*maps)
            self.name = name

    def add(given):
        assert (type(given), given.name, [*map(sorted, given.maps)]) == (Named, "both", [["a"], ["b"]])
        return given["a"] + given["b"]

    given = Named("both", {"a": reduced(1)}, {"b": reduced(2)})
    assert call_function(add, given).dtype is torch.float32
    assert given["a"].dtype is torch.bfloat16
