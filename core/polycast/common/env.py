"""The environment variables of polycast.

An invalid value is a ValueError. An empty variable counts as unset.
"""

import os
import re
from collections.abc import Mapping

_BOOLEANS = {"0": False, "1": True, "false": False, "true": True}
ENGINES = ("auto", "native", "reference")


def canonical_name(distribution: str) -> str:
    """Return the normalized name of a distribution (``My_Pkg`` -> ``my-pkg``)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def discovery() -> bool:
    """Return whether to look for third-party plugins (``POLYCAST_DISCOVERY``, on by default)."""
    return _is_on("POLYCAST_DISCOVERY")


def generic() -> bool:
    """Return whether generic backends serve devices without a plugin (``POLYCAST_GENERIC``, on by default)."""
    return _is_on("POLYCAST_GENERIC")


def blocked() -> frozenset[str]:
    """Return the device types whose backends are blocked (``POLYCAST_BLOCK``)."""
    return frozenset(_items("POLYCAST_BLOCK", "device types separated by commas, such as 'cuda,xpu'"))


def providers() -> Mapping[str, str]:
    """Return the normalized name of the distribution to use for each device type (``POLYCAST_PROVIDER``)."""
    expected = "device=distribution pairs separated by commas, such as 'xpu=polycast,npu=acme-npu'"
    chosen: dict[str, str] = {}
    for item in _items("POLYCAST_PROVIDER", expected):
        device_type, equals, distribution = (part.strip() for part in item.partition("="))
        if not (device_type and equals and distribution) or device_type in chosen:
            raise _invalid("POLYCAST_PROVIDER", os.environ["POLYCAST_PROVIDER"], expected + ", each device once")
        chosen[device_type] = canonical_name(distribution)
    return chosen


def engine() -> str:
    """Return which engine to use (``POLYCAST_ENGINE``)."""
    text = os.environ.get("POLYCAST_ENGINE") or "auto"
    if text.lower() not in ENGINES:
        raise _invalid("POLYCAST_ENGINE", text, "one of " + ", ".join(ENGINES))
    return text.lower()


def _is_on(variable: str) -> bool:
    text = os.environ.get(variable) or "1"
    try:
        return _BOOLEANS[text.lower()]
    except KeyError:
        raise _invalid(variable, text, "one of " + ", ".join(_BOOLEANS)) from None


def _items(variable: str, expected: str) -> list[str]:
    text = os.environ.get(variable, "")
    if not text.strip():
        return []
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise _invalid(variable, text, expected)
    return items


def _invalid(variable: str, text: str, expected: str) -> ValueError:
    return ValueError(f"{variable}={text!r} is invalid: expected {expected}. Correct or unset the variable.")
