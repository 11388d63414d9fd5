"""Training the demo's network in three modes, and inference in a fourth."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...engine.installation import install, uninstall
from ...observer.observation import Observation
from ...observer.observe import observe
from ...policy.dtypes import dtype_name
from ...policy.recipe import Int8
from ...region.autocast import autocast
from ...registry.checks import check_recipe
from ...registry.registry import get_backend
from .digits import SEED, Digits, network

BATCH = 64
LEARNING_RATE = 2e-3
OBSERVED_STEPS = 4


@dataclass(frozen=True)
class Mode:
    """A way to run the network.

    Attributes:
        name: for the user.
        use_kernels: installs or removes polycast's kernels, which torch.autocast would use too.
        region: makes the region, from a device type and a fast dtype.
    """

    name: str
    use_kernels: Callable[[str], None]
    region: Callable[[str, torch.dtype], AbstractContextManager[Any]]


FLOAT32 = Mode("float32", uninstall, lambda device_type, dtype: nullcontext())
TORCH = Mode("torch.autocast", uninstall, torch.autocast)
POLYCAST = Mode("polycast.autocast", install, autocast)
MODES = (FLOAT32, TORCH, POLYCAST)
"""The modes of training."""

_RECIPE = Int8()
INT8 = Mode("polycast int8", install, lambda device_type, dtype: autocast(device_type, dtype, recipe=_RECIPE))
"""For inference only, on devices that support it."""


def inference_modes(device_type: str) -> tuple[Mode, ...]:
    """Return the modes of inference of a device."""
    return (*MODES, INT8) if check_recipe(get_backend(device_type), _RECIPE) else MODES


@dataclass(frozen=True)
class DemoRun:
    """The result of training in one mode on one device.

    Attributes:
        mode: the name of the mode.
        accuracy: on the test images.
        loss: the mean loss over the batches of the last epoch.
        dtypes: the output dtype of each layer, by name.
        network: the trained network.
    """

    mode: str
    accuracy: float
    loss: float
    dtypes: Mapping[str, str]
    network: nn.Module = field(default_factory=nn.Identity, repr=False)


def train(
    mode: Mode, device_type: str, dtype: torch.dtype, digits: Digits, epochs: int, advance: Callable[[], object]
) -> DemoRun:
    """Train a new network, with the same weights and batches at each call.

    Args:
        mode: the mode.
        device_type: the device.
        dtype: the fast dtype of the modes that have one.
        digits: the data, on the device.
        epochs: the number of epochs.
        advance: called after each batch.
    """
    mode.use_kernels(device_type)
    trainer = _Trainer(mode, device_type, dtype)
    order = torch.Generator().manual_seed(SEED)
    with _deterministic():
        for _ in range(epochs):
            losses = []
            for batch in torch.split(torch.randperm(len(digits.images), generator=order), BATCH):
                losses.append(trainer.step(digits.images[batch], digits.labels[batch]) * len(batch))
                advance()
        loss = torch.stack(losses).sum().item() / len(digits.images)
    trained = trainer.network
    right = accuracy(mode, trained, device_type, dtype, digits)
    return DemoRun(mode.name, right, loss, trainer.output_dtypes(digits), trained)


def accuracy(mode: Mode, trained: nn.Module, device_type: str, dtype: torch.dtype, digits: Digits) -> float:
    """Return the accuracy of a network on the test images in a mode."""
    mode.use_kernels(device_type)
    with torch.inference_mode(), mode.region(device_type, dtype):
        labels = trained(digits.test_images).argmax(1)
    return int((labels == digits.test_labels).sum()) / len(digits.test_images)


def observe_training(device_type: str, dtype: torch.dtype, digits: Digits) -> Observation:
    """Observe a few steps under polycast's autocast."""
    POLYCAST.use_kernels(device_type)
    trainer = _Trainer(POLYCAST, device_type, dtype)
    with observe(trainer.network, timing=True, stacks=True, nonfinite="record") as seen:
        for first in range(0, OBSERVED_STEPS * BATCH, BATCH):
            trainer.step(digits.images[first : first + BATCH], digits.labels[first : first + BATCH])
    return seen


def batches(digits: Digits) -> int:
    """Return the number of batches of an epoch."""
    return -(-len(digits.images) // BATCH)


class _Trainer:
    def __init__(self, mode: Mode, device_type: str, dtype: torch.dtype) -> None:
        self._mode = mode
        self._device_type = device_type
        self._dtype = dtype
        self.network = network(device_type)
        self._criterion = nn.CrossEntropyLoss()
        self._optimizer = torch.optim.Adam(self.network.parameters(), lr=LEARNING_RATE)
        # The gradients of float16 underflow unless they are scaled.
        scaled = mode is not FLOAT32 and dtype is torch.float16
        self._scaler = torch.amp.GradScaler(device_type, enabled=scaled)

    def _region(self) -> AbstractContextManager[Any]:
        return self._mode.region(self._device_type, self._dtype)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Train on one batch and return its loss, on the device."""
        with self._region():
            loss: torch.Tensor = self._criterion(self.network(images), labels)
        self._optimizer.zero_grad()
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return loss.detach()

    def output_dtypes(self, digits: Digits) -> dict[str, str]:
        """Return the output dtype of each layer and of the loss."""
        found: dict[str, str] = {}

        def hook(name: str) -> Callable[..., None]:
            return lambda layer, inputs, output: found.update({name: dtype_name(output.dtype)})

        layers = {**dict(self.network.named_children()), "loss": self._criterion}
        handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
        with torch.inference_mode(), self._region():
            self._criterion(self.network(digits.test_images), digits.test_labels)
        for handle in handles:
            handle.remove()
        return found


@contextmanager
def _deterministic() -> Iterator[None]:
    """Use deterministic algorithms where the device has them.

    Otherwise sums in another order make runs differ as much as an op in the wrong precision does.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*[Dd]eterministic", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
