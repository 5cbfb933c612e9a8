"""Which loaders of a run are evaluation's: those for which evaluations waited longer than training did.

>>> from types import SimpleNamespace
>>> waits = {0: {"input.fetch": 5, "eval.input": 1}, 1: {"eval.input": 7}, 2: {}}
>>> evaluation_loaders(SimpleNamespace(loader_ns=waits))
{1}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Waits(Protocol):
    """The part of a ledger that is read here."""

    @property
    def loader_ns(self) -> Mapping[int, Mapping[str, int]]:
        """Loader -> sub-line -> nanoseconds."""
        ...


def evaluation_loaders(ledger: Waits) -> set[int]:
    """Return the groups of the loaders that evaluations read."""
    evaluation = set()
    for group, amounts in ledger.loader_ns.items():
        training_ns = sum(ns for sub, ns in amounts.items() if sub.startswith("input."))
        if amounts.get("eval.input", 0) > training_ns:
            evaluation.add(group)
    return evaluation
