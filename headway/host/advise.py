"""What the host room would change: garbage collection, logging, a rank that lags.

Only proposed where the recorded time pays for it: CPython makes old-generation
collections rare by itself, so freezing wins nothing in most small jobs.

>>> won = Prediction(base_step_s=0.02, step_s=0.0199, interval=(1.0, 1.01), edits=())
>>> _too_little("host.gc", "collections", won).reason
'collections cost 0.5 % of a step: too little to pay for a change'
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.core.units import format_fraction
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.recorded.program import Program
from headway.sim.whatif import Prediction

COLLECT_EVERY = (50, 100, 200, 500)
"""Steps between coordinated collections that are tried, smallest first: garbage must not pile up."""

CLOSE = 1.005
"""Of intervals within 0.5 % of the best, the shortest is taken."""


def propose(ledger: object, program: Program, setup: Setup) -> Iterator[Proposal | Refusal]:
    """Yield the proposals of the host, and reasons where the recorded time does not pay."""
    del ledger
    yield logging(program)
    yield collection(program)
    if setup.world_size > 1:
        yield straggler(program)


def logging(program: Program) -> Proposal | Refusal:
    """Propose to run log handlers in a background thread."""
    prediction = program.predict(["logging=buffered"])
    if prediction.speedup < MIN_SPEEDUP:
        return _too_little("host.logging", "logging", prediction)
    return Proposal(
        name="host.logging",
        room="host",
        edits=("logging=buffered",),
        predicted_speedup=prediction.speedup,
        interval=prediction.interval,
        applies=True,
        cost="one thread per rank",
        risk="records still in the queue are lost when the process is killed with SIGKILL",
        reason=prediction.note,
    )


def collection(program: Program) -> Proposal | Refusal:
    """Propose to freeze what is old and to collect on all ranks at the same step."""
    bound = program.predict(["op:host.gc=none"])
    if bound.speedup < MIN_SPEEDUP:
        called = program.predict(["op:host.collect=none"], interval=False)
        if called.speedup < MIN_SPEEDUP:
            return _too_little("host.gc", "garbage collection", bound)
        reason = "the script calls gc.collect() itself, and what it calls for is not put off: call it less often"
        return Refusal("host.gc", "host", reason)
    tried = {every: program.predict([f"gc=frozen:{every}"], interval=False).step_s for every in COLLECT_EVERY}
    every = next(every for every in COLLECT_EVERY if tried[every] <= CLOSE * min(tried.values()))
    prediction = program.predict([f"gc=frozen:{every}"])
    return Proposal(
        name="host.gc",
        room="host",
        edits=(f"gc=frozen:{every}",),
        predicted_speedup=prediction.speedup,
        interval=prediction.interval,
        applies=True,
        parameters={"every_steps": every},
        cost=f"garbage of up to {every} steps stays in memory",
        risk="memory grows between collections; applied with a guard on resident memory",
        reason=f"What one frozen collection costs is assumed. {prediction.note}".strip(),
    )


def straggler(program: Program) -> Proposal | Refusal:
    """Predict what replacing slow ranks by typical ones would win."""
    prediction = program.predict(["straggler=none"])
    if prediction.speedup < MIN_SPEEDUP:
        return _too_little("straggler.remove", "slow ranks", prediction)
    if program.facts.host is not None and len(program.facts.hosts) < 2:
        reason = "all ranks share one host, whose load is theirs: see what else runs there"
        return Refusal("straggler.remove", "host", reason)
    return Proposal(
        name="straggler.remove",
        room="host",
        edits=("straggler=none",),
        predicted_speedup=prediction.speedup,
        interval=prediction.interval,
        applies=False,
        cost="another host for the slow rank",
        reason=f"This assumes that every rank becomes as fast as the median rank. {prediction.note}".strip(),
    )


def _too_little(name: str, what: str, bound: Prediction) -> Refusal:
    """Say that even taking the cause away would win too little."""
    won = max(0.0, 1 - bound.step_s / bound.base_step_s)
    return Refusal(name, "host", f"{what} cost {format_fraction(won)} of a step: too little to pay for a change")
