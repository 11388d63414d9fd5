"""Remedies that give an op a policy."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from polycast import Policy

FAST = "lower_precision_fp"
_RETURN_FAST = (FAST, "lower_first")
_RETURN_FLOAT32 = ("fp32", "fp32_set_opt_dtype", "fp32_append_dtype")
_BY_FIRST_INPUT = ("layer_norm", "native_layer_norm", "group_norm", "native_group_norm", "batch_norm", "instance_norm")
"""Ops that return the dtype of their first input, whatever the dtype of their weights."""
_MAX_UPSTREAM = 1000

_Node = tuple[str, str | None]
"""An op in a module."""


@dataclass(frozen=True)
class Flow:
    """Tensors that one op passed to another, in the forward pass and in regions.

    Attributes:
        op, module: the op that received the tensors, and its module; None: none of the model's.
        device, policy: the :class:`Decision` for the op.
        source, source_module: the op that made the tensors; empty: unknown, such as an input or a weight.
        dtype: the dtype of the tensors.
        cast: the dtype that they were cast to; empty: none.
        is_first: whether they were the op's first tensors.
        asked_from: the dtype that the source computed in, if the program itself asked for `dtype`, as ``x.float()``
            does; else empty.
        count, bytes: the tensors, and their size.
        casts, cast_bytes: the casts of the tensors, and the bytes that these wrote.
    """

    op: str
    module: str | None
    device: str
    policy: str | None
    source: str
    source_module: str | None
    dtype: str
    cast: str = ""
    is_first: bool = False
    asked_from: str = ""
    count: int = 0
    bytes: int = 0
    casts: int = 0
    cast_bytes: int = 0


def name_of(op: str) -> str:
    """Return the name of an op in a policy, for all its overloads."""
    return op.removeprefix("aten::").partition(".")[0]


@dataclass
class _Remedy:
    """A remedy, and the dtypes that change with it.

    Attributes:
        policy: policies by name of op.
        unconverted: an op that gets its inputs without the program's own conversion.
        changed: the new dtype, ``"fast"`` or ``"float32"``, of the ops that would return another.
    """

    policy: Mapping[str, str] = field(default_factory=dict)
    unconverted: _Node | None = None
    changed: dict[_Node, str] = field(default_factory=dict)

    def dtype(self, flow: Flow) -> str:
        if flow.asked_from:
            as_computed = self.unconverted == (flow.op, flow.module)
            return _kind(flow.asked_from if as_computed else flow.dtype)
        return self.changed.get((flow.source, flow.source_module), _kind(flow.dtype))

    def policy_of(self, flow: Flow) -> str | None:
        return self.policy.get(name_of(flow.op), flow.policy)


class RemedyTrial:
    """Tries remedies on the flows of a run."""

    def __init__(self, flows: Iterable[Flow]) -> None:
        self._given: dict[_Node, list[Flow]] = {}
        self._taken: dict[_Node, list[Flow]] = {}
        for flow in flows:
            if flow.count > 0:
                self._given.setdefault((flow.op, flow.module), []).append(flow)
                if flow.source:
                    self._taken.setdefault((flow.source, flow.source_module), []).append(flow)
        self.has_flows = bool(self._given)
        self._by_name: dict[str, list[_Node]] = {}
        for node in self._given:
            self._by_name.setdefault(name_of(node[0]), []).append(node)
        self._changes: dict[tuple[str, str], int | None] = {}

    def is_kept_in_float32(self, name: str) -> bool:
        """Return whether the policy of an op is to compute in float32."""
        return any(flow.policy in _RETURN_FLOAT32 for node in self._by_name.get(name, ()) for flow in self._given[node])

    def change(self, name: str, policy: str) -> int | None:
        """Return how many more bytes (negative: fewer) would be cast with a policy for an op; None if unknown."""
        if (name, policy) not in self._changes:
            nodes = self._by_name.get(name, [])
            self._changes[name, policy] = self._change(_Remedy({name: policy}), nodes) if nodes else None
        return self._changes[name, policy]

    def change_unconverted(self, op: str, module: str | None) -> int | None:
        """Return the same for an op without the program's own conversion of its inputs to float32."""
        node = (op, module)
        if not any(_is_converted(flow) for flow in self._given.get(node, ())):
            return None
        return self._change(_Remedy(unconverted=node), [node])

    def upstream(self, op: str, module: str | None) -> list[str]:
        """Return the names of an op and of the ops that its float32 inputs come from, up to ops that cast."""
        found, seen, waiting = {name_of(op): None}, {(op, module)}, [(op, module)]
        while waiting and len(seen) < _MAX_UPSTREAM:
            for flow in self._given.get(waiting.pop(), ()):
                source = (flow.source, flow.source_module)
                if flow.dtype != "float32" or flow.asked_from or source in seen:
                    continue
                seen.add(source)
                given = self._given.get(source, ())
                if given and all(each.policy is None or each.policy == "promote" for each in given):
                    found[name_of(flow.source)] = None
                    waiting.append(source)
        return list(found)

    def _change(self, remedy: _Remedy, nodes: Iterable[_Node]) -> int:
        affected = dict.fromkeys(nodes)
        waiting = list(affected)
        while waiting:
            node = waiting.pop()
            returns = None if node in remedy.changed else self._returns(node, remedy)
            if returns is not None:
                remedy.changed[node] = returns
                takers = [(flow.op, flow.module) for flow in self._taken.get(node, ())]
                affected.update(dict.fromkeys(takers))
                waiting += takers
        return sum(
            _bytes_cast(self._given[node], remedy) - _bytes_cast(self._given[node], _Remedy()) for node in affected
        )

    def _returns(self, node: _Node, remedy: _Remedy) -> str | None:
        """Return the dtype that an op would return, if it differs from the one that it returned."""
        flows = self._given[node]
        policies = {remedy.policy_of(flow) for flow in flows}
        if policies <= {*_RETURN_FAST}:
            return "fast" if any(flow.policy not in _RETURN_FAST for flow in flows) else None
        if policies <= {*_RETURN_FLOAT32}:
            return "float32" if any(flow.policy not in _RETURN_FLOAT32 for flow in flows) else None
        if policies & {*_RETURN_FAST, *_RETURN_FLOAT32}:
            return None
        deciding = [flow for flow in flows if flow.is_first] if name_of(node[0]) in _BY_FIRST_INPUT else flows
        dtypes = {remedy.dtype(flow) for flow in deciding}
        if dtypes == {_kind(flow.dtype) for flow in deciding}:
            return None
        return "float32" if "float32" in dtypes else "fast"


def _bytes_cast(flows: Iterable[Flow], remedy: _Remedy) -> int:
    """Return the bytes that casts of the inputs of an op would write."""
    promotes = any(remedy.dtype(flow) == "float32" for flow in flows)
    total = 0
    for flow in flows:
        policy, dtype = remedy.policy_of(flow), remedy.dtype(flow)
        is_as_it_was = policy == flow.policy and dtype == _kind(flow.dtype)
        elements = flow.bytes // (4 if flow.dtype == "float32" else 2)
        if is_as_it_was and (policy != "promote" or promotes):
            total += flow.cast_bytes  # 0 for a weight whose cast is cached
        elif policy == FAST and dtype == "float32":
            total += 2 * elements
        elif dtype == "fast" and (policy == "fp32" or (policy == "promote" and promotes and not is_as_it_was)):
            total += 4 * elements
    return total


def _is_converted(flow: Flow) -> bool:
    return flow.dtype == "float32" and _kind(flow.asked_from or "float32") == "fast"


def _kind(dtype: str) -> str:
    return "float32" if dtype == "float32" else "fast"


FLOAT32_RANGE = ("bfloat16", "float32", "float64", "complex64", "complex128")
"""The dtypes with at least the range of float32."""


def nonfinite_remedy(op: str, dtype: str, phase: str, module: str | None, is_matched: bool = False) -> str:
    """Return what to do about an op that turns finite inputs into inf or nan; `is_matched`: MATCH casts them first."""
    if dtype in FLOAT32_RANGE:
        also = ", which has the range of float32" if dtype == "bfloat16" else ""
        return (
            f"It was computed in {dtype}{also}: a wider dtype does not help. Check its inputs, such as a zero in "
            "a divisor or a logarithm, and avoid them with `clamp()` or an epsilon."
        )
    remedy = SCALE if phase == "backward" else keep_in_float32(op, module)
    raises = f" With {policy_text(name_of(op), 'passthrough')} torch raises instead." if is_matched else ""
    return f"{dtype} has less range than float32. {remedy}{raises}"


SCALE = "Scale the loss (`polycast.grad_scaler`), or use bfloat16."


def keep_in_float32(op: str, module: str | None) -> str:
    """Return how to avoid the narrow range of a dtype in an op of a module."""
    if writes(op):
        return "Create the tensor that it writes in float32, or use bfloat16."
    if module:
        rule = f"polycast.Policy(modules={{{module!r}: 'fp32'}})"
        return f"Keep the module in float32, with `polycast.apply_policy(model, {rule})`, or use bfloat16."
    name = name_of(op)
    return f"Keep the op in float32, with {policy_text(name, 'fp32')}, or use bfloat16." * may_have(name, "fp32") or (
        "Use bfloat16."
    )


def writes(op: str) -> bool:
    """Return whether an op writes to its first input, by its name."""
    return name_of(op).endswith("_")


@functools.cache
def may_have(name: str, policy: str) -> bool:
    """Return whether an op may have a policy."""
    try:
        Policy({name: policy})
    except ValueError:  # it writes to its inputs, or this torch lacks the op
        return False
    return True


def policy_text(name: str, policy: str) -> str:
    """Return a policy for an op, as a program writes it."""
    return f'`policy={{"{name}": "{policy}"}}`'
