"""torch's autocast classes while torch is patched: their instances, subclasses, and the deprecated classes."""

import contextlib
import warnings

import pytest
import torch
from torch import autocast as imported_before

import polycast

X = torch.ones(2, 2)
TORCHS_EXIT = torch.autocast.__exit__


class Half(torch.autocast):
    def __init__(self, device_type="cpu"):
        super().__init__(device_type, dtype=torch.float16)


deprecated = pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast:FutureWarning")


def test_a_region_that_was_made_before_is_torchs_and_works_while_patched():
    region = torch.autocast("cpu")
    with polycast.patch_torch():
        assert isinstance(region, torch.autocast)
        with region:
            assert torch.is_autocast_enabled("cpu")
            assert polycast.autocast_nesting("cpu") == 0


@pytest.mark.usefixtures("patched", "engine")
def test_a_name_that_was_imported_before_means_polycasts():
    with imported_before("cpu"):
        assert polycast.autocast_nesting("cpu") == 1


@pytest.mark.usefixtures("patched")
def test_a_region_is_an_instance_of_torchs_class_and_other_things_are_not():
    assert isinstance(torch.autocast("cpu"), torch.autocast)
    assert not isinstance(contextlib.nullcontext(), torch.autocast)
    assert not issubclass(dict, torch.autocast)


@pytest.mark.usefixtures("patched")
def test_a_region_can_be_entered_and_left_by_methods_of_the_class():
    region = torch.autocast("cpu")
    torch.autocast.__enter__(region)
    assert polycast.autocast_nesting("cpu") == 1
    torch.autocast.__exit__(region, None, None, None)
    assert polycast.autocast_nesting("cpu") == 0


@pytest.mark.usefixtures("engine")
def test_a_subclass_made_while_patched_keeps_its_type():
    with polycast.patch_torch():

        class Half(torch.autocast):
            def __init__(self, device_type):
                super().__init__(device_type, dtype=torch.float16)

            def __enter__(self):
                self.seen = torch.is_autocast_enabled(self.device)
                return super().__enter__()

        with Half("cpu") as region:
            assert (X @ X).dtype is torch.float16
            assert polycast.autocast_nesting("cpu") == 1
        assert region.seen is False
        assert type(region) is Half
        assert not isinstance(torch.autocast("cpu"), Half)
        assert Half != torch.autocast
        assert Half("cpu")(lambda: X @ X)().dtype is torch.float16
        with Half("hpu"):
            assert torch.get_autocast_dtype("hpu") is torch.float16
    with Half("cpu"):  # and it goes on after the patch
        assert (X @ X).dtype is torch.float16
    assert isinstance(Half("cpu"), torch.autocast)


@pytest.mark.usefixtures("patched", "engine")
def test_a_subclass_may_call_the_methods_of_torchs_class_by_name():
    class Half(torch.autocast):
        def __init__(self):
            torch.autocast.__init__(self, "cpu", torch.float16)

        def __enter__(self):
            return torch.autocast.__enter__(self)

    with Half():
        assert polycast.autocast_nesting("cpu") == 1
        assert (X @ X).dtype is torch.float16


@pytest.mark.usefixtures("engine")
def test_a_subclass_made_before_makes_polycasts_regions_while_patched():
    before = Half("cpu")
    with polycast.patch_torch():
        for region, nesting in ((before, 0), (Half("cpu"), 1)):
            with region:
                assert (X @ X).dtype is torch.float16
                assert polycast.autocast_nesting("cpu") == nesting
            assert isinstance(region, torch.autocast)
            assert region(lambda: X @ X)().dtype is torch.float16


@pytest.mark.usefixtures("engine")
def test_a_region_of_a_subclass_can_be_left_after_the_patch_has_ended():
    class Leaving(Half):
        def __exit__(self, *exc_info):
            return super().__exit__(*exc_info)

    patching = polycast.patch_torch()
    patching.start()
    by_hand = Leaving()
    by_hand.__enter__()
    with Leaving():
        patching.stop()
        with polycast.patch_torch(), Leaving():
            pass
    assert polycast.autocast_nesting("cpu") == 1
    by_hand.__exit__(None, None, None)
    assert polycast.autocast_nesting("cpu") == 0
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast.__exit__ is TORCHS_EXIT


@pytest.mark.usefixtures("engine")
def test_a_region_of_a_subclass_that_was_entered_between_patches_can_be_left():
    with polycast.patch_torch():
        region = Half("cpu")
    region.__enter__()
    with polycast.patch_torch():
        region.__exit__(None, None, None)


@pytest.mark.usefixtures("patched", "engine")
@pytest.mark.parametrize(("module", "device", "dtype"), [("cpu", "cpu", "bfloat16"), ("cuda", "cuda", "float16")])
def test_the_deprecated_classes_warn_and_default_as_torchs(module, device, dtype):
    cls = getattr(torch, module).amp.autocast
    with pytest.warns(FutureWarning, match=rf"`torch\.{module}\.amp\.autocast\(args\.\.\.\)` is deprecated") as record:
        region = cls(enabled=False)
    assert [warning.filename for warning in record] == [__file__]
    assert type(region) is cls
    assert (region.device, region.fast_dtype) == (device, getattr(torch, dtype))


@pytest.mark.usefixtures("patched", "engine")
@deprecated
def test_a_deprecated_class_runs_polycasts_region():
    with torch.cpu.amp.autocast(True, torch.float16):
        assert polycast.autocast_nesting("cpu") == 1
        assert (X @ X).dtype is torch.float16
    with pytest.raises(TypeError):
        torch.cpu.amp.autocast("cpu", device_type="cpu")


@pytest.mark.usefixtures("patched", "engine")
def test_a_subclass_of_a_deprecated_class_warns_once_and_is_polycasts():
    with pytest.warns(FutureWarning, match=r"`torch\.cpu\.amp\.autocast\(args\.\.\.\)` is deprecated") as record:

        class Half(torch.cpu.amp.autocast):
            def __init__(self):
                super().__init__(dtype=torch.float16)

    assert [warning.filename for warning in record] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        region = Half()
    with region:
        assert polycast.autocast_nesting("cpu") == 1
        assert (X @ X).dtype is torch.float16


@pytest.mark.usefixtures("patched")
@deprecated
@pytest.mark.parametrize("through", ["torchs", "deprecated", "subclass", "subclass with its own"])
def test_a_warning_names_the_line_of_the_program(through):
    class Plain(torch.autocast): ...

    class Own(torch.autocast):
        def __init__(self):
            super().__init__("cpu", torch.int8)

    make = {
        "torchs": lambda: torch.autocast("cpu", torch.int8),
        "deprecated": lambda: torch.cpu.amp.autocast(dtype=torch.int8),
        "subclass": lambda: Plain("cpu", torch.int8),
        "subclass with its own": Own,
    }[through]
    with pytest.warns(polycast.errors.AutocastDisabledWarning) as record:
        make()
    assert {warning.filename for warning in record} == {__file__}
