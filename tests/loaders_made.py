"""Small datasets and samplers for remedies of loaders, and what a loop over a loader sees."""

import os
import time

import torch
from torch.utils.data import IterableDataset, Sampler

from headway.data.workers.torch_threads import barred, different, slow
from tests.datasets import Sized


def unthreadable(loader):
    """Say why threads may not make this loader's batches, or None."""
    return barred(loader) or different(loader) or slow(loader)


class Squares(Sized):
    """A pure dataset."""

    def __getitem__(self, index):
        return torch.tensor([index, index**2])


class Noisy(Squares):
    """Draws its examples."""

    def __getitem__(self, index):
        return torch.rand(2)


class Ratio(Squares):
    """Its examples depend on what the loop sets."""

    ratio = 0

    def __getitem__(self, index):
        return torch.tensor([index, self.ratio])


class Reading(Squares):
    """A dataset that reads by a function of a module: nothing that it holds says what that does."""

    def __init__(self, read):
        super().__init__(20)
        self.read = read

    def __getitem__(self, index):
        return self.read(index)


class HoldsAFile(Squares):
    def __init__(self):
        super().__init__()
        self.file = open(__file__, "rb")  # noqa: SIM115

    def __getitem__(self, index):
        self.file.seek(0)
        return torch.tensor([index])


class OnADevice(Squares):
    """Works in the process that made it only, as a CUDA tensor does."""

    def __init__(self):
        super().__init__()
        self.pid = os.getpid()

    def __getitem__(self, index):
        if os.getpid() != self.pid:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return torch.tensor([index])


class HangsInWorkers(Squares):
    """Hangs as where a lock was forked while another thread had it."""

    pid = os.getpid()

    def __getitem__(self, index):
        if index > 20 and os.getpid() != self.pid:
            time.sleep(600)
        return super().__getitem__(index)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class ByTurns(Sampler):
    """A sampler of the script's own class."""

    def __iter__(self):
        return iter(range(4))

    def __len__(self):
        return 4


def plain(batch):
    """Return a batch as plain numbers and texts."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return [plain(part) for part in batch] if isinstance(batch, (list, tuple)) else batch


def epochs(make, num_epochs=3, stop_after=None):
    """Read a loader for some epochs; return its batches and a random number drawn after each epoch, and the loader."""
    torch.manual_seed(5)
    loader, seen = make(), []
    for _ in range(num_epochs):
        for number, batch in enumerate(loader):
            seen.append(plain(batch))
            if number == stop_after:
                break
        seen.append(torch.rand(1).item())
    return seen, loader
