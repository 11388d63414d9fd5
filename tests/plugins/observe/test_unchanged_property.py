"""Observed runs are bitwise equal to unobserved ones, for generated models and options."""

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import polycast

LAYERS = {
    "linear": lambda: nn.Linear(8, 8),
    "norm": lambda: nn.LayerNorm(8),
    "gelu": nn.GELU,
    "softmax": lambda: nn.Softmax(-1),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True),
    "dropout": nn.Dropout,
    "inplace": lambda: nn.ReLU(inplace=True),
}
OF_ALL_KINDS = {
    "layers": ["linear", "norm", "gelu", "linear", "softmax", "linear"],
    "policy": None,
    "checkpoints": False,
    "grad": True,
}


def graph(node):
    return None if node is None else (node.name(), tuple(graph(each) for each, _ in node.next_functions))


def left_by(run, layers, policy, caches, checkpoints, grad):
    """Return all that a run leaves: outputs, graphs, gradients or errors, the generator's state and the cache's."""
    torch.manual_seed(0)
    net = nn.Sequential(*(LAYERS[layer]() for layer in layers))
    cache = polycast.WeightCache() if caches else None
    found = []

    def forward(x):
        return net(x * 1)  # which may be written to

    def step():
        x = torch.randn(2, 3, 8, requires_grad=True)
        with polycast.autocast("cpu", policy=policy, cache=cache):
            y = checkpoint(forward, x, use_reentrant=False) if checkpoints else forward(x)
        found.extend([y.detach(), graph(y.grad_fn)])
        if grad:
            y.float().square().sum().backward()
            found.extend([x.grad, *(parameter.grad.clone() for parameter in net.parameters())])

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if list(net.parameters()) else None
    with run(net), torch.set_grad_enabled(grad):
        for _ in range(2):
            try:
                step()
            except RuntimeError as error:  # what was saved for the backward was written in place
                found.append(str(error))
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    stats = None if cache is None else cache.stats()
    return [*found, torch.get_rng_state(), stats, torch.is_autocast_enabled("cpu"), nn.Module.__call__]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layers=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
    policy=st.sampled_from([None, {"softmax": "lower_precision_fp"}, {"linear": "fp32"}]),
    caches=st.booleans(),
    checkpoints=st.booleans(),
    grad=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "timing": st.booleans(),
            "stacks": st.booleans(),
            "numerics": st.booleans(),
            "nonfinite": st.sampled_from(["ignore", "record", "raise"]),
            "threads": st.sampled_from(["this", "all"]),
        }
    ),
)
@example(layers=["inplace", "inplace"], policy=None, caches=False, checkpoints=False, grad=True, options={})
@example(options={"timing": True, "stacks": True, "numerics": True}, caches=True, **OF_ALL_KINDS)
@example(options={"nonfinite": "record", "threads": "all"}, caches=False, **OF_ALL_KINDS)
def test_observed_run_has_the_same_results(engine, layers, policy, caches, checkpoints, grad, options):
    arguments = layers, policy, caches, checkpoints, grad
    plain = left_by(lambda net: torch.enable_grad(), *arguments)
    observed = left_by(lambda net: polycast.observe(net, **options), *arguments)
    assert len(plain) == len(observed)
    for one, other in zip(plain, observed, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
