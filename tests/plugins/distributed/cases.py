"""Cases that the tests of this folder run in two processes on gloo; process 0 writes the results as JSON."""

import contextlib
import functools
import gc
import json
import sys
import warnings

import torch
from torch import distributed, nn
from torch.distributed import fsdp
from training import called_twice_in_a_region, name, recomputed_with_policies, sharded, training

import polycast
from polycast_plugins.distributed import MixedPrecision, fully_shard

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


case(training)
case(recomputed_with_policies)
case(called_twice_in_a_region)


class Child(nn.Module):
    """A Linear in a module that records the dtype of its input."""

    def __init__(self, label, seen):
        super().__init__()
        self.label, self.seen, self.layer = label, seen, nn.Linear(100, 100)

    def forward(self, x):
        self.seen[self.label] = name(x.dtype)
        return self.layer(x)

    def generate(self, x, *, scale):
        self.seen[f"{self.label}.generate"] = [name(x.dtype), name(scale.dtype)]
        return self.layer(x) * scale


class Pair(nn.Module):
    """Two children in sequence; records the dtypes of all inputs."""

    def __init__(self):
        super().__init__()
        self.seen = {}
        self.c1, self.c2 = Child("c1", self.seen), Child("c2", self.seen)

    def forward(self, x):
        self.seen["root"] = name(x.dtype)
        return self.c2(self.c1(x))

    def generate(self, x, *, scale):
        return self.c2.generate(x, scale=scale)


def inputs_seen(units, of_root, of_units):
    """Shard `units`, the last without mixed precision if it has an asterisk; run forward and backward."""
    model = Pair()
    precision = MixedPrecision(torch.float16, cast_root_forward_inputs=of_root, cast_forward_inputs=of_units)
    for label in units.split():
        unit = model if label.startswith("model") else getattr(model, label)
        fully_shard(unit, mixed_precision=None if label.endswith("*") else precision)
    error, grads = None, []
    try:
        model(torch.zeros(2, 100)).sum().backward()
        grads = sorted({name(p.grad.dtype) for p in model.parameters()})
    except RuntimeError as raised:
        error = str(raised)
    return {"seen": model.seen, "error": error, "grads": grads}


SHARDED = ["c2 c1 model", "c2 model*", "c2", "c1 c2 model*"]

for flags in [(units, root, each) for units in SHARDED for root in (True, False) for each in (True, False)]:
    CASES["inputs {} {} {}".format(*flags)] = functools.partial(inputs_seen, *flags)


@case
def the_root_is_the_outermost_unit_with_mixed_precision_that_runs():
    """A unit that runs alone is its own root, but not inside a larger one with mixed precision."""
    precision = MixedPrecision(torch.float16, cast_forward_inputs=False)
    model = Pair()
    for unit in (model.c1, model.c2):
        fully_shard(unit, mixed_precision=precision)
    fully_shard(model, mixed_precision=precision)
    model.c2(torch.ones(2, 100))
    outer = nn.Sequential(nn.Linear(100, 100), Pair())
    for unit in (outer[1].c2, outer[1]):
        fully_shard(unit, mixed_precision=precision)
    fully_shard(outer)
    outer(torch.ones(2, 100)).sum().backward()
    # The pair is the outermost unit with mixed precision; its second child receives the output of the first.
    return [model.seen, outer[1].seen, name(outer[0].weight.grad.dtype)]


@case
def methods_registered_as_forwards_receive_the_same_as_with_torchs_policy():
    """Return the dtypes that a method registered as a forward receives, with FSDP's own policy and with ours."""
    given = []
    for of_units in (True, False):
        theirs = {"mp_policy": fsdp.MixedPrecisionPolicy(torch.float16, cast_forward_inputs=of_units)}
        ours = MixedPrecision(torch.float16, cast_root_forward_inputs=False, cast_forward_inputs=of_units)
        for shard, options in [(fsdp.fully_shard, theirs), (fully_shard, {"mixed_precision": ours})]:
            model = Pair()
            shard(model.c2, **options)
            fsdp.fully_shard(model)
            for unit in (model.c2, model):
                fsdp.register_fsdp_forward_method(unit, "generate")
            x = torch.ones(2, 100, dtype=torch.float32 if of_units else torch.float16)
            y = model.generate(x, scale=torch.ones(()))
            given.append([model.seen["c2.generate"], name(y.dtype)])
    return given


@case
def registered_method_of_the_root():
    model = fully_shard(Child("c", {}), mixed_precision=MixedPrecision(torch.float16, cast_forward_inputs=False))
    fsdp.register_fsdp_forward_method(model, "generate")
    y = model.generate(torch.ones(2, 100), scale=torch.ones(()))
    y.sum().backward()
    return [model.seen["c.generate"], name(y.dtype), name(model.layer.weight.grad.dtype)]


@case
def recomputed():
    """Return the dtypes that a checkpointed unit receives in forward and in backward, with FSDP's policy and ours."""
    runs = []
    theirs, ours = fsdp.MixedPrecisionPolicy(torch.float16), MixedPrecision(torch.float16)
    for shard, options in [(fsdp.fully_shard, {"mp_policy": theirs}), (fully_shard, {"mixed_precision": ours})]:
        for reentrant in (True, False):
            given = []
            unit = Child("c", {})
            unit.register_forward_pre_hook(lambda module, inputs, given=given: given.append(name(inputs[0].dtype)))
            model = nn.Sequential(shard(unit, **options))
            fsdp.fully_shard(model)
            x = torch.ones(2, 100, requires_grad=True)
            y = torch.utils.checkpoint.checkpoint(model[0], x, use_reentrant=reentrant)
            with contextlib.suppress(torch.utils.checkpoint.CheckpointError):  # if it receives another dtype
                y.sum().backward()
            runs.append(given)
    return runs


@case
def rules_apply_to_modules():
    """Return the dtypes of the modules of sharded and replicated models under rules, and after their removal."""

    def seen(wrap):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
        rules = polycast.apply_policy(model, polycast.Policy(modules={"1": "fp32", "2": {"linear": "fp32"}}))
        outputs = []
        for part in (model[0], model[1], model[2]):
            part.register_forward_hook(lambda *given: outputs.append(name(given[-1].dtype)))
        wrapped = wrap(model)
        for _ in range(2):
            with polycast.autocast("cpu"):
                loss = wrapped(torch.ones(2, 4)).sum()
            loss.backward()
            rules.remove()
        return outputs, list(model.state_dict())

    def sharded_by_part(model):
        for part in (model[1], model):
            fully_shard(part)
        return model

    return {"fsdp": seen(sharded_by_part), "ddp": seen(nn.parallel.DistributedDataParallel)}


@case
def the_defaults_are_the_dtype_of_the_backend_and_float32_for_reductions():
    model = fully_shard(nn.Linear(4, 4), mixed_precision=MixedPrecision())
    y = model(torch.ones(2, 4))
    y.sum().backward()
    policy = model._get_fsdp_state()._mp_policy
    return [name(d) for d in (y.dtype, policy.reduce_dtype, model.weight.grad.dtype, model.weight.dtype)]


@case
def outputs_are_cast_on_request():
    model = fully_shard(nn.Linear(4, 4), mixed_precision=MixedPrecision(output_dtype=torch.float32))
    return name(model(torch.ones(2, 4)).dtype)


@case
def without_mixed_precision_the_region_decides():
    model = fully_shard(nn.Linear(4, 4))
    with polycast.autocast("cpu"):
        inside = model(torch.ones(2, 4)).dtype
    return [name(inside), name(model(torch.ones(2, 4)).dtype)]


def refused(model, **arguments):
    try:
        fully_shard(model, **arguments)
    except Exception as error:
        return [type(error).__name__, str(error), type(model) is nn.Linear and not model._forward_pre_hooks]


@case
def invalid_arguments_leave_the_module_unchanged():
    mesh = distributed.init_device_mesh("cpu", (1, 2, 1))
    return {
        "policy": refused(nn.Linear(4, 4), mixed_precision=fsdp.MixedPrecisionPolicy()),
        "dtype": refused(nn.Linear(4, 4), mixed_precision=MixedPrecision(torch.float64)),
        "mesh": refused(nn.Linear(4, 4), mixed_precision=MixedPrecision(), mesh=mesh)[::2],
        "twice": refused(fully_shard(nn.Linear(4, 4)))[:2],
    }


@case
def only_a_unit_with_parameters_of_its_own_casts_its_inputs():
    """Return the input dtypes of a root without the switch for roots: with parameters of its own, and without."""
    seen = []
    for units in (["c2"], ["c1", "c2"]):
        model = Pair()
        precision = MixedPrecision(torch.float16, cast_root_forward_inputs=False)
        for unit in [*(getattr(model, label) for label in units), model]:
            fully_shard(unit, mixed_precision=precision)
        model(torch.ones(2, 100))
        seen.append(model.seen["root"])
    return seen


@case
def a_shard_frees_its_gathered_weights_and_no_cast_of_them_is_cached():
    cache = polycast.WeightCache()
    model = sharded(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
    gathered = []
    model[0].register_forward_pre_hook(lambda layer, _: gathered.append(layer.weight))
    with torch.no_grad(), polycast.autocast("cpu", cache=cache):
        model(torch.ones(2, 8))
    return [type(gathered[0]).__name__, gathered[0].untyped_storage().nbytes(), cache.stats().entries]


@case
def a_weight_gathered_again_into_the_same_memory_is_cast_again():
    """Whether it is the same memory depends on the system; it is in some of the many rounds."""
    return sums_of_gathered("none")


@case
def gathered_again_in_int8():
    return sums_of_gathered(
        "int8" if polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8()) else "none"
    )


def sums_of_gathered(recipe):
    cache, model, x = polycast.WeightCache(), fully_shard(nn.Linear(1024, 1024, bias=False)), torch.ones(2, 1024)
    sums = []
    with torch.no_grad(), polycast.autocast("cpu", cache=cache, recipe=recipe):
        for value in range(40):
            model.weight.to_local().fill_(value)
            sums.append(model(x).float().mean().item())
            model.reshard()
    of_all = [None, None]
    distributed.all_gather_object(of_all, sums)
    return of_all


@case
def others_are_kept():
    """With a process group, casts of weights that are not gathered are cached."""
    cache, model = polycast.WeightCache(), nn.Linear(4, 4)
    for _ in range(2):
        with torch.no_grad(), polycast.autocast("cpu", cache=cache):
            model(torch.ones(2, 4))
    return [cache.stats().misses, cache.stats().hits]


def collected(write):
    """Return the number of stale results after collectives wrote into a weight, in regions with and without a cache."""
    rank = distributed.get_rank()
    weight, cache = nn.Parameter(torch.full((4, 4), 1.0 + rank)), polycast.WeightCache()
    x, right = torch.ones(2, 4), []
    with torch.no_grad(), polycast.autocast("cpu"):
        for _ in range(3):
            for _ in range(2):
                with polycast.autocast("cpu", cache=cache):
                    of_cache = x @ weight
                expected = torch.mm(x.bfloat16(), weight.detach().bfloat16())
                right += [torch.equal(x @ weight, expected), torch.equal(of_cache, expected)]
            write(weight, rank)
            weight += 0.25 * rank
            write(weight, rank)
    of_all = [None, None]
    distributed.all_gather_object(of_all, right)
    return sum(one.count(False) for one in of_all)


def received(weight, rank):
    if rank == 0:
        distributed.send(weight.detach(), 1)
    else:
        distributed.recv(weight.detach(), 0)


def gathered(weight, rank):
    mine = weight.detach()[2 * rank : 2 * rank + 2] + 1
    distributed.all_gather_into_tensor(weight.detach(), mine)


def scattered(weight, rank):
    distributed.scatter(weight.detach(), [weight.detach() * 2] * 2 if rank == 0 else None, 0)


COLLECTIVES = {
    "broadcast": lambda weight, rank: distributed.broadcast(weight, 0),
    "all_reduce": lambda weight, rank: distributed.all_reduce(weight, distributed.ReduceOp.MAX),
    "all_reduce async": lambda weight, rank: distributed.all_reduce(weight, async_op=True).wait(),
    "recv": received,
    "all_gather": gathered,
    "scatter": scattered,
}


@case
def stale_results_after_collectives():
    return {label: collected(write) for label, write in COLLECTIVES.items()}


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "b?float16 is slow on")
    warnings.filterwarnings("ignore", "`torch.distributed.all_gather_into_tensor` is deprecated", FutureWarning)
    distributed.init_process_group("gloo")
    results = {label: run() for label, run in CASES.items()}
    if distributed.get_rank() == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(results, file)
    distributed.destroy_process_group()
    gc.collect()  # sharded models are in cycles, and torch aborts if they outlive the interpreter
