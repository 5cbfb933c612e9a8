"""A plain training loop on a device: a loader that waits, a host that works between launches, an update, maybe a read.

It is not edited for the emulated device: run it by itself where there is a CUDA device, or under tests.accelerator.
"""

import argparse
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset


class Examples(Dataset):
    """Examples that take a while to read."""

    def __init__(self, size, sleep_s):
        self.size, self.sleep_s = size, sleep_s

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return torch.full((8,), index % 7 / 7.0)


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--load-ms", type=float, default=1.0, help="for each batch")
    parser.add_argument("--host-ms", type=float, default=0.0, help="between forward and backward")
    parser.add_argument("--read-every", type=int, default=0, help="read the loss every so many steps; 0 = never")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--blocking", type=int, default=0, help="1: have the host wait for the copy of each batch")
    parser.add_argument("--replays", type=int, default=0, help="1: all steps but the first are replays of a graph")
    parser.add_argument(
        "--side", type=int, default=0, help="1: ask the loader under a stream of its own; 2: copy there"
    )
    parser.add_argument(
        "--timeline", help="write when the loader was asked, ns, to this path, rank and .json behind it"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    batch_size = 4
    loader = DataLoader(
        Examples(batch_size * options.steps, options.load_ms / 1e3 / batch_size), batch_size,
        num_workers=options.workers,
    )  # fmt: skip
    model = torch.nn.Linear(8, 8).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loads = []
    side = torch.cuda.Stream() if options.side else None
    for step, x in enumerate(timed(loader, loads, side, options.side > 1)):
        if options.replays and step >= 4:
            torch.cuda.graphs.CUDAGraph.replay(options)  # the emulated device launches a step, whatever graph it is
            continue
        loss = model(x.to("cuda", non_blocking=not options.blocking)).square().mean()
        if options.host_ms:
            time.sleep(options.host_ms / 1e3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if options.read_every and step % options.read_every == 0:
            loss.item()
    torch.cuda.synchronize()
    if options.timeline:
        Path(f"{options.timeline}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps({"loads": loads}))
    print(f"loss {loss.item():.6f}")


def timed(loader, loads, side, copies):
    """Yield the batches, and note when each was waited for: in the stream `side` if there is one, copied there."""
    batches = iter(loader)
    while True:
        start = time.perf_counter_ns()
        with torch.cuda.stream(side) if side is not None else nullcontext():
            batch = next(batches, None)
            loads.append((start, time.perf_counter_ns()))
            if batch is None:
                return
            batch = batch.to("cuda") if copies else batch  # the host waits
        if side is not None:
            torch.cuda.current_stream(0).wait_stream(side)
        yield batch


if __name__ == "__main__":
    main()
