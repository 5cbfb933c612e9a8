"""Random draws: of examples and of the loop, from generators that both or one of them own.

Remedies: data.workers data.threads data.cache
"""

import random

import numpy as np
import torch
from _training import ROWS, Rows, Training, chosen, train
from torch.utils.data import DataLoader

generator = None


class Cropped(Rows):
    def row(self, index):
        return ROWS[index].roll(int(torch.randint(8, ()))) if index % 40 == 17 else ROWS[index].clone()


def draws_rarely():
    """One example in forty draws random numbers; the first and the last draw none."""
    train(lambda: DataLoader(Cropped(), 8, shuffle=True), 3, Training(dropout=0.2))


def generator_of_loader():
    """The loop draws from the generator that the loader was given."""
    shared = torch.Generator().manual_seed(5)
    training = Training()
    loader = DataLoader(Rows(), 8, shuffle=True, generator=shared)
    for _ in range(3):
        for batch in loader:
            training.step(batch + torch.randn(8, generator=shared) / 10)
    training.finish()


class NoisyByGlobal(Rows):
    def row(self, index):
        return ROWS[index] + torch.as_tensor(np.random.standard_normal(8), dtype=torch.float32)


def numpy_global_draws():
    """Examples and the loop draw from numpy's global generator in turn."""
    np.random.seed(0)
    training = Training()
    for batch in DataLoader(NoisyByGlobal(), 8, shuffle=True):
        training.step(batch * np.random.uniform(0.5, 1.5))
    training.finish()


class Flip:
    def __init__(self):
        self.random = random.Random(4)

    def __call__(self, row):
        return row.flip(0) if self.random.random() < 0.5 else row.clone()


class Flipped(Rows):
    transform = Flip()

    def row(self, index):
        return self.transform(ROWS[index])


def transform_generator():
    """A transform draws from a `random.Random` of its own, and so does the loop."""
    training = Training()
    for batch in DataLoader(Flipped(), 8, shuffle=True):
        training.step(batch * Flipped.transform.random.random())
    training.finish()


def seed_worker(worker):
    global generator
    generator = np.random.default_rng(worker)


class Noisy(Rows):
    def row(self, index):
        noise = generator.standard_normal(8, dtype="float32") if generator is not None else 0
        return ROWS[index] + torch.as_tensor(noise)


def worker_init_seeds():
    """Each of two workers makes a generator of its own in worker_init_fn, and examples draw from it."""
    train(lambda: DataLoader(Noisy(), 8, shuffle=True, num_workers=2, worker_init_fn=seed_worker), 2)


if __name__ == "__main__":
    chosen(globals())
