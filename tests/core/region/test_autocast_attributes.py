"""The attributes of a region that programs may set, as they may with torch's regions."""

import copy
import pickle

import pytest
import torch

import polycast

pytestmark = pytest.mark.usefixtures("engine")
X = torch.ones(2, 2)


class _Own(polycast.autocast):
    """Sets the attributes before and after ``__init__``."""

    def __init__(self, name):
        self.device, self.fast_dtype = "cuda", torch.float32
        super().__init__("cpu")
        self.name = name
        self.fast_dtype = torch.float16


def dtype_in(region):
    """Return the dtype of products in a region, eager and compiled, and of copies of the region."""

    def product(x):
        with region:
            return x @ x

    torch.compiler.reset()  # compiled code keeps what a region was, as it does of torch's
    copied, unpickled = copy.copy(region), pickle.loads(pickle.dumps(region))
    dtypes = {product(X).dtype, torch.compile(product, backend="eager", fullgraph=True)(X).dtype}
    for each in (copied, unpickled):
        with each:
            dtypes.add((X @ X).dtype)
    (dtype,) = dtypes
    return dtype


def test_a_subclass_may_set_them():
    region = _Own("mine")
    assert (region.device, region.fast_dtype, region.name) == ("cpu", torch.float16, "mine")
    assert dtype_in(region) is torch.float16


def test_a_region_has_the_dtype_that_was_set_last():
    region = polycast.autocast("cpu")
    assert dtype_in(region) is torch.bfloat16
    region.fast_dtype = torch.float16
    assert region.fast_dtype is torch.float16
    assert dtype_in(region) is torch.float16
    assert "dtype=torch.float16" in repr(region)
    region.__init__("cpu", torch.bfloat16)
    assert dtype_in(region) is torch.bfloat16


def test_an_open_region_keeps_its_dtype(engine):
    region = polycast.autocast("cpu")
    with region:
        region.fast_dtype = torch.float16
        assert (X @ X).dtype is torch.bfloat16
        with region:
            assert (X @ X).dtype is torch.float16
        assert (X @ X).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_a_region_is_for_the_device_that_was_set_last():
    region = polycast.autocast("cpu")
    with pytest.warns(polycast.errors.AutocastDisabledWarning):
        region.device = "xpu"
    assert region.device == "xpu"
    with region:
        assert (X @ X).dtype is torch.float32


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("device", "no such device", RuntimeError),
        ("device", torch.device("cpu"), ValueError),
        ("fast_dtype", "bfloat16", TypeError),
    ],
    ids=["unknown device", "torch.device", "string"],
)
def test_an_invalid_value_changes_nothing(name, value, error):
    region = polycast.autocast("cpu")
    with pytest.raises(error):
        setattr(region, name, value)
    assert (region.device, region.fast_dtype) == ("cpu", torch.bfloat16)


def test_they_cannot_be_set_in_a_region_with_a_policy():
    region = polycast.autocast("cpu", policy={"softmax": "fp32"})
    region.device, region.fast_dtype = "cpu", torch.bfloat16  # as they are
    with pytest.raises(ValueError, match="make a region with them"):
        region.fast_dtype = torch.float16
    assert region.fast_dtype is torch.bfloat16


def test_copies_have_the_attributes_of_a_subclass():
    region = _Own("a region")
    region.note = ["of the program"]
    for copied in (copy.copy(region), copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        assert vars(copied).keys() == vars(region).keys()
        assert copied.note == region.note
    assert copy.deepcopy(region).note is not region.note
