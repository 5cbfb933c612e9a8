"""Purity over time: a dataset whose examples change while training goes on is found, and no other is; nothing waits."""

import gc
import os
import random
import resource
import select
import time
import weakref
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from headway.core.machine.child import detached, start_detached
from headway.runtime.recorder.rereading import LATER, Rereadings
from headway.runtime.script.batches import batch_bytes, checksum
from headway.trace.events.loader_facts import LoaderFacts, unkept, unmovable, unshared, unthreadable
from tests.loaders_made import Ratio, Squares
from tests.recorded import recording

EPOCH = [0]


class Drawn(Squares):
    def __getitem__(self, index):
        return torch.tensor([index, random.random(), float(torch.rand(1))])


class ByGlobal(Squares):
    def __getitem__(self, index):
        return torch.tensor([index, EPOCH[0]])


class Hangs(Squares):
    def __getitem__(self, index):
        if os.getpid() != PID:
            time.sleep(600)
        return index


class Writes(Squares):
    def __getitem__(self, index):
        if os.getpid() != PID:
            open(f"/tmp/headway-{index}", "w").close()
        return index


PID = os.getpid()


class Recorder:
    """What `Rereadings` needs of probes; steps are made by hand."""

    def __init__(self):
        self.steps, self.due, self.listeners, self.wanted = [0], [1], [], {}
        self.loaders, self.remedied, self.written, self.spans, self.tables = {0: {}}, False, 0, [], {}
        self.run = ""

    def write_tables(self):
        self.written += 1

    def emit(self, *span):
        self.spans.append(span)

    def step(self):
        self.steps[0] += 1
        for listener in self.listeners:
            if self.steps[0] >= self.wanted.get(listener, 0):
                self.wanted[listener] = self.steps[0] + listener(0)


def changes(dataset, change=lambda dataset, step: None, *, workers=False, until=LATER[-1] + 4):
    """Return the facts after training on `dataset`, which the loop changes at each step."""
    recorder = Recorder()
    again = Rereadings(recorder)
    loader = DataLoader(dataset, 5)
    kept = again.keep(0, dataset, loader.collate_fn, None if workers else [3, 1, 2])
    if not workers:
        kept.expected = checksum(loader.collate_fn([dataset[index] for index in [3, 1, 2]]))
    for step in range(until):
        change(dataset, step)
        recorder.step()
        if kept.pipe >= 0:
            answered = select.poll()
            answered.register(kept.pipe, select.POLLIN)
            answered.poll(60_000)
    return recorder.loaders[0]


@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.parametrize("dataset", [Squares, Drawn, ByGlobal, Ratio])
def test_a_dataset_that_gives_the_same_examples_later_does_not_change(dataset, workers):
    states = random.getstate(), torch.get_rng_state()
    facts = changes(dataset(), workers=workers)

    assert facts == {"changes": "", "changes_unchecked": ""}
    assert workers is False or (random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1]))


def test_a_process_with_more_than_a_thousand_descriptors_is_read_again_as_well():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    opened = [os.dup(0) for _ in range(1100)]
    try:
        assert changes(Squares()) == {"changes": "", "changes_unchecked": ""}
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.parametrize(
    ("dataset", "change"),
    [
        (Ratio, lambda dataset, step: setattr(dataset, "ratio", step)),
        (Ratio, lambda dataset, step: setattr(dataset, "ratio", int(step > LATER[0]))),
        (ByGlobal, lambda dataset, step: EPOCH.__setitem__(0, step)),
    ],
    ids=["at each step", "late", "by a global"],
)
def test_a_dataset_that_the_loop_changes_is_found_and_every_remedy_refused(dataset, change, workers):
    EPOCH[0] = 0
    facts = changes(dataset(), change, workers=workers)

    assert "steps later, were others" in facts["changes"]
    for unfit in (unmovable, unthreadable, unkept, unshared):
        assert "change while training goes on: its first examples" in unfit(
            LoaderFacts.of({"sampler": "RandomSampler", **facts})
        )


def in_passes(change, monkeypatch, *, workers, passes=5, left=(), steps=LATER[-1] + 6, told=None, is_gone=False):
    """Return the facts after passes of `steps`; `change` is called before each pass and step, `left` ones are left.

    What is known of the loader's sizes is `told`; at the end of the job the dataset `is_gone`.
    """
    monkeypatch.setattr("headway.runtime.recorder.rereading.SHARE", 1e9)
    monkeypatch.setattr("headway.runtime.recorder.rereading.LAST_S", 60)
    recorder, dataset = Recorder(), Ratio()
    recorder.loaders[0].update(told or {})
    again, loader = Rereadings(recorder), DataLoader(dataset, 5)
    for number in range(1, passes + 1):
        change(dataset, number, -1)
        kept = again.keep(0, dataset, loader.collate_fn, None if workers else [3, 1, 2])
        if kept is not None and not workers:
            kept.expected = checksum(loader.collate_fn([dataset[index] for index in [3, 1, 2]]))
        for step in range(steps):
            change(dataset, number, step)
            recorder.step()
            for load in (*again._kept.values(), *again._ended):
                if load.pipe >= 0:
                    select.select([load.pipe], [], [], 60)
        if number not in left:
            again.ended(0)
    if is_gone:
        for load in (*again._kept.values(), *again._ended):
            if load.pipe >= 0:
                select.select([load.pipe], [], [], 60)
        del dataset, loader, kept
        gc.collect()
    again.finish()
    return recorder.loaders[0] | ({"forks": len(recorder.spans)} if told else {})


@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.parametrize("late", [1, 2, 4])
def test_a_change_within_a_later_pass_is_found(late, workers, monkeypatch):
    def change(dataset, number, step):
        dataset.ratio = int((number, step) > (late, LATER[-1] + 2))

    first = "its first examples" if late == 1 else f"the first examples of pass {late}"
    facts = in_passes(change, monkeypatch, workers=workers, passes=late)

    assert facts["changes"] == f"{first}, read again {LATER[-1] + 6} steps later, were others"


@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.parametrize("left", [(), (2,), (1, 2, 4)])
def test_what_changes_between_passes_is_a_hindrance_only_for_what_outlives_them(left, workers, monkeypatch):
    facts = in_passes(
        lambda dataset, number, step: setattr(dataset, "ratio", number), monkeypatch, workers=workers, left=left
    )

    assert facts["changes"] == facts["changes_unchecked"] == ""
    assert ("changes_between" in facts) == (1 not in left)


@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.parametrize("steps", [5, 20])
def test_what_changes_between_short_passes_is_one_too(steps, workers, monkeypatch):
    def change(dataset, number, step):
        dataset.ratio = number

    facts = in_passes(change, monkeypatch, workers=workers, steps=steps, passes=2 * LATER[-1] // steps)
    known = LoaderFacts.of({"sampler": "RandomSampler", **facts})

    assert facts["changes"] == ""
    assert "steps later, were others" in facts["changes_between"]
    assert unmovable(known) == unthreadable(known) == ""
    assert "change between passes" in unkept(known)
    assert "change between passes" in unshared(known)


@pytest.mark.parametrize("workers", [False, True])
def test_what_changes_in_short_passes_whose_ends_nobody_sees_is_a_hindrance(workers, monkeypatch):
    left = range(1, 20)
    facts = in_passes(
        lambda dataset, number, step: setattr(dataset, "ratio", number), monkeypatch, workers=workers, steps=20,
        left=left,
    )  # fmt: skip

    assert "steps later, were others" in facts["changes"]
    assert "changes_between" not in facts


@pytest.mark.parametrize("workers", [False, True])
def test_a_change_that_lasts_is_seen_at_the_end_of_the_job(workers, monkeypatch):
    def change(dataset, number, step):
        dataset.ratio = int((number, step) > (5, 17))  # no pass that is read again is one in which it changes

    facts = in_passes(change, monkeypatch, workers=workers, passes=7)

    assert facts["changes"] == ""
    assert "were others" in facts["changes_between"]


@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.parametrize("steps", [8, 20])
def test_a_job_too_short_for_the_last_step_of_a_reading_is_judged_when_it_ends(steps, workers, monkeypatch):
    change, still = (lambda dataset, number, step: setattr(dataset, "ratio", number)), (lambda *_: None)
    facts, same = (in_passes(how, monkeypatch, workers=workers, steps=steps, passes=3) for how in (change, still))
    known = LoaderFacts.of({"sampler": "RandomSampler", **facts})

    assert facts["changes"] == ""
    assert "change between passes" in unkept(known)
    assert "change between passes" in unshared(known)
    assert unmovable(known) == ""
    assert same == {"changes": "", "changes_unchecked": ""}


def test_a_short_job_whose_dataset_is_gone_at_its_end_is_judged_by_what_was_read(monkeypatch):
    change, still = (lambda dataset, number, step: setattr(dataset, "ratio", number)), (lambda *_: None)
    facts, same = (
        in_passes(how, monkeypatch, workers=False, steps=10, passes=3, is_gone=True) for how in (change, still)
    )

    assert facts["changes"] == ""
    assert "were others" in facts["changes_between"]
    assert same == {"changes": "", "changes_unchecked": ""}


def test_a_pass_that_ends_soon_is_read_at_its_end_alone(monkeypatch):
    forks = [
        in_passes(lambda *_: None, monkeypatch, workers=False, steps=10, passes=1, told={"batch_size": 5, **sizes})[
            "forks"
        ]
        for sizes in ({"dataset_size": 50}, {"dataset_size": 500}, {"dataset_size": None})
    ]

    assert forks == [1, 2, 2]


@pytest.mark.parametrize("passes", [1, 2])
def test_a_last_reading_without_an_answer_is_told_where_there_were_several_passes(passes, monkeypatch):
    monkeypatch.setattr("headway.runtime.recorder.rereading.LAST_S", 0.01)
    recorder, dataset = Recorder(), Hangs()
    again = Rereadings(recorder)
    for number in range(passes):
        kept = again.keep(0, dataset, DataLoader(dataset, 5).collate_fn, [0])
        if number == 0:
            kept.expected = checksum(torch.tensor([0]))
        recorder.step()
        again.ended(0)
    again.finish()
    known = LoaderFacts.of({"sampler": "RandomSampler", **recorder.loaders[0]})

    assert known.changes is None
    assert ("is not known: the job ended before" in unkept(known)) == (passes > 1)
    assert unmovable(known) == ""


@pytest.mark.parametrize("since", [1, 4])
def test_a_change_within_short_passes_is_found(since, monkeypatch):
    def change(dataset, number, step):
        dataset.ratio = 2 * number + int(step > 15) if number >= since else 0

    facts = in_passes(change, monkeypatch, workers=False, steps=20, passes=8)

    assert "steps later, were others" in facts["changes"]


def test_what_may_not_be_read_in_a_child_is_not_checked_and_says_why():
    facts = changes(Writes())

    assert facts["changes"] is None
    assert "wanted to write" in facts["changes_unchecked"]


@pytest.mark.parametrize(("dataset", "found"), [(Squares, ""), (Writes, None)])
def test_a_child_that_is_forked_for_other_work_reads_first_and_does_both(dataset, found):
    recorder, loader = Recorder(), DataLoader(dataset(), 5, num_workers=2)
    again = Rereadings(recorder)
    load = again.keep(0, loader.dataset, loader.collate_fn, None)
    reading, writing = os.pipe()
    with again.aside() as first:
        start_detached(lambda: b"counted", writing, first=first)
    os.close(writing)
    for _ in range(LATER[-1] + 4):
        recorder.step()
        if load.pipe >= 0:
            select.select([load.pipe], [], [], 60)

    assert os.read(reading, 9) == b"counted"
    assert recorder.loaders[0]["changes"] == found
    assert len(recorder.spans) == (0 if found is None else len(LATER))  # and no child of its own at the first step
    os.close(reading)


def test_a_child_that_hangs_holds_nobody_up_and_ends_itself(monkeypatch):
    monkeypatch.setattr("headway.core.machine.child.TIMEOUT_S", 1)
    before = psutil.Process().children()
    pipe, _ = detached(lambda: b"%d" % time.sleep(600))

    assert select.select([pipe], [], [], 60)[0]
    assert os.read(pipe, 8) == b""
    os.close(pipe)
    assert psutil.Process().children() == before


def test_a_child_that_still_reads_at_the_end_of_the_job_is_ended():
    recorder = Recorder()
    again = Rereadings(recorder)
    dataset = Hangs()
    again.keep(0, dataset, DataLoader(dataset, 5).collate_fn, [0])
    for _ in range(LATER[0]):
        recorder.step()
    (kept,) = again._kept.values()
    assert psutil.pid_exists(kept.pid)
    pipe = os.dup(kept.pipe)
    again.finish()

    assert select.select([pipe], [], [], 10)[0]
    assert os.read(pipe, 8) == b""
    os.close(pipe)
    assert kept.pipe < 0


def test_checksums_tell_batches_apart():
    batches = [
        {"x": torch.arange(4), "y": ["a"]}, {"x": torch.arange(4), "y": ["b"]}, {"x": torch.arange(5), "y": ["a"]},
        torch.zeros(0), torch.tensor([1.5]), [None], (1, 2.0), b"1",
        torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse(), torch.ones(2, dtype=torch.complex64).conj(),
        np.array(["a", None], object), np.array(["b", None], object),
        SimpleNamespace(x=torch.ones(2)), SimpleNamespace(x=torch.zeros(2)),
    ]  # fmt: skip

    assert len({checksum(batch) for batch in batches}) == len(batches)
    assert checksum(torch.arange(6).view(2, 3).T) == checksum(torch.arange(6).view(2, 3).T.contiguous())


def raises(*_, **__):
    raise RuntimeError("code of the script's ran")


ANSWERS = dict.fromkeys(("__iter__", "__len__", "__getitem__", "items", "values", "__repr__", "__getattr__"), raises)


def test_a_look_at_a_batch_runs_nothing_of_the_scripts():
    function = {"__torch_function__": classmethod(raises)}
    values = [torch.ones(2).as_subclass(type("Counts", (torch.Tensor,), function)), np.ones(2)]
    classes = [type(base.__name__.title(), (base,), ANSWERS) for base in (list, tuple, dict, str, float, object)]
    given = [values, values, {"x": values}, "a", 1.5]
    batch = [classes[-1](), *(kind(value) for kind, value in zip(classes, given, strict=False))]

    assert checksum(batch) == checksum([classes[-1](), *given]) != checksum([classes[-1](), *given[:-1], 2.5])
    assert batch_bytes(batch) == 3 * (8 + 16)


class Graph:
    """A batch that is like a tensor in some ways, as those of graph libraries are."""

    def detach(self):
        return self

    @property
    def nbytes(self):
        raise RuntimeError("a graph has none")

    @property
    def tobytes(self):
        raise RuntimeError("nor this")


def test_a_batch_that_cannot_be_looked_into_reaches_the_loop(tmp_path):
    with recording(tmp_path) as session:
        found = list(DataLoader(Squares(4), 2, collate_fn=lambda examples: Graph()))

    assert [type(batch) for batch in found] == [Graph, Graph]
    assert session.probes.tables["patches"].get("input.load", "ok") == "ok"


class Collates(Squares):
    def collate(self, examples):
        return torch.stack(examples)


def test_nothing_that_the_script_lets_go_is_kept():
    again, dataset = Rereadings(Recorder()), Collates()
    again.keep(0, dataset, dataset.collate, [1])
    gone = weakref.ref(dataset)
    del dataset
    gc.collect()

    assert gone() is None


@pytest.mark.parametrize(("share", "checked"), [(0.0, 1), (1e9, 4)])
def test_a_script_that_makes_loader_after_loader_pays_for_the_first_and_within_a_share_of_the_time(
    share, checked, monkeypatch
):
    monkeypatch.setattr("headway.runtime.recorder.rereading.SHARE", share)
    recorder = Recorder()
    recorder.loaders = {group: {} for group in range(4)}
    again, dataset = Rereadings(recorder), Squares()
    loader = DataLoader(dataset, 5)
    every = [again.keep(group, dataset, loader.collate_fn, [0]) for group in range(4)]
    for kept in every:
        kept.expected = checksum(loader.collate_fn([dataset[0]]))
    for _ in range(LATER[-1] + 12):
        recorder.step()
        for kept in every:
            if kept.pipe >= 0:
                select.select([kept.pipe], [], [], 60)

    assert [group for group, facts in recorder.loaders.items() if facts] == list(range(checked))
    assert len(recorder.spans) == len(LATER) * checked
