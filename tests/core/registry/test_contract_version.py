"""The version of the contract that a plugin is made for, and members that are misspelled."""

import dataclasses

import pytest

import polycast
from polycast.common.versions import misspelled
from polycast.errors import InvalidBackendError
from polycast.plugin import API_VERSION, Backend, Extension, Plugin
from polycast.registry.validation import validate, validate_extension

from .conftest import HpuBackend

OWN = " (begin a name of your own with an underscore)"
OTHER = "its api is {!r}, and polycast {} supports version 1 of polycast.plugin: upgrade {}"


class HpuExtension(Extension):
    api = 1
    device_type = "hpu"


def text_of(function, *arguments, error=InvalidBackendError, **keywords):
    with pytest.raises(error) as refusal:
        function(*arguments, **keywords)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("api", "remedy"), [(2, "polycast"), (0, "the plugin"), ("1", "the plugin"), (True, "the plugin")]
)
def test_a_plugin_for_another_version_is_refused_with_both_versions_and_what_to_do(api, remedy):
    text = OTHER.format(api, polycast.__version__, remedy)
    backend, extension = HpuBackend(), HpuExtension()
    backend.api = extension.api = api
    backend.default_dtype = None  # what else it has is of that version
    assert text_of(validate, backend) == f"HpuBackend: {text}"
    assert text_of(validate_extension, extension) == f"HpuExtension: {text}"
    assert text_of(Plugin, api=api, comands={}, error=TypeError) == text


def test_the_running_version_is_the_default_and_accepted():
    assert API_VERSION == Backend.api == Extension.api == Plugin().api == Plugin(api=1).api == 1
    assert validate(HpuBackend())
    assert validate_extension(HpuExtension())


MISSPELLED = {
    "is_capturng": "is_capturing",
    "optional_op": "optional_ops",
    "exclude_ops": "excluded_ops",
    "suported_dtypes": "supported_dtypes",
    "supported_dtype": "supported_dtypes",
    "default_dtypes": "default_dtype",
    "low_bit_kernel": "low_bit_kernels",
    "recipe_availabilty": "recipe_availability",
    "missing_kernel": "missing_kernels",
    "ops_in_cp": "ops_in_cpp",
}


@pytest.mark.parametrize("name", MISSPELLED)
def test_a_misspelled_member_is_rejected_with_the_right_name(name):
    expected = f"  - {name} is unknown: did you mean {MISSPELLED[name]!r}?{OWN}"
    on_class, on_instance = type("HpuBackend", (HpuBackend,), {name: None})(), HpuBackend()
    setattr(on_instance, name, None)
    for backend in (on_class, on_instance):
        assert text_of(validate, backend).splitlines()[1:] == [expected]


def test_a_misspelled_member_of_an_extension_is_rejected():
    extension = type("More", (HpuExtension,), {"polices": {}})()
    assert text_of(validate_extension, extension).endswith(f"  - polices is unknown: did you mean 'policies'?{OWN}")


@pytest.mark.parametrize(
    "name",
    [
        *("driver", "board_name", "mode", "streams", "table", "_optional_op", "_is_capturng"),
        *("unsupported_dtypes", "all_supported_dtypes", "device_type_id", "default_dtype_cpu", "is_capturing_graph"),
    ],
)
def test_other_members_of_an_author_are_allowed(name):
    assert validate(type("HpuBackend", (HpuBackend,), {name: None})())


def test_no_name_of_the_contract_is_near_another():
    for contract in (Backend, Extension, Plugin):
        names = [name for name in dir(contract) if not name.startswith("_")]
        assert misspelled(names, names) == []


@pytest.mark.parametrize(
    ("name", "right"), [("comands", "commands"), ("recipe", "recipes"), ("slow_reason", "slow_reasons")]
)
def test_a_misspelled_keyword_of_a_manifest_is_refused_with_the_right_name(name, right):
    assert text_of(Plugin, error=TypeError, **{name: {}}) == f"{name} is unknown: did you mean {right!r}?"


def test_an_unknown_keyword_of_a_manifest_is_refused():
    assert "unexpected keyword argument 'extras'" in text_of(Plugin, error=TypeError, extras={})


def test_manifests_can_be_derived():
    assert dataclasses.replace(Plugin(needs=("a",)), needs=("b",)) == Plugin(needs=("b",))
