"""Fixtures that the tests of this folder share."""

import ctypes

import pytest
import torch

import polycast


@pytest.fixture
def define():
    """Return a function that defines ops of another library, that return their first argument's double."""
    libraries = []

    def make(*schemas, namespace="polycast_test"):
        library = torch.library.Library(namespace, "FRAGMENT")
        libraries.append(library)
        for schema in schemas:
            library.define(schema)
            library.impl(schema.partition("(")[0], lambda x, *rest, **keywords: x + x, "CompositeExplicitAutograd")
        return library

    yield make
    for library in libraries:
        library._destroy()


@pytest.fixture
def double_unseen():
    """Return a function that doubles a weight of float32 at its address, behind everybody's back."""

    def double(weight):
        memory = ctypes.c_float * weight.numel()
        values = memory.from_address(torch._C.TensorBase.data_ptr(weight))
        values[:] = [2 * value for value in values]

    return double


@pytest.fixture
def registered():
    """Return register_op, of which all that is left is taken back in the end."""
    made = []

    def register(*args, **keywords):
        made.append(polycast.register_op(*args, **keywords))
        return made[-1]

    yield register
    for registration in made:
        registration.remove()
