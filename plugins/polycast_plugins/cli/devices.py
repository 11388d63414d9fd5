"""``polycast devices``: list the backends."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from rich.text import Text

from polycast import BackendStatus, __version__, backends
from polycast.errors import BackendBrokenError
from polycast.plugin import all_recipes, check, choose_engine, dtype_name, get_backend, manifests

from .build import origins
from .terminal import blame_at_end, console, engine_lines, library_errors, print_json, print_line, print_rows

_STYLES = {
    "ready": "green",
    "generic": "green",
    "unavailable": "yellow",
    "broken": "red",
    "conflict": "red",
    "blocked": "dim",
    "missing": "dim",
}
_WIDE = 72
"""Columns of a terminal that is wide enough for two dtypes in a row."""


@dataclass(frozen=True)
class ListedDevice:
    """A backend's status, and its dtypes; `failure` is the error that asking for them raised."""

    status: BackendStatus
    supported_dtypes: tuple[str, ...] | None = None
    failure: BaseException | None = None

    def notes(self) -> list[str]:
        """Return remarks: why the backend is not ready, what it replaces."""
        notes = [self.status.reason] if self.status.reason else []
        if self.failure is not None and self.status.state != "broken":
            notes.append(f"supported_dtypes() raised {type(self.failure).__name__}: {self.failure}")
        if self.status.replaces:
            notes.append(f"in place of {', '.join(self.status.replaces)}")
        if self.status.extensions:
            notes.append(f"extended by {', '.join(self.status.extensions)}")
        return notes

    def recipes(self) -> list[str]:
        """Return whether the device supports each kind of recipe. This may compile C++."""
        if not self.status.is_usable:
            return []
        backend = get_backend(self.status.device_type)
        try:
            answers = {recipe.kind: check(backend, recipe) for recipe in all_recipes() if recipe.needs_kernels}
        except Warning as error:  # a filter turned it into an error
            return [f"recipe_availability() raised {type(error).__name__}: {error}"]
        return [
            f"{kind}: {'yes' if answer else 'no'}, {answer.reason}".rstrip(", ") for kind, answer in answers.items()
        ]

    def remarks(self) -> dict[str, str | None]:
        """Return what plugins say about the device, by key; None if they say nothing."""
        return {
            key: self._remark(each.resolve, path) for each in manifests() for key, path in each.plugin.devices.items()
        }

    def _remark(self, resolve: Callable[[str], Any], path: str) -> str | None:
        if not self.status.is_usable:
            return None
        try:
            remark: str | None = resolve(path)(self.status.device_type)
        except Exception as error:  # a plugin may raise anything
            return f"{path} raised {type(error).__name__}: {error}"
        return remark

    def as_json(self, **computed_by: str) -> dict[str, object]:
        """Return the device for JSON, with what is given besides; what is unknown is None."""
        status = self.status
        return {
            "device_type": status.device_type,
            "state": status.state,
            "reason": status.reason,
            "default_dtype": dtype_name(status.default_dtype) if status.default_dtype is not None else None,
            "supported_dtypes": list(self.supported_dtypes) if self.supported_dtypes is not None else None,
            "distribution": status.distribution,
            "version": status.version,
            "replaces": list(status.replaces),
            "extensions": list(status.extensions),
            **computed_by,
            **self.remarks(),
        }


def known_devices() -> Iterator[ListedDevice]:
    """Yield every device that has a backend or could have one, each when its plugin has been imported.

    Raises:
        ValueError: a ``POLYCAST_`` variable has an invalid value.
    """
    statuses = backends()
    with blame_at_end() as where:
        for name in statuses:
            where(f"the plugin of {name!r}: {_offers(name)}")
            yield _ask(statuses[name])


def _offers(device_type: str) -> str:
    """Return the distributions that have a backend for a device, each with its version and its module."""
    points = entry_points(group="polycast.backends")
    offers = points.select(name=device_type) or points.select(name="generic")
    return ", ".join(f"{' '.join(_source(each))} ({each.value})" for each in offers)


def _ask(status: BackendStatus) -> ListedDevice:
    if status.state in ("blocked", "conflict", "missing"):
        return ListedDevice(status)
    try:
        return ListedDevice(status, tuple(map(dtype_name, get_backend(status.device_type).supported_dtypes())))
    except BackendBrokenError as error:
        return ListedDevice(status, failure=error.__cause__ or error)
    except (Exception, SystemExit) as error:  # a plugin may raise anything; the others are still listed
        return ListedDevice(status, failure=error)


def show(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list with an object for each device.")] = False,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="List devices that need a plugin, too, which recipes each device supports, and tracebacks of plugins.",
        ),
    ] = False,
) -> None:
    """List the backend of every device: its state, its dtypes and where it comes from."""
    with library_errors():
        if as_json:
            engine, devices = choose_engine().name, list(known_devices())
            print_json([device.as_json(polycast=__version__, engine=engine) for device in devices])
        else:
            devices = _print(everything)
    broken = [device for device in devices if device.failure is not None]
    if everything:
        for device in broken:
            typer.echo(f"The plugin of {device.status.device_type!r} raised:", err=as_json)
            typer.echo("".join(traceback.format_exception(device.failure)), err=as_json)
    elif broken and not as_json:
        typer.echo("polycast devices --all shows the tracebacks.")


def _source(entry_point: EntryPoint) -> tuple[str, str]:
    """Return the name and the version of the distribution that has an entry point."""
    try:
        assert entry_point.dist is not None
        name, version = entry_point.dist.name, entry_point.dist.version
    except Exception:  # a half-removed distribution has no metadata: this raises, or is None, as the Python has it
        name = version = ""
    return name or "(nameless)", version or "(no version)"


def _print(everything: bool) -> list[ListedDevice]:
    """Print the devices, and return them."""
    engine, out, devices = engine_lines(), console(), list[ListedDevice]()
    default, supported = len("bfloat16"), len("bfloat16, float16" if out.width >= _WIDE else "supported")
    names, states = max(map(len, ["device", *backends()])), max(map(len, _STYLES))
    widths = {"device": names, "state": states, "default": default, "supported": supported, "from": None}

    def rows() -> Iterator[tuple[str | Text, ...]]:
        for device in known_devices():
            devices.append(device)
            if everything or device.status.state != "missing":
                yield _row(device)

    print_rows(out, widths, rows())
    out.print()
    missing = [device for device in devices if device.status.state == "missing"]
    lines = [line for device in devices if device not in missing for line in _lines_of(device, everything)]
    if missing and everything:
        lines.append(_plugins_needed([device.status for device in missing]))
    elif missing:
        lines.append("Other devices need a plugin: polycast devices --all")
    for line in [*lines, *engine, *(f"Ops of {package}: {origin}" for package, origin in origins().items())]:
        print_line(out, line)
    return devices


def _row(device: ListedDevice) -> tuple[str | Text, ...]:
    status = device.status
    return (
        status.device_type,
        Text(status.state, _STYLES[status.state]),
        dtype_name(status.default_dtype) if status.default_dtype is not None else "-",
        ", ".join(device.supported_dtypes) if device.supported_dtypes is not None else "-",
        f"{status.distribution} {status.version}".strip() or "-",
    )


def _lines_of(device: ListedDevice, everything: bool) -> list[str]:
    remarks = filter(None, device.remarks().values())
    notes = [*device.notes(), *remarks, *(device.recipes() if everything else [])]
    return [f"{device.status.device_type}: {note}" for note in notes]


def _plugins_needed(missing: Sequence[BackendStatus]) -> str:
    """Return a sentence for the devices without a backend; their reasons differ in the name of the device."""
    names = ", ".join(status.device_type for status in missing)
    reason = missing[0].reason.replace(f"entry point {missing[0].device_type!r}", "entry point of that name")
    return f"{names}: {reason}"
