"""Decisions by facts: a loader made anew is the same case, another setting is another one, and trials have a budget."""

import os
import signal
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from headway.core.machine.child import said
from headway.data.cached.apply import cache
from headway.data.guard.decisions import NOT_TRIED, Budget, Decisions, facts_of
from headway.data.guard.outcome import MOST_DECISIONS, OutcomeWriter
from headway.data.remedies import CacheParameters
from headway.data.service.apply import server
from headway.data.workers.apply import workers
from headway.data.workers.torch_threads import threads
from headway.runtime.in_rank.remedy import RefusedRemedy
from headway.trace.events import loader_facts
from tests.loaders_made import Squares
from tests.remedy_context import TestContext, apply

HOME = os.getpid()


class Buffer(Dataset):
    """Grows; its examples may be flipped at random."""

    def __init__(self, size=20, flip=0.0, transforms=()):
        self.rows, self.count = [(torch.zeros(2), k) for k in range(size)], size
        self.flip, self.transforms = flip, list(transforms)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.rows[index]


def joined(scale):
    return lambda rows: torch.stack([scale * row for row, _ in rows])


def first(rows, part=0):
    return rows[part]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (DataLoader(Buffer(20), 4), DataLoader(Buffer(90), 4)),
        (DataLoader(Buffer(), 4, collate_fn=joined(2)), DataLoader(Buffer(), 4, collate_fn=joined(2))),
        (DataLoader(TensorDataset(torch.zeros(9)), 4), DataLoader(TensorDataset(torch.ones(50)), 4)),
    ],
)
def test_loaders_that_differ_in_their_data_alone_are_one_case(one, other):
    assert facts_of(one) == facts_of(other)


@pytest.mark.parametrize(
    "other",
    [
        DataLoader(Buffer(flip=0.5), 4),
        DataLoader(Buffer(), 4, shuffle=True),
        DataLoader(Buffer(), 5),
        DataLoader(Buffer(), 4, collate_fn=first),
        DataLoader(Buffer(), 4, collate_fn=partial(first, part=1)),
        DataLoader(Buffer(transforms=[torch.nn.Flatten()]), 4),
        DataLoader(Buffer(), 4, collate_fn=joined(3)),
    ],
)
def test_another_setting_or_other_code_is_another_case(other):
    loaders = [DataLoader(Buffer(), 4), DataLoader(Buffer(), 4, collate_fn=partial(first, part=0)),
               DataLoader(Buffer(), 4, collate_fn=joined(2)), other]  # fmt: skip

    assert len({facts_of(loader) for loader in loaders}) == len(loaders)


def test_settings_of_the_dataset_do_not_count_where_only_speed_does():
    assert facts_of(DataLoader(Buffer(), 4), settings=False) == facts_of(
        DataLoader(Buffer(flip=1.0), 4), settings=False
    )


def test_trials_stop_at_one_percent_of_the_time_and_go_on_later(monkeypatch):
    monkeypatch.setattr(loader_facts, "TRIAL_S", 0.0)
    now = [100.0]
    tried = Decisions(Budget(lambda: now[0]))

    def trial():
        now[0] += 2.0
        return "no"

    answers = [tried.result(DataLoader(Buffer(), size), trial) for size in (2, 2, 3)]
    now[0] += 199.0
    answers.append(tried.result(DataLoader(Buffer(), 3), trial))

    assert answers == ["no", "no", NOT_TRIED, "no"]
    assert tried.budget.spent_s == 4.0


def test_a_loader_that_was_begun_with_is_asked_each_question_once_whatever_that_takes():
    now = [100.0]
    tried, loader = Decisions(Budget(lambda: now[0])), DataLoader(Buffer(), 4)

    def trial():
        now[0] += 2.0

    answers = [tried.result(loader, trial), tried.speed(loader, trial), tried.speed(DataLoader(Buffer(), 5), trial)]
    loader.dataset.flip = 0.25  # other facts: the same question again
    answers.append(tried.result(loader, trial))

    assert answers == [None, None, NOT_TRIED, NOT_TRIED]
    assert tried.budget.spent_s == 4.0


class Hanging(Squares):
    """Waits in a forked process for what only happens in this one."""

    def __getitem__(self, index):
        if os.getpid() != HOME:
            signal.pause()
        return super().__getitem__(index)


@pytest.mark.parametrize("first", ["cache", "workers"])
def test_a_dataset_that_hangs_in_a_child_does_so_once_for_all_remedies_and_objects(first, monkeypatch):
    remedies = {"cache": (cache, {"bytes": 1 << 20}), "workers": (workers, {}), "threads": (threads, {}),
                "server": (server, {})}  # fmt: skip
    expected, children = [batch.tolist() for batch in DataLoader(Hanging(12), 4)], []

    def counted(*arguments, **named):
        children.append(said(*arguments, **named))
        return children[-1]

    monkeypatch.setattr("headway.data.guard.trial.said", counted)
    context = TestContext(allow="result-equivalent")
    context.shared["data.trials"].longest_s = 0.2
    try:
        for name in sorted(remedies, key=lambda name: name != first):
            remedy, parameters = remedies[name]
            context.allow = "data.threads" if name == "threads" else "result-equivalent"
            apply(remedy, parameters, context)
        for _ in range(3):
            assert [batch.tolist() for batch in DataLoader(Hanging(12), 4)] == expected
    finally:
        for undo in reversed(context.undos):
            undo()

    assert [code for _, code in children].count(-signal.SIGKILL) == 1
    assert len(children) <= 4  # those that read as this process would are told its number, and do not hang
    reasons = {outcome.name: outcome.reason for outcome in context.outcomes if isinstance(outcome, RefusedRemedy)}
    assert len(reasons) == len(remedies)
    assert all("in a forked process took over" in reason for reason in reasons.values())


def test_a_report_of_ever_other_loaders_stays_short():
    report = OutcomeWriter("data.cache", CacheParameters(1), TestContext())
    report({"dataset": "Other", "reason_not_applied": "empty"})
    for size in range(3 * MOST_DECISIONS):
        report({"dataset": "Rollout", "examples": size})
    found = report._context.outcomes[-1].facts["loaders"]

    assert len(found) == MOST_DECISIONS + 1
    assert found[0]["dataset"] == "Other"
    assert found[-1]["examples"] == 3 * MOST_DECISIONS - 1
