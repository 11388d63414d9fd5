"""Every op of the CPU's table on small inputs, in a region against another."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

import polycast
from polycast_plugins.testing.samples import SAMPLES, split

from .timing import Race, Ratio, Side

NOT_SLOWER = 1.03
"""torch's time, with a margin for noise."""
_STATEMENT = "function(*arguments, **keywords)"
_BINDINGS = (torch._C._VariableFunctions, torch._C._nn, torch._C._fft, torch._C._linalg)


class _Make:
    """Makes the tensors of the samples; see polycast_plugins.testing.samples.Maker."""

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape) * 0.8 + 0.1

    def spd(self, size: int) -> torch.Tensor:
        half = self(size, size)
        return half @ half.T + torch.eye(size)

    def signs(self, *shape: int) -> torch.Tensor:
        return torch.ones(*shape)

    def integers(self, values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)


def _function(op: str) -> Callable[..., Any]:
    """Return the Python binding of an op, which is faster than ``torch.ops``."""
    base = op.removeprefix("aten::").partition(".")[0]
    for bindings in _BINDINGS:
        if hasattr(bindings, base):
            function: Callable[..., Any] = getattr(bindings, base)
            return function
    packet: Callable[..., Any] = getattr(torch.ops.aten, base)
    return packet


def _calls() -> dict[str, dict[str, Any]]:
    """Return the names of _STATEMENT for each op of the table that can be called."""
    calls = {}
    for op in polycast.plugin.get_backend("cpu").policies:
        if op not in SAMPLES:
            continue
        arguments, keywords = split(SAMPLES[op](_Make()))
        names = {"function": _function(op), "arguments": arguments, "keywords": keywords}
        try:
            names["function"](*arguments, **keywords)
        except (RuntimeError, TypeError, AttributeError):  # missing in this build or version of torch
            continue
        calls[op] = names
    return calls


def _every_op(
    ours: AbstractContextManager[Any],
    theirs: AbstractContextManager[Any],
    against: str,
    at_most: float,
    *,
    what: str = "",
    of_all: float,
    rounds: int,
    kernels: str = "polycast",
) -> Race:
    """Return the race of our region and theirs, which runs on the kernels of `kernels`."""

    def around(region: AbstractContextManager[Any]) -> Callable[[], AbstractContextManager[Any]]:
        @contextmanager
        def both() -> Iterator[None]:
            with torch.no_grad(), region:
                yield

        return both

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some ops are deprecated
        calls = _calls()
    sides = {}
    for op, names in calls.items():
        sides[f"{op}, ours"] = Side(_STATEMENT, names, around(ours))
        sides[f"{op}, theirs"] = Side(_STATEMENT, names, around(theirs), kernels=kernels)
    return Race(
        sides=sides,
        ratios=[Ratio(op + what, against, f"{op}, ours", f"{op}, theirs", at_most) for op in calls],
        rounds=rounds,
        most_seconds=40,
        mean=f"the geometric mean of {len(calls)} ops{what}",
        mean_at_most=of_all,
        seconds=0.001,
        least=True,
    )


def against_torch() -> Race:
    """Return the race of polycast's kernels and torch's."""
    regions = polycast.autocast("cpu"), torch.autocast("cpu")
    return _every_op(*regions, "torch's kernel", NOT_SLOWER, of_all=1.0, rounds=20, kernels="torch")


def under_policy() -> Race:
    """Return the race of each op under a policy that repeats the table, and in a plain region."""
    regions = polycast.autocast("cpu", policy=polycast.plugin.get_backend("cpu").policies), polycast.autocast("cpu")
    return _every_op(*regions, "a plain region", 1.05, what=", named in a policy", of_all=1.01, rounds=120)
