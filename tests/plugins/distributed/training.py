"""Training steps under DDP and FSDP2, for cases.py."""

import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import polycast
from polycast_plugins.distributed import fully_shard


def name(dtype):
    return str(dtype).removeprefix("torch.")


def sharded(model):
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


WRAP = {"ddp": DistributedDataParallel, "fsdp2": sharded}


def trained(wrap, cache, enabled=True, kept=None):
    torch.manual_seed(0)
    model = WRAP[wrap](nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, losses, dtypes = torch.randn(4, 8) + distributed.get_rank(), [], []
    # One region around all steps, so that its own cache lasts as long.
    with polycast.autocast("cpu", cache_enabled=enabled, cache=cache):
        for _ in range(3):
            y = model(x)
            if kept is not None:
                kept.append(cache.stats().entries)
            loss = y.float().square().mean()
            loss.backward()
            dtypes += [y.dtype, *(p.grad.dtype for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return losses, [p.tolist() for p in full], [name(d) for d in dtypes]


def training():
    results = {}
    for wrap in WRAP:
        cache = polycast.WeightCache()
        kept = []
        plain, own, users = trained(wrap, None, False), trained(wrap, None), trained(wrap, cache, kept=kept)
        results[wrap] = {
            "own": own == plain,
            "users": users == plain,
            "losses": plain[0],
            "dtypes": [plain[2][0], *sorted(set(plain[2][1:5]))],
            "kept": kept,
        }
    return results


def recomputed_with_policies():
    """Return a step with and without checkpoints, in a region with a policy: gradients and the dtypes of outputs."""
    results = {}
    for wrap in WRAP:
        trained = []
        for kind in (None, *CheckpointImpl):
            torch.manual_seed(0)
            seen, layers = [], [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)]
            for layer in layers:
                layer.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(name(output.dtype)))
            model = nn.Sequential(*layers)
            if kind is not None:
                model = checkpoint_wrapper(model, checkpoint_impl=kind)
            model = WRAP[wrap](model)
            x = torch.ones(4, 8, requires_grad=True)
            with polycast.autocast("cpu", policy={"aten::linear": polycast.CastPolicy.FP32}):
                loss = model(x).square().mean()
            loss.backward()
            grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
            trained.append(([x.grad.tolist(), *(grad.tolist() for grad in grads)], sorted(set(seen)), len(seen)))
        results[wrap] = {
            "same": all(gradients == trained[0][0] for gradients, _, _ in trained),
            "dtypes": [dtypes for _, dtypes, _ in trained],
            "runs": [runs for _, _, runs in trained],
        }
    return results


def called_twice_in_a_region():
    """Return the parameters without a gradient where the result of a first call was dropped."""
    model = sharded(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    with polycast.autocast("cpu"):
        model(torch.ones(4, 8))
        y = model(torch.ones(4, 8))
    y.sum().backward()
    return [key for key, parameter in model.named_parameters() if parameter.grad is None]
