"""A training job whose every second is known: each cost is injected by an option, and the truth is written down.

Run it alone or under a launcher; `--truth FOLDER` receives truth-<rank>.json with the seconds that this rank really
spent in each injected cost. The accelerator is a sleep, so that a busy machine does not change the compute.
"""

import argparse
import gc
import json
import logging
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SPENT = {"input_sleep_s": 0.0, "input_work_s": 0.0, "save_s": 0.0, "log_s": 0.0, "gc_s": 0.0, "slow_s": 0.0}

ARRIVED = []
"""When this rank began each backward pass, on the monotonic clock that all ranks of a host share."""


class Timed:
    """Add the wall time of a block to a cost."""

    def __init__(self, cost):
        self.cost = cost

    def __enter__(self):
        self.start = time.perf_counter()

    def __exit__(self, *failure):
        SPENT[self.cost] += time.perf_counter() - self.start


class Examples(Dataset):
    """Examples that wait, work, or both."""

    def __init__(self, size, width, sleep_s, work_s):
        self.size, self.width, self.sleep_s, self.work_s = size, width, sleep_s, work_s

    def __len__(self):
        return self.size

    def wait(self):
        if self.sleep_s:
            time.sleep(self.sleep_s)

    def work(self):
        if self.work_s:
            end = time.thread_time() + self.work_s
            while time.thread_time() < end:
                sum(range(200))

    def __getitem__(self, index):
        self.wait()
        self.work()
        return torch.full((self.width,), index % 7 / 7.0), torch.tensor([index % 2 / 1.0])


class TimedExamples(Examples):
    """The same, timed. Reading them changes `SPENT`, so nothing that reads ahead may be applied to them."""

    def wait(self):
        with Timed("input_sleep_s"):
            super().wait()

    def work(self):
        with Timed("input_work_s"):
            super().work()


class SlowFile:
    """A file whose writes take a while, as on a remote file system."""

    def __init__(self, path, sleep_s):
        self.file, self.sleep_s, self.slept = open(path, "wb"), sleep_s, False  # noqa: SIM115 - closed by close()

    def write(self, data):
        if not self.slept:  # once per save
            self.slept = True
            time.sleep(self.sleep_s)
        return self.file.write(data)

    def flush(self):
        self.file.flush()

    def close(self):
        os.fsync(self.file.fileno())
        self.file.close()


class SlowHandler(logging.Handler):
    """A log handler that takes a while."""

    def __init__(self, sleep_s):
        super().__init__()
        self.sleep_s = sleep_s

    def emit(self, record):
        time.sleep(self.sleep_s)


def collected(phase, info, state={}):  # noqa: B006 - one dict for the life of the callback, on purpose
    """Time garbage collections."""
    if phase == "start":
        state["start"] = time.perf_counter()
    else:
        SPENT["gc_s"] += time.perf_counter() - state["start"]


def arguments():
    """Parse the options."""
    parser = argparse.ArgumentParser()
    for name, kind, default in [
        ("epochs", int, 2), ("examples", int, 400), ("batch-size", int, 8), ("workers", int, 0), ("width", int, 16),
        ("sleep-ms", float, 0), ("work-ms", float, 0), ("accelerator-ms", float, 10), ("log-ms", float, 0),
        ("save-ms", float, 0), ("save-every", int, 20), ("garbage", int, 0), ("gc-every", int, 10),
        ("slow-rank", int, -1), ("slow-ms", float, 0),
    ]:  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--truth", default=None)
    return parser.parse_args()


def main():
    """Train."""
    args = arguments()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo")
    gc.callbacks.append(collected)
    log = logging.getLogger("job")
    log.setLevel(logging.INFO)
    if args.log_ms:
        log.addHandler(SlowHandler(args.log_ms / 1e3))
    examples = TimedExamples if args.truth else Examples
    loader = DataLoader(
        examples(args.examples, args.width, args.sleep_ms / 1e3, args.work_ms / 1e3),
        args.batch_size,
        shuffle=True,
        num_workers=args.workers,
    )
    model = nn.Linear(args.width, 1)
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = 0
    kept = [[i] for i in range(args.garbage)]  # what the collector has to walk through
    SPENT["gc_s"] = 0.0
    for _epoch in range(args.epochs):
        for x, y in loader:
            time.sleep(args.accelerator_ms / 1e3)
            if rank == args.slow_rank and args.slow_ms:
                with Timed("slow_s"):
                    time.sleep(args.slow_ms / 1e3)
            loss = nn.functional.mse_loss(model(x), y)
            ARRIVED.append(time.perf_counter())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if args.log_ms:
                with Timed("log_s"):
                    log.info("step %d", step)
            if kept and step % args.gc_every == 0:
                gc.collect()
            if args.save_ms and step % args.save_every == 0 and args.truth:
                with Timed("save_s"):
                    file = SlowFile(os.path.join(args.truth, f"save-{rank}.pt"), args.save_ms / 1e3)
                    torch.save({"model": model.state_dict()}, file)
                    file.flush()
                    file.close()
    if args.truth:
        with open(os.path.join(args.truth, f"truth-{rank}.json"), "w") as file:
            json.dump({**SPENT, "steps": step, "arrived_s": ARRIVED}, file)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
