"""The best plan for a training step: dPRO's optimiser (arXiv 2205.02473) on a compiled Dag.

Use `optimise(step)` on the step of a recorded run (`headway.sim.training_moves.recorded_step`). Memory
comes first: while the peak exceeds the budget, blocks are computed again or gradients are
accumulated, whichever costs least. Then rounds over the neighbourhoods of
`headway.plan.step_search`, until `QUIET_ROUNDS` rounds in a row have changed
the step time by less than 0.1 %. The answer says which of the moves
`headway run --apply` can make to an unmodified script, and how to make the
others by hand. Times are int64 ns, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headway.core.errors import InputError
from headway.core.files.planfile import PlanFile, Remedy
from headway.core.search import smallest_true
from headway.core.tables import pick
from headway.core.units import MIB, format_bytes
from headway.plan.step_search import NEIGHBOURHOODS, Scorer, uniform
from headway.sim.training_step import Flags, TrainingStep

QUIET_ROUNDS = 5
"""The search stops after so many rounds in a row that changed little."""

LEAST_CHANGE = 0.001
"""What counts as little, as a share of the step time."""

MOST_ROUNDS = 60
"""Rounds at most, whatever they change."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """One line of `KINDS`."""

    move: str
    fields: tuple[str, ...]
    words: Callable[[TrainingStep, TrainingStep], str]
    remedy: str | None
    how: str


def _bucket_words(before: TrainingStep, after: TrainingStep) -> str:
    sizes = [format_bytes(int(size)) for size in after.bucket_bytes()]
    shown = ", ".join(sizes[:6]) + (", ..." if len(sizes) > 6 else "")
    return f"{before.bucket_ends().size} -> {len(sizes)}: {shown}"


KINDS: dict[str, _Kind] = {
    "gradient_view": _Kind(
        "view_gradients", ("gradient_view",), lambda _, after: "gradients live inside the buckets",
        "comm.gradient_view",
        "DDP: DistributedDataParallel(..., gradient_as_bucket_view=True). FSDP2: nothing to do, sharded gradients are "
        "views of what was reduced",
    ),
    "recompute": _Kind(
        "recompute", ("recomputed",), lambda _, after: f"{int(after.recomputed.sum())} blocks computed again", None,
        "DDP: wrap those blocks in torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False). FSDP2: wrap each "
        "before fully_shard(block)",
    ),
    "accumulate": _Kind(
        "accumulate", ("microbatches",), lambda _, after: f"{after.microbatches} micro-batches accumulated", None,
        "cut the batch, and sum gradients over ranks at the last micro-batch only. DDP: run the others under "
        "model.no_sync(). FSDP2: model.set_requires_gradient_sync(False) before them, True before the last",
    ),
    "precision": _Kind(
        "compute_in_half", ("half",), lambda _, after: f"{int(after.half.sum())} blocks in 16 bits", None,
        "DDP: run those blocks under torch.autocast(device_type, dtype=torch.bfloat16); sums of gradients need a comm "
        "hook. FSDP2: fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), which gathers "
        "and sums in 16 bits too",
    ),
    "buckets": _Kind(
        "join_buckets", ("joined",), _bucket_words, "comm.bucket",
        "DDP: DistributedDataParallel(..., bucket_cap_mb_list=[...]). FSDP2: what one fully_shard call holds is summed "
        "together, so fully_shard([a, b]) joins and one call each splits",
    ),
    "parts": _Kind(
        "cut_bucket", ("parts",),
        lambda _, after: f"buckets cut into {sorted(set(after.parts[after.bucket_ends()].tolist()))} parts", None,
        "set the partition size of the parameter-server library, for BytePS BYTEPS_PARTITION_BYTES. DDP sums a bucket "
        "in one piece: make it smaller. FSDP2: call fully_shard on smaller modules",
    ),
    "operations": _Kind(
        "fuse_ops", ("fused",), lambda _, after: f"{int(after.fused.sum())} pairs of operations fused", None,
        "DDP: compile those blocks with torch.compile. FSDP2: block.compile() before fully_shard(block)",
    ),
    "order": _Kind(
        "forward_first", ("order",), lambda _, after: f"order of communication: {after.order}", None,
        "schedule sums by priority of their layer, for BytePS BYTEPS_SCHEDULING_CREDIT. DDP sums in the order of "
        "readiness. FSDP2: the remedy comm.order of headway run --apply gathers the next module ahead, or "
        "set_modules_to_forward_prefetch by hand",
    ),
}  # fmt: skip
"""Kind of move -> its name as a move, what it changes, its words, the remedy that makes it, how to do it by hand."""

MOVES: dict[str, _Kind] = {entry.move: entry for entry in KINDS.values()}
"""Move, as `optimise` is allowed it -> its line."""

SAFE: tuple[str, ...] = tuple(name for name in MOVES if name != "compute_in_half")
"""Moves that leave results as they are, up to the order in which floating-point numbers are added."""


@dataclass(frozen=True, slots=True)
class MoveRow:
    """One kind of move that was chosen."""

    name: str
    """A key of `KINDS`: 'buckets', 'operations', 'precision', ...."""

    what: str
    """In words."""

    step_ns: int
    """Step time with this kind and those before it."""

    remedy: str | None
    """Remedy that makes it on an unmodified script; None = by hand."""

    how: str
    """How to make it by hand with DDP and with FSDP2."""


@dataclass(frozen=True, slots=True, eq=False)
class Optimised:
    """What the search found."""

    before: TrainingStep
    """As given."""

    after: TrainingStep
    """The best step found."""

    base_ns: int
    """Step time before."""

    step_ns: int
    """Predicted step time after."""

    moves: tuple[MoveRow, ...]
    """What changed, in the order in which `step_ns` of the rows adds up."""

    rounds: tuple[int, ...]
    """Step time after each round of the search."""

    scored: int
    """Variants replayed."""

    uniform: TrainingStep
    """`after` with its buckets replaced by the best of one size: what older versions of DDP can be told."""

    uniform_ns: int
    """Its step time."""

    @property
    def speedup(self) -> float:
        """Steps per second after / before."""
        return self.base_ns / self.step_ns if self.step_ns else float("inf")

    def remedies(self) -> tuple[Remedy, ...]:
        """Return what `headway run --apply` can do of it on an unmodified DDP script."""
        made = {row.remedy for row in self.moves}
        parameters = {"comm.bucket": self.bucket_parameters, "comm.gradient_view": dict[str, Any]}
        return tuple(Remedy(name, of(), self._gain(name)) for name, of in parameters.items() if name in made)

    def bucket_parameters(self) -> dict[str, object]:
        """Return the sizes in MiB: `bucket_mb_list` per bucket, and the best single size for a torch without lists.

        A bucket closes once it holds its size, so each is written half a byte below what it shall hold.
        """
        sizes = [(int(size) - 0.5) / MIB for size in self.after.bucket_bytes()]
        return {"bucket_mb": max(self._single(), 1 / MIB), "bucket_mb_list": sizes}

    def plan_file(self, baseline: str | None = None) -> PlanFile:
        """Return the plan that holds the remedies; its speedup is that of them together."""
        remedies = self.remedies()
        if not remedies:
            return PlanFile(baseline=baseline)
        names = {remedy.name for remedy in remedies}
        step_ns = _with_only(self.before, self.after, names)
        return PlanFile(remedies, predicted_speedup=self.base_ns / step_ns, baseline=baseline)

    def to_json(self) -> dict[str, object]:
        """Return the JSON object, schema headway.optimised/1."""
        return {
            "schema": "headway.optimised/1",
            "base_step_s": self.base_ns / 1e9,
            "step_s": self.step_ns / 1e9,
            "predicted_speedup": self.speedup,
            "moves": [
                {"name": row.name, "what": row.what, "step_s": row.step_ns / 1e9, "remedy": row.remedy, "how": row.how}
                for row in self.moves
            ],
            "uniform_bucket_mb": self._single(),
            "uniform_step_s": self.uniform_ns / 1e9,
            "peak_bytes": self.after.peak_bytes(),
            "scored": self.scored,
            "rounds": len(self.rounds),
        }

    def _gain(self, remedy: str) -> float:
        """Return the predicted speedup of one remedy alone."""
        return self.base_ns / _with_only(self.before, self.after, {remedy})

    def _single(self) -> float:
        """Return the size in MiB that yields the best buckets of one size."""
        sizes = self.uniform.bucket_bytes()
        # Every bucket but the last has reached the cap, and had not before its last gradient.
        return (int(sizes[:-1].min() if sizes.size > 1 else sizes.sum()) - 0.5) / MIB


def optimise(step: TrainingStep, *, memory_bytes: int | None = None, allow: Iterable[str] = SAFE) -> Optimised:
    """Search for the fastest step that fits `memory_bytes` (no limit by default), with the moves in `allow`.

    Raises `UnknownNameError` on a move, `InputError` when no allowed move
    brings the peak under the budget.
    """
    allowed = frozenset(allow)
    for name in allowed:
        pick(MOVES, name, "move")
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
    took = scorer.steps(list(ends.values()))
    return Optimised(
        before=step,
        after=found,
        base_ns=base_ns,
        step_ns=int(scorer.steps([found])[0]),
        moves=_explain(step, found, scorer),
        rounds=tuple(rounds),
        scored=scorer.scored,
        uniform=list(ends.values())[int(np.argmin(took))],
        uniform_ns=int(took.min()),
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


def _explain(before: TrainingStep, after: TrainingStep, scorer: Scorer) -> tuple[MoveRow, ...]:
    """Say what changed, kind by kind, each with the step time so far."""
    rows, step = [], before
    for name, kind in KINDS.items():
        wanted = replace(step, **{part: getattr(after, part) for part in kind.fields})
        if not wanted.equals(step):
            step = wanted
            rows.append(MoveRow(name, kind.words(before, after), int(scorer.steps([step])[0]), kind.remedy, kind.how))
    return tuple(rows)


def _with_only(before: TrainingStep, after: TrainingStep, remedies: set[str]) -> int:
    """Return the step time of `before` with only those changes that the remedies make."""
    parts = [part for kind in KINDS.values() if kind.remedy in remedies for part in kind.fields]
    step = replace(before, **{part: getattr(after, part) for part in parts})
    return int(Scorer(frozenset()).steps([step])[0])
