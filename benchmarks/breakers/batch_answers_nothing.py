"""Batches are objects of the script's own that have half the methods of a tensor, and raise at whatever else is asked.

Remedies: data.workers data.threads data.cache
"""

from _training import Rows, Training
from torch.utils.data import DataLoader, default_collate


class Batch:
    """Rows of one batch, as graph libraries have them."""

    def __init__(self, rows):
        self.rows = rows

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"a batch has no {name}")

    def __len__(self):
        raise TypeError("a batch has no length")

    def __eq__(self, other):
        raise TypeError("batches are not compared")

    def __bool__(self):
        raise TypeError("a batch is neither true nor false")

    def __iter__(self):
        raise TypeError("a batch has no order")

    def detach(self):
        return self

    @property
    def nbytes(self):
        raise RuntimeError("a batch has no size")


class Example(Batch):
    """One row."""


class Examples(Rows):
    """Rows as objects."""

    def __getitem__(self, index):
        return Example(super().__getitem__(index))


def collate(examples):
    return Batch(default_collate([example.rows for example in examples]))


training = Training()
loader = DataLoader(Examples(), 8, shuffle=True, collate_fn=collate)
for _ in range(4):
    for batch in loader:
        training.step(batch.rows)
training.finish()
