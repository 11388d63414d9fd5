"""Compare float32, torch.autocast and polycast.autocast on each available device, and check that polycast is right.

Times a few large layers, updates a weight in a region, and trains a small network on handwritten digits in each mode.
The exit status is 1 if a network is not accurate, if the two autocasts disagree, or if polycast uses an old weight.

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
from pathlib import Path
from typing import Any, NamedTuple

import sklearn.datasets
import torch
from torch import nn

import polycast

FLOAT32, TORCH, POLYCAST = TRAINED = "float32", "torch.autocast", "polycast.autocast"
CACHED, INT8 = "polycast, WeightCache", "polycast, int8"  # for inference
SEED, TEST_IMAGES, BATCH, EPOCHS, LEARNING_RATE = 0, 360, 64, 4, 2e-3
LAYERS, FEATURES, ROWS, ROUNDS = 4, 2048, (1, 512), 3

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


def region(
    mode: str, device: str, dtype: torch.dtype, cache: polycast.WeightCache | None = None
) -> AbstractContextManager[Any]:
    """Return the region of a mode, with a cache in one of them; use it before asking for another."""
    polycast.uninstall(device)  # torch.autocast would run on the kernels that regions of polycast install
    if mode == FLOAT32:
        return nullcontext()
    if mode == TORCH:
        return torch.autocast(device, dtype)
    options = {CACHED: {"cache": cache}, INT8: {"recipe": "int8"}}
    return polycast.autocast(device, dtype, **options.get(mode, {}))


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


def speeds(modes: tuple[str, ...], device: str, dtype: torch.dtype, rows: int) -> dict[str, float]:
    """Return how many times as fast as float32 a few large layers are in each mode. The modes take turns."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(FEATURES, FEATURES), nn.GELU())]
    model, x = nn.Sequential(*layers).to(device), torch.randn(rows, FEATURES).to(device)
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    cache = polycast.WeightCache()
    for turn in range(ROUNDS):
        for mode in modes[turn % len(modes) :] + modes[: turn % len(modes)]:
            call = functools.partial(infer, model, x, region(mode, device, dtype, cache))
            call()  # not timed: the first call with other kernels is slow
            times[mode].append(timeit.timeit(call, number=1))
    return {mode: statistics.median(map(float.__truediv__, times[FLOAT32], times[mode])) for mode in modes}


def compare_speeds(device: str, dtype: torch.dtype) -> bool:
    """Print how fast each mode is at inference; return whether int8 is one: last, as its kernels may be compiled."""
    print(f"{LAYERS} layers of {FEATURES} x {FEATURES} on {device}, autocast to {dtype}:\n")
    columns = (f"{rows} row{'s' * (rows > 1)}" for rows in ROWS)
    print("Times as fast as float32", *(f"{column:>8}" for column in columns), flush=True)
    of_one_row = dict[str, float]()

    def show(*modes: str) -> None:
        by_rows = [speeds((FLOAT32, *modes), device, dtype, rows) for rows in ROWS]
        of_one_row.update(by_rows[0])
        for mode in modes:
            print(f"{mode:24}", *(f"{of_rows[mode]:8.1f}" for of_rows in by_rows), flush=True)

    show(TORCH, POLYCAST, CACHED)
    has_int8 = bool(polycast.plugin.check(polycast.plugin.get_backend(device), polycast.Int8()))
    if has_int8:
        show(INT8)
    best = max(of_one_row.keys() - {FLOAT32, TORCH}, key=of_one_row.__getitem__)
    print(
        f"\nWith one row, as a language model decodes a token, {best} is {of_one_row[best]:.1f} times as fast as "
        f"float32, {TORCH} {of_one_row[TORCH]:.1f} times."
    )
    return has_int8


def uses_new_weight(mode: str, device: str, dtype: torch.dtype) -> bool:
    """Return whether a layer whose weight is updated in a region computes with the new weight."""
    layer, x = nn.Linear(64, 64, bias=False).to(device), torch.ones(1, 64, device=device)
    with region(mode, device, dtype):
        layer(x)
        with torch.no_grad():
            layer.weight.zero_()
        return not layer(x).any()


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
    has_int8 = compare_speeds(device, dtype)
    weights = {mode: ("old", "new")[uses_new_weight(mode, device, dtype)] for mode in (TORCH, POLYCAST)}
    print("A weight is updated in a region:", *(f"{mode} computes with the {weights[mode]} one." for mode in weights))

    digits, runs, int8_accuracy = load_digits(device), dict[str, Run](), None
    print("\nTraining on handwritten digits:", flush=True)
    for mode in TRAINED:
        run = runs[mode] = train(mode, device, dtype, digits)
        print(f"{mode:24} accuracy {run.accuracy:.2%}, loss {run.loss:.8f}", flush=True)
    if has_int8:
        int8_accuracy = accuracy_of(runs[FLOAT32].network, digits, region(INT8, device, dtype))
        print(f"{'float32, run in int8':24} accuracy {int8_accuracy:.2%}")

    found = list(problems(dtype, runs, int8_accuracy))
    if weights[POLYCAST] == "old":
        found.append("polycast.autocast computes with an old weight")
    if not found:
        print(
            f"The {len(runs[POLYCAST].dtypes)} output dtypes under polycast.autocast are those under torch.autocast.\n"
        )
    return found


def main() -> None:
    """Run on each available device."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    ready = {name: status.default_dtype for name, status in polycast.backends().items() if status.is_usable}
    wrong = [f"On {name}, {problem}." for name, dtype in ready.items() for problem in demonstrate(name, dtype)]
    if not ready:
        wrong = ["No device is available: polycast devices says why."]
    python, here = Path(sys.executable), Path.cwd()
    command = f"{python.relative_to(here) if python.is_relative_to(here) else python} -m polycast"
    print(f"Other devices need hardware or a plugin: {command} devices")
    print(f"Try your own program, unchanged: {command} run --observe PROGRAM.py")
    print("If it has no torch.autocast, add --wrap auto before its name.")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
