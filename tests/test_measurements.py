"""The three phases inside a rank: which steps count, when the script ends, what the filling pass reads."""

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from headway.catalog import MEASUREMENTS
from headway.core.remedies import record_at
from headway.core.tables import resolved
from headway.data.stalls import torch_measurements as measurements
from headway.data.stalls.torch_measurements import Filling, Stopwatch
from headway.runtime.calls.patches import replace_attribute
from tests.datasets import Sized

READS = mmap.mmap(-1, 4096)
"""How often each example was read, shared with forked workers."""

UNRECORDED = -1
"""Group of a loader in a process without headway's recording."""


class Counted(Sized):
    size = 24

    def __getitem__(self, index):
        READS[index] += 1
        return index


def stopwatch(**changes) -> tuple[Stopwatch, list]:
    results = []
    return Stopwatch(**{"phase": "warm", "steps": 10, "warmup": 2, "write": results.append, **changes}), results


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_each_measurement_of_the_catalog_is_a_function_that_says_what_it_measures(name):
    function = resolved(record_at(MEASUREMENTS[name], name).apply)

    assert name == f"measure.{function.__name__}"
    assert function.__doc__.startswith("Measure with")


@given(order=st.lists(st.integers(0, 3), max_size=60), steps=st.integers(1, 20))
def test_a_script_takes_exactly_the_steps_of_its_busiest_optimizer_and_then_ends(order, steps):
    watch, results = stopwatch(steps=steps, warmup=1)
    counts, ended = dict.fromkeys(range(4), 0), False
    for optimizer in order:
        counts[optimizer] += 1
        if max(counts.values()) == steps:
            with pytest.raises(SystemExit, match=r"^0$"):
                watch.stepped(optimizer)
            ended = True
            break
        assert watch.stepped(optimizer) == 1

    assert len(watch.step_s) == max(counts.values())
    assert ended == (max(counts.values()) == steps)
    assert [result["complete"] for result in results] == ([True] if ended else [])


def test_a_script_that_goes_on_after_the_end_is_ended_again():
    watch, results = stopwatch(steps=1, warmup=1)
    for _ in range(3):
        with pytest.raises(SystemExit):
            watch.stepped(0)

    assert results[0]["complete"]


def test_what_headway_does_itself_is_left_out_of_the_steps(monkeypatch):
    clock = iter([0, 10, 15, 30, 70, 100])  # begun; paused at 10, and again at 15, until 30; steps end at 70 and 100
    monkeypatch.setattr(measurements, "perf_counter_ns", lambda: next(clock))
    watch, _ = stopwatch(warmup=5, last_ns=next(clock))
    with watch.paused(), watch.paused():
        pass
    watch.stepped(0)
    watch.stepped(0)

    assert watch.step_s == [50e-9, 30e-9]


def test_the_result_says_how_far_a_script_came_that_ended_early():
    watch, results = stopwatch()
    watch.handed(3)
    watch.stepped(0)
    watch.finish()

    assert (results[0]["complete"], len(results[0]["step_s"]), results[0]["batches"]) == (False, 1, {3: 1})


def filled_and_read(num_batches: int, **settings) -> tuple[list[int], list[list[int]], Stopwatch]:
    """Return how often each example was read when the first batch came, and a pass over a loader that was filled."""
    READS[:] = bytes(4096)
    torch.manual_seed(1)
    watch, _ = stopwatch()
    filling = Filling(watch, {UNRECORDED: num_batches})
    module = "torch.utils.data.dataloader:"
    undos = [
        replace_attribute(module + "_BaseDataLoaderIter._next_index", filling.around_next_index),
        replace_attribute(module + "DataLoader.__iter__", filling.around_iter),
    ]
    try:
        loader = DataLoader(Counted(), 4, shuffle=True, collate_fn=list, **settings)
        iterator = iter(loader)
        first = next(iterator)
        reads = list(READS[:24])
        return reads, [first, *iterator], watch
    finally:
        for undo in reversed(undos):
            undo()


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
    ids=["no workers", "workers", "kept workers"],
)
def test_a_filled_loader_reads_the_same_examples_again_in_a_pass_of_the_same_length(settings):
    reads, batches, watch = filled_and_read(3, **settings)
    timed = [example for batch in batches[:3] for example in batch]

    assert [len(batch) for batch in batches] == [4] * 6
    assert len(set(timed)) == 12
    assert all(reads[example] >= 1 for example in timed)
    assert all(reads[example] == 2 for example in batches[0])
    assert watch.paused_ns > 0
    assert all(READS[example] >= 2 for example in timed)


@pytest.mark.parametrize(
    ("fill", "reads"), [(100, [1] * 20 + [2] * 4), (0, [0] * 20 + [1] * 4)], ids=["more than a pass", "nothing"]
)
def test_what_is_filled_is_read_once_before_it_is_handed_out(fill, reads):
    counts, batches, _ = filled_and_read(fill)

    assert sorted(counts) == reads
    assert len(batches) == 6
