"""Call torch's ops with a weight in each tensor argument, and print which of them leave casts of the weight stale.

Not for a frozen weight, and not across regions, does ``torch.autocast`` keep casts: it always uses the weight's value.
Run as a script, because ops with arguments of this kind may crash: a child of a fork calls the ops, and after a crash
the next calls those that are left. Prints a line of JSON before each op, ``[number, name]``, and one after it if it
made casts stale: ``[number, name, how]``.

Usage: python writes_of_ops.py TEMPLATES, the number of arguments that an op accepts to call it with
"""

import contextlib
import functools
import itertools
import json
import os
import sys
import traceback
import warnings

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import polycast
from polycast.torch_internals.builtin_functions import const_data_ptr

SIZE = 4
X = torch.ones(SIZE, SIZE, dtype=torch.bfloat16)
OTHER_TENSORS = (
    lambda: torch.full((SIZE, SIZE), 2.0),
    lambda: torch.full((SIZE,), 2.0),
    lambda: torch.zeros(SIZE, dtype=torch.long),
    lambda: torch.full((2, SIZE, SIZE), 2.0),
)
NUMBERS = (0, 1, SIZE)
FORMS = {
    "itself": lambda weight: weight,
    "detach()": lambda weight: weight.detach(),
    "a view": lambda weight: weight.view(-1)[:SIZE],
}


def ops():
    """Return the overloads of torch's ops that take tensors, by name."""
    found = {}
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if space == "aten":
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            if any("Tensor" in str(argument.type) for argument in op._schema.arguments):
                found[name] = op
    return found


VALUES = {
    "Tensor": lambda tensor, number: tensor(),
    "Optional[Tensor]": lambda tensor, number: tensor(),
    "List[Tensor]": lambda tensor, number: [tensor(), tensor()],
    "List[Optional[Tensor]]": lambda tensor, number: [tensor()],
    "int": lambda tensor, number: number,
    "SymInt": lambda tensor, number: number,
    "float": lambda tensor, number: 0.5,
    "number": lambda tensor, number: 1.0,
    "bool": lambda tensor, number: bool(number),
    "List[int]": lambda tensor, number: [number] * 2,
    "List[SymInt]": lambda tensor, number: [number] * 2,
    "List[float]": lambda tensor, number: [1.0, 1.0],
    "List[number]": lambda tensor, number: [1.0, 1.0],
    "List[bool]": lambda tensor, number: [True, True, True],
    "str": lambda tensor, number: "reflect",
    "ScalarType": lambda tensor, number: torch.float32,
}
"""By the type of an argument: its value, given a function that makes a tensor, and a number."""


@functools.cache
def parameters(op):
    """Return the name and the type of each argument, and whether it is given by its name."""
    return [(each.name, str(each.real_type), each.kwarg_only) for each in op._schema.arguments]


def value_of(kind, tensor, number):
    """Return a value for an argument, or raise KeyError if there is none for its type."""
    return None if kind.startswith("Optional[") and "Tensor" not in kind else VALUES[kind](tensor, number)


def arguments(op, tensor, number):
    return {name: value_of(kind, tensor, number) for name, kind, _ in parameters(op)}


def call(op, values):
    positional = [values[name] for name, _, by_name in parameters(op) if not by_name]
    return op(*positional, **{name: values[name] for name, _, by_name in parameters(op) if by_name})


def places(op):
    """Return the arguments that hold tensors, as (name, the position in a list or None)."""
    for name, kind, _ in parameters(op):
        if "Tensor" in kind:
            yield name, (0 if "List" in kind else None)


def with_weight(values, place, weight):
    name, position = place
    if position is None:
        return {**values, name: weight}
    return {**values, name: [weight if at == position else each for at, each in enumerate(values[name])]}


def equal(one, other):
    """Return whether two tensors are equal, with NaN equal to itself."""
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


class Uses:
    """Uses of a weight in a plain region and with a cache."""

    def __init__(self):
        self.weight = nn.Parameter(torch.ones(SIZE, SIZE), requires_grad=False)
        self.cache = polycast.WeightCache()

    def are_fresh(self, times=3):
        weight = self.weight
        if weight.shape != (SIZE, SIZE) or weight.layout is not torch.strided or weight.dtype is not torch.float32:
            return True  # the op has changed the weight to another kind of tensor
        expected = torch.mm(X, weight.bfloat16())
        for _ in range(times):
            plain = torch.mm(X, weight)
            with polycast.autocast("cpu", cache=self.cache):
                cached = torch.mm(X, weight)
            if not (equal(plain, expected) and equal(cached, expected)):
                return False
        return True


def aliases(result, weight):
    """Return the tensors in a result that share memory with the weight."""
    memory = range(const_data_ptr(weight), const_data_ptr(weight) + weight.nbytes)
    for each in tree_leaves(result):
        if not isinstance(each, torch.Tensor) or each is weight:
            continue
        with contextlib.suppress(RuntimeError):  # some tensors have no memory
            if each.layout is not torch.strided:
                each = each._values() if each.layout is torch.sparse_coo else each.values()
            if each.numel() and const_data_ptr(each) in memory:
                yield each


def how_stale(op, values, place, form, is_old):
    """Return how casts become stale, or an empty string; `is_old`: the op is called before the weight is cast."""
    uses = Uses()
    weight = uses.weight
    with torch.no_grad(), polycast.autocast("cpu"):
        if not is_old:
            uses.are_fresh()
        with torch.autocast("cpu", enabled=False):
            try:
                result = call(op, with_weight(values, place, FORMS[form](weight)))
            except Exception:
                return ""  # what an op writes before it raises is not seen: docs/limits.md
        if not uses.are_fresh():
            return "it writes"
        for alias in aliases(result, weight):
            for _ in range(2):
                with contextlib.suppress(Exception):
                    alias.add_(1)
                if not uses.are_fresh():
                    return "a write through a result that lives"
        return ""


def call_ops(first, templates):
    """Call the ops from a number on."""
    for number, (name, op) in itertools.islice(enumerate(ops().items()), first, None):
        print(json.dumps([number, name]), flush=True)
        accepted = []
        for tensor, each in itertools.product(OTHER_TENSORS, NUMBERS):
            try:
                with torch.no_grad():
                    call(op, arguments(op, tensor, each))
            except Exception:
                continue
            accepted.append((tensor, each))
            if len(accepted) == templates:
                break
        for (tensor, each), place, form, is_old in itertools.product(accepted, places(op), FORMS, (False, True)):
            how = how_stale(op, arguments(op, tensor, each), place, form, is_old)
            if how:
                print(json.dumps([number, name, f"{place[0]} is {form}: {how}"]), flush=True)


def main():
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    with torch.no_grad(), polycast.autocast("cpu"):
        Uses().are_fresh()  # imports what the children need
    number, status = -1, -1
    while status < 0:  # after a crash, of torch: it does not check these arguments
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(write, 1)
            try:
                call_ops(number + 1, int(sys.argv[1]))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(write)
        with open(read) as lines:
            for line in lines:
                print(line, end="")
                number = json.loads(line)[0]
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(status)


if __name__ == "__main__":
    main()
