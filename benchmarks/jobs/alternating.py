"""A job that computes on one core and then waits for its slow storage, step by step; writes when each step ended."""

import json
import os
import sys
import time

import torch

STEPS, WRITE_S = 9, 0.012


class SlowFile:
    """A file that takes its time."""

    def write(self, data: bytes) -> int:
        """Take a while."""
        time.sleep(WRITE_S)
        return len(data)

    def flush(self) -> None:
        """Nothing is kept."""


torch.set_num_threads(1)
model, batch = torch.nn.Linear(256, 256), torch.randn(512, 256)
optimizer = torch.optim.SGD(model.parameters(), 1e-9)
times = []
with open(sys.argv[1], "w") as file:
    json.dump({"pid": os.getpid()}, file)
for _ in range(STEPS):
    began = time.perf_counter()
    for _ in range(int(sys.argv[2])):
        model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    computed = time.perf_counter()
    torch.save({}, SlowFile())
    times.append((began, computed, time.perf_counter()))
with open(sys.argv[1], "w") as file:
    json.dump({"pid": os.getpid(), "times": times}, file)
