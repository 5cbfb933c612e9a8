"""Verification of batches under a remedy: equal ones cost nothing but time, a changed one is found and put right."""

import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.data.bytes.torch_examples import equal
from headway.data.cached.apply import cache
from headway.data.workers import hand_over as in_process_tail
from headway.data.workers.apply import workers
from headway.data.workers.torch_threads import threads
from tests.datasets import Sized
from tests.loaders_made import Squares
from tests.paths import ROOT, python_path
from tests.recorded import environment
from tests.remedy_context import TestContext, applied, apply

REMEDIES = {
    "threads": (threads, {"num_workers": 2, "prefetch_factor": 2}),
    "workers": (workers, {"num_workers": 2, "prefetch_factor": 2}),
    "cache": (cache, {"bytes": 1 << 20}),
}
RATIO = [0.0]
ADDRESS = id(RATIO)
"""Where it lies: code that knows only that gets at it, and no look does."""


@pytest.fixture(autouse=True)
def _threads_that_do_not_wait(monkeypatch):
    """How much threads wait for each other depends on what else the host does."""
    monkeypatch.setattr("headway.data.workers.torch_threads.lock_wait_fraction", lambda work, keys: 0.0)


class Mixed(Sized):
    """Its examples depend on a number outside, which the loop changes, and which no look finds."""

    size = 40

    def __getitem__(self, index):
        return torch.tensor([float(index), ctypes.cast(ADDRESS, ctypes.py_object).value[0]])


class Named(Mixed):
    """The same, and its code names the number: remedies see when the loop changes it."""

    def __getitem__(self, index):
        return torch.tensor([float(index), RATIO[0]])


class ByWorkers(Squares):
    """Its examples, but for the first ones, which a trial reads, depend on how many workers there are."""

    def __getitem__(self, index):
        return super().__getitem__(index) + (index > 2) * getattr(get_worker_info(), "num_workers", 0)


def passes(loader, *, changing=False, at=None, count=2):
    """Return the batches of some passes, and a random number after them.

    The number outside changes before each batch, or before batch `at` alone.
    """
    torch.manual_seed(3)
    RATIO[0] = 0.0
    found = []
    for _ in range(count):
        for batch in loader:
            found.append(batch.clone())
            RATIO[0] += changing or len(found) == at
    return found, torch.rand(())


def facts_of(context):
    return context.outcomes[-1].json()["facts"]


SEEN = {
    "nothing": (lambda: Squares(40), {"count": 4}, (40, 7)),  # 2, 8, 32, and the first one of each pass: 0, 10, 20, 30
    "a change": (Named, {"at": 5, "count": 1}, (10, 4)),  # 0, 2, 8, and 5
}
"""What a remedy sees of a loop -> the dataset, how it is read, the batches and those that are compared."""


@pytest.mark.filterwarnings("ignore:Named is cached no more")
@pytest.mark.parametrize("name", REMEDIES)
@pytest.mark.parametrize("seen", [pytest.param("nothing", marks=pytest.mark.slow), "a change"])
def test_a_remedy_is_found_equal_also_at_the_batch_at_which_it_sees_a_change_and_stays(name, seen):
    dataset, read, (batches, compared) = SEEN[seen]
    expected = passes(DataLoader(dataset(), 4, shuffle=True), **read)

    with applied(*REMEDIES[name], verify=True) as context:
        assert equal(passes(DataLoader(dataset(), 4, shuffle=True), **read), expected)

    counts = {"batches": batches, "compared": compared, "equal": compared, "unequal": 0}
    assert facts_of(context)["verification"] == counts
    assert facts_of(context)["not_compared"] == {}
    assert context.failures == []


@pytest.mark.parametrize("name", ["threads", "workers"])
def test_what_is_wrong_from_a_change_on_is_replaced_at_once(name, monkeypatch):
    expected = passes(DataLoader(Named(), 4, shuffle=True), at=5, count=1)
    right = in_process_tail.InProcessTail._next_data
    monkeypatch.setattr(in_process_tail.InProcessTail, "_next_data", lambda rest: right(rest) + 1)

    with applied(*REMEDIES[name], verify=True) as context:
        assert equal(passes(DataLoader(Named(), 4, shuffle=True), at=5, count=1), expected)

    assert facts_of(context)["verification"] == {"batches": 6, "compared": 3, "equal": 2, "unequal": 1}


def test_a_first_batch_that_is_replaced_leaves_the_generators_where_the_script_s_own_does(monkeypatch):
    expected = passes(DataLoader(Squares(40), 4, shuffle=True))

    for name in REMEDIES:
        with monkeypatch.context() as patched, applied(*REMEDIES[name], verify=True) as context:
            patched.setattr("headway.data.guard.verification.equal", lambda *_: False)
            assert equal(passes(DataLoader(Squares(40), 4, shuffle=True)), expected)
        assert facts_of(context)["verification"]["unequal"] == 1


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_the_script_s_that_stay_can_only_be_compared_in_their_first_pass(persistent):
    with applied(*REMEDIES["workers"], verify=True) as context:
        passes(DataLoader(Squares(16), 4, num_workers=1, persistent_workers=persistent), count=3)

    compared = 1 if persistent else 3
    assert facts_of(context)["verification"] == {"batches": 12, "compared": compared, "equal": compared, "unequal": 0}
    assert sum(facts_of(context)["not_compared"].values()) == 3 - compared


def test_a_batch_under_two_remedies_is_counted_once():
    context = TestContext(verify=True)
    try:
        for remedy, parameters in (REMEDIES["cache"], REMEDIES["workers"]):
            apply(remedy, parameters, context)
        passes(DataLoader(Squares(40), 4), count=1)
    finally:
        for undo in reversed(context.undos):
            undo()

    found = {outcome.name: outcome.json()["facts"]["verification"] for outcome in context.outcomes}
    assert len(found) == 2
    assert [sum(counts[name] for counts in found.values()) for name in ("batches", "compared")] == [10, 3]


@pytest.mark.parametrize("name", ["threads", "workers"])
def test_a_changed_batch_is_replaced_and_all_later_ones_are_the_script_s_own(name, capfd):
    expected, after = passes(DataLoader(Mixed(), 4, shuffle=True), changing=True)

    with applied(*REMEDIES[name], verify=True) as context:
        found, drawn = passes(DataLoader(Mixed(), 4, shuffle=True), changing=True)

    assert not equal(found[1], expected[1])  # read ahead, and not one of those that are compared
    assert equal(found[2:], expected[2:])
    assert torch.equal(drawn, after)
    assert facts_of(context)["verification"] == {"batches": 3, "compared": 2, "equal": 1, "unequal": 1}
    assert [(row["dataset"], row["about"]) for row in facts_of(context)["withdrawn"]] == [("Mixed", "dataset")]
    assert f"data.{name} changed batch 2 of Mixed" in capfd.readouterr().err


def test_of_a_loader_with_workers_the_first_batch_is_made_by_a_worker_like_its_own():
    expected = passes(DataLoader(ByWorkers(16), 4, num_workers=1))[0]

    with applied(*REMEDIES["workers"], verify=True) as context:
        loader = DataLoader(ByWorkers(16), 4, num_workers=1)
        first, second = passes(loader, count=1)[0], passes(loader, count=1)[0]

    assert not equal(first, expected[:4])
    assert equal(second, expected[4:])
    assert facts_of(context)["verification"]["unequal"] == 1


def test_a_batch_that_cannot_be_compared_is_counted_with_the_reason(monkeypatch):
    monkeypatch.setattr("headway.data.guard.verification.in_child", lambda *_, **__: ("the child ended or hung", 0))
    expected = passes(DataLoader(Squares(40), 4))

    with applied(*REMEDIES["threads"], verify=True) as context:
        assert equal(passes(DataLoader(Squares(40), 4)), expected)

    assert facts_of(context)["verification"]["compared"] == 0
    assert facts_of(context)["not_compared"] == {"the child ended or hung": 4}


SCRIPT = """
import ctypes, sys, torch
from torch.utils.data import DataLoader, Dataset
ratio = [0.0]
address = id(ratio)
class Mixed(Dataset):
    def __len__(self): return 48
    def __getitem__(self, index):
        return torch.full((3,), index / 48 + ctypes.cast(address, ctypes.py_object).value[0])
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in DataLoader(Mixed(), 4):
    optimizer.zero_grad(); model(batch).mean().backward(); optimizer.step()
    ratio[0] += "change" in sys.argv
if "fail" in sys.argv: sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [([], 0), (["change"], 3), (["change", "fail"], 7)])
def test_a_run_whose_batches_were_changed_exits_with_3_unless_the_script_failed(tmp_path, words, code):
    (tmp_path / "train.py").write_text(SCRIPT)
    write_plan(PlanFile((Remedy("data.workers", {"num_workers": 2}),)), tmp_path / "plan.json")
    command = [sys.executable, "-m", "headway.cli", "run", "--windows", "0", "--out", "run", "--apply", "plan.json"]
    done = subprocess.run(
        [*command, "--verify", "--json", "--", "train.py", *words],
        env=environment(None, PYTHONPATH=python_path(ROOT)), capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip

    assert done.returncode == code, done.stderr[-2000:]
    found = json.loads(done.stdout)["verified"]
    assert found["batches"] == (3 if words else 12)
    assert (found["unequal"], "taken away from this loader" in done.stderr) == ((1, True) if words else (0, False))
    assert found["compared"] == found["equal"] + found["unequal"] >= 2


@dataclass
class Collator:
    """Collates as those of transformers do: an object without a hash."""

    scale: int = 1

    def __call__(self, examples):
        return torch.stack(examples) * self.scale


def test_batches_of_a_collator_without_a_hash_are_compared_too():
    with applied(*REMEDIES["workers"], verify=True) as context:
        found = list(DataLoader(Squares(8), 4, collate_fn=Collator()))

    assert len(found) == 2
    assert facts_of(context)["verification"]["equal"] == 1


class Normalised(Squares):
    """Its examples are means over so many numbers that intra-op threads share them."""

    rows = torch.randn(4, 1 << 20, generator=torch.Generator().manual_seed(1))

    def __getitem__(self, index):
        return self.rows[index % 4].sum()


def test_the_scripts_own_batch_is_made_with_as_many_intra_op_threads_as_it_has():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with applied(*REMEDIES["cache"], verify=True) as context:
            list(DataLoader(Normalised(4), 2))
    finally:
        torch.set_num_threads(before)

    assert facts_of(context)["verification"] == {"batches": 2, "compared": 1, "equal": 1, "unequal": 0}
