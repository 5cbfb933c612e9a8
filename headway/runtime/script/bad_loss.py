"""Losses that no job goes on from well: NaN, infinite, or many times the usual one; and the curve of the others.

The guard (`fault.guard`) judges the losses of all ranks before each update; the recording looks at one in a while.

>>> judge([1.0, 1.1], [1.0] * 20), judge([1.0, float("nan")], []), judge([7.0, 1.0], [1.0] * 20)
(None, Bad(ranks=(1,), what='nan'), Bad(ranks=(0,), what='7, 7 times the usual 1'))
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SPIKE = 5.0
"""A loss so many times the usual one is a spike."""

USUAL, FEWEST = 64, 20
"""Losses of so many steps make the usual one, their median; before there are the fewest, nothing is a spike."""

MOST_SPIKES = 3
"""Spikes among the usual losses from which on they are usual themselves."""

MOST_NOTED = 16
"""Bad losses of a rank that the recording notes."""

MOST_KEPT = 512
"""Points of the curve of losses that the recording keeps; where there are more, every other one is left out."""


@dataclass(frozen=True, slots=True)
class Bad:
    """What is wrong with the losses of a step."""

    ranks: tuple[int, ...]
    """Those whose loss it is."""

    what: str
    """nan, inf, or how large."""

    def __str__(self) -> str:
        """Return it in words; the same for the same batches, whenever they come."""
        who = ", ".join(map(str, self.ranks))
        return f"the loss of rank{'s' if len(self.ranks) > 1 else ''} {who} is {self.what}"


def judge(losses: Sequence[float | None], usual: Sequence[float]) -> Bad | None:
    """Return what is wrong with the losses of all ranks in one step, None for a rank without one.

    `usual` are the losses of the steps before: the mean over ranks, or the largest where that was a spike. Spikes that
    came `MOST_SPIKES` times among them are the level of the loss, or hard batches that it knows.
    """
    found = {rank: loss for rank, loss in enumerate(losses) if loss is not None}
    broken = tuple(rank for rank, loss in found.items() if not math.isfinite(loss))
    if broken:
        return Bad(broken, str(losses[broken[0]]))
    if len(usual) < FEWEST or not found:
        return None
    middle, highest = statistics.median(usual), max(found.values())
    high = tuple(rank for rank, loss in found.items() if loss > SPIKE * middle)
    if middle <= 0 or not high or sum(one > SPIKE * middle for one in usual) >= MOST_SPIKES:
        return None
    return Bad(high, f"{highest:.4g}, {highest / middle:.3g} times the usual {middle:.4g}")


@dataclass(slots=True)
class LossLooks:
    """The losses of one rank that the recording has looked at."""

    bad: list[dict[str, Any]] = field(default_factory=list)
    """Step and what was wrong, the first `MOST_NOTED`."""

    curve: list[tuple[int, float]] = field(default_factory=list)
    """Step and loss of those that were not bad, evenly spaced: at most `MOST_KEPT`."""

    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL))
    _looks: int = 0
    _every: int = 1
    """Looks from one point of the curve to the next."""

    def seen(self, loss: float, step: int) -> bool:
        """Take in the loss of `step`, counted from 1; says whether it is the first bad one."""
        # The least of the usual ones is no larger than their median: most losses need no sorting.
        usual = math.isfinite(loss) and bool(self._usual) and loss <= SPIKE * min(self._usual)
        found = None if usual else judge([loss], self._usual)
        if found is None:
            self._usual.append(loss)
            if self._looks % self._every == 0:
                self.curve.append((step, float(f"{loss:.6g}")))
                if len(self.curve) > MOST_KEPT:
                    del self.curve[1::2]
                    self._every *= 2
            self._looks += 1
        elif len(self.bad) < MOST_NOTED:
            self.bad.append({"step": step, "what": found.what})
        return found is not None and len(self.bad) == 1
