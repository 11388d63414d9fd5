"""Record regions in the graphs that torch.export traces without Dynamo, as torch does with its own.

Such a trace runs the Python of the model, and a function mode of torch's records the ops above the Autocast key, before
any cast. Entering and leaving a region notifies that mode, as torch.autocast does, and the exported program holds the
region as ``wrap_with_autocast``.
"""

from collections.abc import Iterator
from typing import Any

from ..engine.state import Settings
from ..torch_internals.private_names import enter_autocast, exit_autocast, function_modes


def record_entry(settings: Settings) -> None:
    """Record the entry of a region in the active modes.

    Raises:
        RuntimeError: the region has a policy, which an exported program cannot hold.
    """
    for mode in _recording_modes():
        if settings.override is not None:
            more = "policy=" if settings.override.policies else "recipe="
            raise RuntimeError(
                f"torch.export: a region with {more} cannot be exported, because programs hold torch's autocast only. "
                f"Leave out {more}, or cast in the model what has to run in another dtype."
            )
        if enter_autocast is None or exit_autocast is None:
            raise RuntimeError(
                "torch.export: a region cannot be exported with strict=False by this torch, which lacks the functions "
                "that represent regions there. Export with strict=True."
            )
        values = settings.device_type, settings.dtype, settings.enabled, settings.cache_enabled
        mode.__torch_function__(enter_autocast, (), values)


def record_exit() -> None:
    """Record the exit of the last region in the active modes."""
    for mode in _recording_modes():
        mode.__torch_function__(exit_autocast, (), ())


def _recording_modes() -> Iterator[Any]:
    # slow to import, and needed only if a mode is active
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    for mode in function_modes():
        if isinstance(mode, PreDispatchTorchFunctionMode):
            yield mode
