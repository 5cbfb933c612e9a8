"""Steps of more than 5 ms of real compute with a loader and an optimizer; writes what they cost the process in CPU.

`python steady.py STEPS ANSWER` trains for STEPS and writes the CPU nanoseconds of each, of all threads.
`python steady.py STEPS ANSWER --turns FOLDER` switches headway's recording on for a stretch of steps, off for the next,
and so on: pairs of stretches [bare, recorded], each the CPU nanoseconds per step, over its last `CHUNK` steps, of what
is not forward or backward: there alone does recording act, and compute's own noise is a hundred times its cost.
"""

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, LAYERS, BATCH = 384, 6, 16
WARM, CHUNK = 6, 16
"""Steps of a stretch that do not count (tables are written then), and steps that do: one in 16 loads is measured."""


class Training:
    """A model, its optimizer and its loader; each call is a step."""

    def __init__(self, *, light: bool) -> None:
        """Make it; `light` trains the last bias only: an optimizer's own time would drown what is looked for."""
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        trained = [self.model[-1].bias] if light else list(self.model.parameters())
        self.optimizer = torch.optim.SGD(trained, 1e-3) if light else torch.optim.Adam(trained, 1e-3)
        self.loader = DataLoader(TensorDataset(torch.randn(256 * BATCH, WIDTH)), BATCH)

    def batches(self) -> Iterator[torch.Tensor]:
        """Pass over the data for ever."""
        while True:
            for (x,) in self.loader:
                yield x

    def compute(self, x: torch.Tensor) -> None:
        """Forward and backward of two micro-batches."""
        for _ in range(2):
            self.model(x).square().mean().backward()

    def update(self) -> None:
        """One update."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def each_step(training: Training, num_steps: int) -> list[int]:
    """Train; returns the CPU nanoseconds of each step."""
    marks = [time.process_time_ns()]
    for x in itertools.islice(training.batches(), num_steps):
        training.compute(x)
        training.update()
        marks.append(time.process_time_ns())
    return [after - before for before, after in itertools.pairwise(marks)]


def stretch(training: Training) -> float:
    """Train for one stretch; returns the CPU nanoseconds per step of its later part, forward and backward left out."""
    batches, cost = training.batches(), 0
    for index in range(WARM + CHUNK):
        asked = time.process_time_ns()
        x = next(batches)
        got = time.process_time_ns()
        training.compute(x)
        computed = time.process_time_ns()
        training.update()
        if index >= WARM:
            cost += time.process_time_ns() - computed + got - asked
        training.model.zero_grad()
    return cost / CHUNK


@contextmanager
def recorded(folder: str) -> Iterator[None]:
    """Record as `headway run` would, without windows."""
    from headway.runtime.in_rank import bootstrap

    run = tempfile.mkdtemp(dir=folder)
    os.environ |= {"HEADWAY_RUN": run, "HEADWAY_WINDOWS": "0"}
    session = bootstrap.start_here(os.environ)
    try:
        yield
    finally:
        session.stop()


def in_turns(training: Training, num_steps: int, folder: str) -> list[list[float]]:
    """Alternate; returns pairs [bare, recorded]. Which of the two is first alternates too: what drifts cancels."""
    pairs = []
    for turn in range(num_steps // (2 * (WARM + CHUNK))):
        pair = [0.0, 0.0]
        for side in (0, 1) if turn % 2 else (1, 0):
            if side:
                with recorded(folder):
                    pair[1] = stretch(training)
            else:
                pair[0] = stretch(training)
        pairs.append(pair)
    return pairs


def main() -> None:
    """Train as asked."""
    num_steps, answer, *turns = sys.argv[1:]
    training, start = Training(light=bool(turns)), time.perf_counter()
    costs: list[int] | list[list[float]]
    costs = in_turns(training, int(num_steps), turns[1]) if turns else each_step(training, int(num_steps))
    with open(answer, "w") as file:
        json.dump({"cpu_ns": costs, "wall_s": time.perf_counter() - start}, file)


main()
