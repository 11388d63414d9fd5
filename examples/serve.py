"""Serve a model from threads that share the casts of its weights, while its weights are updated.

The weights are in float32, so they can be trained or loaded as usual. All threads share one `polycast.WeightCache`:
each weight is cast once, and again after an update. No request uses an outdated cast.

    python examples/serve.py --requests 400 --threads 4
"""

import argparse
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

import polycast


class Server:
    """Answers requests on threads; `update` loads new weights between requests."""

    def __init__(self, model: nn.Module, device: str, threads: int) -> None:
        self.model = model.eval()
        self.cache = polycast.WeightCache()
        # A region holds settings only, so threads can share it.
        self._region = polycast.autocast(device, cache=self.cache)
        self._pool = ThreadPoolExecutor(threads)
        self._threads = threads
        # A request takes one permission to use the weights, an update takes all.
        self._free: queue.Queue[None] = queue.Queue()
        self._updating = threading.Lock()
        for _ in range(threads):
            self._free.put(None)

    def submit(self, x: torch.Tensor) -> "Future[torch.Tensor]":
        """Return a future for the model's answer to `x`."""
        return self._pool.submit(self._answer, x)

    def _answer(self, x: torch.Tensor) -> torch.Tensor:
        self._free.get()
        try:
            with torch.inference_mode(), self._region:
                return self.model(x).float()
        finally:
            self._free.put(None)

    def update(self, weights: dict[str, torch.Tensor]) -> None:
        """Load float32 weights between requests; the next request casts them."""
        with self._updating:
            for _ in range(self._threads):
                self._free.get()
            try:
                self.model.load_state_dict(weights)
            finally:
                for _ in range(self._threads):
                    self._free.put(None)

    def close(self) -> None:
        """Wait for the submitted requests."""
        self._pool.shutdown()


def main() -> None:
    """Serve random requests, with an update after each quarter of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()

    torch.manual_seed(0)
    width = options.width
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(options.device)
    server = Server(model, options.device, options.threads)
    started = time.perf_counter()
    for quarter in range(4):
        requests = [torch.randn(1, width, device=options.device) for _ in range(options.requests // 4)]
        for answer in [server.submit(x) for x in requests]:
            answer.result()
        if quarter < 3:
            server.update({name: weight * 1.01 for name, weight in model.state_dict().items()})
    server.close()
    seconds = time.perf_counter() - started
    stats = server.cache.stats()
    print(f"{options.requests} requests on {options.threads} threads, {options.requests / seconds:.0f} a second")
    print(f"casts of weights: {stats.misses} made, {stats.hits} found")


if __name__ == "__main__":
    main()
