"""The purity probe: what it lets through, what it finds, and that it leaves no trace."""

import random

import numpy as np
import pytest
import torch

from headway.data.guard.picture import picture
from headway.data.guard.purity import impurity


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
    """Draws from a generator of its own."""

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
        (Own(), "draws random numbers"),
    ],
    ids=["broken", "counting", "remembering", "random", "torch", "numpy", "own generator"],
)
def test_each_impurity_is_found_and_named(dataset, finding):
    assert finding in impurity(dataset, [3])


def test_random_states_and_threads_are_as_before():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = (
        random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), torch.get_num_threads(),
    )  # fmt: skip

    impurity(Noisy(lambda: (random.random(), torch.rand(1), np.random.rand())), [0])

    after = (
        random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), torch.get_num_threads(),
    )  # fmt: skip
    assert after == before


def test_a_generator_of_the_datasets_own_is_put_back_too():
    dataset, twin = Own(), Own()
    impurity(dataset, [0, 1])

    assert [dataset[k] for k in range(5)] == [twin[k] for k in range(5)]


class Drawing(Pure):
    def __getitem__(self, index):
        return index + random.random() + np.random.rand() + float(torch.rand(1))


def test_where_draws_are_allowed_equal_draws_must_give_equal_examples():
    assert "draws random numbers" in impurity(Drawing(), [0, 3])
    assert impurity(Drawing(), [0, 3], may_draw=True) is None
    assert "draws random numbers" in impurity(Own(), [0], may_draw=True)


class Nested:
    def __init__(self, inside):
        self.inside = inside


def nested(value, depth):
    """Return `value` inside `depth` objects."""
    return nested(Nested(value), depth - 1) if depth else value


@pytest.mark.parametrize("depth", range(10))
def test_two_pictures_of_the_same_are_equal_at_any_depth(depth):
    whole = nested({"a": [1, (2.0, "x" * 100)], "b": {1, 2}, "c": np.arange(5), "d": torch.zeros(2)}, depth)
    first, others = picture(whole), [nested({"some": "other"}, 3) for _ in range(50)]

    assert picture(whole) == first
    assert len(others) == 50


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.inside.__setattr__("p", 0.5), lambda d: d.paths.append("new"),
        lambda d: d.paths.__setitem__(3, "new"), lambda d: d.table.__setitem__("b", 2),
        lambda d: d.array.__setitem__(2, 7), lambda d: d.tensor.add_(1),
        lambda d: d.inside.__dict__.__setitem__("inside", d), lambda d: setattr(d, "epoch", 1),
    ],
    ids=["nested", "longer list", "entry", "dict", "array", "tensor", "loop", "new attribute"],
)  # fmt: skip
def test_a_picture_shows_what_was_changed(change):
    dataset = nested(0, 2)
    dataset.inside.p, dataset.paths, dataset.table = 0.1, list("abcdef"), {"a": 1}
    dataset.array, dataset.tensor = np.zeros(10), torch.zeros(3)
    before = picture(dataset)
    change(dataset)

    assert picture(dataset) != before
