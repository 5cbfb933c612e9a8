"""Train a small language model on real text: plain PyTorch, 2 ranks or 1, nothing of headway in it.

The text is the source code of Python's standard library. Two things are
emulated, and say so by name: `EmulatedRemoteStore` makes every read wait as
an object store would, and `EmulatedLogCollector` makes every log line wait as
a remote collector would. `EmulatedAccelerator` rounds each step's compute up
to a fixed time with a sleep, so that two CPU cores can stand in for a device.
"""

import argparse
import glob
import logging
import os
import sysconfig
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

log = logging.getLogger("train")


class EmulatedRemoteStore:
    """Real files behind the latency of an object store."""

    def __init__(self, paths, latency_s):
        self.paths, self.latency_s = paths, latency_s

    def read(self, position, length):
        time.sleep(self.latency_s)
        with open(self.paths[position % len(self.paths)], "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek((position * 7919) % max(1, size - length))
            return file.read(length)


class TextBlocks(Dataset):
    """Blocks of bytes of this rank's shard; one read from the store each."""

    def __init__(self, store, num_blocks, block_size, rank, world_size):
        self.store, self.num_blocks, self.block_size = store, num_blocks, block_size
        self.rank, self.world_size = rank, world_size

    def __len__(self):
        return self.num_blocks

    def __getitem__(self, index):
        text = self.store.read(index * self.world_size + self.rank, self.block_size + 1)
        return torch.tensor(list(text.ljust(self.block_size + 1, b"\n")), dtype=torch.long)


class TinyLanguageModel(nn.Module):
    """Predict the next byte from the `reach` bytes before it."""

    def __init__(self, width, reach=8):
        super().__init__()
        self.reach = reach
        self.embed = nn.Embedding(256, width)
        self.mix = nn.Conv1d(width, width, reach)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        past = nn.functional.pad(self.embed(tokens).transpose(1, 2), (self.reach - 1, 0))
        return self.head(torch.relu(self.mix(past)).transpose(1, 2))


class EmulatedLogCollector(logging.Handler):
    """Ship each line to a collector that takes a while to answer."""

    def __init__(self, path, latency_s):
        super().__init__()
        self.file, self.latency_s = open(path, "a"), latency_s

    def emit(self, record):
        time.sleep(self.latency_s)
        self.file.write(self.format(record) + "\n")
        self.file.flush()


class EmulatedAccelerator:
    """Make a block take at least `step_s`, as if a device had computed it."""

    def __init__(self, step_s):
        self.step_s = step_s

    def __enter__(self):
        self.end = time.perf_counter() + self.step_s

    def __exit__(self, *failure):
        time.sleep(max(0.0, self.end - time.perf_counter()))


def save_checkpoint(path, model, optimizer, epoch):
    """Write aside, force it to disk, then rename: the usual careful way."""
    with open(path + ".tmp", "wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=640, help="examples per rank and epoch")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--read-ms", type=float, default=2.5, help="latency of the emulated store")
    parser.add_argument("--log-ms", type=float, default=6.0, help="latency of the emulated collector")
    parser.add_argument("--accelerator-ms", type=float, default=25.0, help="compute time of a step; 0 = as it comes")
    parser.add_argument("--out", default="demo-out")
    args = parser.parse_args()

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(1234 + rank)
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo")
    os.makedirs(args.out, exist_ok=True)
    log.setLevel(logging.INFO)
    log.addHandler(EmulatedLogCollector(os.path.join(args.out, f"log-{rank}.txt"), args.log_ms / 1e3))

    paths = sorted(glob.glob(os.path.join(sysconfig.get_path("stdlib"), "*.py")))
    store = EmulatedRemoteStore(paths, args.read_ms / 1e3)
    loader = DataLoader(TextBlocks(store, args.blocks, 96, rank, world_size), args.batch_size, shuffle=True)
    model = TinyLanguageModel(64)
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    accelerator = EmulatedAccelerator(args.accelerator_ms / 1e3)

    for epoch in range(args.epochs):
        for tokens in loader:
            with accelerator:  # before the gradients are reduced: a rank that waits there computes no faster
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log.info("epoch %d loss %.4f", epoch, loss.item())
        if rank == 0:
            save_checkpoint(os.path.join(args.out, "model.pt"), model, optimizer, epoch)
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
