"""Fixtures for ops of other libraries, weights written unseen, and recipes."""

import ctypes

import pytest
import torch

import polycast


@pytest.fixture
def define():
    """Return a function that defines ops of another library, which return twice their first argument."""
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
    """Return a function that doubles a float32 weight at its address, which no hook sees."""

    def double(weight):
        memory = ctypes.c_float * weight.numel()
        values = memory.from_address(torch._C.TensorBase.data_ptr(weight))
        values[:] = [2 * value for value in values]

    return double


@pytest.fixture
def registered():
    """Return register_op; what it registers is removed after the test."""
    made = []

    def register(*args, **keywords):
        made.append(polycast.register_op(*args, **keywords))
        return made[-1]

    yield register
    for registration in made:
        registration.remove()


@pytest.fixture
def linear(engine, int8_kernels):
    """Return the kernel of int8 linears."""
    return int8_kernels["aten::linear"]


@pytest.fixture
def declined(low_bit_counts):
    """Return a function that runs a layer with int8 and returns why it fell back; empty if it did not."""

    def declined(layer, **settings):
        with low_bit_counts() as counts, polycast.autocast("cpu", recipe=polycast.Int8(min_size=1), **settings):
            layer(torch.randn(3, 8))
        (record,) = counts.records()
        return record.declined

    return declined
