"""Call torch's ops with a weight in each tensor argument, and print which of them leave casts of the weight stale.

Not for a frozen weight, and not across regions, does ``torch.autocast`` keep casts: it always uses the weight's value.
Run as a script, because ops with arguments of this kind may crash: a child of a fork calls the ops, and after a crash
the next calls those that are left. Prints a line of JSON before each op, ``[number, name]``, and one after it if it
made casts stale: ``[number, name, how]``.

Usage: python writes_of_ops.py TEMPLATES, the number of arguments that an op accepts to call it with
"""

import contextlib
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


def value_of(argument, tensor, number):
    """Return a value for an argument that is no tensor, or raise TypeError if there is none."""
    kind = str(argument.real_type)
    if kind.startswith("Optional[") and "Tensor" not in kind:
        return None
    values = {
        "Tensor": tensor,
        "Optional[Tensor]": tensor,
        "List[Tensor]": lambda: [tensor(), tensor()],
        "List[Optional[Tensor]]": lambda: [tensor()],
        "int": lambda: number,
        "SymInt": lambda: number,
        "float": lambda: 0.5,
        "number": lambda: 1.0,
        "bool": lambda: bool(number),
        "List[int]": lambda: [number] * 2,
        "List[SymInt]": lambda: [number] * 2,
        "List[float]": lambda: [1.0, 1.0],
        "List[number]": lambda: [1.0, 1.0],
        "List[bool]": lambda: [True, True, True],
        "str": lambda: "reflect",
        "ScalarType": lambda: torch.float32,
    }
    if kind not in values:
        raise TypeError(kind)
    return values[kind]()


def arguments(op, tensor, number):
    return {argument.name: value_of(argument, tensor, number) for argument in op._schema.arguments}


def call(op, values):
    schema = op._schema.arguments
    positional = [values[argument.name] for argument in schema if not argument.kwarg_only]
    return op(*positional, **{argument.name: values[argument.name] for argument in schema if argument.kwarg_only})


def places(op):
    """Return the arguments that hold tensors, as (name, the position in a list or None)."""
    for argument in op._schema.arguments:
        if "Tensor" in str(argument.real_type):
            yield argument.name, (0 if "List" in str(argument.real_type) else None)


def with_weight(values, place, weight):
    name, position = place
    if position is None:
        return {**values, name: weight}
    return {**values, name: [weight if at == position else each for at, each in enumerate(values[name])]}


class Uses:
    """Uses of a weight in a plain region and with a cache."""

    def __init__(self):
        self.weight = nn.Parameter(torch.ones(SIZE, SIZE), requires_grad=False)
        self.cache = polycast.WeightCache()

    def are_fresh(self, times=3):
        weight = self.weight
        if weight.shape != (SIZE, SIZE) or weight.layout is not torch.strided or weight.dtype is not torch.float32:
            return True  # the op has changed the weight to another kind of tensor
        expected = (X.float() @ weight.detach().bfloat16().float()).bfloat16()
        for _ in range(times):
            plain = torch.mm(X, weight)
            with polycast.autocast("cpu", cache=self.cache):
                cached = torch.mm(X, weight)
            if not all(torch.equal(each.nan_to_num(), expected.nan_to_num()) for each in (plain, cached)):
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
