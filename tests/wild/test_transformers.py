"""Models of transformers, with random weights: forward, backward and generation."""

import os
import re

import pytest
import torch

import polycast

transformers = pytest.importorskip("transformers", reason="transformers is in the extra 'test'")


def bert():
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    return transformers.BertForMaskedLM(config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("make", [bert, gpt2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
# Newer versions of transformers have another name for it, which the oldest that are tested lack.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_forward_and_backward_give_torchs_bits(on_both, make, dtype, checkpointing):
    def program():
        model = make()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        words = torch.randint(64, (2, 16))
        with torch.autocast("cpu", dtype=dtype):
            out = model(words, labels=words)
        out.loss.backward()
        return {
            "loss": out.loss.detach(),
            "logits": out.logits.detach(),
            **{name: parameter.grad for name, parameter in model.named_parameters()},
        }

    theirs, ours = on_both(program)
    assert theirs["logits"].dtype is dtype
    for name, their in theirs.items():
        assert ours[name].dtype is their.dtype, name
        assert torch.equal(ours[name], their), name


@pytest.mark.parametrize("name", ["", "lm_head"], ids=["model", "lm_head"])
def test_a_rule_casts_the_logits_that_a_model_returns(name):
    model = gpt2().eval()
    words = torch.arange(8)[None]
    with torch.no_grad(), polycast.autocast("cpu"):
        plain = model(words)
        polycast.apply_policy(model, polycast.Policy(modules={name: {"output": "float32"}}))
        cast = model(words)
    assert type(cast) is type(plain)
    assert plain.logits.dtype is torch.bfloat16
    assert torch.equal(cast.logits, plain.logits.float())
    assert cast["logits"] is cast.logits


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("make", [bert, gpt2])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
# torch's: the words need no gradient, and the embedding of them is what is checkpointed last
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_gradient_checkpointing_recomputes_with_the_policies_of_the_forward(make, reentrant):
    def gradients(checkpointing):
        torch.manual_seed(0)
        model = make()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        words = torch.randint(64, (2, 16))
        torch.manual_seed(1)  # the same dropout
        policy = dict.fromkeys(("aten::linear", "aten::addmm"), polycast.CastPolicy.FP32)
        with polycast.autocast("cpu", cache=polycast.WeightCache(), policy=policy):
            out = model.train()(words, labels=words)
        assert out.logits.dtype is torch.float32
        out.loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    plain, checkpointed = gradients(False), gradients(True)
    assert checkpointed.keys() == plain.keys()
    for name, gradient in plain.items():
        assert torch.equal(checkpointed[name], gradient), name


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
def test_generation_gives_torchs_words(on_both, sampling):
    def program():
        model = gpt2().eval()
        words = torch.randint(1, 64, (2, 4))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model.generate(words, max_new_tokens=12, do_sample=sampling, pad_token_id=0)

    theirs, ours = on_both(program)
    assert torch.equal(ours, theirs)


PROGRAM = """
import torch, transformers
torch.manual_seed(0)
config = transformers.GPT2Config(
    vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
model = transformers.GPT2LMHeadModel(config).eval()
words = torch.randint(1, 64, (2, 4))
for _ in range(3):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        words = model.generate(words, max_new_tokens=4, do_sample=False, pad_token_id=0)
print(words.tolist())
"""


@pytest.mark.slow
def test_a_program_generates_the_same_words_under_polycast_run_on_either_engine(launch, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)

    def output(module, *arguments, engine="auto"):
        script = f"import runpy\nrunpy.{module}, run_name='__main__')"
        environment = {**os.environ, "POLYCAST_ENGINE": engine}
        imports = "torch, transformers.models.gpt2.modeling_gpt2, transformers.generation"
        done = launch(script, *arguments, imports=imports, folder=tmp_path, environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout, [line for line in done.stderr.splitlines() if line.startswith("polycast: ")]

    theirs, _ = output("run_path('program.py'")
    for engine in ("native", "reference"):
        ours, (*_, summary) = output("run_module('polycast'", "run", "--weight-cache", "program.py", engine=engine)
        assert ours == theirs
        found = re.match(rf"polycast: {engine} engine, \d+ regions \((.+)\), weight cache: (\w+) .*", summary)
        assert found, summary
        assert "cpu bfloat16 3" in found[1]
        assert (found[2] == "none") == (engine == "reference")
        assert found[2] != "0"


@pytest.mark.usefixtures("engine")
def test_a_static_cache_holds_keys_of_norms_in_float32():
    pytest.importorskip("transformers", minversion="5.24", reason="one dtype for keys and values: see docs/limits.md")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    config = transformers.Qwen3Config(**sizes, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.Qwen3ForCausalLM(config).bfloat16().eval()
    polycast.apply_policy(model, polycast.Policy(modules={"**.k_norm": "fp32"}))
    cache = transformers.StaticCache(config=config, max_cache_len=8)
    with torch.no_grad(), polycast.autocast("cpu"):
        for words in (torch.arange(4)[None], torch.tensor([[4]])):
            model(words, cache=cache)
    (layer,) = cache.layers
    assert (layer.keys.dtype, layer.values.dtype) == (torch.float32, torch.bfloat16)
    assert layer.keys[0, 0].any(dim=-1).tolist() == [True] * 5 + [False] * 3
