"""`polycast.plugin.LibraryRegion`: a region that is asked at each entry what to enter."""

import contextlib

import pytest
import torch

import polycast
from polycast.plugin import LibraryRegion

pytestmark = pytest.mark.usefixtures("engine")


class Rewritten(LibraryRegion):
    """Enters what `now` is."""

    now = None

    def entered(self):
        return self if self.now is None else self.now


def dtype_now():
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def test_it_is_asked_at_each_entry():
    region, seen = Rewritten("cpu"), []
    for region.now in (None, polycast.autocast("cpu", torch.float16), polycast.autocast("cpu", enabled=False)):
        with region:
            seen.append(dtype_now())
    assert seen == [torch.bfloat16, torch.float16, None]


def test_what_it_enters_may_have_a_policy():
    region = Rewritten("cpu")
    region.now = polycast.autocast("cpu", policy={"mm": "fp32"})
    with region:
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


def test_leave_says_whether_the_thread_was_in_it(in_thread):
    region = Rewritten("cpu")
    assert not region.leave()
    region.__enter__()
    assert not in_thread(region.leave)
    assert region.leave()
    assert dtype_now() is None


def test_a_decorated_generator_is_in_what_is_active_when_its_body_starts():
    region, before = Rewritten("cpu"), []

    def set_dtype():
        before.append(dtype_now())
        region.now = polycast.autocast("cpu", torch.float16)

    def steps():
        yield dtype_now()
        yield dtype_now()

    decorated = region.decorate(steps, contextlib.nullcontext(), set_dtype)
    assert list(decorated()) == [torch.float16] * 2
    assert before == [None]


def test_a_decorated_function_runs_in_the_block():
    region = Rewritten("cpu")
    assert region.decorate(dtype_now, region, lambda: 1 / 0)() is torch.bfloat16


def test_an_error_while_an_entry_is_recorded_leaves_the_region(engine):
    class Model(torch.nn.Module):
        def forward(self, x):
            with LibraryRegion("cpu", policy={"softmax": "fp32"}):
                return x @ x

    with contextlib.suppress(RuntimeError):
        torch.export.export(Model(), (torch.ones(2, 2),), strict=False)
    assert (polycast.autocast_nesting("cpu"), torch.is_autocast_enabled("cpu")) == (0, False)
