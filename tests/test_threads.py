"""Threads as loader workers: batches equal to everybody else's, in order, bounded, and never left behind."""

import gc
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.machine.hidden_thread import running
from headway.data import DataLoader, generator, torch_generator
from headway.data.bytes import account
from headway.data.loader.threads import WORKERS, Task, ThreadPool
from tests.datasets import Sized
from tests.spawn import in_fork

THREADS = {"num_workers": 2, "workers": "threads"}


class Augmented(Sized):
    """Draws from the generators of the example."""

    def __getitem__(self, item):
        return item, generator().random(), float(torch.rand(1, generator=torch_generator())), generator().random()


class Draws(Augmented):
    def __init__(self, draw, n=8):
        super().__init__(n)
        self.draw = draw

    def __getitem__(self, item):
        self.draw()
        return item


class Listed:
    """The work of the law: parts are numbers, some of which fail."""

    def __init__(self, failing):
        self.failing = failing

    def begin(self, keys):
        return [None] * len(keys)

    def parts(self, keys):
        return len(keys)

    def fill(self, making, keys, part):
        if part in self.failing:
            raise ValueError(f"part {part}")
        making[part] = keys[part] * 2

    def finish(self, making, keys):
        return making


# Law.


@settings(max_examples=60)
@given(
    batches=st.lists(st.tuples(st.integers(0, 9), st.sets(st.integers(0, 8), max_size=3)), min_size=1, max_size=6),
    num_threads=st.integers(1, 4),
)
def test_every_batch_is_made_whole_or_fails_as_its_first_failing_part_does(batches, num_threads):
    pool = ThreadPool(num_threads)
    tasks = [Task(Listed(failing), list(range(size))) for size, failing in batches]
    for task in tasks:
        pool.help(task)

    for task, (size, failing) in zip(tasks, batches, strict=True):
        assert task.wait(20)
        bad = [part for part in sorted(failing) if part < size]
        if bad:
            with pytest.raises(
                ValueError, match=rf"Caught ValueError in DataLoader worker thread \d[\s\S]*part {bad[0]}"
            ):
                task.result()
        else:
            assert task.result() == [2 * k for k in range(size)]
    pool.close()


# The loader.


def rows(loader):
    return [(list(zip(*examples, strict=True)), drawn) for examples, drawn in loader]


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_threads_go_on_exactly_where_another_world_stopped(taken):
    whole = [row for batch in DataLoader(Augmented(29), 4, True, collate_fn=list) for row in batch]
    first = DataLoader(Augmented(29), 4, True, collate_fn=list, **THREADS)
    batches = iter(first)
    got = [row for _ in range(taken) for row in next(batches)]

    rest = []
    for rank in range(2):
        later = DataLoader(Augmented(29), 2, True, collate_fn=list, rank=rank, world_size=2, **THREADS)
        later.load_state_dict(first.state_dict())
        rest += [row for batch in later for row in batch]

    assert got == whole[: 4 * taken]
    assert sorted(rest) == sorted(whole[4 * taken :])


def test_the_examples_of_one_batch_are_made_at_once():
    class Meets(Augmented):
        together = threading.Barrier(2)

        def __getitem__(self, item):
            self.together.wait(30)
            return item

    assert [batch.tolist() for batch in DataLoader(Meets(4), 4, **THREADS)] == [[0, 1, 2, 3]]


def test_no_more_is_read_ahead_than_the_window():
    begun = []

    class Counted(Augmented):
        def __getitem__(self, item):
            begun.append(item)
            return item

    for taken, _ in enumerate(DataLoader(Counted(60), 3, prefetch_factor=2, **THREADS), start=1):
        assert len(begun) <= 3 * (2 * 2 + taken)
    assert sorted(begun) == list(range(60))


def test_examples_and_batches_are_made_in_the_loaders_threads_without_a_worker_info():
    def where(_=None):
        return running.get(threading.get_ident(), "").rsplit("-", 1)[0], torch.utils.data.get_worker_info()

    class Here(Augmented):
        def __getitem__(self, item):
            return where()

    (batch,) = DataLoader(Here(4), 4, collate_fn=lambda examples: {*examples, where()}, **THREADS)

    assert batch == {("headway-loader", None)}


def test_a_dataset_that_reads_whole_batches_is_asked_for_them():
    class Many(Augmented):
        def __getitems__(self, items):
            noise = generator().integers(0, 1000)
            return [(item, noise) for item in items]

    expected = list(DataLoader(Many(10), 4, collate_fn=list))

    assert list(DataLoader(Many(10), 4, collate_fn=list, **THREADS)) == expected
    assert all(len({noise for _, noise in batch}) == 1 for batch in expected)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (random.random, "random"),
        (np.random.rand, "numpy"),
        (lambda: torch.rand(1), "torch"),
        (np.random.default_rng(0), "a generator of its own"),
    ],
    ids=["random", "numpy", "torch", "own"],
)
def test_draws_from_generators_that_threads_share_are_refused_and_undone(draw, name):
    dataset = Draws(draw.random if isinstance(draw, np.random.Generator) else draw)
    dataset.holds = draw
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    threads = threading.active_count()

    with pytest.raises(InputError, match=rf"draws from {name}, which all threads share.*headway.data.generator"):
        iter(DataLoader(dataset, 2, **THREADS))

    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert threading.active_count() == threads


def test_a_collate_function_that_draws_is_refused_too():
    with pytest.raises(InputError, match="draws from torch"):
        iter(DataLoader(Augmented(4), 2, collate_fn=lambda examples: torch.rand(1), **THREADS))


def test_what_only_processes_have_is_refused_to_threads():
    with pytest.raises(InputError, match="worker_init_fn prepares a process, which threads do not have"):
        DataLoader(Augmented(4), worker_init_fn=print, **THREADS)
    with pytest.raises(InputError, match="multiprocessing_context starts processes"):
        DataLoader(Augmented(4), multiprocessing_context="fork", **THREADS)
    with pytest.raises(InputError, match="Did you mean 'threads'"):
        DataLoader(Augmented(4), workers="thread")


# "auto".


class Python(Augmented):
    def __getitem__(self, item):
        return sum(k * k for k in range(60_000))


class Numeric(Augmented):
    def __getitem__(self, item):
        return float(np.sort(generator().random(150_000))[0])


class Remembers(Augmented):
    seen = 0

    def __getitem__(self, item):
        self.seen += 1
        return item


class Reads(Augmented):
    """Reads from a file that stays open: two threads would move each other's position."""

    file = None

    def __getitem__(self, item):
        self.file = self.file or open(__file__, "rb")  # noqa: SIM115 - it stays open: that is the point
        self.file.seek(item)
        return self.file.read(1)[0]


@pytest.mark.parametrize(
    ("dataset", "options", "used"),
    [
        (Numeric(12), {}, {"threads"}), (Augmented(12), {}, {"threads", "processes"}), (Python(12), {}, {"processes"}),
        (Draws(random.random), {}, {"processes"}), (Remembers(12), {}, {"processes"}), (Reads(12), {}, {"processes"}),
        (Numeric(12), {"worker_init_fn": id}, {"processes"}), (Numeric(12), {"num_workers": 0}, {"none"}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_auto_takes_threads_where_they_are_safe_and_scale(dataset, options, used):
    loader = DataLoader(dataset, 4, **{"num_workers": 2, "workers": "auto", **options})

    assert len(list(loader)) == len(loader)
    assert loader.workers_used in used
    assert loader.workers_used in {*WORKERS, "none"}
    assert getattr(dataset, "file", None) is None or loader.workers_used == "none"  # nothing was opened in this process


# Ends.


@pytest.mark.slow
def test_a_broken_off_loop_and_a_failed_one_leave_no_thread():
    gc.collect()
    before = threading.active_count()

    for batch in DataLoader(Augmented(40), 2, **THREADS):
        assert len(batch) == 4
        break
    with pytest.raises(ZeroDivisionError):
        list(DataLoader(Draws(lambda: 1 // 0), 2, **THREADS))
    gc.collect()

    assert threading.active_count() == before


def test_an_example_that_hangs_does_not_hold_up_the_end():
    never = threading.Event()

    class Hangs(Listed):
        def fill(self, making, keys, part):
            never.wait(60)

    pool = ThreadPool(2)
    pool.help(Task(Hangs(()), [1, 2]))
    pool.close(timeout_s=0.05)
    never.set()


def test_persistent_threads_begin_the_next_epoch_afresh_after_a_break():
    loader = DataLoader(Augmented(12), 2, True, collate_fn=list, persistent_workers=True, **THREADS)
    expected = DataLoader(Augmented(12), 2, True, collate_fn=list)
    next(iter(expected))
    for _ in loader:
        break
    threads = threading.active_count()

    assert list(loader) == list(expected)
    assert threading.active_count() == threads


def test_an_iterator_that_went_through_a_fork_says_so():
    batches = iter(DataLoader(Augmented(40), 2, **THREADS))
    next(batches)

    def go_on():
        with pytest.raises(InputError, match="of which this one is a fork"):
            list(batches)

    assert in_fork(go_on) == 0


def test_what_the_threads_spent_is_told_to_the_recorder_once_per_batch(monkeypatch):
    told = []
    monkeypatch.setattr(account, "on", lambda: True)
    monkeypatch.setattr(account, "loaded", lambda start, end, **facts: told.append((start, end, facts)))

    list(DataLoader(Numeric(10), 4, collate_fn=lambda e: torch.tensor(e), **THREADS))

    assert [(facts["batch"], facts["items"], facts["workers"]) for _, _, facts in told] == [
        (0, 4, 2),
        (1, 4, 2),
        (2, 2, 2),
    ]
    for start, end, facts in told:
        spent = facts["fetch_ns"] + facts["prep_ns"] + facts["cpu_wait_ns"]
        assert 0 < facts["prep_ns"] <= spent <= 2 * (end - start)
        assert facts["bytes"] == 4 * facts["items"]
