"""Checks of the autocast state in regions of the device, and after them."""

import asyncio
import threading
import warnings
from collections.abc import Iterator

import torch

from polycast.errors import AutocastDisabledWarning

from .subject import Device, Subject, require


class RegionChecks(Subject):
    """Entering and leaving regions."""

    def test_region_sets_and_restores(self, device: Device) -> None:
        """A region enables autocast in its dtype, and restores the state before it."""
        before = device.state()
        for dtype in (None, *device.fast_dtypes()):
            with device.region(dtype):
                device.must_be(_inside(device, dtype), f"in a region of {dtype}")
            device.must_be(before, f"after a region of {dtype}")

    def test_region_of_an_unsupported_dtype_is_disabled(self, device: Device) -> None:
        """A region of an unsupported dtype warns and is disabled."""
        before = device.state()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            region = device.region(torch.int8)
        require(
            [warning.category for warning in caught] == [AutocastDisabledWarning],
            f"a region of torch.int8 on {device.type} must warn once that it is disabled; it warned: "
            f"{[str(warning.message) for warning in caught]}",
        )
        with region:
            device.must_be({"enabled": False}, "in a region of torch.int8")
        device.must_be(before, "after a region of torch.int8")

    def test_exception_restores(self, device: Device) -> None:
        """A region restores the state if an exception leaves it."""
        before = device.state()
        try:
            with device.region(), device.region(enabled=False):
                raise KeyError("raised in the region")
        except KeyError:
            device.must_be(before, "after an exception in a region")

    def test_nested_regions(self, device: Device) -> None:
        """Each of several nested regions restores the state of the region around it."""
        before = device.state()
        last = device.fast_dtypes()[-1]
        with device.region():
            outer = device.state()
            with device.region(enabled=False):
                device.must_be({"enabled": False, "nesting": 2}, "in a disabled region in a region")
                with device.region(last):
                    device.must_be({**_inside(device, last), "nesting": 3}, "in the third region")
                device.must_be({"enabled": False, "nesting": 2}, "after the third region")
            device.must_be(outer, "after a disabled region in a region")
        device.must_be(before, "after nested regions")

    def test_region_nested_in_itself(self, device: Device) -> None:
        """A region can be entered again while it is active."""
        before = device.state()
        region = device.region()
        with region:
            once = device.state()
            with region, region:
                device.must_be({**_inside(device, None), "nesting": 3}, "in a region nested in itself twice")
            device.must_be(once, "after the inner entries of a region nested in itself")
        device.must_be(before, "after a region nested in itself")

    def test_higher_order_op(self, device: Device) -> None:
        """A higher-order op, here ``torch.cond``, runs in a region, and its branches are autocast."""

        def branch(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
            return (torch.mm(x, y),)

        x, y = device(4, 4), device(4, 4)
        with device.region():
            expected = torch.mm(x, y).dtype
            try:
                (result,) = torch.ops.higher_order.cond(True, branch, branch, (x, y))
            except NotImplementedError as error:
                raise AssertionError(f"torch.cond raises in a region on {device.type}: {error}") from error
        require(
            result.dtype is expected,
            f"mm in a branch of torch.cond gave {result.dtype} in a region on {device.type}; outside of the branch, it "
            f"gives {expected}",
        )

    def test_threads_have_their_own_state(self, device: Device) -> None:
        """A region is active on the thread that entered it; another thread can enter the same one."""
        before = device.state()
        region = device.region()
        failures: list[BaseException] = []

        def elsewhere() -> None:
            try:
                device.must_be({"enabled": False, "nesting": 0}, "on a thread outside of regions")
                fresh = device.state()
                with region, device.region():
                    device.must_be({"enabled": True, "nesting": 2}, "on another thread, in its own regions")
                device.must_be(fresh, "on another thread, after its regions")
            except BaseException as error:  # raised again on the test's thread
                failures.append(error)

        with region:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            if failures:
                raise failures[0]
            device.must_be(_inside(device, None), "after another thread has left its regions")
        device.must_be(before, "after regions on two threads")

    def test_decorated_generator(self, device: Device) -> None:
        """A decorated generator runs in the region, its caller does not."""
        before = device.state()

        @device.region()
        def steps() -> Iterator[dict[str, object]]:
            yield device.state()
            yield device.state()

        for inside in steps():
            device.must_be(_inside(device, None), "in a decorated generator", inside)
            device.must_be(before, "between the steps of a decorated generator")
        device.must_be(before, "after a decorated generator")

    def test_generator_closed_late(self, device: Device) -> None:
        """A generator suspended in a region can be closed after the region around it has ended."""
        before = device.state()

        def suspended() -> Iterator[None]:
            with device.region(enabled=False):
                yield

        generator = suspended()
        with device.region():
            next(generator)
        generator.close()  # type: ignore[attr-defined]
        device.must_be(before, "after a generator that was suspended in a region was closed late")

    def test_decorated_coroutine(self, device: Device) -> None:
        """A decorated coroutine runs in the region, the event loop does not."""
        before = device.state()

        @device.region()
        async def body() -> dict[str, object]:
            await asyncio.sleep(0)
            return device.state()

        async def together() -> list[dict[str, object]]:
            found = [await body(), await body()]
            device.must_be(before, "in the event loop, after decorated coroutines")
            return found

        for inside in asyncio.run(together()):
            device.must_be(_inside(device, None), "in a decorated coroutine", inside)
        device.must_be(before, "after decorated coroutines")


def _inside(device: Device, dtype: torch.dtype | None) -> dict[str, object]:
    return {"enabled": True, "dtype": dtype or device.backend.default_dtype, "nesting": 1}
