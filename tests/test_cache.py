"""The example cache as a remedy: equal batches, each example read once, copies handed out; else left alone."""

import ctypes
import mmap
import os
from contextlib import ExitStack

import pytest
import torch
from torch.utils.data import DataLoader

from headway.data import DataLoader as OwnLoader
from headway.data.bytes import scrutiny
from headway.data.bytes.torch_examples import encode
from headway.data.cached.apply import cache
from headway.data.guard.decisions import NOT_TRIED
from headway.data.workers.apply import workers
from headway.runtime.in_rank.remedy import Applied, RefusedRemedy
from tests.datasets import Sized
from tests.loaders_made import Stream
from tests.remedy_context import applied

READS = mmap.mmap(-1, 4096)
"""How often each example was read, shared with forked workers."""

ADDRESS = ctypes.addressof(ctypes.c_char.from_buffer(READS))
"""Where it lies: a dataset that knows only that has no state that a look could miss."""


@pytest.fixture
def rarely(monkeypatch):
    """Compare only the first example that each reader finds in a pass, and the first of each size."""
    monkeypatch.setattr(scrutiny, "CHECK_FIRST", 0)
    monkeypatch.setattr(scrutiny, "CHECK_EVERY", 10**9)


class Counted(Sized):
    """Pure as far as anybody can see; the reads are counted outside."""

    size = 30

    def __getitem__(self, index):
        ctypes.c_uint8.from_address(ADDRESS + index).value += 1
        return {"x": torch.full((3,), float(index)), "y": index}


class CountedMany(Counted):
    """Reads many at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Noisy(Counted):
    def __getitem__(self, index):
        return torch.rand(1)


def read(loader, num_epochs=3):
    """Return all batches as plain lists; every batch is spoilt after reading, as training might."""
    READS[:] = bytes(4096)
    seen = []
    for _ in range(num_epochs):
        for batch in loader:
            seen.append((batch["x"].tolist(), batch["y"].tolist()))
            batch["x"].zero_()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Counted, CountedMany])
def test_batches_are_equal_and_each_example_is_read_once(dataset, num_workers, rarely):
    def make():
        torch.manual_seed(1)
        return DataLoader(dataset(), 4, shuffle=True, num_workers=num_workers)

    plain = read(make())
    with applied(cache, {"bytes": 1 << 20}) as context:
        cached = read(make())

    assert cached == plain
    checked = 2 * max(1, num_workers) + 1  # each reader of the later passes compares its first, and one size differs
    assert 30 <= sum(READS[:30]) <= 30 + checked
    assert isinstance(context.outcomes[-1], Applied)


class Scaled(Counted):
    """Examples go by the class, by the environment and by torch's default type."""

    factor = 1.0

    def __getitem__(self, index):
        scale = self.factor * float(os.environ.get("FACTOR", "1"))
        return {"x": scale * torch.full((3,), index / 3, dtype=torch.get_default_dtype()), "y": index}


@pytest.mark.parametrize("change", ["class", "environment", "default type"])
def test_what_the_loop_changes_within_a_pass_is_read_at_once(change, rarely, monkeypatch):
    def made():
        seen = []
        monkeypatch.setattr(Scaled, "factor", 1.0)
        monkeypatch.delenv("FACTOR", raising=False)
        loader = DataLoader(Scaled(), 4)
        try:
            for epoch in range(3):
                for step, batch in enumerate(loader):
                    seen.append((batch["x"].dtype, batch["x"].tolist()))
                    if (epoch, step) == (1, 2) and change == "class":
                        Scaled.factor = 2.0
                    elif (epoch, step) == (1, 2) and change == "environment":
                        os.environ["FACTOR"] = "3"
                    elif (epoch, step) == (1, 2):
                        torch.set_default_dtype(torch.float64)
        finally:
            torch.set_default_dtype(torch.float32)
        return seen

    plain = made()
    with applied(cache, {"bytes": 1 << 20}) as context, pytest.warns(RuntimeWarning, match="what it goes by was"):
        cached = made()

    assert cached == plain
    last = context.outcomes[-1].facts["loaders"][-1]
    assert "what it goes by" in last["reason_not_applied"]
    assert last["about"] == "dataset"


def test_under_other_modes_the_dataset_itself_is_read_and_the_cache_stays(rarely):
    with applied(cache, {"bytes": 1 << 20}) as context:
        loader = DataLoader(Counted(), 4)
        read(loader, num_epochs=1)
        with torch.no_grad():
            read(loader, num_epochs=1)
            without = sum(READS[:30])
        read(loader, num_epochs=1)

    assert without == 30
    assert sum(READS[:30]) <= 3
    assert isinstance(context.outcomes[-1], Applied)


def test_the_budget_holds_and_the_rest_is_read_as_before(rarely):
    size = len(encode(Counted()[3]))
    with applied(cache, {"bytes": 10 * size}):
        cached = read(DataLoader(Counted(), 4), num_epochs=2)

    assert cached == read(DataLoader(Counted(), 4), num_epochs=2)
    with applied(cache, {"bytes": 10 * size}):
        read(DataLoader(Counted(), 4), num_epochs=2)
    assert 50 <= sum(READS[:30]) <= 54  # 60 less the ten that fit, checks, give or take sizes of small numbers


def test_the_users_objects_stay_what_they_are():
    dataset = Counted()
    loader = DataLoader(dataset, 4)
    with applied(cache, {"bytes": 1 << 20}):
        read(loader)

        assert loader.dataset is dataset
        assert vars(dataset) == {"size": 30}


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Noisy(), "draws random numbers"),
        (Stream(), "not map-style"),
        ([{"x": torch.zeros(1), "y": 0}], "in memory as it is"),
        (Counted(0), "empty"),
    ],
    ids=["noisy", "stream", "list", "empty"],
)
def test_what_cannot_be_kept_is_left_alone_with_a_reason(dataset, reason):
    with applied(cache, {"bytes": 1 << 20}) as context:
        list(DataLoader(dataset, 2))

    assert isinstance(context.outcomes[-1], RefusedRemedy)
    assert reason in context.outcomes[-1].reason


def test_two_datasets_share_one_budget():
    with applied(cache, {"bytes": 40 * len(encode(Counted()[3]))}) as context:
        loaders = [DataLoader(Counted(30), 4) for _ in range(3)]
        for loader in loaders:
            read(loader, 1)

    decisions = context.outcomes[-1].facts["loaders"]
    assert ["reason_not_applied" in decision for decision in decisions] == [False, False, True]


def test_datasets_with_the_same_facts_are_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr("headway.data.cached.apply.probed", lambda loader: tried.append(loader) or (None, 100))
    with applied(cache, {"bytes": 1 << 20}) as context:
        for size in (8, 8, 12):
            read(DataLoader(Counted(size), 4), 1)

    assert len(tried) == 1
    assert [fact["examples"] for fact in context.outcomes[-1].facts["loaders"]] == [8, 12]


def test_a_dataset_is_cached_from_a_later_pass_on_when_trying_costs_little_by_then(rarely):
    now = [0.0]
    with applied(cache, {"bytes": 1 << 20}) as context:
        budget = context.shared["data.trials"]
        budget.clock, budget.began, budget.spent_s = lambda: now[0], 0.0, 1.0
        loader = DataLoader(Counted(), 4)
        read(loader, 1)
        first = context.outcomes[-1]
        now[0] = 51.0
        read(loader, 1)
        read(loader, 1)

    assert first.reason == NOT_TRIED
    assert isinstance(context.outcomes[-1], Applied)
    assert sum(READS[:30]) <= 3


class Augmented(Counted):
    """Multiplies by a factor of its transform, which a script may change."""

    def __init__(self, size=30):
        super().__init__(size)
        self.transform = Factor()
        self.epoch = 0

    def __getitem__(self, index):
        return {"x": torch.full((3,), float(index) * self.transform.factor + OFFSET[0]), "y": index + self.epoch}


class Factor:
    factor = 1.0

    def __init__(self):
        self.factor = 2.0


OFFSET = [0.0]
"""Something that a dataset reads and nobody can see."""


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("change", ["epoch", "transform", "nested", "outside"])
def test_a_dataset_that_the_script_changes_between_passes_is_read_as_it_is_now(change, num_workers):
    def batches():
        OFFSET[0] = 0.0
        dataset = Augmented()
        loader = DataLoader(torch.utils.data.Subset(dataset, range(20)), 4, num_workers=num_workers)
        seen = []
        for epoch in range(3):
            seen += [(batch["x"].tolist(), batch["y"].tolist()) for batch in loader]
            if change == "epoch":
                dataset.epoch = epoch + 1
            elif change == "transform":
                dataset.transform = Factor()
                dataset.transform.factor = 3.0 + epoch
            elif change == "nested":
                dataset.transform.factor = 3.0 + epoch
            else:
                OFFSET[0] = 1.0 + epoch
        return seen

    plain = batches()
    with applied(cache, {"bytes": 1 << 20}) as context:
        cached = batches()

    assert cached == plain
    if change != "outside":
        assert isinstance(context.outcomes[-1], Applied), context.outcomes
        assert "it was changed" in str(context.outcomes[-1].facts)


@pytest.mark.slow
@pytest.mark.parametrize("remedies", [(cache,), (cache, workers)])
@pytest.mark.parametrize("at", [7, 10, 12])
def test_a_dataset_that_the_script_changes_during_a_pass_is_read_as_it_is_now(remedies, at, rarely):
    def batches():
        dataset = Augmented(20)
        loader, seen = DataLoader(dataset, 4), []
        for _ in range(4):
            for batch in loader:
                seen.append((batch["x"].tolist(), batch["y"].tolist()))
                dataset.transform.factor += len(seen) == at
        return seen

    plain = batches()
    with ExitStack() as stack:
        for remedy in remedies:
            stack.enter_context(applied(remedy, {"bytes": 1 << 20} if remedy is cache else {"num_workers": 2}))
        assert batches() == plain


class OpenedLate(Sized):
    """Opens its file when it is first read, as tar and zip files are."""

    size = 20
    file = None

    def __getitem__(self, index):
        if self.file is None:
            self.file = open(__file__, "rb")  # noqa: SIM115 - for as long as the dataset lives
        self.file.seek(index)
        return {"byte": self.file.read(1)[0]}


@pytest.mark.parametrize("remedies", [(cache, workers), (workers, cache)])
def test_a_file_that_the_first_reading_opens_is_no_change_beside_workers(remedies, rarely):
    def batches():
        dataset = OpenedLate()
        loader = DataLoader(dataset, 4)
        seen = [batch["byte"].tolist() for _ in range(4) for batch in loader]
        if dataset.file is not None:
            dataset.file.close()
        return seen

    plain, contexts = batches(), []
    with ExitStack() as stack:
        for remedy in remedies:
            settings = {"bytes": 1 << 20} if remedy is cache else {"num_workers": 2}
            contexts.append(stack.enter_context(applied(remedy, settings)))
        assert batches() == plain

    outcomes = [context.outcomes[-1] for context in contexts]
    assert all(isinstance(outcome, Applied) for outcome in outcomes), outcomes
    assert "reason_not_applied" not in str([outcome.facts for outcome in outcomes])


class Together(Counted):
    """Gives many examples in another form than one."""

    def __getitems__(self, indices):
        return {"x": torch.tensor(indices), "y": torch.tensor(indices)}


def test_headways_own_loader_keeps_its_examples_itself():
    with applied(cache, {"bytes": 10**6}) as context:
        list(OwnLoader(Counted(8), 4))

    assert isinstance(context.outcomes[-1], RefusedRemedy)
    assert "headway's own loader" in context.outcomes[-1].reason


def test_a_dataset_that_reads_many_in_another_form_is_left_alone():
    loader = DataLoader(Together(), 4, collate_fn=lambda batch: batch)
    with applied(cache, {"bytes": 1 << 20}) as context:
        assert next(iter(loader))["y"].tolist() == [0, 1, 2, 3]

    assert "depends on what is read with it" in context.outcomes[-1].reason


class OneOdd(Counted):
    """One example cannot be pickled."""

    def __getitem__(self, index):
        return (lambda: 0) if index == 5 else index


def test_an_example_that_cannot_be_kept_is_read_anew():
    loader = DataLoader(OneOdd(), None)
    with applied(cache, {"bytes": 1 << 20}) as context:
        kinds = [[type(example).__name__ for example in loader] for _ in range(2)]

    assert kinds[0] == kinds[1] == ["int"] * 5 + ["function"] + ["int"] * 24
    assert isinstance(context.outcomes[-1], Applied)


def test_the_probe_opens_nothing_that_the_scripts_own_workers_would_inherit():
    class Lazy(Counted):
        opened = None

        def __getitem__(self, index):
            self.opened = self.opened or index + 1
            return {"x": torch.zeros(1), "y": index}

    dataset = Lazy()
    with applied(cache, {"bytes": 1 << 20}) as context:
        read(DataLoader(dataset, 4, num_workers=1), 1)

    assert dataset.opened is None
    assert isinstance(context.outcomes[-1], Applied)


def test_datasets_that_the_script_lets_go_give_back_budget_and_open_files(rarely):
    kept = []
    with applied(cache, {"bytes": 100_000}) as context:
        num_open = len(os.listdir("/proc/self/fd"))
        for _ in range(40):
            kept.append(Counted())  # in the place of one that is gone
            dataset = Counted()
            assert len(list(DataLoader(dataset, 5))) == 6
        num_open = len(os.listdir("/proc/self/fd")) - num_open

    assert num_open <= 4
    assert isinstance(context.outcomes[-1], Applied)
