"""A program that uses torch.autocast and knows nothing of polycast.

polycast run examples/unchanged.py --epochs 3
polycast run --observe examples/unchanged.py
"""

import argparse

import torch


def main() -> None:
    """Fit a network to sums of numbers, and print the loss of each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(1024, 8)
    for epoch in range(1, epochs + 1):
        for inputs in x.split(32):
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
