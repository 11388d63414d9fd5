"""``polycast new-backend``: write a package with a backend, or with an extension of one, to edit and publish."""

import keyword
from collections.abc import Callable
from typing import Annotated

import torch
import typer

from polycast import backends
from polycast.plugin import STANDARD_POLICIES, Backend, drift_of, get_backend, torch_name

from .scaffold import check_name, names_of, write_package
from .terminal import library_errors

_privateuse1_name: Callable[[], str] = torch_name(
    "torch._C._get_privateuse1_backend_name",
    lambda: "privateuseone",
    "`polycast new-backend` does not know whether a device is named",
)


def run(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The device type as torch spells it, such as mtia or npu; with --extend, a name for the package.",
        ),
    ],
    extend: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="Write an extension of this device instead: an op with a policy, and a recipe with a kernel.",
        ),
    ] = None,
) -> None:
    """Write a package with a backend for a device: its entry point, op table, tests and README."""
    with library_errors():
        if extend is not None:
            device = get_backend(extend).device_type
            names = check_name(name)
            description = f"An extension of polycast's {device}: policies of ops, and a recipe."
            names |= {"device": device, "description": description}
            return write_package("extension", names, f"an extension of {device}")
        names = _names(name, _is_known(name))
        others = [each.distribution for each in backends().values() if each.device_type == name and each.distribution]
        has = f" ({name} has that of {others[0]}; --extend {name} would add to it)" if others else ""
        write_package("backend", names, f"the backend of {name}{has}")


def _is_known(name: str) -> bool:
    """Return whether torch has a name for a device, or raise a ValueError that says why it can have no backend."""
    if not (name.isascii() and name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")):
        raise ValueError(
            f"{name!r} cannot be part of a Python module's name. Name the device as torch does: letters, such as npu."
        )
    if name != name.lower():
        raise ValueError(f"{name!r} is not in lower case, as device types of torch are. Write {name.lower()}.")
    try:
        known = torch.device(name)
    except RuntimeError as error:
        if "Expected one of" in str(error):  # well formed: an out-of-tree device, which its package will name
            return False
        problem = f"torch does not accept {name!r} as a device: {error}. Use letters and underscores, such as npu."
        raise ValueError(problem) from error
    if not torch.amp.is_autocast_available(known.type):
        raise ValueError(f"torch has no Autocast dispatch key for {name!r}, so it can have no backend.")
    return name != _privateuse1_name()


class _Standard(Backend):
    """The backend that is written."""

    policies = STANDARD_POLICIES

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type


def _names(device: str, in_tree: bool) -> dict[str, str]:
    """Return what the templates of a backend have for its device."""
    failures = drift_of(_Standard(device)).only_in_torch if in_tree else ()
    names = names_of(f"polycast_{device}")
    names |= {
        "device": device,
        "stem": names_of(device)["stem"],
        "description": f"The polycast backend of {device}: autocast for PyTorch.",
        "failures": "".join(f"{op}  has no policy in policies.py yet: torch's own kernel runs\n" for op in failures),
    }
    return {**names, "naming": ""} if in_tree else names
