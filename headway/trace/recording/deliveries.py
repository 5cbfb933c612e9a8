"""What loaders say beside their spans: audit rows, of which few are enough, and counts, which add up over ranks.

Every batch taken leaves a row with the sum so far. All of them matter while
the rank may be killed, a few when it has ended: the beginning of a pass, its
last row, and one in `EVERY` between, at which pieces of interrupted runs are
cut. `headway.data.audit` reads what is kept.

>>> len(thinned(RecordedRows.blank(3)))
3
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.vocabulary import SPANS
from headway.trace.recording.rows import RecordedRows

EVERY = 64
"""Of a pass's rows one in this many is kept."""

_AUDIT = list(SPANS).index("input.audit")


def thinned(rows: RecordedRows) -> RecordedRows:
    """Return the rows of one process, in the order of its records, with few audit rows."""
    notes = np.flatnonzero((rows.name == _AUDIT) & (rows.seq >= 0))
    keep = np.ones(len(rows), bool)
    for number in np.unique(rows.peer[notes]):
        own = notes[rows.peer[notes] == number]
        keep[own] = _kept(len(own))
    return rows.where(keep)


def _kept(count: int) -> NDArray[np.bool_]:
    """Return bool [count]: one in `EVERY`, and the last."""
    at = np.arange(1, count + 1)
    kept: NDArray[np.bool_] = (at % EVERY == 0) | (at == count)
    return kept


def counts_of(ranks: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the input counts of some ranks together: name -> number by key. `ranks` are entries of `Trace.ranks`.

    >>> counts_of([{"input": {"cache": {"hits": 2}}}, {}, {"input": {"cache": {"hits": 3}}}])
    {'cache': {'hits': 5}}
    """
    found: dict[str, Counter[str]] = {}
    for facts in ranks:
        for name, numbers in (facts.get("input") or {}).items():
            found.setdefault(name, Counter()).update(numbers)
    return {name: dict(numbers) for name, numbers in found.items()}
