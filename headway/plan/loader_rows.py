"""What a plan does with each loader of the run: the remedy that it takes, or why it takes none.

>>> from headway.trace.events.loader_facts import LoaderFacts
>>> row = Proposal("data.threads", "data", ("workers=4@0",), 2.0, (1.8, 2.2), applies=True, loaders=(0,),
...                left_alone={1: "it draws random numbers"})
>>> loaders = {"0": LoaderFacts(dataset="Train"), "1": LoaderFacts(dataset="Test")}
>>> [(row.remedies, row.reason) for row in loader_rows([row], [], ("data.threads",), loaders, evaluation={1})]
[(('data.threads',), ''), ((), 'data.threads: it draws random numbers')]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from headway.plan.proposal import Proposal, Refusal
from headway.trace.events.loader_facts import LoaderFacts


class LoaderRow(msgspec.Struct, frozen=True):
    """One entry of `loaders` in `headway plan --json`."""

    loader: int
    """Its group."""
    line: str | None = None
    """Where the script makes it."""
    dataset: str = ""
    """Class of its dataset."""
    used_by: str = ""
    """'training' or 'evaluation'."""
    remedies: tuple[str, ...] = ()
    """The chosen ones that are for it."""
    reason: str = ""
    """Why it takes none."""


def loader_rows(
    proposals: Sequence[Proposal],
    refused: Sequence[Refusal],
    chosen: Collection[str],
    loaders: Mapping[str, LoaderFacts],
    *,
    evaluation: Collection[int],
) -> list[LoaderRow]:
    """Return a row per loader: where it is, what reads it, the chosen remedies for it, or the reason for none.

    `evaluation` are the groups of the loaders that evaluations read.
    """
    about: list[Proposal | Refusal] = [row for row in proposals if row.loaders]
    about += [row for row in refused if row.left_alone]
    rows = []
    for name, facts in sorted(loaders.items(), key=lambda pair: int(pair[0])):
        group = int(name)
        taken = [row.name for row in proposals if row.name in chosen and group in row.loaders]
        used_by = "evaluation" if group in evaluation else "training"
        reason = "" if taken else _reason(group, about, chosen)
        rows.append(LoaderRow(group, facts.place or None, facts.dataset, used_by, tuple(taken), reason))
    return rows


def _reason(group: int, about: Sequence[Proposal | Refusal], chosen: Collection[str]) -> str:
    """Return why a loader takes no remedy: of the chosen ones if they leave it alone, else of the first that does."""
    leaving = [row for row in about if group in row.left_alone]
    if leaving:
        first = min(leaving, key=lambda row: row.name not in chosen)
        return f"{first.name}: {first.left_alone[group]}"
    if any(group in row.loaders for row in about if isinstance(row, Proposal)):
        return "no remedy for it is in the plan"
    return "the replayed steps did not wait for it" if about else "no remedy was considered"
