"""The purity probe: what it lets through, what it finds, and that it leaves no trace."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from headway.data.runtime.purity import impurity


class Pure:
    """Squares, with a file opened on first use."""

    def __init__(self):
        self.opened = None

    def __getitem__(self, index):
        self.opened = self.opened or [1]
        return {"x": torch.tensor([index**2]), "y": index}


class Broken(Pure):
    def __getitem__(self, index):
        raise OSError("the disk is gone")


class Counting(Pure):
    count = 0

    def __getitem__(self, index):
        self.count += 1
        return index


class Remembering(Pure):
    def __init__(self):
        self.seen = []

    def __getitem__(self, index):
        self.seen.append(index)
        return index


class Noisy(Pure):
    def __init__(self, draw):
        self.draw = draw

    def __getitem__(self, index):
        self.draw()
        return index


class Own(Pure):
    """Draws from a generator that the probe does not know, so only the result tells."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index):
        return self.rng.random()


def test_a_pure_dataset_passes():
    assert impurity(Pure(), [0, 5]) is None


@pytest.mark.parametrize(
    ("dataset", "finding"),
    [
        (Broken(), "raised OSError: the disk is gone"),
        (Counting(), "changes attributes"),
        (Remembering(), "changes attributes"),
        (Noisy(random.random), "draws random numbers"),
        (Noisy(lambda: torch.rand(1)), "draws random numbers"),
        (Noisy(np.random.rand), "draws random numbers"),
        (Own(), "two different results"),
    ],
    ids=["broken", "counting", "remembering", "random", "torch", "numpy", "own generator"],
)
def test_each_impurity_is_found_and_named(dataset, finding):
    assert finding in impurity(dataset, [3])


def test_random_states_and_threads_are_as_before():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
        torch.get_num_threads(),
    )

    impurity(Noisy(lambda: (random.random(), torch.rand(1), np.random.rand())), [0])

    after = (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
        torch.get_num_threads(),
    )
    assert after == before
