"""The classes of the native engine: Python makes no object whose memory C++ has not initialized."""

import copy
import itertools
import pickle
import subprocess
import sys

import pytest

import polycast

pytestmark = pytest.mark.usefixtures("native")

PROGRAM = """
import polycast
with polycast.autocast("cpu"):
    pass
method = type(vars(polycast.autocast)["__init__"])
for make in (lambda: method(), lambda: method.__new__(method), lambda: object.__new__(method)):
    try:
        make().__get__(1)
    except TypeError as error:
        print(error)
"""


@pytest.fixture
def made():
    """Objects of all classes of the engine."""
    library = polycast.plugin.choose_engine()._extension
    return [
        vars(polycast.autocast)["__init__"],
        library.Override({}),
        library.UserStore(None, False),
        library.KernelRegistrations("cpu", "AutocastCPU"),
        library.begin_capture(),
    ]


@pytest.mark.slow
def test_the_method_that_constructs_regions_cannot_be_made_in_python():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cannot = "cannot create 'polycast.InitDescriptor' instances"
    unsafe = "object.__new__(polycast.InitDescriptor) is not safe"
    assert [cannot in line or unsafe in line for line in done.stdout.splitlines()] == [True] * 3


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
