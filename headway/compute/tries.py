"""What was measured of each candidate on the same batches from the same state, and the best set of them.

    plain | channels_last | fused_optimizer | compile | ...     one after the other, each a few steps from one state
    plain | channels_last | ...                                 and again: what drifts on the host meets all of them
    plain | channels_last + compile | ...                       then sets: the fastest, with the next one added

A gain is a ratio of median steps in one round, so that it compares what ran beside each other. Times are seconds.

>>> plain, fast = TryBranch(step_s=[2.0, 2.2, 2.1]), TryBranch(("compute.compile",), step_s=[1.0, 1.1, 1.05])
>>> low, mid, high = speedup([plain, plain], [fast, fast])
>>> low < mid < high, mid
(True, 2.0)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Iterable, Sequence

import msgspec

from headway.compute.remedies import REMEDIES
from headway.core.tables import pick

CANDIDATES: dict[str, str] = {record.name: record.allow or "" for record in REMEDIES}
"""Remedy -> the grant without which it is not applied; the cheapest to try come first."""

WORTH = 1.02
"""A candidate whose gain is below it is not worth another line."""

MAD_TO_SIGMA = 1.4826
MEDIAN_ERROR = 1.2533
"""Standard error of a median, in standard errors of the mean (normal numbers)."""


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
        return statistics.median(steps) + self.wait_s if steps else 0.0


class TryRow(msgspec.Struct, frozen=True):
    """One set of remedies, as the command says it."""

    remedies: tuple[str, ...]
    predicted: tuple[float, float, float] | None
    """Gain (low, middle, high); None where nothing predicts it."""
    measured: tuple[float, float, float] | None
    loss_difference: float | None
    """|loss - that of the script as it is| behind the same steps."""
    noise: float | None
    """The same between two branches of the script as it is."""
    memory_bytes: int | None
    refused: str | None


def speedup(
    plain: Sequence[TryBranch], changed: Sequence[TryBranch], wait_s: float = 0.0
) -> tuple[float, float, float] | None:  # fmt: skip
    """Return the gain (low, middle, high) of `changed` over `plain`, round by round; None without steps of both.

    `wait_s` is what a step of either waits for its batch. The interval holds the gains of all rounds, and the error of
    their medians.
    """
    pairs = [(a.step_s, b.step_s) for a, b in zip(plain, changed, strict=False) if a.step_s and b.step_s]
    if not pairs:
        return None
    ratios = [(statistics.median(a) + wait_s) / (statistics.median(b) + wait_s) for a, b in pairs]
    error = max(_relative_error(a) + _relative_error(b) for a, b in pairs)
    return min(ratios) * (1 - error), statistics.median(ratios), max(ratios) * (1 + error)


def _relative_error(step_s: Sequence[float]) -> float:
    """Return the standard error of the median / the median."""
    middle = statistics.median(step_s)
    deviation = statistics.median(abs(value - middle) for value in step_s)
    return MAD_TO_SIGMA * MEDIAN_ERROR * deviation / middle / math.sqrt(len(step_s))


def schedule(names: Iterable[str], rounds: int) -> Generator[tuple[str, ...], TryBranch, None]:
    """Yield the set of the next branch, and take what was measured of it: singles first, then the greedy sets.

    A candidate that is refused is not tried again. A set is tried beside the script as it is, in as many rounds.
    """
    singles: dict[tuple[str, ...], list[TryBranch]] = {(): []}
    singles |= {(name,): [] for name in names}
    yield from _measured(singles, rounds)
    gains = {key: speedup(singles[()], branches) for key, branches in singles.items() if key}
    winners = sorted((-gain[1], key) for key, gain in gains.items() if gain and gain[1] >= WORTH)
    best: tuple[str, ...] = winners[0][1] if winners else ()
    for _, key in winners[1:]:
        more = (*best, *key)
        sets: dict[tuple[str, ...], list[TryBranch]] = {(): [], best: [], more: []}
        yield from _measured(sets, rounds)
        gain = speedup(sets[best], sets[more])
        best = more if gain and gain[1] >= WORTH else best


def _measured(
    sets: dict[tuple[str, ...], list[TryBranch]], rounds: int
) -> Generator[tuple[str, ...], TryBranch, None]:  # fmt: skip
    """Fill in a branch of each set per round; what is refused once gets no more."""
    for _ in range(rounds):
        for key, branches in sets.items():
            if not any(branch.refused for branch in branches):
                branches.append((yield key))


def rows_of(tries: Tries) -> list[TryRow]:
    """Return a row per set of remedies, in the order of their first branches."""
    by_set: dict[tuple[str, ...], list[TryBranch]] = {}
    for branch in tries.branches:
        by_set.setdefault(branch.remedies, []).append(branch)
    plain = by_set.pop((), [])
    losses = [branch.loss for branch in plain if branch.loss is not None and branch.same_batches]
    noise = max(losses) - min(losses) if len(losses) > 1 else None
    rows = []
    for remedies, branches in by_set.items():
        ran = [branch for branch in branches if branch.step_s]
        changed = [branch.loss for branch in ran if branch.loss is not None and branch.same_batches]
        rows.append(TryRow(
            remedies,
            predicted=None,
            measured=speedup(_beside(plain, tries.branches, ran), ran, tries.wait_s),
            loss_difference=abs(changed[-1] - losses[-1]) if changed and losses else None,
            noise=noise,
            memory_bytes=max((branch.memory_bytes or 0 for branch in ran), default=0) or None,
            refused=next((branch.refused for branch in branches if branch.refused), None),
        ))  # fmt: skip
    return rows


def _beside(plain: Sequence[TryBranch], order: Sequence[TryBranch], ran: Sequence[TryBranch]) -> list[TryBranch]:
    """Return for each branch the plain one that ran nearest to it."""
    indices = {id(branch): index for index, branch in enumerate(order)}

    def nearest(branch: TryBranch) -> TryBranch:
        return min(plain, key=lambda candidate: abs(indices[id(candidate)] - indices[id(branch)]))

    return list(map(nearest, ran)) if plain else []


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
