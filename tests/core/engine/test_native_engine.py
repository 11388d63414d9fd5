"""The native engine: its classes, the numbers that Python and C++ give to the same names, and its signatures."""

import copy
import itertools
import pickle
from importlib import resources

import pytest

import polycast
from polycast.engine import choice
from polycast.engine.native import engine as native_engine

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture
def made():
    """Objects of all classes of the engine. Python makes none whose memory C++ has not initialized."""
    library = polycast.plugin.choose_engine()._extension
    return [
        vars(polycast.autocast)["__init__"],
        library.Override({}, ""),
        library.UserStore(None, False),
        library.KernelRegistrations("cpu", "AutocastCPU"),
        library.begin_capture(),
    ]


def test_objects_of_the_engine_are_not_copied(made):
    for each, function in itertools.product(made, (copy.copy, copy.deepcopy)):
        with pytest.raises(TypeError, match="cannot pickle"):
            function(each)
    for each, protocol in itertools.product(made, range(pickle.HIGHEST_PROTOCOL + 1)):
        with pytest.raises((TypeError, pickle.PicklingError)):
            pickle.loads(pickle.dumps(each, protocol))


def test_classes_of_the_engine_have_no_instance_without_its_arguments_and_no_subclass(made):
    for cls in map(type, made):
        for make, arguments in ((cls, ()), (object.__new__, (cls,)), (type, ("Derived", (cls,), {}))):
            with pytest.raises(TypeError):
                make(*arguments)


@pytest.mark.parametrize("kind", ["policies", "not_prepacked", "actions", "prepack_ids", "settings"])
@pytest.mark.parametrize("change", ["other number", "missing", "more"])
def test_a_name_with_another_number_is_refused(kind, change, monkeypatch):
    bound = choice.choose_engine()
    numbers = dict(native_engine._NUMBERS[kind])
    first, *_, last = numbers
    if change == "other number":
        numbers[first], numbers[last] = numbers[last], numbers[first]
    elif change == "missing":
        del numbers[last]
    else:
        numbers["NEW"] = 99
    monkeypatch.setitem(native_engine._NUMBERS, kind, numbers)
    with pytest.raises(RuntimeError, match=rf"Python and C\+\+ number the {kind} differently"):
        type(bound)(bound._extension, "", {})
    with polycast.autocast("cpu"):  # on the engine that was bound before
        pass


def test_every_op_of_a_built_in_backend_has_an_unboxed_entry_point():
    """The boxed one is slower."""
    text = (resources.files("polycast.engine.native") / "signatures.h").read_text()
    listed = set(text.partition("OpList<\n")[2].partition(">;")[0].replace(",", " ").split())
    found = {
        name.partition("::")[2].replace(".", "_")
        for device_type in ("cpu", "cuda", "maia", "mps", "mtia", "xpu")
        for backend in [polycast.plugin.get_backend(device_type)]
        for name in (*backend.policies, *backend.matched_ops)
    }
    assert found <= listed
