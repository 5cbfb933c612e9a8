"""A job on an accelerator that is a sleep, whose power ramps: it works in proportion to what it draws."""

import json
import math
import sys
import time

import torch

STEPS, COMPUTE_S, WAIT_S, IDLE, TICK_S = 5, 2.0, 2.0, 0.1, 0.01


class Accelerator:
    """Draws at most what its ramp allows (fractions of the TDP per second), and works as much as it draws."""

    def __init__(self, per_s: float) -> None:
        self.per_s, self.drawn, self.at = per_s, 1.0, time.perf_counter()

    def tick(self, asked: float) -> float:
        """Sleep a moment; returns the seconds of work done in it."""
        time.sleep(TICK_S)
        now = time.perf_counter()
        passed, self.at = now - self.at, now
        change = self.per_s * passed
        self.drawn = asked if math.isinf(change) else min(max(asked, self.drawn - change), self.drawn + change)
        return passed * min(1.0, self.drawn / asked)

    def work(self, seconds: float) -> None:
        """Compute for so long at full power, or longer with less."""
        while seconds > 0:
            seconds -= self.tick(1.0)


class Slow(torch.nn.Module):
    """A layer that takes the accelerator's time."""

    def __init__(self, device: Accelerator) -> None:
        super().__init__()
        self.device, self.layer = device, torch.nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Compute."""
        self.device.work(COMPUTE_S)
        return self.layer(batch)


class SlowFile:
    """A file that takes its time, while the accelerator idles."""

    def __init__(self, device: Accelerator) -> None:
        self.device, self.written = device, False

    def write(self, data: bytes) -> int:
        """Take all the time at the first piece."""
        end = time.perf_counter() + (0.0 if self.written else WAIT_S)
        while time.perf_counter() < end:
            self.device.tick(IDLE)
        self.written = True
        return len(data)

    def flush(self) -> None:
        """Nothing is kept."""


ramp_s = float(sys.argv[2])
device = Accelerator((1 - IDLE) / ramp_s if ramp_s else math.inf)
model, batch = Slow(device), torch.randn(2, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
ends = []
for _ in range(STEPS):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save({}, SlowFile(device))
    ends.append(time.perf_counter())
with open(sys.argv[1], "w") as file:
    json.dump(ends, file)
