"""The best buckets for a recorded data-parallel step, and whether gradients should live inside them.

Use `optimise(step)` on the step of a recorded run (`headway.sim.ddp.ddp_step.recorded_step`). A ring carries one bucket
after the other, so the best buckets are computed, not searched for. The answer says which of its changes
`headway run --apply` can make to an unmodified script, and how to make them by hand. dPRO's search (arXiv 2205.02473),
which also fuses operations, cuts buckets into parts and trades time for memory on modelled steps, is
`benchmarks/_step_search.py`; on a recorded step it finds the same. Times are int64 ns, sizes bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headway.core.files.planfile import PlanFile, Remedy
from headway.core.units import MIB, format_bytes
from headway.sim.ddp.ddp_step import RecordedStep

NUM_CAPS = 24
"""Sizes that are tried where all buckets have one."""


@dataclass(frozen=True, slots=True)
class StepChange:
    """One kind of change, and how it is made by hand."""

    field: str
    """What it changes about a step."""

    remedy: str
    """Remedy that makes it on an unmodified script."""

    how: str
    """How to make it by hand with DDP and with FSDP2."""


CHANGES: dict[str, StepChange] = {
    "gradient_view": StepChange(
        "gradient_view", "comm.gradient_view",
        "DDP: DistributedDataParallel(..., gradient_as_bucket_view=True). FSDP2: nothing to do, sharded gradients are "
        "views of what was reduced",
    ),
    "buckets": StepChange(
        "joined", "comm.bucket",
        "DDP: DistributedDataParallel(..., bucket_cap_mb_list=[...]). FSDP2: what one fully_shard call holds is summed "
        "together, so fully_shard([a, b]) joins and one call each splits",
    ),
}  # fmt: skip
"""Kind of change -> what it is, in the order in which an answer lists them."""


@dataclass(frozen=True, slots=True)
class MoveRow:
    """One kind of change that was chosen."""

    name: str
    """A key of `CHANGES`."""

    what: str
    """In words."""

    step_ns: int
    """Step time with this kind and those before it."""


@dataclass(frozen=True, slots=True, eq=False)
class Optimised:
    """The best step, and what it changes."""

    before: RecordedStep
    """As given."""

    after: RecordedStep
    """With the best buckets."""

    moves: tuple[MoveRow, ...]
    """What changed, in the order in which `step_ns` of the rows adds up."""

    uniform: RecordedStep
    """`after` with its buckets replaced by the best of one size: what older versions of DDP can be told."""

    scored: int
    """Buckets and sizes compared."""

    @property
    def speedup(self) -> float:
        """Steps per second after / before."""
        return self._speedup(self.after)

    def remedies(self) -> tuple[Remedy, ...]:
        """Return what `headway run --apply` can do of it on an unmodified DDP script."""
        made = {CHANGES[row.name].remedy for row in self.moves}
        parameters = {"comm.bucket": self.bucket_parameters, "comm.gradient_view": dict[str, Any]}
        return tuple(
            Remedy(name, of(), self._speedup(self._with_only({name})))
            for name, of in parameters.items()
            if name in made
        )

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
        together = self._with_only({remedy.name for remedy in remedies})
        return PlanFile(remedies, predicted_speedup=self._speedup(together), baseline=baseline)

    def to_json(self) -> dict[str, object]:
        """Return the JSON object, schema headway.optimised/1."""
        return {
            "schema": "headway.optimised/1",
            "base_step_s": self.before.step_ns() / 1e9,
            "step_s": self.after.step_ns() / 1e9,
            "predicted_speedup": self.speedup,
            "moves": [
                {
                    "name": row.name, "what": row.what, "step_s": row.step_ns / 1e9,
                    "remedy": CHANGES[row.name].remedy, "how": CHANGES[row.name].how,
                }
                for row in self.moves
            ],
            "uniform_bucket_mb": self._single(),
            "uniform_step_s": self.uniform.step_ns() / 1e9,
            "peak_bytes": 0 if self.after.gradient_view else int(self.after.gradient_bytes.sum()),
            "scored": self.scored,
            "rounds": 1,
        }  # fmt: skip

    def _speedup(self, step: RecordedStep) -> float:
        """Return how much faster a step is than the given one."""
        step_ns = step.step_ns()
        return self.before.step_ns() / step_ns if step_ns else float("inf")

    def _with_only(self, remedies: set[str]) -> RecordedStep:
        """Return the step with only those changes that the remedies make."""
        fields = [change.field for change in CHANGES.values() if change.remedy in remedies]
        return replace(self.before, **{field: getattr(self.after, field) for field in fields})

    def _single(self) -> float:
        """Return the size in MiB that yields the best buckets of one size."""
        sizes = self.uniform.bucket_bytes()
        # Every bucket but the last has reached the cap, and had not before its last gradient.
        return (int(sizes[:-1].min() if sizes.size > 1 else sizes.sum()) - 0.5) / MIB


def optimise(step: RecordedStep) -> Optimised:
    """Return the fastest step: gradients inside the buckets where that wins, and the best of all buckets."""
    viewed = _faster(step, replace(step, gradient_view=True))
    after = _faster(viewed, replace(viewed, joined=viewed.best_buckets()))
    bucketings = uniform(after)
    moves = []
    if after.gradient_view != step.gradient_view:
        moves.append(MoveRow("gradient_view", "gradients live inside the buckets", viewed.step_ns()))
    if not np.array_equal(after.joined, step.joined):
        moves.append(MoveRow("buckets", _bucket_words(step, after), after.step_ns()))
    return Optimised(
        before=step,
        after=after,
        moves=tuple(moves),
        uniform=min(bucketings, key=RecordedStep.step_ns),
        scored=step.joined.size * (step.joined.size + 1) // 2 + len(bucketings),
    )


def uniform(step: RecordedStep) -> list[RecordedStep]:
    """Return the step with buckets of one size: from one gradient to all."""
    total = int(step.gradient_bytes.sum())
    caps = np.unique(np.geomspace(max(1, total // 256), max(2, total), NUM_CAPS).astype(np.int64))
    return [step.in_buckets(float(cap)) for cap in caps]


def _faster(step: RecordedStep, other: RecordedStep) -> RecordedStep:
    """Return the faster of two steps; the first among equals."""
    return other if other.step_ns() < step.step_ns() else step


def _bucket_words(before: RecordedStep, after: RecordedStep) -> str:
    sizes = [format_bytes(int(size)) for size in after.bucket_bytes()]
    shown = ", ".join(sizes[:6]) + (", ..." if len(sizes) > 6 else "")
    return f"{before.bucket_ends().size} -> {len(sizes)}: {shown}"
