"""Equal datasets have equal portraits in every process; whatever changes the data changes the portrait."""

import subprocess
import sys
import threading
from functools import partial

import numpy as np
import pytest
import torch

from headway.data.guard.content_digest import portrait
from tests.paths import ROOT

SOURCE = """
import numpy as np, torch
from functools import partial

class Images(torch.utils.data.Dataset):
    def __init__(self, scale):
        self.scale, self.table = scale, {"b": np.arange(5), "a": torch.ones(3)}
        self.pick = lambda x: x * scale
        self.names = {f"name{k}" for k in range(50)}
        self.rng = np.random.default_rng()
    def __len__(self): return 10
    def __getitem__(self, i): return partial(np.add, i)(self.scale)
"""


def portraits(source, name):
    """Portraits of the dataset of a script that is run as module `name`, with two arguments."""
    module = {"__name__": name}
    exec(source, module)
    return [portrait(module["Images"](scale)) for scale in (2.0, 3.0)]


@pytest.mark.slow
def test_another_process_sees_the_same_and_a_change_of_code_or_data_is_seen():
    command = [sys.executable, "-c", "from tests.test_portrait import *; print(portraits(SOURCE, '__main__'))"]
    there = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=100).stdout
    two, three = portraits(SOURCE, "train")

    assert there.strip() == str([two, three])
    assert two != three
    assert two not in portraits(SOURCE.replace("(np.add, i)", "(np.subtract, i)"), "train")


class Plain:
    def __init__(self, **held):
        self.__dict__.update(held)


CHANGES = [
    (1, 2), (1, True), (1.0, 1), ("a", "b"), (b"a", "a"), ([1, 2], [2, 1]), ((1,), [1]), ({"a": 1}, {"a": 2}),
    (np.arange(3), np.arange(4)), (np.arange(3), np.arange(3.0)), (np.arange(4), np.arange(4).reshape(2, 2)),
    (torch.zeros(3), torch.ones(3)), (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
    (lambda x: x + 1, lambda x: x + 2), (partial(int, base=2), partial(int, base=8)), (min, max), (int, float),
    (slice(1), slice(2)), ({1, 2}, {1, 3}), (list(range(5000)), [*range(4999), -1][:4990]),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), CHANGES, ids=range(len(CHANGES)))
def test_what_differs_looks_different_at_any_depth(one, other):
    assert portrait(one) != portrait(other)
    assert portrait(Plain(inside=[Plain(held=one)])) != portrait(Plain(inside=[Plain(held=other)]))
    assert portrait(Plain(inside=one)) == portrait(Plain(inside=one))


def test_a_closure_is_seen_by_what_it_holds():
    def scaled(by):
        return lambda x: x * by

    assert portrait(scaled(2)) == portrait(scaled(2))
    assert portrait(scaled(2)) != portrait(scaled(3))


def test_random_generators_and_handles_say_nothing():
    one, other = (Plain(rng=np.random.default_rng(seed), lock=threading.Lock(), name="x") for seed in (1, 2))

    assert portrait(one) == portrait(other)


def test_methods_count_and_circles_end():
    class One:
        def read(self):
            return 1

    class Two:
        def read(self):
            return 2

    Two.__qualname__ = One.__qualname__
    circle = Plain()
    circle.itself = [circle]

    assert portrait(One()) != portrait(Two())
    assert portrait(circle) == portrait(circle)


def test_a_large_dataset_is_looked_at_in_little_time():
    paths = [(f"/data/{k}.jpg", k % 10) for k in range(300_000)]

    assert portrait(Plain(samples=paths)) == portrait(Plain(samples=list(paths)))
    assert portrait(Plain(samples=paths)) != portrait(Plain(samples=paths[:-1]))
