"""Regions in what torch.export traces without Dynamo: recorded in the graph, as torch's own are.

Such a trace runs the Python of the model, and a function mode of torch's writes down the ops above the Autocast key, so
before any cast. torch.autocast tells that mode when it is entered and left; so does a region, and the exported program
holds it as ``wrap_with_autocast``.
"""

from collections.abc import Iterator
from typing import Any

from ..engine.state import Settings
from ..torch_internals.names import enter_autocast, exit_autocast, function_modes


def record_entry(settings: Settings) -> None:
    """Record that a region is entered, where something records.

    Raises:
        RuntimeError: the region has a policy, for which the graph of an exported program has no place.
    """
    for mode in _recording_modes():
        if settings.override is not None:
            more = "policy=" if settings.override.policies else "recipe="
            raise RuntimeError(
                f"torch.export: a region with {more} cannot be exported, for a program can hold torch's autocast only. "
                f"Leave out {more}, or cast in the model what has to run in another dtype."
            )
        if enter_autocast is None or exit_autocast is None:
            raise RuntimeError(
                "torch.export: a region cannot be exported with strict=False by this torch, which lacks the functions "
                "that stand for regions there. Export with strict=True."
            )
        values = settings.device_type, settings.dtype, settings.enabled, settings.cache_enabled
        mode.__torch_function__(enter_autocast, (), values)


def record_exit() -> None:
    """Record that the region entered last is left, where something records."""
    for mode in _recording_modes():
        mode.__torch_function__(exit_autocast, (), ())


def _recording_modes() -> Iterator[Any]:
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode  # heavy, and only modes bring us here

    for mode in function_modes():
        if isinstance(mode, PreDispatchTorchFunctionMode):
            yield mode
