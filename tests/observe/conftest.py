"""Fixtures for tests of observations."""

import pytest

import polycast
from polycast.engine import installation
from polycast.observer.facts import Facts, Run, total_of
from polycast.observer.records import Chain, Counts, Decision, Module, Op


@pytest.fixture(name="engine", params=["native"])  # the id of the parameter selects tests for sanitizers
def _engine(request, monkeypatch):
    """Run a test on the native engine: the reference engine cannot be observed."""
    installation.forget_choice()
    monkeypatch.setenv("POLYCAST_ENGINE", request.param)
    yield request.param
    installation.forget_choice()


LAYERS = 400
PARTS = {
    "": ("Block", ("aten::add.Tensor",)),
    "attention": ("Attention", ("aten::view", "aten::transpose.int", "aten::scaled_dot_product_attention")),
    "attention.norm": ("RMSNorm", ("aten::pow.Tensor_Scalar", "aten::mean.dim", "aten::rsqrt", "aten::mul.Tensor")),
    **{f"attention.{name}": ("Linear", ("aten::linear",)) for name in ("q", "k", "v", "out")},
    "mlp": ("MLP", ("aten::mul.Tensor",)),
    "mlp.norm": ("RMSNorm", ("aten::pow.Tensor_Scalar", "aten::mean.dim", "aten::rsqrt", "aten::mul.Tensor")),
    **{f"mlp.{name}": ("Linear", ("aten::linear",)) for name in ("gate", "up", "down")},
    "mlp.act": ("SiLU", ("aten::silu",)),
    "mlp.dropout": ("Dropout", ("aten::dropout",)),
}


def _op(name: str, phase: str, number: int) -> Op:
    casts = 3 if name == "aten::linear" else 0
    dtype = "bfloat16" if casts else "float32"
    counts = Counts(
        calls=4,
        input_dtypes={"float32": 8},
        compute_dtypes={dtype: 4},
        output_dtypes={dtype: 4},
        seconds={dtype: 0.0123 + number / 1e6},
        casts=casts,
        cast_bytes=casts * 4096 + number,
    )
    policy, rule = ("lower_precision_fp", "backend's table") if casts else (None, "none")
    stack = tuple(f"site-packages/library/modeling_model.py:{100 * number + i} forward" for i in range(30))
    decisions = (Decision("cpu", policy, rule, "", 4),)
    return Op(**vars(counts), op=name, phase=phase, policy=policy, rule=rule, decisions=decisions, stack=stack)


@pytest.fixture(scope="session")
def seen_of_thousands():
    """Return what is seen of 5,600 modules, with times and stacks, each of which has ops in both passes."""
    ops = {
        part: tuple(_op(name, phase, i) for i, name in enumerate(names) for phase in ("forward", "backward"))
        for part, (_, names) in PARTS.items()
    }
    modules = []
    for layer in range(LAYERS):
        for part, (kind, _) in PARTS.items():
            inside = [op for other in PARTS if other.startswith(part) for op in ops[other]]
            name = f"layers.{layer}.{part}".rstrip(".")
            own, total = total_of(ops[part]), total_of(inside)
            modules.append(Module(**vars(own), module=name, kind=kind, entries=4, total=total, ops=ops[part]))
    of_all = total_of(module.total for module in modules if module.kind == "Block")
    outer = [Module(module=name, kind=kind, total=of_all) for name, kind in (("", "Large"), ("layers", "ModuleList"))]
    chain = Chain(
        "unlisted_float32_op", ("aten::linear", "aten::mul.Tensor", "aten::linear"), None, "bfloat16", 4, 4096
    )
    chains = tuple(
        Chain(chain.kind, chain.ops, module.module, chain.dtype, 4, 4096, {f"{module.module[:-5]}.q": 4})
        for module in modules
        if module.kind == "RMSNorm"
    )
    together = tuple(op for part in PARTS for op in ops[part])
    names = {(op.op, op.phase): op for op in together}
    run = Run(seconds=9.0, engine="native", model="Large", devices={"cpu": ["bfloat16"]}, timing=True, stacks=True)
    return polycast.Observation(Facts(run=run, ops=tuple(names.values()), modules=(*outer, *modules), chains=chains))
