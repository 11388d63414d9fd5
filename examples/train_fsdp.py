"""Train a classifier of handwritten digits, sharded over processes with FSDP2, in mixed precision.

On one machine, with scikit-learn installed:

    torchrun --nproc-per-node 2 examples/train_fsdp.py

docs/distributed.md shows how to run it on several machines.
"""

import argparse
import gc
import os

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn

import polycast
from polycast_plugins.distributed import MixedPrecision, fully_shard


def load(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 1797 images, pixels from 0 to 1, and their digits, in one shuffled order for all processes."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    return images[order].to(device), torch.tensor(digits.target)[order].to(device)


def main() -> None:
    """Train in this process, which torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu")
    if accelerator is not None:
        device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    distributed.init_process_group(None if accelerator is not None else "gloo")
    train(device, epochs)
    distributed.destroy_process_group()
    # A sharded model is in reference cycles. If it is alive when Python exits, threads of torch free it without the
    # interpreter, and abort the process.
    gc.collect()


def train(device: torch.device, epochs: int) -> None:
    """Train, and print the results."""
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    mesh = distributed.init_device_mesh(device.type, (processes,))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    precision = MixedPrecision()  # the default dtype of the device's backend; gradients are reduced in float32
    for unit in [layer for layer in model if isinstance(layer, nn.Linear)] + [model]:
        fully_shard(unit, mixed_precision=precision, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    images, digits = load(device)
    split, batch = 1440, 32
    draw = torch.Generator().manual_seed(rank)  # each process draws its own batches
    for epoch in range(epochs):
        for _ in range(max(1, split // (batch * processes))):
            mine = torch.randint(split, (batch,), generator=draw).to(device)
            # The units compute in their own dtype; the region makes the loss one in float32.
            with polycast.autocast(device.type):
                loss = nn.functional.cross_entropy(model(images[mine]), digits[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = (model(images[split:]).argmax(1) == digits[split:]).float().mean().item()
        total = loss.detach().clone()
        distributed.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1}  loss {total.item() / processes:.3f}  accuracy {right:.1%}", flush=True)


if __name__ == "__main__":
    main()
