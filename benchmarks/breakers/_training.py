"""The training that every breaker shares: its loss tells batches, their order and their content apart.

A case of this folder is a script that runs by itself: `python FILE CASE`. It is a function without parameters whose
docstring says what it attacks, with which remedies and on how many ranks; where it does not, the file's docstring does.
It prints what it likes, then one line `examples DIGEST` (the multiset of rows that it trained on, in whatever order)
and, last, one line with its final loss and parameters to the digit. Classes and what they look at are of the module, as
in a script of few functions: `global` names what a dataset, sampler or handler finds there.
"""

import os
import sys
import time
import zlib

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

NUM_ROWS, WIDTH = 160, 8
ROWS = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
"""[160, 8] What datasets read from."""


def wait() -> None:
    """Wait as for storage: the interpreter lock is free meanwhile, and so are the cores."""
    time.sleep(3e-4)


class Rows(Dataset):
    """The rows, as copies, each after a short wait. Scripts override `row`."""

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        wait()
        return self.row(index)

    def row(self, index):
        """Return [8]."""
        return ROWS[index].clone()


class Training:
    """A small model whose parameters depend on every batch and on their order."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, 8), torch.nn.Dropout(dropout), torch.nn.Tanh(), torch.nn.Linear(8, 4)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.num_steps, self.loss, self.examples = 0, 0.0, 0

    def step(self, batch):
        """Train on [n, 8]; return the loss."""
        loss = (self.model(batch) - 1).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for row in batch.detach().float().numpy():
            self.examples = (self.examples + zlib.crc32(row.tobytes())) % (1 << 64)
        self.num_steps, self.loss = self.num_steps + 1, loss.item()
        return self.loss

    def finish(self, *more):
        """Print the digits by which runs are compared."""
        finish(self.model, self.loss, *more, examples=self.examples)


def train(loader, passes=1, training=None):
    """Train on a loader, or on the one that a function makes for each pass, and print the digits."""
    training = training or Training()
    for _ in range(passes):
        for batch in loader() if callable(loader) else loader:
            training.step(batch)
    training.finish()


def finish(model, loss, *more, examples=0):
    """Print the digits of a model that trained by itself; in a group the first rank does."""
    total = sum((value.double() * (1 + place)).sum().item() for place, value in enumerate(model.parameters()))
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("examples", examples)
        print("loss", repr(loss), "parameters", repr(total), *map(repr, more), flush=True)


def join():
    """Join the group of the ranks, however they were started."""
    where = {name: int(os.environ[name.upper()]) for name in ("rank", "world_size")}
    if "STORE" in os.environ:
        dist.init_process_group("gloo", init_method=os.environ["STORE"], **where)
    else:
        dist.init_process_group("gloo")


def chosen(cases):
    """Run the case that the command line names."""
    cases[sys.argv[1]]()
