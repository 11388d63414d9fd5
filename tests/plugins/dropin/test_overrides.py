"""The regions that ``polycast run`` enters in place of a program's."""

from collections.abc import Sequence

import pytest
import torch

from polycast import Policy, WeightCache, autocast
from polycast.plugin import Availability, refresh
from polycast.policy.recipe_kinds import kinds
from polycast_plugins.dropin.overrides import RunOverrides
from polycast_plugins.quantize import LowBitRecipe


@pytest.mark.parametrize("cache", [None, WeightCache()], ids=["alone", "cache"])
@pytest.mark.usefixtures("engine", "no_grad")
def test_a_region_is_made_again_after_a_refresh_and_for_another_number_of_threads(hand_made, cache):
    class Threads(LowBitRecipe):
        kind = "threads"
        count: int = 0
        ops: Sequence[str] = ("mm",)

        def resolved(self, device_type, measure):
            return Threads(torch.get_num_threads())

    backend = hand_made("cpu", recipe_availability=lambda recipe: Availability(True))
    overrides = RunOverrides(Policy(ops={"softmax": "fp32"}), "threads", cache)

    def recipe():
        region = overrides.apply(autocast("cpu"), "cpu", torch.float16, True, None)
        return region._settings.override.recipe

    before = torch.get_num_threads()
    try:
        assert recipe() == Threads(before)
        torch.set_num_threads(before + 1)
        assert recipe() == Threads(before + 1)
        vars(backend).update(recipe_availability=lambda recipe: Availability(False, "unplugged"))
        refresh("cpu")
        with pytest.warns(UserWarning, match="unplugged"):
            assert recipe().kind == "none"
    finally:
        torch.set_num_threads(before)
        del kinds["threads"]
