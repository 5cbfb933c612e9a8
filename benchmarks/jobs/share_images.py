"""A training job of benchmarks/shared_preparation.py and opportunistic_jobs.py: epochs over images, as stdin says.

Each line on stdin is a JSON object; each answer one line. {"way": "plain"} reads with torch's DataLoader, "served" with
headway's server, "consume" as a TensorSocket consumer, "produce" as its producer. CPU is that of this process and of
the workers that it started and waited for; that of a data server is asked of the kernel by whoever started the jobs.
"""

import fcntl
import importlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import headway.data
from headway.data.pipeline import torch_ops as ops

SIZE = (224, 224)


class Images(Dataset):
    """JPEGs in a folder: decoded, a random crop resized to 224, flipped; uint8."""

    def __init__(self, folder: str, count: int, *, keyed: bool) -> None:
        self.folder, self.count, self.keyed = folder, count, keyed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = ops.decode(Path(f"{self.folder}/{index}.jpg").read_bytes())
        draws = headway.data.generator() if self.keyed else np.random.default_rng(torch.randint(1 << 30, ()).item())
        image = ops.resized_crop(image, draws, size=SIZE, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3))
        return torch.from_numpy(np.ascontiguousarray(ops.flip(image, draws))), index


class Slow(Dataset):
    """Arrays in a storage that all processes share: a lock is held for as long as reading takes; reads are counted."""

    def __init__(self, folder: str, count: int, item_bytes: int, bytes_per_s: float) -> None:
        self.folder, self.count, self.item_bytes, self.read_s = folder, count, item_bytes, item_bytes / bytes_per_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with open(f"{self.folder}/reads", "ab") as storage:
            fcntl.flock(storage, fcntl.LOCK_EX)
            storage.write(b"r")
            storage.flush()
            time.sleep(self.read_s)
        return torch.full((self.item_bytes,), index % 256, dtype=torch.uint8), index


def cpu_s() -> float:
    """Return the CPU seconds of this process and of children that it waited for."""
    return sum(os.times()[:4])


def train(loader, epochs: int, step_s: float) -> list[list[int]]:
    """Take every batch, sleep as long as a step takes, return the items of each epoch."""
    taken = []
    for _ in range(epochs):
        taken.append([])
        for images, items in loader:
            assert images.dtype == torch.uint8
            taken[-1] += items.tolist()
            time.sleep(step_s)
    return taken


def plain(order: dict) -> list[list[int]]:
    """Train with torch's DataLoader and two workers that are kept."""
    loader = DataLoader(
        Images(order["folder"], order["count"], keyed=False), order["batch"], shuffle=True, num_workers=2,
        persistent_workers=True,
    )  # fmt: skip
    return train(loader, order["epochs"], order["step_s"])


def served(order: dict) -> list[list[int]]:
    """Train with headway's server."""
    loader = headway.data.DataLoader(
        Images(order["folder"], order["count"], keyed=True), order["batch"], shuffle=True,
        server=headway.data.DataServer(**order["server"]),
    )  # fmt: skip
    return train(loader, order["epochs"], order["step_s"])


def slow(order: dict) -> Slow:
    """Return the dataset in slow storage."""
    return Slow(order["folder"], order["count"], order["item_bytes"], order["bytes_per_s"])


def slow_plain(order: dict) -> list[list[int]]:
    """Train from slow storage with torch's DataLoader and two workers that are kept."""
    loader = DataLoader(slow(order), order["batch"], shuffle=True, num_workers=2, persistent_workers=True)
    return train(loader, order["epochs"], order["step_s"])


def slow_served(order: dict) -> list[list[int]]:
    """Train from slow storage through headway's server."""
    server = headway.data.DataServer(**order["server"])
    loader = headway.data.DataLoader(slow(order), order["batch"], shuffle=True, server=server)
    return train(loader, order["epochs"], order["step_s"])


def consume(order: dict) -> list[list[int]]:
    """Train as a consumer of TensorSocket."""
    from tensorsocket.consumer import TensorConsumer

    ports = order["ports"]
    consumer = TensorConsumer(ports[0], ports[1], tuple(ports[2:]), batch_size=order["batch"])
    return train(consumer, order["epochs"], order["step_s"])


def produce(order: dict) -> list[list[int]]:
    """Feed TensorSocket from a DataLoader with two workers, once all consumers are there.

    On the CPU it pickles the storage behind each tensor that it sends: so the groups of batches that it sends together
    are as small as it can (two), and what is sent is cut out of their storage. As shipped, it takes many times as long.
    """
    from tensorsocket.producer import TensorProducer, pack

    data = Images(order["folder"], order["count"], keyed=False)
    loader = DataLoader(data, order["batch"], shuffle=True, num_workers=2, persistent_workers=True)
    ports = order["ports"]
    producer = TensorProducer(
        loader, ports[0], ports[1], tuple(ports[2:]), producer_batch_size=2,
        pack_fn=lambda data: pack(tuple(part.clone() for part in data)),
    )  # fmt: skip
    while len(producer.hb.consumers) < order["jobs"]:
        time.sleep(0.05)
    for _ in range(order["epochs"]):
        for _ in producer:
            pass
    del loader, producer.data_loader_iter, producer.data_loader
    return []


WAYS = {"plain": plain, "served": served, "consume": consume, "produce": produce, "slow_plain": slow_plain,
        "slow_served": slow_served}  # fmt: skip


def main() -> None:
    """Obey stdin."""
    torch.set_num_threads(1)
    if "peer" not in sys.argv:  # loaded before the clock starts, as torch's own loader is
        importlib.import_module("headway.data.service.torch_served")
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        before, start = cpu_s(), time.perf_counter()
        taken = WAYS[order["way"]](order)
        spent = cpu_s() - before
        answer = {"cpu_s": spent, "wall_s": time.perf_counter() - start, "taken": taken}
        print(json.dumps(answer), flush=True)
    os._exit(0)  # TensorSocket's threads do not end


if __name__ == "__main__":
    main()
