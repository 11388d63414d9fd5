"""Regions: arguments, errors, entering and leaving; the attributes that programs may set, as with torch's regions."""

import copy
import inspect
import pickle

import pytest
import torch

import polycast

pytestmark = pytest.mark.usefixtures("engine")


def test_a_region_enables_autocast_with_the_backends_default_dtype():
    with polycast.autocast("cpu") as region:
        assert polycast.is_autocast_enabled("cpu")
        assert polycast.get_autocast_dtype("cpu") is torch.bfloat16
    assert (region.device, region.fast_dtype) == ("cpu", torch.bfloat16)
    assert polycast.autocast("cpu:0").device == "cpu"
    assert not polycast.is_autocast_enabled("cpu")


def test_the_signature_is_that_of_torch_with_keywords_of_its_own():
    def words(signature):
        return [(each.name, each.kind, each.default) for each in signature.parameters.values()]

    torchs, own = words(inspect.signature(torch.autocast)), words(inspect.signature(polycast.autocast))
    assert own[: len(torchs)] == torchs
    assert own[len(torchs) :] == [
        (name, inspect.Parameter.KEYWORD_ONLY, None) for name in ("cache", "policy", "recipe")
    ]


def test_leaving_on_a_thread_that_has_not_entered_raises_and_changes_nothing(in_thread):
    region = polycast.autocast("cpu")
    with region:
        with pytest.raises(RuntimeError, match="has not entered it.*left on the thread that entered it"):
            in_thread(lambda: region.__exit__(None, None, None))
        assert polycast.is_autocast_enabled("cpu")
    with pytest.raises(RuntimeError, match=r"^autocast\('cpu', dtype=torch.bfloat16, enabled=True\) cannot be left"):
        region.__exit__(None, None, None)


def test_a_dtype_that_the_backend_does_not_support_disables_the_region_with_a_warning():
    with pytest.warns(polycast.errors.AutocastDisabledWarning) as caught:
        region = polycast.autocast("cpu", dtype=torch.float64)
    assert str(caught[0].message) == (
        "In CPU autocast, but the target dtype is not supported. Disabling autocast.\n"
        "torch.float64 was asked for: cpu supports torch.bfloat16, torch.float16."
    )
    assert caught[0].filename == __file__
    with region:
        assert not polycast.is_autocast_enabled("cpu")


def test_a_disabled_region_asks_nothing_of_the_device(hand_made):
    hand_made("hpu", availability=lambda: pytest.fail("the device is asked"))
    with polycast.autocast("hpu", dtype=torch.float64, enabled=False):
        assert not polycast.is_autocast_enabled("hpu")


@pytest.mark.parametrize("used", [False, True])
def test_regions_can_be_copied_and_pickled(used):
    region = polycast.autocast("cpu", dtype=torch.float16, policy={"aten::mm": polycast.CastPolicy.FP32})
    x = torch.ones(2, 2)
    if used:
        with region:
            pass
    for twin in (copy.copy(region), copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        with twin:
            assert polycast.get_autocast_dtype("cpu") is torch.float16
            assert torch.mm(x, x).dtype is torch.float32


BAD = [
    (lambda: polycast.set_autocast_dtype("cpu", torch.int32), ValueError, "must be floating point, got torch.int32"),
    (lambda: polycast.set_autocast_dtype("cpu", torch.float64), ValueError, "cpu supports torch.bfloat16, torch.fl"),
    (lambda: polycast.set_autocast_dtype("cpu", "half"), TypeError, "must be a torch.dtype, got 'half'"),
    (lambda: polycast.set_autocast_enabled("cpu", 1), TypeError, "enabled must be a bool, got 1"),
    (lambda: polycast.set_autocast_cache_enabled(None), TypeError, "enabled must be a bool, got None"),
    (lambda: polycast.is_autocast_enabled("meta"), polycast.errors.BackendNotFoundError, "no Autocast dispatch key"),
    (lambda: polycast.autocast_nesting("nonsense"), RuntimeError, "^Invalid device string: 'nonsense'. "),
    (lambda: polycast.autocast("cpu", "bfloat16"), TypeError, "^dtype must be a torch.dtype or None, got 'bfloat16'$"),
    (lambda: polycast.autocast("cpu", policy=[]), ValueError, "^policy: must map op names to CastPolicy, got list"),
    (lambda: polycast.autocast(len), ValueError, r"As a decorator, autocast .* the device, as in @polycast\.autocast"),
    (
        lambda: polycast.autocast("cpu")(3),
        TypeError,
        r"^autocast\(\)\(func\) requires a callable, but got int\. To run",
    ),
]


def test_bad_arguments_are_refused_and_change_nothing(subtests):
    for call, error, message in BAD:
        with subtests.test(message=message):
            with pytest.raises(error, match=message):
                call()
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16


def test_enabling_by_hand_runs_polycasts_kernels():
    mixed = [torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)]
    polycast.set_autocast_enabled("cpu", True)
    try:
        assert torch.cat(mixed).dtype is torch.float32
    finally:
        polycast.set_autocast_enabled("cpu", False)


CACHE = polycast.WeightCache()


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({}, ""),
        ({"cache_enabled": False}, ", cache_enabled=False"),
        ({"policy": {"softmax": "fp32"}}, ", policy={'softmax': 'fp32'}"),
        ({"recipe": "none"}, ", recipe=NoRecipe()"),
        ({"cache": CACHE}, f", cache={CACHE!r}"),
    ],
    ids=["plain", "cache_enabled", "policy", "recipe", "cache"],
)
def test_repr_shows_what_the_region_sets(arguments, shown):
    region = polycast.autocast("cpu", torch.bfloat16, **arguments)
    assert repr(region) == f"autocast('cpu', dtype=torch.bfloat16, enabled=True{shown})"


X = torch.ones(2, 2)


class _Own(polycast.autocast):
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


def test_a_subclass_may_set_device_and_dtype_and_its_copies_have_its_attributes():
    region = _Own("mine")
    assert (region.device, region.fast_dtype, region.name) == ("cpu", torch.float16, "mine")
    assert dtype_in(region) is torch.float16
    region.note = ["of the program"]
    for copied in (copy.copy(region), copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        assert vars(copied).keys() == vars(region).keys()
        assert copied.note == region.note
    assert copy.deepcopy(region).note is not region.note


def test_a_region_has_the_dtype_that_was_set_last():
    region = polycast.autocast("cpu")
    assert dtype_in(region) is torch.bfloat16
    region.fast_dtype = torch.float16
    assert region.fast_dtype is torch.float16
    assert dtype_in(region) is torch.float16
    assert "dtype=torch.float16" in repr(region)
    region.__init__("cpu", torch.bfloat16)
    assert dtype_in(region) is torch.bfloat16


def test_an_open_region_keeps_its_dtype():
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
    ("policy", "name", "value", "error"),
    [
        (None, "device", "no such device", RuntimeError),
        (None, "device", torch.device("cpu"), ValueError),
        (None, "fast_dtype", "bfloat16", TypeError),
        ({"softmax": "fp32"}, "fast_dtype", torch.float16, ValueError),  # it would have to be read again
    ],
    ids=["unknown device", "torch.device", "string", "policy"],
)
def test_an_invalid_value_changes_nothing(policy, name, value, error):
    region = polycast.autocast("cpu", policy=policy)
    region.device, region.fast_dtype = "cpu", torch.bfloat16  # as they are
    with pytest.raises(error, match="make a region with them" if policy else None):
        setattr(region, name, value)
    assert (region.device, region.fast_dtype) == ("cpu", torch.bfloat16)
