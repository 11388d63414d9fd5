"""The records of an observation: counts by op, module, cast, region and more.

All are values with JSON-safe fields. Times are in seconds, sizes in bytes; dtypes are names such as ``"bfloat16"``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Dtypes = Mapping[str, int]


def in_ascii(text: str) -> str:
    """Escape the characters of a text that are not ASCII, as ``ascii()`` does."""
    return text.encode("ascii", "backslashreplace").decode("ascii")


@dataclass(frozen=True)
class Counts:
    """Counts of an op, or of the ops of a module.

    Attributes:
        calls: how often the op was called; for a module, how often its ops were.
        inner_calls: the part of `calls` made by another counted op, such as the bmm in an einsum. An op in another one
            that does not reach autocast (the addmm in a linear with a policy) is not counted.
        input_dtypes: the floating-point inputs, by dtype before any cast.
        compute_dtypes: calls by the dtype that they computed in: that of the first floating-point output or, without
            one, the widest of the inputs. Calls without floating-point tensors are left out.
        output_dtypes: the floating-point outputs.
        seconds: the time of the calls that are not inner ones, casts included, by the dtype that they computed in
            (``""``: none); empty without ``timing=True``.
        casts: the casts that autocast made for the op, of float32 weights and of activations. Cached casts that were
            found are `hits` and not casts.
        cast_bytes: the bytes that these casts wrote.
        cast_seconds: the time that they took; 0.0 without ``timing=True``.
        hits: how often the cast of a weight was found in the cache of the region or in a WeightCache.
        misses: how often it was not found there, and made.
        recasts: the part of `casts` whose weight had been cast to the same dtype before, and not been written since.
        recast_bytes: the bytes that these wrote.
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

    @property
    def time(self) -> float:
        """The sum of `seconds`."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Decision:
    """Calls of an op that one rule decided.

    Attributes:
        device: the device whose autocast the calls reached; empty: autocast was off.
        policy: the policy, as ``polycast.CastPolicy`` spells it; None: the op has none, and nothing was cast.
        rule: the kind of rule, as in :func:`polycast.explain`: ``"region's policy"``, ``"module rule"``, ``"backend's
            table"``, ``"register_op"``, ``"none"``, ...; or ``"autocast is off"``.
        rule_name: the name of the rule, if it has one.
        calls: the number of calls.
        seconds: their time, as in :class:`Counts`, in all dtypes.
    """

    device: str
    policy: str | None
    rule: str
    rule_name: str
    calls: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Op(Counts):
    """An op, in the forward or the backward pass.

    Attributes:
        op: the name in the dispatcher: ``"aten::linear"``, ``"aten::add.Tensor"``.
        phase: ``"forward"``, or ``"backward"`` if autograd called it.
        policy, rule, rule_name: the decision for most of the calls; see :class:`Decision`.
        decisions: all decisions, the one for most calls first.
        stack: with ``stacks=True`` the Python stack of the first call, innermost last, as ``"file:line function"``.
    """

    op: str = ""
    phase: str = "forward"
    policy: str | None = None
    rule: str = ""
    rule_name: str = ""
    decisions: tuple[Decision, ...] = ()
    stack: tuple[str, ...] = ()

    @property
    def is_inner(self) -> bool:
        """Whether only other ops called it, and it has no policy."""
        return self.calls == self.inner_calls and self.policy is None

    @property
    def is_outside(self) -> bool:
        """Whether it ran only outside of regions, and not in a backward pass, such as the ops of an optimizer."""
        return self.phase == "forward" and bool(self.decisions) and not any(each.device for each in self.decisions)


@dataclass(frozen=True)
class Module(Counts):
    """A module of the model.

    Its own counts are those of the ops that it calls outside of inner modules, in both passes.

    Attributes:
        module: the name in ``model.named_modules()``; ``""`` is the model itself.
        kind: the name of the class.
        rule: its rule of :func:`polycast.apply_policy`, as text; empty if it has none of its own.
        entries: how often it was called.
        total: the counts of the module and all modules inside it.
        ops: its own ops.
    """

    module: str = ""
    kind: str = ""
    rule: str = ""
    entries: int = 0
    total: Counts = field(default_factory=Counts)
    ops: tuple[Op, ...] = ()


@dataclass(frozen=True)
class Cast:
    """Casts of one kind for one op in one module.

    Attributes:
        op, phase: the op that needed the casts.
        module: the module that called the op; None: none of the model's.
        source, target: the dtypes.
        of: ``"weight"`` (a float32 leaf or parameter) or ``"activation"`` (any other tensor).
        count, bytes, seconds: as `casts`, `cast_bytes` and `cast_seconds` of :class:`Counts`; likewise the others.
        policy: the policy of the op, as for a :class:`Decision`.
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
    policy: str | None = None


@dataclass(frozen=True)
class NumericsRecord:
    """Values that an op computed or that were cast for it, in one module, pass and dtype.

    Attributes:
        module: the module that called the op, in the backward pass the one whose gradients it computed; None: none of
            the model's.
        op: the name in the dispatcher.
        role: ``"forward"`` or ``"backward"``.
        dtype: the dtype of the values, of a cast after it.
        count: the number of values.
        amax: the largest magnitude of the finite ones, of a cast before it.
        underflowed: how many became zero or subnormal in `dtype`: of a cast, those that were not so before.
        overflowed: how many became inf or nan: of a cast, those that were finite before; of a result, those of ops
            whose inputs were finite.
        of: ``"weight"`` or ``"activation"``, as for :class:`Cast`, or ``"result"`` of
            the op.
        source: the dtype before a cast; empty for results.
        zeroed: how many of `underflowed` became zero.
        nonfinite: how many are inf or nan, whatever they were before.
    """

    module: str | None
    op: str
    role: str
    dtype: str
    count: int = 0
    amax: float = 0.0
    underflowed: int = 0
    overflowed: int = 0
    of: str = "result"
    source: str = ""
    zeroed: int = 0
    nonfinite: int = 0

    @property
    def underflow_share(self) -> float:
        """The share of the values that underflowed, from 0 to 1."""
        return self.underflowed / self.count if self.count else 0.0

    @property
    def overflow_share(self) -> float:
        """The share of the values that overflowed, from 0 to 1."""
        return self.overflowed / self.count if self.count else 0.0


@dataclass(frozen=True)
class Region:
    """Regions that one line of the program entered.

    Attributes:
        where: the line, ``"file.py:12"``.
        device, enabled, dtype: what the region sets.
        reason: why it is disabled.
        entries: how often it was entered.
        unused: how often it was left without an op that reached autocast and without a call of compiled code.
        ops: the ops in it that reached autocast.
        compiled: calls of compiled code in it. The ops of compiled code are not counted.
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
    """Compiled code that ran. Ops that the compiler fused are not counted.

    Attributes:
        region: torch's name, ``"Torch-Compiled Region: 0/0"``: the numbers of the frame and of its compilation.
        module, calls: the module that called it (None: none of the model's), and how often.
    """

    region: str
    module: str | None
    calls: int = 0


@dataclass(frozen=True)
class LowBit:
    """Calls of an op that a recipe is for.

    Attributes:
        device, recipe: the device, and the recipe of the region: ``"int8"``.
        op: the name in the dispatcher.
        declined: why the op ran in the fast dtype; empty: the recipe computed it.
        calls: the number of calls.
        package: the distribution whose kernel computed it; empty: torch's did, or it is unknown.
    """

    device: str
    recipe: str
    op: str
    declined: str = ""
    calls: int = 0
    package: str = ""


@dataclass(frozen=True)
class Chain:
    """Ops that pass results to each other in a way that a finding is about.

    Attributes:
        kind, ops: the kind of finding, and the ops in order.
        module: the module that called the op in question; None: none of the model's.
        dtype: the fast dtype.
        count, bytes: how often, and the bytes that were computed or cast in a wider dtype, or back and forth.
        consumers: for ``"unlisted_float32_op"``, the casts of the op's result, by the module that needed them.
    """

    kind: str
    ops: tuple[str, ...]
    module: str | None
    dtype: str
    count: int = 0
    bytes: int = 0
    consumers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Origin:
    """The first op of a step that turned finite inputs into inf or nan.

    Attributes:
        op: the name in the dispatcher: ``"aten::mm"``.
        phase: ``"forward"`` or ``"backward"``.
        module: the module that called it; None: none of the model's.
        what: ``"inf"``, ``"nan"`` or ``"inf and nan"``.
        dtype: the dtype of its output.
        stack: the Python stack of the call, innermost last, as ``"file:line function"``; in the backward pass, that of
            the call of backward. Empty unless it was asked for.
    """

    op: str
    phase: str
    module: str | None
    what: str
    dtype: str
    stack: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The op, module, pass and dtype; ``str()`` of the origin is the same in ASCII."""
        where = "outside of the model" if self.module is None else f"in {self.module or 'the model'!r}"
        return f"{self.op} {where} ({self.phase}, {self.dtype}): {self.what}"

    def __str__(self) -> str:
        return in_ascii(self.text)


@dataclass(frozen=True)
class NonFinite(Origin):
    """The first op of an observation that turned finite inputs into inf or nan: an :class:`Origin` with a count.

    Attributes:
        count: how many ops so far did so.
    """

    count: int = 1
