"""What the communication room would change: the size of DDP's buckets, and faster links.

Both start from exposed communication, the part that backward does not hide.
The size of buckets decides how much that is. Where the run has deep windows
and a link of one rate, sizes are replayed and the best one is proposed; on
busy cores a small all-reduce takes ten times its idle time, and no size can be
predicted: there it is offered for a live try, without a promise.

>>> setup = Setup.from_facts({"world_size": 1}, memory_bytes=0)
>>> [row.reason for row in propose(None, None, setup)]  # one rank: the program is not even asked
['no collective over ranks was recorded']
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.core.errors import BarMissedError, InputError
from headway.core.units import format_fraction
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.program import Prediction, Program

TRY_MB = 25
"""Size in MiB to try where none can be predicted: all buckets of 25, where DDP's default makes the first one 1."""

SIZES_MB = (1, 2, 5, 10, 25, 50, 100)
"""Sizes in MiB that are replayed."""


def propose(ledger: object, program: Program, setup: Setup) -> Iterator[Proposal | Refusal]:
    """Yield what another bucket size and faster links would win, or why the size has to be tried."""
    del ledger
    if setup.world_size < 2 or not program.recording.meetings:
        yield Refusal("comm.bucket", "comm", "no collective over ranks was recorded")
        return
    bound = program.predict(["comm=instant"])
    if bound.speedup < MIN_SPEEDUP:
        share = format_fraction(1 - 1 / bound.speedup)
        reason = f"exposed communication costs {share} of a step: no bucket size can win more"
        yield Refusal("comm.bucket", "comm", reason)
        return
    yield _bucket(program, bound)
    yield _links(program, bound)


def _bucket(program: Program, bound: Prediction) -> Proposal | Refusal:
    """Return the size that is predicted best, a refusal when none is worth it, a live try where none can be told."""
    try:
        found = {size: program.predict([f"bucket_mb={size}"]) for size in SIZES_MB}
    except (InputError, BarMissedError) as cause:
        return _to_try(bound, str(cause))
    size = min(found, key=lambda tried: found[tried].step_s)
    best = found[size]
    if best.speedup < MIN_SPEEDUP:
        reason = f"of {', '.join(map(str, SIZES_MB))} MiB, {size} is predicted best: {best.speedup:.3f}x"
        return Refusal("comm.bucket", "comm", reason)
    return Proposal(
        name="comm.bucket",
        room="comm",
        edits=(f"bucket_mb={size}",),
        predicted_speedup=best.speedup,
        interval=best.interval,
        applies=True,
        parameters={"bucket_mb": size},
        cost="one more copy of the largest bucket",
        risk="more than two ranks may add gradients in another order",
        reason=f"Buckets of {size} MiB overlap backward best. {best.note}",
    )


def _to_try(bound: Prediction, reason: str) -> Proposal:
    """Return the offer without a promise."""
    return Proposal(
        name="comm.bucket",
        room="comm",
        edits=(),
        predicted_speedup=1.0,
        interval=(1 / bound.speedup, bound.speedup),
        applies=True,
        parameters={"bucket_mb": TRY_MB},
        cost="one more copy of the largest bucket",
        risk="larger buckets start later, smaller ones cost more wake-ups: either may be slower",
        reason=f"At most {bound.speedup:.3f}x, at worst a loss: {reason}",
    )


def _links(program: Program, bound: Prediction) -> Proposal:
    """Return what links of twice the bandwidth would win.

    Without deep windows only the exposed part is known: then the truth lies between no gain and no communication.
    """
    faster = program.predict(["bandwidth=2x"])
    interval = faster.interval
    if not program.replays_links:
        interval = (min(1.0, interval[0]), max(interval[1], bound.speedup))
    return Proposal(
        name="comm.links",
        room="comm",
        edits=("bandwidth=2x",),
        predicted_speedup=faster.speedup,
        interval=interval,
        applies=False,
        cost="links of twice the bandwidth",
        reason=faster.note,
    )
