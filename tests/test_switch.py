"""Threads as a remedy: same batches, same order, same random numbers after; else left alone with a reason."""

import io
import json
import random
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.data import DataLoader as OwnLoader
from headway.data.workers.torch_threads import threads
from headway.runtime.in_rank.remedy import Applied, RefusedRemedy
from tests.datasets import Sized
from tests.loaders_made import ByTurns, Stream, epochs, plain, unthreadable
from tests.paths import ROOT, python_path
from tests.recorded import environment
from tests.remedy_context import applied

PARAMETERS = {"num_workers": 3, "prefetch_factor": 2}


@pytest.fixture(autouse=True)
def _threads_that_do_not_wait(monkeypatch):
    """How much threads wait for each other depends on what else the host does; that it is asked has a test below."""
    monkeypatch.setattr("headway.data.workers.torch_threads.lock_wait_fraction", lambda work, keys: 0.0)


class Squares(Sized):
    """A pure dataset, now and then slow."""

    def __getitem__(self, index):
        if index % 5 == 0:
            time.sleep(0.0005)
        return torch.tensor([index, index**2]), {"name": str(index)}


class Whole(Squares):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Columns(Squares):
    """Reads batches, as something that is no list."""

    def __getitems__(self, indices):
        return {"number": torch.tensor(indices)}


def as_it_is(batch):
    return batch


class OpensLate(Squares):
    """Opens what it reads from at its first example, as workers want it."""

    file = None

    def __getitem__(self, index):
        self.file = self.file or open(__file__, "rb")  # noqa: SIM115
        self.file.seek(index)
        return torch.tensor([*self.file.read(4)])


class ComputesLate(Squares):
    table = None

    def __getitem__(self, index):
        self.table = torch.arange(100) ** 2 if self.table is None else self.table
        return self.table[index]


class Noisy(Squares):
    def __getitem__(self, index):
        return random.random()


MADE = {
    "shuffled": lambda: DataLoader(Squares(), 5, shuffle=True),
    "in order": lambda: DataLoader(Squares(), 5),
    "one by one": lambda: DataLoader(Squares(), None),
    "own count": lambda: DataLoader(Squares(), 5, sampler=RandomSampler(Squares(), replacement=True, num_samples=20)),
    "own generator": lambda: DataLoader(Squares(), 5, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "dealt": lambda: DataLoader(Squares(), 5, sampler=DistributedSampler(Squares(), 2, 1), drop_last=True),
    "whole batches": lambda: DataLoader(Whole(), 5, shuffle=True),
    "two workers": lambda: DataLoader(Squares(), 5, shuffle=True, num_workers=2),
    "kept workers": lambda: DataLoader(Squares(), 5, shuffle=True, num_workers=1, persistent_workers=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [None, 2], ids=["whole", "early"])
@pytest.mark.parametrize("name", MADE)
def test_batches_and_later_random_numbers_are_the_same(name, stop_after):
    expected, _ = epochs(MADE[name], stop_after=stop_after)

    with applied(threads, PARAMETERS) as context:
        found, _ = epochs(MADE[name], stop_after=stop_after)

    assert found == expected
    assert isinstance(context.outcomes[-1], Applied)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Stream()), "IterableDataset"),
        (DataLoader(Squares(), sampler=ByTurns()), "read it ahead"),
        (DataLoader(Squares(), num_workers=1, worker_init_fn=print), "worker_init_fn prepares a process"),
        (DataLoader(Noisy()), "draws random numbers"),
        (DataLoader(OpensLate(), 4), "open BufferedReader, which threads would share"),
        (DataLoader(ComputesLate(), 4), "its first reading sets what threads would share"),
        (DataLoader(Squares(0)), "empty"),
        (DataLoader(Columns(), 4, collate_fn=as_it_is), "another batch of its examples than torch does"),
        (OwnLoader(Squares(), 4), "headway's own loader"),
    ],
    ids=[
        "stream", "own sampler", "worker_init_fn", "noisy", "opens late", "computes late", "empty", "columns",
        "own loader",
    ],
)  # fmt: skip
def test_a_loader_that_threads_could_change_or_slow_down_is_left_alone(loader, reason):
    assert re.search(reason, unthreadable(loader))

    with applied(threads, PARAMETERS) as context:
        iterator = iter(loader)

    assert type(iterator).__name__ != "ScriptThreads"
    if not isinstance(loader, OwnLoader):  # which makes its iterators without torch's method
        assert isinstance(context.outcomes[-1], RefusedRemedy)


def test_a_loader_whose_threads_wait_for_each_other_is_left_to_processes(monkeypatch):
    monkeypatch.setattr("headway.data.workers.torch_threads.lock_wait_fraction", lambda work, keys: 0.4)

    assert "two threads wait 40% of their time for the interpreter lock" in unthreadable(DataLoader(Squares(), 4))


def test_datasets_that_were_recorded_to_block_are_not_tried_for_speed_again(monkeypatch):
    monkeypatch.setattr("headway.data.workers.torch_threads.slow", lambda loader: "slow")
    for names, reason in ([], "slow"), (["Squares"], None):
        with applied(threads, {**PARAMETERS, "blocked_datasets": names}) as context:
            list(DataLoader(Squares(), 4))
            outcome = context.outcomes[-1]
        assert getattr(outcome, "reason", None) == reason


WHERE, DRAW = "random", "randrange"  # texts that no code names


class Phased(Squares):
    """Its examples depend on an epoch that the script sets; from the third on they are drawn."""

    epoch = 0

    def __getitem__(self, index):
        time.sleep(0.0005)
        return torch.tensor([index, self.epoch, getattr(sys.modules[WHERE], DRAW)(100) if self.epoch > 1 else 0])


def test_what_the_script_changes_between_epochs_is_seen_and_tried_again():
    def batches():
        random.seed(1)
        dataset = Phased()
        loader = DataLoader(dataset, 5, shuffle=True, generator=torch.Generator().manual_seed(1))
        seen = []
        for epoch in range(4):
            dataset.epoch = epoch
            seen += [batch.tolist() for batch in loader]
        return seen

    expected = batches()
    with applied(threads, PARAMETERS) as context:
        assert batches() == expected
    found = {fact.get("about"): fact.get("reason_not_applied", "") for fact in context.outcomes[-1].facts["loaders"]}
    assert "draws random numbers" in found["dataset"]


@pytest.mark.slow
def test_scripts_that_draw_between_the_iterator_and_its_first_batch_get_the_same_numbers():
    def script():
        torch.manual_seed(7)
        first, second, seen = MADE["shuffled"](), MADE["two workers"](), []
        for _ in range(2):
            iterators = iter(first), iter(second)
            seen += [torch.rand(1).tolist(), *(plain(batch) for each in zip(*iterators, strict=True) for batch in each)]
        return seen, torch.rand(1).item()

    expected = script()
    with applied(threads, PARAMETERS):
        assert script() == expected


def test_an_exception_of_the_dataset_keeps_its_type():
    class Broken(Squares):
        def __getitem__(self, index):
            if index == 11:
                raise KeyError("eleven")
            return index

    with applied(threads, PARAMETERS), pytest.raises(KeyError, match="eleven"):
        list(DataLoader(Broken(), 4))


def test_undone_means_undone():
    before = DataLoader._get_iterator
    with applied(threads, PARAMETERS):
        assert DataLoader._get_iterator is not before

    assert DataLoader._get_iterator is before


SCRIPT = """
    import time, torch
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self):
            return 96

        def __getitem__(self, index):
            time.sleep(0.004)
            return torch.full((64,), float(index))

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    loader = DataLoader(Slow(), 8, shuffle=True)
    for epoch in range(3):
        begin = time.perf_counter()
        for batch in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print("loss", loss.item().hex(), flush=True)
    print("took", time.perf_counter() - begin)
"""


@pytest.mark.slow
def test_an_unmodified_script_gets_bit_equal_losses_in_less_time(tmp_path):
    """32 ms of sleep per batch, by four threads at once; the first epoch also holds the trial, and does not count."""
    script = tmp_path / "train.py"
    script.write_text("\n".join(line[4:] for line in SCRIPT.splitlines()))
    plan = tmp_path / "plan.json"
    write_plan(
        PlanFile((Remedy("data.threads", {"num_workers": 4, "prefetch_factor": 2}, allow="data.threads"),)), plan
    )
    outputs = []
    for more in ((), ("--apply", str(plan))):
        run = tmp_path / f"run-{len(outputs)}"
        command = [sys.executable, "-m", "headway.cli", "run", "--windows", "0", "--out", str(run), *more]
        done = subprocess.run(
            [*command, "--", str(script)],
            env=environment(None, PYTHONPATH=python_path(ROOT)), capture_output=True, text=True, timeout=120,
            cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        outputs.append([line.split() for line in done.stdout.splitlines()])
    losses = [[row[1] for row in rows if row[:1] == ["loss"]] for rows in outputs]
    took = [[float(row[1]) for row in rows if row[:1] == ["took"]][-1] for rows in outputs]
    facts = json.loads((tmp_path / "run-1" / "run.json").read_text())

    assert len(losses[0]) == 36
    assert losses[0] == losses[1]
    assert [row["reason_not_applied"] for row in facts["applied"] if row["name"] == "data.threads"] == [None]
    assert facts["loaders"]["0"]["workers"] == "threads"
    assert took[1] < 0.6 * took[0]


def test_tensors_are_left_to_torch():
    """Reading them takes so little that two threads mostly wait for each other, or is taken: either way it is exact."""
    expected, _ = epochs(lambda: DataLoader(TensorDataset(torch.arange(40)), 4, shuffle=True))

    with applied(threads, PARAMETERS):
        assert epochs(lambda: DataLoader(TensorDataset(torch.arange(40)), 4, shuffle=True))[0] == expected


class Buffered(Squares):
    """Reads into a buffer of its own, and hands out a copy."""

    def __init__(self):
        super().__init__()
        self.buffer = np.zeros(4)

    def __getitem__(self, index):
        self.buffer[:] = index
        if index > 2:  # later than a trial looks
            time.sleep(0.001)
        return torch.from_numpy(self.buffer.copy())


class Noting(Squares):
    """Notes what it reads."""

    def __getitem__(self, index):
        self.now = index
        if index > 2:  # later than a trial looks
            time.sleep(0.001)
        return torch.tensor(self.now)


class Through(Squares):
    """Reads in a file in memory."""

    def __init__(self):
        super().__init__()
        self.file = io.BytesIO(bytes(range(37)))

    def __getitem__(self, index):
        self.file.seek(index)
        if index > 2:  # later than a trial looks
            time.sleep(0.001)
        return torch.tensor(list(self.file.read(1)))


@pytest.mark.parametrize("dataset", [Buffered, Noting, Through])
def test_a_dataset_whose_readings_share_a_place_is_read_by_one_thread(dataset):
    expected, _ = epochs(lambda: DataLoader(dataset(), 5))
    with applied(threads, PARAMETERS) as context:
        found, _ = epochs(lambda: DataLoader(dataset(), 5))

    assert found == expected
    assert isinstance(context.outcomes[-1], RefusedRemedy)
