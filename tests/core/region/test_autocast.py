"""Regions: arguments, errors, entering and leaving."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch

import polycast


def test_a_region_enables_autocast_with_the_backends_default_dtype(engine):
    with polycast.autocast("cpu") as region:
        assert polycast.is_autocast_enabled("cpu")
        assert polycast.get_autocast_dtype("cpu") is torch.bfloat16
    assert (region.device, region.fast_dtype) == ("cpu", torch.bfloat16)
    assert not polycast.is_autocast_enabled("cpu")


def test_the_signature_is_that_of_torch_with_keywords_of_its_own():
    def words(signature):
        return [(each.name, each.kind, each.default) for each in signature.parameters.values()]

    torchs, own = words(inspect.signature(torch.autocast)), words(inspect.signature(polycast.autocast))
    assert own[: len(torchs)] == torchs
    assert own[len(torchs) :] == [
        (name, inspect.Parameter.KEYWORD_ONLY, None) for name in ("cache", "policy", "recipe")
    ]


def test_a_device_string_with_an_index_means_its_type():
    assert polycast.autocast("cpu:0").device == "cpu"


def test_a_region_without_dtype_takes_the_threads_current_one():
    with polycast.autocast("cpu", dtype=torch.float16):
        assert polycast.autocast("cpu").fast_dtype is torch.float16
    with torch.autocast("cpu", dtype=torch.float16):
        assert polycast.autocast("cpu").fast_dtype is torch.float16
    assert polycast.autocast("cpu").fast_dtype is torch.bfloat16


def test_an_exception_leaves_the_region(engine):
    with pytest.raises(ZeroDivisionError), polycast.autocast("cpu"):
        raise ZeroDivisionError
    assert not polycast.is_autocast_enabled("cpu")


def test_one_instance_nested_in_itself_leaves_autocast_off(engine):
    region = polycast.autocast("cpu")
    with region, region:
        assert polycast.autocast_nesting("cpu") == 2
    assert not polycast.is_autocast_enabled("cpu")


def test_leaving_on_a_thread_that_has_not_entered_raises_and_changes_nothing(in_thread):
    region = polycast.autocast("cpu")
    with region:
        with pytest.raises(RuntimeError, match="has not entered it.*left on the thread that entered it"):
            in_thread(lambda: region.__exit__(None, None, None))
        assert polycast.is_autocast_enabled("cpu")
    with pytest.raises(RuntimeError, match=r"^autocast\('cpu', dtype=torch.bfloat16, enabled=True\) cannot be left"):
        region.__exit__(None, None, None)


@pytest.mark.parametrize("enabled", [True, False])
def test_torch_sees_polycasts_region_and_the_other_way_round(enabled, engine):
    with polycast.autocast("cpu", dtype=torch.float16, enabled=enabled):
        assert torch.is_autocast_enabled("cpu") is enabled
        assert torch.get_autocast_dtype("cpu") is torch.float16
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not enabled):
            assert polycast.is_autocast_enabled("cpu") is not enabled
            assert polycast.get_autocast_dtype("cpu") is torch.bfloat16
        assert polycast.is_autocast_enabled("cpu") is enabled


def test_a_region_inherits_or_sets_cache_enabled():
    with polycast.autocast("cpu", cache_enabled=False):
        assert not polycast.is_autocast_cache_enabled()
        with polycast.autocast("cpu"):
            assert not polycast.is_autocast_cache_enabled()
        with polycast.autocast("cpu", cache_enabled=True):
            assert polycast.is_autocast_cache_enabled()
    assert polycast.is_autocast_cache_enabled()


def test_a_dtype_that_the_backend_does_not_support_disables_the_region_with_a_warning(engine):
    with pytest.warns(polycast.errors.AutocastDisabledWarning) as caught:
        region = polycast.autocast("cpu", dtype=torch.float64)
    assert str(caught[0].message) == (
        "In CPU autocast, but the target dtype is not supported. Disabling autocast.\n"
        "torch.float64 was asked for: cpu supports torch.bfloat16, torch.float16."
    )
    assert caught[0].filename == __file__
    with region:
        assert not polycast.is_autocast_enabled("cpu")


def test_a_device_that_cannot_be_used_disables_the_region_with_a_warning(hand_made):
    hand_made("hpu", availability=lambda: polycast.plugin.Availability(False, "the cable is out"))
    with pytest.warns(
        polycast.errors.AutocastDisabledWarning, match=r"^hpu is not available: the cable is out\. Disabling"
    ):
        region = polycast.autocast("hpu")
    with region:
        assert not polycast.is_autocast_enabled("hpu")


def test_the_warning_is_a_user_warning_that_a_filter_can_make_an_error(hand_made):
    hand_made("hpu", availability=lambda: polycast.plugin.Availability(False, "the cable is out"))
    assert issubclass(polycast.errors.AutocastDisabledWarning, UserWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("error", polycast.errors.AutocastDisabledWarning)
        with pytest.raises(polycast.errors.AutocastDisabledWarning):
            polycast.autocast("hpu")


def test_a_disabled_region_asks_nothing_of_the_device(hand_made):
    hand_made("hpu", availability=lambda: polycast.plugin.Availability(False, "the cable is out"))
    with polycast.autocast("hpu", dtype=torch.float64, enabled=False):
        assert not polycast.is_autocast_enabled("hpu")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.device("cpu"),), ValueError, r"Expected `device_type` of type `str`, got: `<class 'torch.device'>`"),
        (("not a real device",), RuntimeError, r"^Invalid device string: 'not a real device'\. "),
        (("meta",), polycast.errors.BackendNotFoundError, r"^No polycast backend is installed for 'meta'\."),
        (("cpu", "bfloat16"), TypeError, r"^dtype must be a torch.dtype or None, got 'bfloat16'$"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        polycast.autocast(*arguments)


def test_decorating_an_object_that_is_not_callable_raises():
    with pytest.raises(TypeError, match=r"^autocast\(\)\(func\) requires a callable, but got int\. To run a block"):
        polycast.autocast("cpu")(3)


def test_a_bad_policy_is_refused(subtests):
    for policy, message in [
        ({"m m": polycast.CastPolicy.FP32}, "'m m' is not the name of an op"),
        ({"aten::no_such_op": polycast.CastPolicy.FP32}, r"has no op 'no_such_op'"),
        ({"aten::mm": "fp23"}, "the policy of 'aten::mm' must be a CastPolicy or the name of one, got 'fp23'"),
        ({"aten::add_.Tensor": polycast.CastPolicy.FP32}, "in-place and out= variants are never cast"),
        ({"aten::mm": polycast.CastPolicy.FP32_SET_OPT_DTYPE}, "has no optional dtype argument"),
        ([], "must map op names to CastPolicy, got list"),
    ]:
        refusal = pytest.raises(ValueError, match=f"^policy: .*{message}")
        with subtests.test(policy=policy, message=message), refusal:
            polycast.autocast("cpu", policy=policy)


def test_settings_can_be_copied_and_pickled(engine):
    region = polycast.autocast("cpu", dtype=torch.float16)
    for twin in (copy.copy(region), copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        with twin:
            assert polycast.get_autocast_dtype("cpu") is torch.float16


BAD = [
    (
        lambda: polycast.set_autocast_dtype("cpu", torch.int32),
        ValueError,
        "must be floating point, got torch.int32",
    ),
    (
        lambda: polycast.set_autocast_dtype("cpu", torch.float64),
        ValueError,
        "cpu supports torch.bfloat16, torch.fl",
    ),
    (lambda: polycast.set_autocast_dtype("cpu", "half"), TypeError, "must be a torch.dtype, got 'half'"),
    (lambda: polycast.set_autocast_enabled("cpu", 1), TypeError, "enabled must be a bool, got 1"),
    (lambda: polycast.set_autocast_cache_enabled(None), TypeError, "enabled must be a bool, got None"),
    (
        lambda: polycast.is_autocast_enabled("meta"),
        polycast.errors.BackendNotFoundError,
        "no Autocast dispatch key",
    ),
    (lambda: polycast.autocast_nesting("nonsense"), RuntimeError, "^Invalid device string: 'nonsense'. "),
]


def test_bad_switches_are_refused_and_change_nothing(subtests):
    for call, error, message in BAD:
        with subtests.test(call=call, error=error, message=message):
            with pytest.raises(error, match=message):
                call()
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16


def test_enabling_by_hand_runs_polycasts_kernels(engine):
    mixed = [torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)]
    polycast.set_autocast_enabled("cpu", True)
    try:
        assert torch.cat(mixed).dtype is torch.float32
    finally:
        polycast.set_autocast_enabled("cpu", False)


def test_a_cache_setting_that_is_no_bool_is_refused():
    with pytest.raises(TypeError, match="^cache_enabled must be a bool or None, got 1$"):
        polycast.autocast("cpu", cache_enabled=1)


def test_a_region_with_a_policy_can_be_copied_after_its_use(engine):
    region = polycast.autocast("cpu", policy={"aten::mm": polycast.CastPolicy.FP32})
    x = torch.ones(2, 2)
    with region:
        pass
    for twin in (copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        with twin:
            assert torch.mm(x, x).dtype is torch.float32


def test_a_decorator_without_a_device_says_what_is_missing():
    with pytest.raises(
        ValueError, match=r"As a decorator, autocast is called with the device, as in @polycast\.autocast"
    ):

        @polycast.autocast
        def function():
            pass


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({}, ""),
        ({"cache_enabled": False}, ", cache_enabled=False"),
        ({"policy": {"softmax": "fp32"}}, ", policy={'softmax': 'fp32'}"),
        ({"recipe": "none"}, ", recipe=NoRecipe()"),
        ({"cache": polycast.WeightCache()}, ", cache=<WeightCache: entries 0, MiB 0.0, hits 0, misses 0>"),
    ],
    ids=["plain", "cache_enabled", "policy", "recipe", "cache"],
)
def test_repr_shows_what_the_region_sets(arguments, shown):
    region = polycast.autocast("cpu", torch.bfloat16, **arguments)
    assert repr(region) == f"autocast('cpu', dtype=torch.bfloat16, enabled=True{shown})"
