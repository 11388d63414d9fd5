"""Compare float32, torch.autocast and polycast.autocast on each available device, and check that polycast is right.

Trains a small network on handwritten digits in each mode, shows the dtypes of its layers, and times a few large layers.
The exit status is 1 if a network is not accurate, or if the two autocasts disagree.

    pip install ".[demo]"
    python examples/demo.py
"""

import functools
import statistics
import sys
import timeit
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import sklearn.datasets
import torch
from torch import nn

import polycast

FLOAT32, TORCH, POLYCAST, INT8 = "float32", "torch.autocast", "polycast.autocast", "polycast, int8"
TRAINED = FLOAT32, TORCH, POLYCAST  # int8 is for inference
SEED, TEST_IMAGES, BATCH, EPOCHS, LEARNING_RATE = 0, 360, 64, 4, 2e-3
LAYERS, FEATURES, ROWS, ROUNDS, CALLS = 4, 2048, 512, 5, 2

LEAST_ACCURACY = 0.95
INT8_TOLERANCE = 0.005  # between the accuracies of one network in int8 and in float32
LOSS_TOLERANCE = 1e-4  # between the two autocasts, relative: an op in another precision makes a difference of 1e-3


class Digits(NamedTuple):
    """Images of shape (n, 1, 8, 8), float32 from 0 to 1, and their labels."""

    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


class Run(NamedTuple):
    """A network that was trained in one mode, and the output dtype of each of its layers."""

    network: nn.Module
    accuracy: float
    loss: float
    dtypes: Mapping[str, str]


def load_digits(device: str) -> Digits:
    """Return scikit-learn's 1,797 digits, shuffled, on a device."""
    data: Any = sklearn.datasets.load_digits()
    shuffled = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(SEED))
    images = (torch.tensor(data.images, dtype=torch.float32)[shuffled, None] / 16).to(device)
    labels = torch.tensor(data.target)[shuffled].to(device)
    return Digits(images[TEST_IMAGES:], labels[TEST_IMAGES:], images[:TEST_IMAGES], labels[:TEST_IMAGES])


def network(device: str) -> nn.Sequential:
    """Return the network to train, with the same weights at each call."""
    torch.manual_seed(SEED)
    layers = OrderedDict[str, nn.Module](
        conv1=nn.Conv2d(1, 32, 3, padding=1),
        norm1=nn.GroupNorm(8, 32),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 64, 3, stride=2, padding=1),
        norm2=nn.GroupNorm(8, 64),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        hidden=nn.Linear(64 * 4 * 4, 64),
        relu3=nn.ReLU(),
        logits=nn.Linear(64, 10),
    )
    return nn.Sequential(layers).to(device)


def region(mode: str, device: str, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return the region of a mode; use it before asking for another."""
    polycast.uninstall(device)  # torch.autocast would run on the kernels that regions of polycast install
    if mode == FLOAT32:
        return nullcontext()
    if mode == TORCH:
        return torch.autocast(device, dtype)
    return polycast.autocast(device, dtype, recipe=polycast.Int8() if mode == INT8 else None)


def infer(model: nn.Module, x: torch.Tensor, within: AbstractContextManager[Any]) -> torch.Tensor:
    """Return the labels of a batch, on the host, computed in a region."""
    with torch.inference_mode(), within:
        return model(x).argmax(1).cpu()


def accuracy_of(model: nn.Module, digits: Digits, within: AbstractContextManager[Any]) -> float:
    """Return the accuracy on the test images in a region."""
    return (infer(model, digits.test_images, within) == digits.test_labels.cpu()).double().mean().item()


def output_dtypes(model: nn.Module, digits: Digits, within: AbstractContextManager[Any]) -> dict[str, str]:
    """Return the output dtype of each layer and of the loss."""
    dtypes, x = dict[str, str](), digits.test_images
    with torch.inference_mode(), within:
        for name, layer in model.named_children():
            x = layer(x)
            dtypes[name] = str(x.dtype)
        return {**dtypes, "loss": str(nn.functional.cross_entropy(x, digits.test_labels).dtype)}


def train(mode: str, device: str, dtype: torch.dtype, digits: Digits) -> Run:
    """Train a network in a mode, with the same batches at each call."""
    within, model = region(mode, device, dtype), network(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    scaler = polycast.grad_scaler(device, torch.float32 if mode == FLOAT32 else dtype)
    order = torch.Generator().manual_seed(SEED)
    for _ in range(EPOCHS):
        total = 0.0
        for batch in torch.randperm(len(digits.images), generator=order).split(BATCH):
            with within:
                loss = nn.functional.cross_entropy(model(digits.images[batch]), digits.labels[batch])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.item() * len(batch)
    accuracy, dtypes = accuracy_of(model, digits, within), output_dtypes(model, digits, within)
    return Run(model, accuracy, total / len(digits.images), dtypes)


def time_inference(modes: tuple[str, ...], device: str, dtype: torch.dtype) -> dict[str, list[float]]:
    """Return the seconds that a few large layers take in each mode, by round. The modes take turns."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(FEATURES, FEATURES), nn.GELU())]
    model, rows = nn.Sequential(*layers).to(device), torch.randn(ROWS, FEATURES).to(device)
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    for turn in range(ROUNDS):
        for mode in modes[turn % len(modes) :] + modes[: turn % len(modes)]:
            call = functools.partial(infer, model, rows, region(mode, device, dtype))
            call()  # not timed: the first call with other kernels is slow
            times[mode].append(timeit.timeit(call, number=CALLS) / CALLS)
    return times


def problems(dtype: torch.dtype, runs: Mapping[str, Run], int8_accuracy: float | None) -> Iterator[str]:
    """Yield a sentence for each thing that is wrong; nan counts as wrong."""
    plain, theirs, ours = (runs[mode] for mode in TRAINED)
    for mode, run in runs.items():
        if not run.accuracy >= LEAST_ACCURACY:
            yield f"the accuracy of {mode} is {run.accuracy:.2%}, expected at least {LEAST_ACCURACY:.0%}"
        if mode != FLOAT32 and str(dtype) not in run.dtypes.values():
            yield f"no layer outputs {dtype} under {mode}"
    if int8_accuracy is not None and not abs(int8_accuracy - plain.accuracy) <= INT8_TOLERANCE:
        yield f"the network trained in float32 has an accuracy of {plain.accuracy:.2%}, and in int8 {int8_accuracy:.2%}"
    if not abs(ours.loss - theirs.loss) <= LOSS_TOLERANCE * abs(theirs.loss):
        yield f"the loss is {theirs.loss:.8f} under torch.autocast, and {ours.loss:.8f} under polycast.autocast"
    for layer, expected in theirs.dtypes.items():
        if ours.dtypes[layer] != expected:
            yield f"{layer} outputs {expected} under torch.autocast, and {ours.dtypes[layer]} under polycast.autocast"


def demonstrate(device: str, dtype: torch.dtype) -> list[str]:
    """Print the results on one device; return what is wrong."""
    digits, runs, int8_accuracy = load_digits(device), dict[str, Run](), None
    print(f"Training on {device}, autocast to {dtype}:", flush=True)
    for mode in TRAINED:
        run = runs[mode] = train(mode, device, dtype, digits)
        print(f"{mode:18} accuracy {run.accuracy:.2%}, loss {run.loss:.8f}", flush=True)
    print(f"\n{'Output dtype of':18}", *(f"{mode:18}" for mode in TRAINED))
    for layer in runs[FLOAT32].dtypes:
        print(f"{layer:18}", *(f"{run.dtypes[layer]:18}" for run in runs.values()))

    modes: tuple[str, ...] = TRAINED
    if polycast.plugin.check(polycast.plugin.get_backend(device), polycast.Int8()):
        modes += (INT8,)
        int8_accuracy = accuracy_of(runs[FLOAT32].network, digits, region(INT8, device, dtype))
    print(f"\nInference, {ROWS} rows through {LAYERS} layers of {FEATURES} x {FEATURES}:", flush=True)
    times = time_inference(modes, device, dtype)
    ratios = {mode: statistics.median(map(float.__truediv__, times[mode], times[FLOAT32])) for mode in modes}
    for mode in modes:
        print(f"{mode:18} {statistics.median(times[mode]) * 1e3:.1f} ms, {ratios[mode]:.2f} of float32")

    found = list(problems(dtype, runs, int8_accuracy))
    if not found:
        ours = ratios[POLYCAST]
        print(f"\nOn {device}, polycast trains like torch.autocast, and infers in {ours:.2f} of float32's time.")
    return found


def main() -> None:
    """Run on each available device."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    ready = {name: status.default_dtype for name, status in polycast.backends().items() if status.is_usable}
    wrong = [f"On {name}, {problem}." for name, dtype in ready.items() for problem in demonstrate(name, dtype)]
    if not ready:
        wrong = ["No device is available: polycast devices says why."]
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
