"""PEFT: adapters that are merged into frozen weights inside a region."""

import pytest
import torch
from torch import nn

import polycast

peft = pytest.importorskip("peft", reason="peft is in no extra")
pytestmark = pytest.mark.usefixtures("engine")


def adapted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    config = peft.LoraConfig(target_modules=["0", "2"], r=4, lora_alpha=16, init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
def test_an_adapter_that_is_merged_inside_a_region_has_effect(merge):
    model, x = adapted(), torch.randn(4, 16)
    base = model.get_base_model()
    with torch.no_grad(), polycast.autocast("cpu"):
        for _ in range(3):
            before = model(x).float()
        if merge == "merge_adapter":
            model.merge_adapter()
            for layer in (base[0], base[2]):
                assert layer.merged
        else:
            model = model.merge_and_unload()
        after = model(x).float()
        if merge == "merge_adapter":
            model.unmerge_adapter()
            unmerged = model(x).float()
            torch.testing.assert_close(unmerged, before, rtol=0.02, atol=0.02)
    torch.testing.assert_close(after, before, rtol=0.05, atol=0.05)  # merged weights compute what the adapter added
