"""The best plan for a training step: dPRO's optimiser (arXiv 2205.02473) on a compiled Dag.

Memory comes first: while the peak exceeds the budget, blocks are computed again or gradients are accumulated, whichever
costs least. Then rounds over the neighbourhoods of `benchmarks._step_search`, until `QUIET_ROUNDS` rounds in a row have
changed the step time by less than 0.1 %. Times are int64 ns, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks._step_model import Flags, TrainingStep
from benchmarks._step_search import NEIGHBOURHOODS, Scorer, uniform
from headway.core.errors import InputError
from headway.core.search import smallest_true
from headway.core.units import format_bytes

QUIET_ROUNDS = 5
"""The search stops after so many rounds in a row that changed little."""

LEAST_CHANGE = 0.001
"""What counts as little, as a share of the step time."""

MOST_ROUNDS = 60
"""Rounds at most, whatever they change."""

MOVES: tuple[str, ...] = (
    "view_gradients", "recompute", "accumulate", "compute_in_half", "join_buckets", "cut_bucket", "fuse_ops",
)  # fmt: skip
"""Moves, as `optimise` is allowed them."""

SAFE: tuple[str, ...] = tuple(name for name in MOVES if name != "compute_in_half")
"""Moves that leave results as they are, up to the order in which floating-point numbers are added."""


@dataclass(frozen=True, slots=True, eq=False)
class OptimisedStep:
    """What the search found."""

    after: TrainingStep
    """The best step found."""

    base_ns: int
    """Step time before."""

    step_ns: int
    """Predicted step time after."""

    rounds: tuple[int, ...]
    """Step time after each round of the search."""

    scored: int
    """Variants replayed."""

    uniform_ns: int
    """Step time of `after` with the best buckets of one size."""

    @property
    def speedup(self) -> float:
        """Steps per second after / before."""
        return self.base_ns / self.step_ns if self.step_ns else float("inf")


def optimise(step: TrainingStep, *, memory_bytes: int | None = None, allow: Iterable[str] = SAFE) -> OptimisedStep:
    """Search for the fastest step that fits `memory_bytes` (no limit by default), with the moves in `allow`.

    Raises `InputError` when no allowed move brings the peak under the budget.
    """
    allowed = frozenset(allow)
    scorer = Scorer(allowed)
    base_ns = int(scorer.steps([step])[0])
    found = step
    if "view_gradients" in allowed:
        found = _better(found, [replace(found, gradient_view=True)], scorer)
    if memory_bytes is not None:
        found = fit_memory(found, memory_bytes, scorer)
    if "compute_in_half" in allowed:
        found = _precision(found, scorer)
    found, rounds = _rounds(found, scorer)
    ends = {one.joined.tobytes(): one for one in uniform(found)[3:]}
    return OptimisedStep(
        after=found,
        base_ns=base_ns,
        step_ns=int(scorer.steps([found])[0]),
        rounds=tuple(rounds),
        scored=scorer.scored,
        uniform_ns=int(scorer.steps(list(ends.values())).min()),
    )


def _rounds(step: TrainingStep, scorer: Scorer) -> tuple[TrainingStep, list[int]]:
    """Take the neighbourhoods in turn until as many rounds in a row as there are of them change little."""
    names, rounds, quiet = list(NEIGHBOURHOODS), list[int](), 0
    now = int(scorer.steps([step])[0])
    while quiet < QUIET_ROUNDS and len(rounds) < MOST_ROUNDS:
        step = NEIGHBOURHOODS[names[len(rounds) % len(names)]](step, scorer)
        took = int(scorer.steps([step])[0])
        quiet = quiet + 1 if now - took < LEAST_CHANGE * now else 0
        now = took
        rounds.append(took)
    return step, rounds


def fit_memory(step: TrainingStep, memory_bytes: int, scorer: Scorer) -> TrainingStep:
    """Compute blocks again or accumulate gradients while the peak exceeds the budget, whichever costs least time.

    Gradients move into their buckets first, which costs nothing. Equal
    blocks are candidates together: as many of them as are needed, the first
    ones, whose activations live longest. Raises `InputError` when nothing is
    left to try.
    """
    needs = step.peak_bytes()
    if needs > memory_bytes and "view_gradients" in scorer.allowed:
        step = replace(step, gradient_view=True)  # never slower
    while step.peak_bytes() > memory_bytes:
        variants = [*_recomputing(step, memory_bytes, scorer), *_accumulating(step, memory_bytes, scorer)]
        variants = [variant for variant in variants if variant.peak_bytes() < step.peak_bytes()]
        if not variants:
            raise InputError(
                f"the step needs {format_bytes(needs)}, {format_bytes(step.peak_bytes())} with every move that lowers "
                f"it; the budget is {format_bytes(memory_bytes)}. Allow recompute and accumulate, shard states over "
                "ranks, or give a larger budget."
            )
        took = scorer.steps(variants)
        fits = np.array([variant.peak_bytes() <= memory_bytes for variant in variants])
        saved = np.array([step.peak_bytes() - variant.peak_bytes() for variant in variants])
        cost = np.where(fits, took, np.inf) if fits.any() else took / saved
        step = variants[int(np.argmin(cost))]
    return step


def _recomputing(step: TrainingStep, memory_bytes: int, scorer: Scorer) -> list[TrainingStep]:
    """Return, for each kind of block, the step with as few of them computed again as fit, or all of them."""
    variants = []
    for kind in np.unique(step.profile.block_kind) if "recompute" in scorer.allowed else []:
        able = (step.profile.block_kind == kind) & ~step.recomputed

        def first(count: int, able: Flags = able) -> TrainingStep:
            return replace(step, recomputed=step.recomputed | (able & (np.cumsum(able) <= count)))

        variants += [_fewest(first, 1, int(able.sum()), memory_bytes)] if able.any() else []
    return variants


def _accumulating(step: TrainingStep, memory_bytes: int, scorer: Scorer) -> list[TrainingStep]:
    """Return the step with as few micro-batches more as fit, or as many as there can be."""
    least, most = step.microbatches + 1, step.profile.most_microbatches
    if "accumulate" not in scorer.allowed or least > most:
        return []
    return [_fewest(lambda count: replace(step, microbatches=count), least, most, memory_bytes)]


def _fewest(variant: Callable[[int], TrainingStep], least: int, most: int, memory_bytes: int) -> TrainingStep:
    """Return the variant with the least count in least..most that fits, or with the most."""
    fits = smallest_true(lambda count: variant(count).peak_bytes() <= memory_bytes, least, most)
    return variant(fits or most)


def _precision(step: TrainingStep, scorer: Scorer) -> TrainingStep:
    """Compute in 16 bits the kinds of blocks that gain by it, equal blocks together."""
    kinds = [np.flatnonzero(step.profile.block_kind == kind) for kind in np.unique(step.profile.block_kind)]
    variants = []
    for blocks in kinds:
        half = step.half.copy()
        half[blocks] = True
        variants.append(replace(step, half=half))
    took, now = scorer.steps(variants), int(scorer.steps([step])[0])
    together = step.half.copy()
    for at in np.flatnonzero(took < now):
        together[kinds[at]] = True
    return _better(step, [replace(step, half=together), *variants], scorer)


def _better(step: TrainingStep, variants: Sequence[TrainingStep], scorer: Scorer) -> TrainingStep:
    """Return the fastest of a step and its variants; the step itself among equals."""
    took = scorer.steps([step, *variants])
    return [step, *variants][int(np.argmin(took))]
