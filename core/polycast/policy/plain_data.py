"""`plain_data`: results as values for JSON."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from .cast_policy import CastPolicy
from .dtypes import dtype_name
from .recipe import Recipe


def plain_data(value: Any) -> Any:
    """Return a value for JSON: records as dicts; dtypes, policies and recipes by name; inf and nan as texts."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, CastPolicy):
        return value.value
    if isinstance(value, Recipe):
        return value.short
    if isinstance(value, Mapping):
        return {key: plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return {field.name: plain_data(getattr(value, field.name)) for field in fields(value)}
    return value


def plain_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a record for JSON, by name."""
    return {name: plain_data(value) for name, value in vars(record).items()}
