"""The perplexity of a GPT-2 with outliers in its activations, in recipes with a calibration."""

import copy
import math
from pydoc_data.topics import topics

import pytest
import torch

import polycast

AVAILABLE = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not AVAILABLE, reason=f"no int8 here: {AVAILABLE.reason}"),
    pytest.mark.filterwarnings("ignore"),  # of transformers
]

WINDOW, CHANNELS, STEPS = 64, torch.tensor([3, 17, 41]), 120
RECIPES = [(polycast.Int8(min_size=0), 1.002), (polycast.Int4(min_size=0), 1.005)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text():
    text = "\n".join(topics[name] for name in sorted(topics))
    numbers = {letter: number for number, letter in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[letter] for letter in text])


@pytest.fixture(scope="module")
def batches(text):
    torch.manual_seed(1)
    starts = torch.randint(len(text) * 9 // 10 - WINDOW, (4, 8, 1))
    return list(text[starts + torch.arange(WINDOW)])


@pytest.fixture(scope="module")
def gpt2(text):
    """Return a small GPT-2 that was trained on the text of Python's help topics."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": int(text.max()) + 1, "n_positions": WINDOW, "n_embd": 64, "n_layer": 2, "n_head": 4}
    zeros = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "bos_token_id", "eos_token_id"), 0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **zeros, tie_word_embeddings=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(STEPS):
        tokens = text[torch.randint(len(text) * 9 // 10 - WINDOW, (16, 1)) + torch.arange(WINDOW)]
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    return model.eval()


def with_outliers(model, times):
    """Return the same function with three channels of each norm times a number."""
    planted = copy.deepcopy(model)
    layers = planted.transformer
    pairs = [(layers.ln_f, planted.lm_head.weight, 1)]
    for block in layers.h:
        pairs += [(block.ln_1, block.attn.c_attn.weight, 0), (block.ln_2, block.mlp.c_fc.weight, 0)]
    with torch.no_grad():
        for norm, weight, dim in pairs:
            norm.weight[CHANNELS] *= times
            norm.bias[CHANNELS] *= times
            weight.index_copy_(dim, CHANNELS, weight.index_select(dim, CHANNELS) / times)
    return planted


def perplexity(model, text, recipe=None):
    held_out = text[len(text) * 9 // 10 :].unfold(0, WINDOW, WINDOW)[:64]
    with torch.no_grad(), polycast.autocast("cpu", enabled=recipe is not None, recipe=recipe):
        return math.exp(model(held_out, labels=held_out).loss.float().item())


@pytest.mark.parametrize(("recipe", "bound"), RECIPES, ids=str)
@pytest.mark.parametrize("times", [1, 50, 200])
def test_outliers_hardly_change_the_perplexity(gpt2, text, batches, recipe, bound, times):
    model = with_outliers(gpt2, times)
    exact = perplexity(model, text)
    calibration = polycast.calibrate(model, batches, recipe)
    assert len(calibration.weights) == 4 * 2 + 1
    assert perplexity(model, text, recipe.with_options(calibration=calibration)) <= bound * exact
    if times == 200:
        assert perplexity(model, text, recipe) > 1.02 * exact
