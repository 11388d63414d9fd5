"""`DeviceProfile`: how long ops take on a device in float32, in each fast dtype and by each recipe."""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from typing_extensions import Self

from polycast.plugin import Result

from .measurement import FLOAT32, PREEMPTED, Measurement, Omission, is_positive, is_valid, table_legend, table_rows

_FORMAT = 2
_NOISY = 0.25
"""A profile is noisy if more than this fraction of its measurements is."""
BUSY = 0.15
"""A profile is also noisy if other processes took more than this part of the processors' time."""


@dataclass(frozen=True, eq=False, repr=False)
class DeviceProfile(Result):
    """What is fast on a device, from :func:`profile`. Immutable; profiles with equal contents are equal.

    ``print`` shows a table of times relative to float32: ``~`` marks noisy ones, ``*`` extrapolated ones.

    Attributes:
        device_type: the device type.
        device: the name of the device, such as the processor's.
        threads: torch's threads while it was measured.
        versions: the versions of polycast, torch and the distribution of the backend.
        details: what else the speed depends on, such as the instructions that torch uses; see
            ``Backend.device_details``.
        measurements: the times.
        bandwidth: the rate at which memory is read, in bytes/s; 0 if it is unknown.
        omissions: what was not measured, and why.
        other_load: the part of the processors' time that other processes, or a limit, took while it was measured.
        date: when it was measured, such as ``"2026-05-01 09:30 UTC"``; empty if it was not.
        digest: the digest of the contents, 16 hexadecimal digits.
    """

    device_type: str
    device: str
    threads: int
    versions: Mapping[str, str]
    details: Mapping[str, str]
    measurements: tuple[Measurement, ...]
    bandwidth: float
    omissions: tuple[Omission, ...] = ()
    other_load: float = 0.0
    date: str = ""
    digest: str = field(init=False)
    _curves: Mapping[tuple[str, str], Mapping[int, Mapping[int, float]]] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("versions", "details"):
            object.__setattr__(self, name, MappingProxyType(dict(sorted(getattr(self, name).items()))))
        digest = hashlib.sha256(json.dumps(self._contents(), sort_keys=True).encode()).hexdigest()[:16]
        object.__setattr__(self, "digest", digest)
        curves: dict[tuple[str, str], dict[int, dict[int, float]]] = {}
        for each in sorted(self.measurements, key=lambda each: (each.size, each.rows)):
            curves.setdefault((each.op, each.way), {}).setdefault(each.size, {})[each.rows] = each.seconds
        object.__setattr__(self, "_curves", curves)

    @property
    def is_noisy(self) -> bool:
        """Whether many measurements are noisy or missing, or other processes took much of the processors' time."""
        return self.noise > 1

    @property
    def noise(self) -> float:
        """The noise of the measurements, by which profiles are compared. Over 1, the profile is noisy."""
        measured = [each.noisy for each in self.measurements if each.noisy or not each.extrapolated]
        measured += [True for each in self.omissions if each.reason == PREEMPTED]
        return max(sum(measured) / max(len(measured), 1) / _NOISY, self.other_load / BUSY)

    def ways(self, op: str) -> tuple[str, ...]:
        """Return the ways in which an op was measured, float32 first."""
        return tuple(way for of, way in dict.fromkeys((each.op, each.way) for each in self.measurements) if of == op)

    def seconds(self, op: str, rows: int, way: str, size: int | None = None) -> float | None:
        """Return the estimated time of a call in seconds; None if the op was not measured in this way.

        It is interpolated between measurements on logarithmic scales. Beyond the largest, it grows with rows and size;
        below the smallest, it is constant.

        Args:
            op, rows, way: as in a `Measurement`.
            size: the elements of the weight. None: the largest that was measured.
        """
        curves = curves_of(self, op, way)
        if not curves:
            return None
        of_size = {each: _interpolated_time(curve, rows) for each, curve in curves.items()}
        return of_size[max(of_size)] if size is None else _interpolated_time(of_size, size)

    def ratio(self, op: str, rows: int, way: str, size: int | None = None) -> float | None:
        """Return the time of a call relative to float32; None if the op was not measured in this way or in float32.

        It is interpolated in the logarithms of rows and size; beyond the measurements, it is the nearest one's.

        Args:
            op, rows, way: as in a `Measurement`.
            size: the elements of the weight. None: the largest that was measured.
        """
        float32 = curves_of(self, op, FLOAT32)
        of_size = {}
        for each, curve in curves_of(self, op, way).items():
            base = float32.get(each, {})
            ratios = {measured: seconds / base[measured] for measured, seconds in curve.items() if measured in base}
            if ratios:
                of_size[each] = _interpolated(ratios, rows)
        if not of_size:
            return None
        return of_size[max(of_size)] if size is None else _interpolated(of_size, size)

    def to_json(self) -> str:
        """Return the profile as JSON."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain data for JSON."""
        return {"format": _FORMAT, **self._contents(), "digest": self.digest}

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the profile in a text from :meth:`to_json`.

        Raises:
            ValueError: the text is not a profile, or was changed.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON: {error}") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the profile in plain data from :meth:`to_dict`.

        Raises:
            ValueError: the data are not a profile, or were changed.
        """
        if not isinstance(data, Mapping) or data.get("format") != _FORMAT:
            raise ValueError(f"it is not a profile of format {_FORMAT}")
        contents = {name: value for name, value in data.items() if name not in ("format", "digest")}
        try:
            found = cls(
                **{
                    **contents,
                    "measurements": tuple(Measurement(**each) for each in contents["measurements"]),
                    "omissions": tuple(Omission(**each) for each in contents["omissions"]),
                }
            )
            found._check()
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it is not a profile: {error}") from None
        if found.digest != data.get("digest"):
            raise ValueError("it was changed: its digest differs")
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a file, as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the profile in a file.

        Raises:
            ValueError: the file cannot be read, or is not a profile.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            raise ValueError(
                f"{str(path)!r} cannot be used as a profile: {reason}. Write one with `polycast profile --json > PATH`."
            ) from error

    def _check(self) -> None:
        """Raise TypeError unless every value has its type and range."""
        expected = {"device_type": str, "device": str, "threads": int, "date": str}
        wrong = [name for name, kind in expected.items() if not isinstance(getattr(self, name), kind)]
        texts = {"versions": self.versions, "details": self.details}
        wrong += [name for name, each in texts.items() if not all(isinstance(value, str) for value in each.values())]
        numbers = {"bandwidth": self.bandwidth, "other_load": self.other_load}
        wrong += [name for name, value in numbers.items() if value != 0 and not is_positive(value)]
        if not all(map(is_valid, self.measurements)):
            wrong.append("measurements")
        if not all(isinstance(value, str) for each in self.omissions for value in vars(each).values()):
            wrong.append("omissions")
        if wrong:
            raise TypeError(f"wrong values of {', '.join(wrong)}")

    def _contents(self) -> dict[str, Any]:
        return {
            "device_type": self.device_type,
            "device": self.device,
            "threads": self.threads,
            "versions": dict(self.versions),
            "details": dict(self.details),
            "bandwidth": self.bandwidth,
            "other_load": self.other_load,
            "date": self.date,
            "measurements": [dict(vars(each)) for each in self.measurements],
            "omissions": [dict(vars(each)) for each in self.omissions],
        }

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, DeviceProfile) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_json, (self.to_json(),)

    def heading(self) -> str:
        """See :class:`polycast.plugin.Result`."""
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        date = f", {self.date}" * bool(self.date) + ", noisy" * self.is_noisy
        return f"{self.device_type}: {self.device}, {threads}, reads {self.bandwidth / 1e9:.3g} GB/s{date}"

    def tables(self) -> list[tuple[Sequence[str], Sequence[Sequence[str]]]]:
        """See :class:`polycast.plugin.Result`."""
        columns, *rows = table_rows(self.measurements)
        return [(columns, rows)]

    def lines(self) -> list[str]:
        """See :class:`polycast.plugin.Result`."""
        return table_legend(self.omissions)

    def __repr__(self) -> str:
        return str(self)


def curves_of(profile: DeviceProfile, op: str, way: str) -> Mapping[int, Mapping[int, float]]:
    """Return the seconds of an op in one way, by size and rows, both in ascending order."""
    return profile._curves.get((op, way), {})


def _interpolated(curve: Mapping[int, float], at: int) -> float:
    """Return a value interpolated in the logarithm of its ascending keys; beyond them the nearest."""
    low, high = _neighbours(tuple(curve), at)
    if low == high:
        return curve[low]
    part = math.log(at / low) / math.log(high / low)
    return curve[low] + part * (curve[high] - curve[low])


def _interpolated_time(curve: Mapping[int, float], at: int) -> float:
    """Return a time interpolated on logarithmic scales.

    Beyond the largest key it grows with the key as between the smallest and the largest: on a device that computes all
    of them in less than the time of a call, that of the largest key is no measure of the work.
    """
    smallest, largest = min(curve), max(curve)
    if at > largest:
        rate = (
            (curve[largest] - curve[smallest]) / (largest - smallest)
            if smallest < largest
            else curve[largest] / largest
        )
        return curve[largest] + max(rate, 0.0) * (at - largest)
    if at in curve:
        return curve[at]
    return math.exp(_interpolated({key: math.log(seconds) for key, seconds in curve.items()}, at))


def _neighbours(keys: Sequence[int], at: int) -> tuple[int, int]:
    """Return the nearest keys on both sides; both are the nearest one if there are none, or the key itself."""
    below = [key for key in keys if key <= at]
    above = [key for key in keys if key >= at]
    low = max(below, default=keys[0])
    return low, min(above, default=keys[-1]) if low <= at else low
