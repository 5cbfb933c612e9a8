"""What users of torch's DataLoader rely on: the same batches, errors and lives of workers, in processes and threads."""

import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections import namedtuple

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, ConcatDataset, IterableDataset, RandomSampler, Subset, TensorDataset

from headway.core.errors import InputError
from headway.data import DataLoader
from tests.datasets import Sized
from tests.paths import ROOT, python_path

KINDS = {"none": {}, "processes": {"num_workers": 2}, "threads": {"num_workers": 2, "workers": "threads"}}
AUTO = {"num_workers": 2, "workers": "auto"}
Pair = namedtuple("Pair", ["left", "right"])


class Nested(Sized):
    """Examples of every structure that torch's default collate function knows."""

    size = 13

    def __getitem__(self, item):
        return {
            "image": torch.full((40, 40), float(item)), "array": np.arange(3000) + item, "row": np.float32(item),
            "pair": Pair(item, [str(item), item / 2]), "bytes": bytes([item]), "none": (torch.tensor(item),),
        }  # fmt: skip


class Numbers(Sized):
    def __init__(self, n, name="x"):
        self.size, self.name = n, name

    def __getitem__(self, item):
        if item == 5 and self.name == "bad":
            raise ValueError("cannot decode example 5")
        return item


def equal(left, right):
    """Compare nested batches: types, shapes, strides, bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        same = left.dtype == right.dtype and left.stride() == right.stride()
        return same and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    return left == right


def double(examples):
    return torch.tensor(examples) * 2


@pytest.mark.parametrize("kind", ["none", "processes", "threads"])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Nested(), {"batch_size": 4}),
        (Nested(), {"batch_size": None}),
        (TensorDataset(torch.arange(9.0), torch.randn(9, 50, 50)), {"batch_size": 4, "drop_last": True}),
        (ConcatDataset([Numbers(3), Numbers(4)]), {"batch_size": 2}),
        (Subset(TensorDataset(torch.arange(20)), [3, 1, 4, 1, 5]), {"batch_size": 2}),
        (Numbers(10), {"sampler": [3, 1, 4, 1, 5, 9], "batch_size": 4}),
        (Numbers(10), {"batch_sampler": BatchSampler(range(9), 4, drop_last=False)}),
        (Numbers(10), {"batch_sampler": [[1], [2, 3], [0, 0, 0]], "collate_fn": double}),
        (Numbers(10), {"batch_size": 3, "collate_fn": lambda examples: sum(examples)}),
        ({"b": 1, "a": 2}, {"sampler": ["a", "b", "a"], "batch_size": 2}),
        ([], {"batch_size": 2}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else "-".join(map(str, value)),
)
def test_batches_are_torchs_own_to_the_last_bit_and_stride(kind, dataset, options):
    theirs = torch.utils.data.DataLoader(dataset, **options)
    ours = DataLoader(dataset, **options, **KINDS[kind])

    assert len(ours) == len(theirs)
    assert equal(list(ours), list(theirs))


@pytest.mark.parametrize("kind", [*KINDS, "auto"])
def test_a_sampler_with_a_generator_of_its_own_goes_through_the_same_epochs(kind):
    def make():
        return RandomSampler(range(20), generator=torch.Generator().manual_seed(3))

    theirs = torch.utils.data.DataLoader(Numbers(20), 4, sampler=make())
    ours = DataLoader(Numbers(20), 4, sampler=make(), **{**KINDS, "auto": AUTO}[kind])

    expected = [[batch.tolist() for batch in theirs] for _ in range(2)]
    assert [[batch.tolist() for batch in ours] for _ in range(2)] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_several_iterators_at_once_do_not_disturb_each_other(kind):
    loader = DataLoader(Numbers(9), 2, **KINDS[kind])

    pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]

    assert pairs == [(k, k) for k in ([0, 1], [2, 3], [4, 5], [6, 7], [8])]


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_an_exception_of_a_worker_comes_with_its_traceback_and_the_loop_may_go_on(kind):
    batches = iter(DataLoader(Numbers(12, "bad"), 4, **KINDS[kind]))

    assert next(batches).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"Caught ValueError in DataLoader worker (process|thread) \d") as caught:
        next(batches)
    message = str(caught.value)
    del caught  # it holds this frame, and the iterator with it
    assert "cannot decode example 5" in message
    assert "in __getitem__" in message
    assert next(batches).tolist() == [8, 9, 10, 11]


class NeedsTwoError(Exception):
    def __init__(self, one, two):
        super().__init__(one)


class Fails(Numbers):
    def __getitem__(self, item):
        raise NeedsTwoError("shard 3", 3)


def test_an_exception_with_arguments_of_its_own_is_told_as_torch_tells_it():
    for options in (KINDS["processes"], KINDS["threads"]):
        with pytest.raises(RuntimeError, match="Caught NeedsTwoError in DataLoader worker"):
            next(iter(DataLoader(Fails(4), 2, **options)))


class Waits(Numbers):
    """Example 2 waits for what does not come."""

    def __getitem__(self, item):
        if item == 2:
            self.never.wait(30)
        return item


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_a_batch_that_does_not_come_in_time_is_an_error(kind):
    dataset = Waits(4)
    dataset.never = threading.Event()
    batches = iter(DataLoader(dataset, 2, timeout=0.5, **KINDS[kind]))

    try:
        assert next(batches).tolist() == [0, 1]
        with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0.5 seconds"):
            next(batches)
    finally:
        dataset.never.set()
        for worker in getattr(batches, "_workers", ()):
            worker.terminate()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"prefetch_factor": 2}, "prefetch_factor option could only be specified in multiprocessing"),
        ({"num_workers": 1, "prefetch_factor": -1}, "prefetch_factor option should be non-negative"),
        ({"num_workers": -1}, "num_workers option should be non-negative"),
        ({"timeout": -1}, "timeout option should be non-negative"),
        ({"persistent_workers": True}, "persistent_workers option needs num_workers > 0"),
        ({"sampler": [0], "shuffle": True}, "sampler option is mutually exclusive with shuffle"),
        ({"batch_sampler": [[0]], "drop_last": True}, "batch_sampler option is mutually exclusive"),
    ],
    ids=str,
)
@pytest.mark.parametrize("workers", ["processes", "threads"])
def test_torchs_own_mistakes_are_torchs_own_errors(options, error, workers):
    with pytest.raises(ValueError, match=error):
        DataLoader(Numbers(4), workers=workers, **options)
    with pytest.raises(ValueError, match=error):
        torch.utils.data.DataLoader(Numbers(4), **options)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
@pytest.mark.parametrize("kind", KINDS)
def test_pinned_memory_may_be_asked_for_without_a_device(kind):
    assert [batch.tolist() for batch in DataLoader(Numbers(4), 2, pin_memory=True, **KINDS[kind])] == [[0, 1], [2, 3]]


class Where(Numbers):
    def __getitem__(self, item):
        time.sleep(0.001)
        return threading.get_native_id()


@pytest.mark.parametrize("kind", ["processes", "threads"])
@pytest.mark.parametrize("persistent", [False, True])
def test_persistent_workers_stay_and_others_end_with_their_epoch(kind, persistent):
    loader = DataLoader(Where(16), 4, persistent_workers=persistent, **KINDS[kind])

    first, second = ({number for batch in loader for number in batch.tolist()} for _ in range(2))

    # A thread's number may be given out again, but not while the first ones live.
    assert bool(first & second) or not persistent
    if kind == "processes":
        assert bool(first & second) == persistent


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_a_loader_that_keeps_its_workers_is_freed_with_them_as_soon_as_nobody_has_it(kind):
    loader = DataLoader(Numbers(8), 2, persistent_workers=True, **KINDS[kind])
    list(loader)
    gone = weakref.ref(loader), weakref.ref(loader._iterator)
    gc.disable()
    try:
        del loader
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_an_iterator_is_freed_as_soon_as_the_caller_is_done_with_its_exception(kind):
    batches = iter(DataLoader(Numbers(12, "bad"), 4, **KINDS[kind]))
    gone = weakref.ref(batches)
    gc.disable()
    try:
        try:
            list(batches)
        except ValueError:
            del batches
        assert gone() is None  # torch's own would wait for the garbage collector, and then for its workers
    finally:
        gc.enable()


class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return iter(range(0 if info is None else info.id, 6, 1 if info is None else info.num_workers))


def test_a_stream_is_read_by_processes_and_refused_to_threads():
    for options in ({}, KINDS["processes"], AUTO):
        theirs = torch.utils.data.DataLoader(Stream(), 2, num_workers=options.get("num_workers", 0))
        ours = DataLoader(Stream(), 2, **options)
        assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in theirs]
    with pytest.raises(InputError, match="an iterable dataset is read by one thread at a time"):
        DataLoader(Stream(), 2, **KINDS["threads"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_datasets_and_lambdas_of_the_script_itself_work_and_the_interpreter_ends(kind, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import sys, time, torch
        from headway.data import DataLoader

        class Mine(torch.utils.data.Dataset):
            def __init__(self): self.scale = lambda x: x * 3
            def __len__(self): return 1000
            def __getitem__(self, item):
                time.sleep(0.002)
                return self.scale(item)

        loader = DataLoader(Mine(), 4, num_workers=2, workers=sys.argv[1], collate_fn=lambda rows: rows)
        for batch in loader:
            print(batch)
            break
        loader.kept = iter(loader)
        next(loader.kept)
        """)
    )
    done = subprocess.run(
        [sys.executable, script, kind], cwd=ROOT, env={"PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 3, 6, 9]\n", "")


def test_threads_pin_the_batches_that_they_make_and_the_loop_waits_for_none(monkeypatch):
    pinned_by = []

    def pin(batch, device=None):
        pinned_by.append(threading.current_thread())
        return batch

    monkeypatch.setattr("headway.data.loader.threads.pin_memory", pin)
    iterator = iter(DataLoader(Numbers(8), 2, workers="threads", num_workers=2))
    iterator._pin_memory, iterator._pin_memory_device = True, "cuda"

    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert pinned_by
    assert threading.main_thread() not in pinned_by
    gone = weakref.ref(iterator)
    del iterator
    gc.collect()
    assert gone() is None
