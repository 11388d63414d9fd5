"""The regions that ``polycast run`` enters in place of a program's."""

from collections.abc import Sequence

import pytest
import torch

from polycast import Policy
from polycast.plugin import Availability, refresh
from polycast.policy.recipe_kinds import kinds
from polycast_plugins.dropin.session import Options, RunOverrides
from polycast_plugins.dropin.shim import PatchedRegion
from polycast_plugins.quantize import LowBitRecipe


@pytest.mark.parametrize("weight_cache", [False, True], ids=["alone", "cache"])
@pytest.mark.usefixtures("engine", "no_grad")
def test_a_region_is_made_again_after_a_refresh_and_for_another_number_of_threads(hand_made, weight_cache):
    class Threads(LowBitRecipe):
        kind = "threads"
        count: int = 0
        ops: Sequence[str] = ("mm",)

        def resolved(self, device_type, measure):
            return Threads(torch.get_num_threads())

    backend = hand_made("cpu", recipe_availability=lambda recipe: Availability(True))
    overrides = RunOverrides(Options(weight_cache, policy=Policy(ops={"softmax": "fp32"}), recipe="threads"))

    def recipe():
        return overrides.apply(PatchedRegion("cpu", torch.float16))._settings.override.recipe

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
