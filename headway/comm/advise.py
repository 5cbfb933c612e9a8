"""What the communication room would change: the size of DDP's buckets, and faster links.

Both start from exposed communication, the part that backward does not hide.
The size of buckets decides how much that is, but what is hidden is not in the
always-on records, and on busy cores a small all-reduce takes ten times its
idle time: so it is tried live rather than predicted.

>>> setup = Setup.from_facts({"world_size": 1}, memory_bytes=0)
>>> [row.reason for row in propose(None, None, setup)]  # one rank: the program is not even asked
['no collective over ranks was recorded']
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.program import Program

TRY_MB = 25
"""Size to try: all buckets of 25 MB, where DDP's default makes the first one 1 MB."""


def propose(ledger: object, program: Program, setup: Setup) -> Iterator[Proposal | Refusal]:
    """Yield what faster links would win, and why the bucket size has to be tried."""
    del ledger
    if setup.world_size < 2 or not program.recording.meetings:
        yield Refusal("comm.bucket", "comm", "no collective over ranks was recorded")
        return
    bound = program.predict(["comm=instant"])
    if bound.speedup < MIN_SPEEDUP:
        reason = f"exposed communication costs {1 - 1 / bound.speedup:.1%} of a step: no bucket size can win more"
        yield Refusal("comm.bucket", "comm", reason)
        return
    yield Proposal(
        name="comm.bucket",
        room="comm",
        edits=(),
        predicted_speedup=1.0,
        interval=(1 / bound.speedup, bound.speedup),
        applies=True,
        parameters={"bucket_mb": TRY_MB},
        cost="one more copy of the largest bucket",
        risk="larger buckets start later, smaller ones cost more wake-ups: either may be slower",
        reason=f"Not predictable from this run: at most {bound.speedup:.3f}x, at worst a loss. Try it live.",
    )
    faster = program.predict(["bandwidth=2x"])
    yield Proposal(
        name="comm.links",
        room="comm",
        edits=("bandwidth=2x",),
        predicted_speedup=faster.speedup,
        interval=(min(1.0, faster.interval[0]), max(faster.interval[1], bound.speedup)),
        applies=False,
        cost="links of twice the bandwidth",
        reason=faster.note,
    )
