"""A small script as people write them: real compute on torch's own threads, examples that sleep, compute, or both.

Prints one JSON line: seconds of its training part, from before the first pass to behind the last update, and the loss.
"""

import argparse
import json
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
for name, default in (("sleep-ms", 0.0), ("work-ms", 0.0)):
    parser.add_argument(f"--{name}", type=float, default=default)
for name, default in (("batch", 16), ("examples", 640), ("epochs", 3), ("width", 512), ("workers", 0), ("threads", 0)):
    parser.add_argument(f"--{name}", type=int, default=default)
options = parser.parse_args()


class Examples(Dataset):
    """Numbers that take `sleep-ms` of waiting and `work-ms` of computing each."""

    def __len__(self) -> int:
        """Return how many there are."""
        return options.examples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return example `index`: [256] numbers and its class."""
        time.sleep(options.sleep_ms / 1000)
        end, total = time.thread_time() + options.work_ms / 1000, index
        while time.thread_time() < end:
            total = (total * 1103515245 + 12345) % 2147483648
        return torch.full((256,), index / options.examples), index % 10


def main() -> None:
    """Train."""
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    model = nn.Sequential(nn.Linear(256, options.width), nn.ReLU(), nn.Linear(options.width, options.width), nn.ReLU(),
                          nn.Linear(options.width, 10))  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    more = {"persistent_workers": True} if options.workers else {}
    loader = DataLoader(Examples(), options.batch, shuffle=True, num_workers=options.workers, **more)
    begin = time.perf_counter()
    for _ in range(options.epochs):
        for inputs, classes in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), classes)
            loss.backward()
            optimizer.step()
    print(json.dumps({"training_s": time.perf_counter() - begin, "loss": loss.item()}))


if __name__ == "__main__":
    main()
