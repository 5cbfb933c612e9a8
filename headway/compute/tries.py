"""What was measured of each candidate on the same batches from the same state, and the best set of them.

    plain | channels_last | fused_optimizer | compile | ...     one after the other, each a few steps from one state
    plain | channels_last | ...                          plain  and again: what drifts on the host meets all of them
    plain | channels_last + compile | ...                plain  then sets: the fastest, with the next one added

A gain compares a branch with what ran just before and just behind it. Of each branch the lower quartile of its steps
counts: what else runs on a host makes steps longer, never shorter. Times are seconds.

>>> before, behind = TryBranch(step_s=[2.0] * 4), TryBranch(step_s=[2.2] * 4)
>>> low, mid, high = gain([before, TryBranch(("compute.compile",), step_s=[1.0] * 4), behind], ("compute.compile",))
>>> low < mid < high, round(mid, 3)
(True, 2.1)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Iterable, Mapping, Sequence

import msgspec

from headway.compute.remedies import REMEDIES
from headway.core.tables import pick

CANDIDATES: dict[str, str] = {record.name: record.allow or "" for record in REMEDIES}
"""Remedy -> the grant without which it is not applied; the cheapest to try come first."""

Interval = tuple[float, float, float]
"""A gain: low end, middle, high end."""

WORTH = 1.02
"""A candidate whose gain is below it is not worth another line."""

NO_LOSS = 0.95
"""A candidate whose gain alone is below it is not tried on top of others."""

QUARTILE_ERROR = 2.0
"""Standard error of the lower quartile, in distances of the median from the fastest step / sqrt(steps)."""


class TryBranch(msgspec.Struct):
    """Steps with one set of remedies, from the state that all branches begin at."""

    remedies: tuple[str, ...] = ()
    """The empty set is the script as it is."""
    step_s: list[float] = []
    """Its steps behind the first ones, without the time in which they wait for batches."""
    wait_s: float = 0.0
    """Median time in which a step waited for its batch: of the first branch it is the loader's."""
    loss: float | None = None
    """Of the last step; None where no backward of a scalar was seen."""
    memory_bytes: int | None = None
    """Peak memory on the device; None on a CPU."""
    same_batches: bool = True
    """Whether the model was given what the first branch gave it."""
    refused: str | None = None
    """Why it could not be tried."""


class Tries(msgspec.Struct):
    """What a rank writes: RUN/try/r<rank>.json."""

    branches: list[TryBranch] = []
    """In the order in which they ran."""
    ended: str = "the script ended before all was tried"
    """Why there are no more of them; '' when all were tried."""
    state_bytes: int = 0
    """Memory that the copy of the training state takes."""

    @property
    def wait_s(self) -> float:
        """What a step waits for its batch, as the first branch did: those after it have their batches in memory."""
        return self.branches[0].wait_s if self.branches else 0.0

    @property
    def step_s(self) -> float:
        """A step of the script as it is; 0 where none was measured."""
        steps = [seconds for branch in self.branches if not branch.remedies for seconds in branch.step_s]
        return quiet_s(steps) + self.wait_s if steps else 0.0


class TryRow(msgspec.Struct, frozen=True):
    """One set of remedies, as the command says it."""

    remedies: tuple[str, ...]
    predicted: Interval | None
    """Gain (low, middle, high); None where nothing predicts it."""
    measured: Interval | None
    loss_difference: float | None
    """|loss - that of the script as it is| behind the same steps."""
    noise: float | None
    """The same between two branches of the script as it is."""
    memory_bytes: int | None
    refused: str | None


def gain(
    order: Sequence[TryBranch], remedies: tuple[str, ...], *, over: tuple[str, ...] = (), wait_s: float = 0.0
) -> Interval | None:  # fmt: skip
    """Return the gain (low, middle, high) of a set over another one, the script as it is; None where one has no steps.

    `order` is how the branches ran, and `wait_s` what a step waits for its batch. Each branch of the set is compared
    with the one of `over` before it and the one behind it. The gain is the median of these ratios; the interval is the
    median's of 95 % (order statistics: half -+ sqrt(n) of n sorted ratios), with the error of their steps.
    """
    ratios, errors = [], []
    for index, branch in enumerate(order):
        if branch.remedies != remedies or not branch.step_s:
            continue
        before = next((base for base in reversed(order[:index]) if base.remedies == over and base.step_s), None)
        after = next((base for base in order[index:] if base.remedies == over and base.step_s), None)
        for base in (before, after):
            if base is not None:
                ratios.append((quiet_s(base.step_s) + wait_s) / (quiet_s(branch.step_s) + wait_s))
                errors.append(_relative_error(branch.step_s) + _relative_error(base.step_s))
    if not ratios:
        return None
    ratios.sort()
    left_out = max(0, int(len(ratios) / 2 - math.sqrt(len(ratios))))
    spread = 1 + statistics.median(errors)
    return ratios[left_out] / spread, statistics.median(ratios), ratios[-1 - left_out] * spread


def quiet_s(step_s: Sequence[float]) -> float:
    """Return the lower quartile of steps.

    >>> quiet_s([1.0, 1.0, 3.0, 9.0, 1.2])
    1.0
    """
    return sorted(step_s)[len(step_s) // 4]


def _relative_error(step_s: Sequence[float]) -> float:
    """Return the standard error of the lower quartile / it, from the distance of the steps below the median."""
    ordered = sorted(step_s)
    return QUARTILE_ERROR * (statistics.median(ordered) - ordered[0]) / ordered[0] / math.sqrt(len(ordered))


def schedule(names: Iterable[str], rounds: int) -> Generator[tuple[str, ...], TryBranch, None]:
    """Yield the set of the next branch, and take what was measured of it: singles first, then the greedy sets.

    What wins little alone may win much behind another: once precision has made the products short, what is left are
    launches and passes through memory, which torch.compile and fused updates shorten. So each candidate that is not
    refused and does not lose is tried on top of the best set, those that win most first. A set is tried beside the
    script as it is, in as many rounds; a candidate that is refused is not tried again.
    """
    singles = [(name,) for name in names]
    order = yield from _measured([(), *singles], rounds)
    gains = {key: gain(order, key) for key in singles}
    ranked = sorted((-measured[1], key) for key, measured in gains.items() if measured and measured[1] >= NO_LOSS)
    best: tuple[str, ...] = ()
    for negative, key in ranked:
        if not best:
            best = key if -negative >= WORTH else ()
            continue
        more = (*best, *key)
        order = yield from _measured([(), best, more], rounds)
        measured = gain(order, more, over=best)
        best = more if measured and measured[1] >= WORTH else best


def _measured(
    sets: Sequence[tuple[str, ...]], rounds: int
) -> Generator[tuple[str, ...], TryBranch, list[TryBranch]]:  # fmt: skip
    """Return a branch of each set per round, and one more of the first set; what is refused once gets no more."""
    order: list[TryBranch] = []
    refused: set[tuple[str, ...]] = set()
    for key in [*list(sets) * rounds, sets[0]]:
        if key not in refused:
            order.append((yield key))
            if order[-1].refused:
                refused.add(key)
    return order


def rows_of(tries: Tries, predicted: Mapping[str, Interval] | None = None) -> list[TryRow]:
    """Return a row per set of remedies, in the order of their first branches.

    `predicted` has what a plan says of single remedies, (low, likely, high).
    """
    order = tries.branches
    plain = [branch.loss for branch in order if not branch.remedies and branch.same_batches and branch.loss is not None]
    noise = max(plain) - min(plain) if len(plain) > 1 else None
    rows = []
    for remedies in dict.fromkeys(branch.remedies for branch in order if branch.remedies):
        branches = [branch for branch in order if branch.remedies == remedies]
        losses = [branch.loss for branch in branches if branch.loss is not None and branch.same_batches]
        rows.append(TryRow(
            remedies,
            predicted=(predicted or {}).get(remedies[0]) if len(remedies) == 1 else None,
            measured=gain(order, remedies, wait_s=tries.wait_s),
            loss_difference=abs(losses[-1] - plain[-1]) if losses and plain else None,
            noise=noise,
            memory_bytes=max((branch.memory_bytes or 0 for branch in branches), default=0) or None,
            refused=next((branch.refused for branch in branches if branch.refused), None),
        ))  # fmt: skip
    return rows


def best_of(rows: Iterable[TryRow], allowed: Iterable[str]) -> TryRow | None:
    """Return the fastest set of which every remedy is allowed, if any is worth its lines.

    `allowed` names grants; 'lossy' remedies stay out without theirs.
    """
    grants = set(allowed)
    may = [row for row in rows if row.measured and all(CANDIDATES[name] in grants for name in row.remedies)]
    best = max(may, key=lambda row: row.measured[1] if row.measured else 0.0, default=None)
    return best if best and best.measured and best.measured[1] >= WORTH and best.measured[0] > 1.0 else None


def chosen(only: Sequence[str]) -> list[str]:
    """Return the candidates by name, 'compile' for 'compute.compile' too. Raises `UnknownNameError`.

    >>> chosen(["compile", "compute.tf32"]), len(chosen([])) == len(CANDIDATES)
    (['compute.compile', 'compute.tf32'], True)
    """
    table = {name.removeprefix("compute."): name for name in CANDIDATES} | {name: name for name in CANDIDATES}
    return [pick(table, name, "candidate of --only") for name in only] or list(CANDIDATES)
