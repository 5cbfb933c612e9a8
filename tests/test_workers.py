"""Loader workers as a remedy: same batches, same order, same random numbers after; else left alone with a reason."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from headway.data.bytes.torch_examples import equal
from headway.data.workers.apply import WAITS, untunable, workers
from headway.ledger.booking.rows import rows_by_rank
from headway.ledger.booking.waits import find_loads, match_batches
from headway.runtime.in_rank.remedy import Applied, RefusedRemedy
from headway.runtime.run_folder.finalise import finalise_attempt
from headway.trace.recording.runs import Run
from tests.loaders_made import (
    ByTurns,
    HangsInWorkers,
    HoldsAFile,
    Noisy,
    OnADevice,
    Ratio,
    Squares,
    Stream,
    epochs,
    plain,
)
from tests.paths import ROOT
from tests.recorded import recording
from tests.remedy_context import TestContext, applied, apply

PARAMETERS = {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": True}


class Augmented(Squares):
    def __getitem__(self, index):
        return torch.tensor([float(index), float(torch.rand(1))])


class OwnLoader(DataLoader):
    """A subclass with a constructor of its own."""

    def __init__(self, size):
        super().__init__(Squares(size), batch_size=4, shuffle=True, drop_last=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Squares(), 5, shuffle=True),
        lambda: DataLoader(Squares(), 5),
        lambda: DataLoader(Squares(), 5, sampler=RandomSampler(Squares(), replacement=True, num_samples=20)),
        lambda: DataLoader(Squares(), 5, shuffle=True, generator=torch.Generator().manual_seed(3)),
        lambda: OwnLoader(21),
        lambda: DataLoader(Squares(), 5, shuffle=True, num_workers=1),
        lambda: DataLoader(Squares(), 5, shuffle=True, num_workers=1, persistent_workers=True),
    ],
    ids=["shuffled", "in order", "own count", "own generator", "subclass", "one worker", "one kept worker"],
)
def test_batches_and_later_random_numbers_are_the_same(make):
    plain, _ = epochs(make)

    with applied(workers, PARAMETERS) as context:
        tuned, _ = epochs(make)

    assert tuned == plain
    assert context.outcomes[-1].facts["loaders"][0]["num_workers"] == 2
    assert isinstance(context.outcomes[-1], Applied)


def test_workers_that_make_steps_slower_are_left_in_the_middle_of_a_pass():
    def make():
        return DataLoader(Squares(600), 5, shuffle=True, generator=torch.Generator().manual_seed(3))

    def workers_there():
        return sum("pt_data_worker" in child.name() for child in psutil.Process().children())

    expected, context, there = [plain(batch) for batch in make()], TestContext(), []
    context.step_s = 1e-9
    try:
        apply(workers, PARAMETERS, context)
        seen = []
        for number, batch in enumerate(make()):
            seen.append(plain(batch))
            context.after(10 * number)
            there.append(workers_there())
    finally:
        for undo in reversed(context.undos):
            undo()

    assert seen == expected
    assert (max(there), there[-1]) == (2, 0)  # the second may start behind the first batch


def test_an_epoch_goes_on_to_its_end_when_the_remedy_is_undone_in_it():
    def make():
        return DataLoader(Squares(), 5, shuffle=True, generator=torch.Generator().manual_seed(3))

    with applied(workers, {**PARAMETERS, "prefetch_factor": 8}):
        loader = make()
        iterator = iter(loader)
        seen = [next(iterator)]
    seen += iterator
    whole = sorted(row[0] for batch in loader for row in batch.tolist())
    loader._iterator = None

    assert equal(seen, list(make()))
    assert whole == list(range(37))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options", "stop_after"),
    [
        (37, {}, 6), (37, {}, None), (40, {}, 7), (40, {"num_workers": 1}, 5),
        (37, {"num_workers": 1, "prefetch_factor": 5}, 0),
    ],
    ids=["before a short batch", "to the end", "at the end of even ones", "one worker", "a worker far ahead"],
)  # fmt: skip
def test_a_sampler_with_a_generator_of_its_own_draws_when_it_did_also_where_epochs_end_early(size, options, stop_after):
    """Such a sampler draws once more at its end: read to its end too soon, the next epoch has another order."""
    generators = []

    def make():
        generators.append(torch.Generator().manual_seed(3))
        return DataLoader(Squares(size), 5, sampler=RandomSampler(Squares(size), generator=generators[-1]), **options)

    plain, _ = epochs(make, stop_after=stop_after)
    with applied(workers, PARAMETERS) as context:
        tuned, _ = epochs(make, stop_after=stop_after)

    assert tuned == plain
    assert torch.equal(*(generator.get_state() for generator in generators))
    assert isinstance(context.outcomes[-1], Applied)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Stream()), "every worker would yield all of it"),
        (DataLoader(Squares(), sampler=ByTurns()), "read it ahead"),
        (DataLoader(Squares(), worker_init_fn=print), "worker_init_fn has never run"),
        (DataLoader(Noisy()), "draws random numbers"),
        (DataLoader(Squares(0)), "empty"),
    ],
    ids=["stream", "own sampler", "worker_init_fn", "noisy", "empty"],
)
def test_a_loader_that_workers_could_change_is_left_alone(loader, reason):
    assert reason in untunable(loader)

    with applied(workers, PARAMETERS) as context:
        list(loader)

    assert loader.num_workers == 0
    assert isinstance(context.outcomes[-1], RefusedRemedy)
    assert reason in context.outcomes[-1].reason


def test_never_more_workers_than_batches():
    with applied(workers, {**PARAMETERS, "num_workers": 8, "persistent_workers": False}) as context:
        list(DataLoader(TensorDataset(torch.arange(6.0)), 3))

    assert context.outcomes[-1].facts["loaders"][0]["num_workers"] == 2


def test_workers_that_are_kept_see_what_the_script_changes_between_epochs():
    def batches():
        dataset = Ratio()
        loader = DataLoader(dataset, 5, shuffle=True, generator=torch.Generator().manual_seed(1))
        seen = []
        for epoch in range(3):
            dataset.ratio = epoch
            seen += [batch.tolist() for batch in loader]
        return seen

    plain = batches()
    with applied(workers, PARAMETERS):
        assert batches() == plain


def test_two_passes_at_once_over_one_loader_stay_apart():
    def pairs():
        torch.manual_seed(2)
        loader = DataLoader(Squares(), 10)
        return [(a.tolist(), b.tolist()) for a in loader for b in loader]

    plain = pairs()
    with applied(workers, PARAMETERS):
        assert pairs() == plain


def spoilt(batch):
    return torch.stack(batch) + torch.rand(1)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Squares(), 4, collate_fn=spoilt), "draws random numbers"),
        (DataLoader(HoldsAFile(), 4), "open before its workers start"),
        (DataLoader(OnADevice(), 4), "in a worker, .*forked subprocess"),
    ],
    ids=["random collate", "open file", "device"],
)
def test_a_loader_whose_batches_workers_could_not_make_is_left_alone(loader, reason):
    assert re.search(reason, untunable(loader))


def test_a_start_method_other_than_fork_and_a_daemon_are_left_alone(monkeypatch):
    defaults = multiprocessing.context._default_context
    monkeypatch.setattr(defaults, "_actual_context", multiprocessing.get_context("spawn"))
    assert "start by spawn" in untunable(DataLoader(Squares()))
    monkeypatch.setattr(defaults, "_actual_context", None)
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    assert "daemon" in untunable(DataLoader(Squares()))


def test_threads_process_names_and_start_method_are_as_without_workers(monkeypatch):
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)

    def number():
        return int(multiprocessing.Process().name.rpartition("-")[2])

    threads, before = threading.enumerate(), number()
    with applied(workers, PARAMETERS) as context:
        loader = DataLoader(Squares(), 5)
        for _ in range(2):
            list(loader)

        assert threading.enumerate() == threads
        assert number() == before + 1
        assert multiprocessing.get_start_method(allow_none=True) is None
        assert isinstance(context.outcomes[-1], Applied)


def test_batches_that_shared_memory_could_not_hold_are_left_alone(monkeypatch):
    monkeypatch.setattr("headway.data.workers.apply.shared_memory_bytes", lambda: 100)

    assert "/dev/shm has no room" in untunable(DataLoader(Squares()), 4)


def test_a_report_that_fails_does_not_reach_the_script(monkeypatch):
    with applied(workers, PARAMETERS) as context:
        loader = DataLoader(Squares(), 5)
        monkeypatch.setattr(type(loader.dataset), "__len__", lambda self: 1 // 0)
        assert len(context.outcomes) == 0
        with pytest.raises(ZeroDivisionError, match="division"):
            list(loader)  # raised by torch, as without the remedy

    assert isinstance(context.outcomes[-1], RefusedRemedy)


def test_a_worker_that_dies_is_said_also_where_the_script_keeps_no_loader():
    plain = [batch.tolist() for batch in DataLoader(Squares(), 1)]
    with applied(workers, PARAMETERS) as context:
        iterator = iter(DataLoader(Squares(), 1))
        first = next(iterator).tolist()
        os.kill(iterator._workers[0].pid, signal.SIGKILL)
        assert [first, *(batch.tolist() for batch in iterator)] == plain

    assert "a worker failed" in context.outcomes[-1].json()["facts"]["loaders"][-1]["reason_not_applied"]


def shuffled():
    return DataLoader(Squares(), 5, shuffle=True)


def drawing_in_between():
    loader, seen = shuffled(), []
    for _ in range(3):
        iterator = iter(loader)
        seen += [torch.rand(1).tolist(), *(batch.tolist() for batch in iterator), torch.rand(1).tolist()]
    return seen


def asked_for_in_vain():
    loader = shuffled()
    iter(loader)
    return [torch.rand(1).tolist(), *(batch.tolist() for batch in loader)]


def one_generator_for_two():
    generator = torch.Generator().manual_seed(8)
    loaders = [DataLoader(Squares(), 5, shuffle=True, generator=generator) for _ in range(2)]
    return [batch.tolist() for _ in range(2) for pair in zip(*loaders, strict=True) for batch in pair]


def sampled_from_a_generator():
    generator = torch.Generator().manual_seed(8)
    sampler = RandomSampler(Squares(), replacement=True, num_samples=200, generator=generator)
    loader = DataLoader(Squares(), 5, sampler=sampler)
    return [next(iter(loader)).tolist() for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [drawing_in_between, asked_for_in_vain, one_generator_for_two, sampled_from_a_generator]
)
def test_scripts_that_draw_while_a_loader_starts_get_the_same_numbers(script):
    torch.manual_seed(7)
    plain = script(), torch.rand(1).item()

    torch.manual_seed(7)
    with applied(workers, PARAMETERS):
        assert (script(), torch.rand(1).item()) == plain


@pytest.mark.slow
@pytest.mark.parametrize("replacement", [False, True])
def test_two_loaders_side_by_side_keep_their_workers_and_their_orders(replacement):
    """The iterator of the second one draws its seed between that of the first one and its first batch."""

    def drawn():
        torch.manual_seed(2)
        first, second = Squares(40), Squares(24)
        loaders = [
            DataLoader(each, 4, sampler=RandomSampler(each, replacement=replacement)) for each in (first, second)
        ]
        pairs = [(a.tolist(), b.tolist()) for _ in range(3) for a, b in zip(*loaders, strict=False)]
        return pairs, torch.rand(2).tolist()

    plain = drawn()
    with applied(workers, PARAMETERS) as context:
        assert drawn() == plain

    found = [each for outcome in context.outcomes for each in outcome.facts["loaders"]]
    assert any(each.get("num_workers") == 2 for each in found)
    assert not any("reason_not_applied" in each for each in found), found


def test_a_loader_made_anew_is_tried_once_and_others_only_while_the_budget_lasts(monkeypatch):
    tried = []
    for name in ("TRIAL_S", "TRIAL_SHARE"):
        monkeypatch.setattr(f"headway.trace.events.loader_facts.{name}", 0.0)
    monkeypatch.setattr("headway.data.workers.apply.untunable", lambda loader, *_, **__: tried.append(loader))
    with applied(workers, {**PARAMETERS, "num_workers": 1}) as context:
        counts = []
        for batch_size in (2, 2, 2, 3, 4):
            loader = DataLoader(Squares(4 + len(counts)), batch_size)
            counts.append(len(getattr(iter(loader), "_workers", ())))

    assert (counts, len(tried)) == ([1, 1, 1, 0, 0], 1)
    assert len(context.outcomes[-1].facts["loaders"]) == 2
    left = context.outcomes[-1].facts["loaders"][1]
    assert "more than 1% of the time trained" in left["reason_not_applied"]
    assert "about" not in left


def test_a_dataset_that_draws_gets_workers_only_where_other_draws_are_allowed():
    def make():
        return DataLoader(Augmented(), 5, shuffle=True)

    with applied(workers, PARAMETERS) as refused:
        plain, left = epochs(make)
    with applied(workers, PARAMETERS, allow="result-equivalent") as context:
        tuned, _ = epochs(make)
    rows, others = ([row for batch in seen if isinstance(batch, list) for row in batch] for seen in (plain, tuned))

    assert left.num_workers == 0
    assert "draws random numbers" in refused.outcomes[-1].reason
    assert isinstance(context.outcomes[-1], Applied)
    assert sorted(int(row[0]) for row in rows) == sorted(int(row[0]) for row in others)
    assert len({row[1] for row in others}) == len(others), "workers repeat each other's draws"
    assert {row[1] for row in others} != {row[1] for row in rows}


def test_each_batch_of_workers_that_are_kept_is_matched_with_the_load_that_made_it(tmp_path):
    with recording(tmp_path), applied(workers, PARAMETERS):
        loader = DataLoader(Squares(), 5)
        for _ in range(3):
            assert len(list(loader)) == 8
    finalise_attempt(tmp_path, 0)
    rows = rows_by_rank(Run.open(tmp_path).trace)[0]
    waits, loads = rows.of("input.next"), find_loads(rows)
    match = match_batches(rows, waits, loads)

    assert len(rows.of("input.iter")) == 3
    assert (match >= 0).tolist() == 3 * [*8 * [True], False]
    assert rows.column("seq", waits)[match >= 0].tolist() == 3 * [*range(8)]
    assert (loads.end_ns[match[match >= 0]] <= rows.end_ns[waits[match >= 0]]).all()
    assert len({*match[match >= 0].tolist()}) == 24


def last_reason(context):
    return context.outcomes[-1].json()["facts"]["loaders"][-1]["reason_not_applied"]


def test_workers_of_a_stream_are_left_alone_where_they_only_would_be_kept():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from torch.arange(10)

    with applied(workers, PARAMETERS) as context:
        loader = DataLoader(Stream(), 5, num_workers=2)
        passes = [len(list(loader)) for _ in range(2)]

    assert passes == [4, 4]
    assert "IterableDataset" in last_reason(context)
    assert loader._iterator is None


@pytest.mark.slow
@pytest.mark.parametrize("own_workers", [0, 1])
def test_where_workers_cannot_be_started_the_loop_gets_the_scripts_own_batches(own_workers, monkeypatch):
    def make():
        return DataLoader(Squares(), 5, shuffle=True, num_workers=own_workers)

    started, start = [], multiprocessing.process.BaseProcess.start
    before = multiprocessing.active_children()

    def refuse(process):
        started.append(process)
        if len(started) == 2:  # the second worker of the remedy
            raise BlockingIOError(11, "Resource temporarily unavailable")
        start(process)

    expected, _ = epochs(make)
    with applied(workers, {"num_workers": 2}) as context:
        monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
        found, _ = epochs(make)

    assert found == expected
    assert "could not be started: BlockingIOError" in last_reason(context)
    assert multiprocessing.active_children() == before


def test_workers_that_hang_do_not_hang_the_loop(monkeypatch):
    monkeypatch.setattr("headway.data.workers.worker_iterators.PATIENCE_S", 1.0)
    expected, _ = epochs(lambda: DataLoader(HangsInWorkers(), 5))
    with applied(workers, {"num_workers": 2}) as context:
        found, _ = epochs(lambda: DataLoader(HangsInWorkers(), 5))

    assert found == expected
    assert "made no batch" in last_reason(context)


def test_a_wait_for_any_child_finds_none_of_the_workers(monkeypatch):
    def wait3(options):
        return 0, 0, None

    monkeypatch.setattr(os, "wait3", wait3)
    with applied(workers, {"num_workers": 2}) as context:
        loader = DataLoader(Squares(), 5)
        batches = iter(loader)
        next(batches)
        os.wait3(os.WNOHANG)

        assert len(list(batches)) == 7
        assert last_reason(context) == WAITS


QUEUED = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset
from headway.data.workers.apply import workers
from tests.remedy_context import applied
class Rows(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        return torch.zeros(1 << 13) + index
with applied(workers, {"num_workers": 2, "prefetch_factor": 32, "persistent_workers": False}):
    iterator = iter(DataLoader(Rows(), 4))
    next(iterator)
    print(*[worker.pid for worker in iterator._workers], flush=True)
    time.sleep(600)
"""


LATE = """
import multiprocessing.process, os, time
training = os.getpid()
def wait_for_its_end():
    while multiprocessing.process._children and os.getppid() == training:  # only the second worker has a sibling
        time.sleep(0.01)
os.register_at_fork(after_in_child=wait_for_its_end)
"""


@pytest.mark.parametrize("begins", ["", LATE])
def test_workers_leave_a_full_pipe_where_the_training_process_was_killed(begins):
    command = [sys.executable, "-c", begins + QUEUED]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        started = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        process.kill()
    _, alive = psutil.wait_procs(started, timeout=60)
    for worker in alive:
        worker.kill()

    assert len(started) == 2
    assert not alive
