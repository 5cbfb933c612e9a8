"""Decisions by facts: a loader made anew is the same case, another setting is another one, and trials have a budget."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from headway.data.runtime import decisions
from headway.data.runtime.decisions import NOT_TRIED, Budget, Decisions, facts_of


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
    monkeypatch.setattr(decisions, "FIRST_S", 0.0)
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
