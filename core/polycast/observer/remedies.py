"""Trying a remedy on what was observed: which casts there would be with it, told from the flows between ops.

A policy often moves casts rather than saving them: ``layer_norm`` in bfloat16 has its input cast instead of its output.
So a finding offers a policy only where fewer bytes would be cast than were counted.

The dtypes are followed from op to op: one with a casting policy returns its dtype, any other that of its inputs. What
is not known to change stays as it was. So a remedy that would help may be missed; one that would not is not offered.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .records import Flow

FAST = "lower_precision_fp"
_RETURN_FLOAT32 = ("fp32", "fp32_set_opt_dtype", "fp32_append_dtype")
_BY_FIRST_INPUT = ("layer_norm", "native_layer_norm", "group_norm", "native_group_norm", "batch_norm", "instance_norm")
"""Ops that return the dtype of their first input, whatever that of their weights."""
_MOST_UPSTREAM = 1000

_Node = tuple[str, str | None]
"""An op in a module."""


def name_of(op: str) -> str:
    """Return the name by which a policy means an op, in all its overloads."""
    return op.removeprefix("aten::").partition(".")[0]


@dataclass
class _Remedy:
    """A remedy, and what has been found to change with it.

    Attributes:
        policy: by name of op.
        unconverted: the op that is given its inputs as they were computed, and not as the program converts them.
        changed: ``"fast"`` or ``"float32"``, by the op that would return that and did not.
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


class Trial:
    """The flows of a run, on which remedies are tried."""

    def __init__(self, flows: Iterable[Flow]) -> None:
        self._given: dict[_Node, list[Flow]] = {}
        self._taken: dict[_Node, list[Flow]] = {}
        for flow in flows:
            if flow.count > 0:
                self._given.setdefault((flow.op, flow.module), []).append(flow)
                if flow.source:
                    self._taken.setdefault((flow.source, flow.source_module), []).append(flow)
        self.is_empty = not self._given
        """Whether no flows are known, as of what an older version has saved."""
        self._by_name: dict[str, list[_Node]] = {}
        for node in self._given:
            self._by_name.setdefault(name_of(node[0]), []).append(node)
        self._changes: dict[tuple[str, str], int | None] = {}

    def is_kept_in_float32(self, name: str) -> bool:
        """Return whether a policy has ops of a name compute in float32."""
        return any(flow.policy in _RETURN_FLOAT32 for node in self._by_name.get(name, ()) for flow in self._given[node])

    def change(self, name: str, policy: str) -> int | None:
        """Return how many bytes more (negative: fewer) would be cast if ops had a policy; None: it is not known."""
        if (name, policy) not in self._changes:
            nodes = self._by_name.get(name, [])
            self._changes[name, policy] = self._change(_Remedy({name: policy}), nodes) if nodes else None
        return self._changes[name, policy]

    def change_unconverted(self, op: str, module: str | None) -> int | None:
        """Return the same if an op were given what the program converts to float32 for it as that was computed."""
        node = (op, module)
        if not any(_is_converted(flow) for flow in self._given.get(node, ())):
            return None
        return self._change(_Remedy(unconverted=node), [node])

    def upstream(self, op: str, module: str | None) -> list[str]:
        """Return the names of an op and of those that its float32 inputs come from, up to those that cast."""
        found, seen, waiting = {name_of(op): None}, {(op, module)}, [(op, module)]
        while waiting and len(seen) < _MOST_UPSTREAM:
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
        """Return the dtype that an op would return, where that is another than it did return."""
        flows = self._given[node]
        policies = {remedy.policy_of(flow) for flow in flows}
        if policies == {FAST}:
            return "fast" if any(flow.policy != FAST for flow in flows) else None
        if policies <= {*_RETURN_FLOAT32}:
            return "float32" if any(flow.policy not in _RETURN_FLOAT32 for flow in flows) else None
        if policies & {FAST, *_RETURN_FLOAT32}:
            return None
        deciding = [flow for flow in flows if flow.is_first] if name_of(node[0]) in _BY_FIRST_INPUT else flows
        dtypes = {remedy.dtype(flow) for flow in deciding}
        if dtypes == {_kind(flow.dtype) for flow in deciding}:
            return None
        return "float32" if "float32" in dtypes else "fast"


def _bytes_cast(flows: Iterable[Flow], remedy: _Remedy) -> int:
    """Return the bytes that casts of what an op is given would write."""
    promotes = any(remedy.dtype(flow) == "float32" for flow in flows)
    total = 0
    for flow in flows:
        policy, dtype = remedy.policy_of(flow), remedy.dtype(flow)
        is_as_it_was = policy == flow.policy and dtype == _kind(flow.dtype)
        elements = flow.bytes // (4 if flow.dtype == "float32" else 2)
        if is_as_it_was and (policy != "promote" or promotes):
            total += flow.cast_bytes  # which may be none, of a weight whose cast is kept
        elif policy == FAST and dtype == "float32":
            total += 2 * elements
        elif dtype == "fast" and (policy == "fp32" or (policy == "promote" and promotes and not is_as_it_was)):
            total += 4 * elements
    return total


def _is_converted(flow: Flow) -> bool:
    return flow.dtype == "float32" and _kind(flow.asked_from or "float32") == "fast"


def _kind(dtype: str) -> str:
    return "float32" if dtype == "float32" else "fast"
