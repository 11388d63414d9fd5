"""What an observation is made of: counts, by op, by module, by cast and by region.

All are values with JSON-safe fields. Times are seconds, sizes are bytes, dtypes are names such as ``"bfloat16"``, and a
mapping from dtypes has counts.
"""

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ..common.plain_text import in_ascii

Dtypes = Mapping[str, int]
"""How many, by dtype."""


@dataclass(frozen=True)
class Counts:
    """What was counted for an op, or for the ops of a module.

    Attributes:
        calls: how often it was called; of a module, how often its ops were.
        inner_calls: those of `calls` that another op made which is counted too, such as the bmm in an einsum. An op
            that autocast does not look at inside another one (the addmm in a linear that has a policy) is not counted.
        input_dtypes: the floating-point tensors that it was given, by their dtype before any cast.
        compute_dtypes: its calls by the dtype of what they computed: of the first floating-point tensor that they
            returned; without one, the widest of those that they were given. Other calls are in none.
        output_dtypes: the floating-point tensors that it returned.
        seconds: how long the calls that no other op made took, by the dtype that they computed in (``""``: none), casts
            included; empty without ``timing=True``.
        casts: the casts that autocast made for it: of float32 weights, of activations; kept ones that were found are
            `hits` and no casts.
        cast_bytes: the bytes of what these casts wrote.
        cast_seconds: how long they took; 0.0 without ``timing=True``.
        hits: how often the cast of a weight was found where casts are kept: by the region or a WeightCache.
        misses: how often it was looked for there and not found, so that it was made.
        recasts: those of `casts` whose weight had been cast to the same dtype before and not been written since.
        recast_bytes: the bytes of what these wrote.
    """

    calls: int = 0
    inner_calls: int = 0
    input_dtypes: Dtypes = field(default_factory=dict)
    compute_dtypes: Dtypes = field(default_factory=dict)
    output_dtypes: Dtypes = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    casts: int = 0
    cast_bytes: int = 0
    cast_seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    recasts: int = 0
    recast_bytes: int = 0


@dataclass(frozen=True)
class Decision:
    """Calls of an op that one rule decided for.

    Attributes:
        device: the device whose autocast looked at the calls; empty: none did, for autocast was off there.
        policy: the policy, as ``polycast.CastPolicy`` spells it; None: the op has none there, and ran as it is.
        rule: what decided, as in :func:`polycast.explain`: ``"region's policy"``, ``"module rule"``, ``"backend's
            table"``, ``"register_op"``, ``"none"``, ...; ``"autocast is off"`` where none looked.
        rule_name: the name that the rule has, if any.
        calls: how many calls.
    """

    device: str
    policy: str | None
    rule: str
    rule_name: str
    calls: int = 0


@dataclass(frozen=True)
class Op(Counts):
    """An op, in the forward or the backward pass.

    Attributes:
        op: its name in the dispatcher: ``"aten::linear"``, ``"aten::add.Tensor"``.
        phase: ``"forward"`` or ``"backward"``: whether autograd called it.
        policy, rule, rule_name: what decided for most of its calls; see :class:`Decision`.
        decisions: all that decided, that of most calls first.
        stack: with ``stacks=True`` the Python stack of its first call, innermost last, as ``"file:line function"``.
    """

    op: str = ""
    phase: str = "forward"
    policy: str | None = None
    rule: str = ""
    rule_name: str = ""
    decisions: tuple[Decision, ...] = ()
    stack: tuple[str, ...] = ()


@dataclass(frozen=True)
class Module(Counts):
    """A module of the model: what its ops did that are in no module inside it, and what all in it did together.

    The counts that it has itself are of its own ops, in both passes; see :class:`Counts`.

    Attributes:
        module: the name in ``model.named_modules()``; the model itself is ``""``.
        kind: the name of its class.
        entries: how often its forward was called.
        total: as the counts, for it and the modules that it called.
        ops: its own ops.
    """

    module: str = ""
    kind: str = ""
    entries: int = 0
    total: Counts = field(default_factory=Counts)
    ops: tuple[Op, ...] = ()


@dataclass(frozen=True)
class Cast:
    """Casts that autocast made, or found, of one kind, for one op, in one module.

    Attributes:
        op, phase: the op that they were made for.
        module: the module that the op ran in; None: in none of the model's.
        source, target: the dtypes.
        of: ``"weight"`` (a float32 leaf or parameter) or ``"activation"``, which is every other tensor.
        count, bytes, seconds: as casts, cast_bytes and cast_seconds of :class:`Counts`; as do the others there.
    """

    op: str
    phase: str
    module: str | None
    source: str
    target: str
    of: str
    count: int = 0
    bytes: int = 0
    seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    recasts: int = 0
    recast_bytes: int = 0


@dataclass(frozen=True)
class Region:
    """Regions that were entered at one place in the program, with one outcome.

    Attributes:
        where: ``"file.py:12"``, the line that entered them.
        device, enabled, dtype: what they set.
        reason: where they are disabled, why.
        entries: how often they were entered.
        unused: how many of those were left without an op that autocast looked at, and without a call of compiled code.
        ops: how many ops autocast looked at in them.
        compiled: how often compiled code was called in them, whose ops are in no count.
    """

    where: str
    device: str
    enabled: bool
    dtype: str
    reason: str = ""
    entries: int = 0
    unused: int = 0
    ops: int = 0
    compiled: int = 0


@dataclass(frozen=True)
class Compiled:
    """Compiled code that ran: what torch tells of it, and no more; ops that the compiler fused are in no count.

    Attributes:
        region: as torch names it, ``"Torch-Compiled Region: 0/0"``: the number of the frame and of its compilation.
        module: the module that called it; None: none of the model's.
        calls: how often it ran.
    """

    region: str
    module: str | None
    calls: int = 0


@dataclass(frozen=True)
class LowBit:
    """Calls of an op that a recipe was to compute, with one outcome.

    Attributes:
        device, recipe: the device whose autocast looked, and the recipe of the region: ``"int8"``.
        op: its name in the dispatcher.
        declined: why it ran in the fast dtype; empty: it was computed by the recipe.
        calls: how many.
    """

    device: str
    recipe: str
    op: str
    declined: str = ""
    calls: int = 0


@dataclass(frozen=True)
class Matmul:
    """Calls of an op that multiplies matrices, in one module, with one outcome for the recipe that was in force.

    Attributes:
        op, phase: the op: mm, addmm, bmm, linear, a convolution, attention, a recurrent layer. Where one calls another,
            the outermost counts; an op that is none of these has the operations of those that it is made of, such as an
            einsum outside of autocast.
        module: the module that it ran in; None: in none of the model's.
        device: the device whose autocast looked; empty: none did.
        recipe: the recipe that was in force, ``"int8"``; empty: none was.
        declined: why it was not computed by the recipe; empty: it was, or there was none.
        calls: how many.
        flops: the floating-point operations that they take by the sizes of their tensors: two for each product of two
            elements, as in ``torch.utils.flop_counter``. Masks save none, and other dtypes do not change it.
    """

    op: str
    phase: str
    module: str | None
    device: str
    recipe: str = ""
    declined: str = ""
    calls: int = 0
    flops: float = 0.0


@dataclass(frozen=True)
class Chain:
    """Ops, each of which took what the one before it returned, that one kind of finding is about.

    Attributes:
        kind: the finding's.
        ops: the ops, in order.
        module: the module that the op it is about ran in; None: none of the model's.
        dtype: the fast dtype that it is about.
        count: how often.
        bytes: the bytes of what was computed or cast there in a wider dtype, or to and fro.
        consumers: of ``"unlisted_float32_op"``, by module the casts of what the op returned, for the last op.
    """

    kind: str
    ops: tuple[str, ...]
    module: str | None
    dtype: str
    count: int = 0
    bytes: int = 0
    consumers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Flow:
    """Tensors that ops in one module made and an op in another was given, in the forward pass of regions.

    Remedies are tried on these: see ``remedies.py``.

    Attributes:
        op, module: the op that was given them, and its module; None: none of the model's.
        device, policy: as in :class:`Decision`, of the op.
        source, source_module: the op that made them; empty: an input, a weight, or what no op was seen to make.
        dtype: theirs.
        cast: what they were cast to; empty: nothing.
        is_first: whether they were the op's first tensors.
        asked_from: what the source computed in, where the program itself asked for this dtype, as ``x.float()`` does;
            empty: it did not.
        count, bytes: how many, and how large.
        casts, cast_bytes: the casts that were made of them, and the bytes that these wrote.
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


@dataclass(frozen=True)
class NonFinite:
    """The first op that turned finite inputs into inf or nan.

    Attributes:
        op, phase, module: the op, and where it ran.
        what: ``"inf"``, ``"nan"`` or ``"inf and nan"``.
        dtype: that of its output.
        stack: the Python stack that called it, innermost last, as ``"file:line function"``; of a call in the backward
            pass, that of the call of backward.
        count: how many outputs of all ops so far were not finite while the inputs were.
    """

    op: str
    phase: str
    module: str | None
    what: str
    dtype: str
    stack: tuple[str, ...] = ()
    count: int = 1


@dataclass(frozen=True)
class Finding:
    """Something that costs time or accuracy, in words.

    Attributes:
        kind: ``"weights_cast_again"``, ``"round_trip"``, ``"float32_by_one_input"``, ``"unlisted_float32_op"``,
            ``"nonfinite"``, ``"slow_dtype"``, ``"disabled_region"``, ``"unused_region"``, ``"loss_in_fast_dtype"`` or
            ``"recipe_in_training"``.
        where: the module, the place in the program or the device, for people.
        what: what was seen, and how much of it.
        remedy: what to do.
        module: the module, if it is about one.
        ops: the ops, if it is about some.
        count: how often.
        bytes: the bytes that it cost, written by casts.
        bytes_per_second: the same by the seconds that were observed.
    """

    kind: str
    where: str
    what: str
    remedy: str
    module: str | None = None
    ops: tuple[str, ...] = ()
    count: int = 0
    bytes: int = 0
    bytes_per_second: float = 0.0

    def __str__(self) -> str:
        return in_ascii(f"{self.where}: {self.what} {self.remedy}")


NESTED: dict[tuple[type[Any], str], type[Any]] = {
    (Op, "decisions"): Decision,
    (Module, "ops"): Op,
    (Module, "total"): Counts,
}
"""The fields of records that have records, and of which kind."""

_R = TypeVar("_R")


def plain(record: Any) -> dict[str, Any]:
    """Return a record as a mapping of JSON-safe values."""
    return {name: _jsonable(value) for name, value in asdict(record).items()}


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    return [_jsonable(item) for item in value] if isinstance(value, (list, tuple)) else value


def read(cls: type[_R], said: Mapping[str, Any]) -> _R:
    """Return the record that a mapping says; what it does not know of it, a later version wrote.

    Raises:
        TypeError: a value is none that its field can have.
    """
    if not isinstance(said, Mapping):
        raise TypeError(f"a {cls.__name__} is a mapping, got {type(said).__name__}")
    known: dict[str, Any] = {}
    hints = _hints(cls)  # type: ignore[arg-type]
    for each in fields(cls):  # type: ignore[arg-type]
        if each.name not in said:
            continue
        value = said[each.name]
        if not _fits(value, hints[each.name]):
            raise TypeError(f"{each.name} of a {cls.__name__} cannot be {value!r:.100}")
        nested = NESTED.get((cls, each.name))
        if nested is Counts:
            value = read(Counts, value)
        elif nested is not None:
            value = tuple(read(nested, item) for item in value)
        elif isinstance(value, list):
            value = tuple(value)
        known[each.name] = value
    return cls(**known)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value that was read from JSON can be one of a type, as far as the fields of records need it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(_fits(item, arguments[1]) for item in value.values())
    if origin in (tuple, list):
        return isinstance(value, (tuple, list)) and all(_fits(item, arguments[0]) for item in value)
    if origin is not None:
        return any(_fits(value, each) for each in arguments)
    if is_dataclass(hint):
        return True  # it is read by itself
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool) and not abs(value) >= _MOST
    return isinstance(value, hint)


_MOST = 2**63
