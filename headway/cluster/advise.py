"""What `headway plan` hears of this room: copies of a script on ranks of unlike speed, and where to ask for a batch.

In lockstep every rank waits for the slowest; copies that are dealt batches by their speeds (HadarE) do not, but for one
average per slot:

    rank 0   ##......|##......|##......|        copy 0   ##|##|##|##|##|##|##|##|##|##|##|##|  average
    rank 1   ########|########|########|        copy 1   ########|########|########|           average

    batches/s   in lockstep: ranks / step        in copies: sum over ranks of 1 / own time of a batch, but for averages
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from headway.cluster.fork.slots import slot_seconds
from headway.core.units import NS_PER_S, format_fraction, format_seconds
from headway.ledger.answers.comm_causes import by_chance
from headway.ledger.answers.ledger import Ledger
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.ddp.ddp_window import models_of
from headway.sim.recorded.program import Program

FORK, BATCH = "cluster.fork", "cluster.batch"

LEAST_FIXED = 0.2
"""Share of a step that does not grow with the batch, from which on measuring what a larger one learns is advised."""

OWN = ("useful", "input", "host")
"""Buckets of a rank's own work: what it would do without the others."""

UNLIKE = 1.25
"""The slowest rank's own time of a step over the fastest one's, at least: less is evened out by other remedies."""

BY_CHANCE = 0.01
"""A rank that is last so often by chance less often than this is slower."""

FILE_BYTES_PER_S = 1e9
"""What a state is written and read at; nothing recorded says it."""

STATE = 3
"""Bytes of a state over those of the parameters: they and two moments."""


def propose(ledger: object, program: Program, setup: Setup) -> Iterator[Proposal | Refusal]:
    """Yield copies where ranks have unlike speeds, and where to ask once a run has measured its gradients' noise."""
    if isinstance(ledger, Ledger):
        yield from _fork(ledger, program, setup)
    if "cluster.noise" in setup.in_force:
        path = "RUN" if program.run is None else str(program.run.path)
        reason = f"the noise of the gradients was measured: {batch_command(path, lossy=True)} chooses a batch by it"
        yield Refusal(BATCH, "cluster", reason)
    elif isinstance(ledger, Ledger) and program.run is not None and BATCH not in setup.in_force:
        fixed = _fixed_fraction(ledger)
        sized = any(loader.batch_size for loader in setup.loaders.values())
        if sized and fixed >= LEAST_FIXED and not ledger.ledger_ns["bubble"]:
            command = batch_command(str(program.run.path))
            reason = (
                f"{format_fraction(fixed)} of the steps are communication and calls, which do not grow with the batch: "
                f"a larger one may learn more per second. The noise of the gradients, which decides it, was not "
                f"measured: {command} writes the plan that measures it"
            )
            yield Refusal(BATCH, "cluster", reason)


def batch_command(run: str, *, lossy: bool = False) -> str:
    """Return the command that writes the plan which measures the noise of gradients, or (`lossy`) sets the batch."""
    grant = ["--allow", "lossy"] if lossy else []
    return shlex.join(["headway", "cluster", "batch", run, "--out", "batch.json", *grant])


def _fixed_fraction(ledger: Ledger) -> float:
    """Return the share of the steps' device time that a larger batch does not lengthen: exposed collectives, calls."""
    in_steps_ns = sum(ledger.ledger_ns[bucket] for bucket in (*OWN, "comm", "straggler"))
    longer_ns = sum(ledger.sub_ns.get(name, 0) for name in ("host.cpu_wait", "host.script"))  # those it does, or may
    fixed_ns = ledger.ledger_ns["comm"] + ledger.ledger_ns["host"] - longer_ns
    return fixed_ns / in_steps_ns if in_steps_ns else 0.0


def _fork(ledger: Ledger, program: Program, setup: Setup) -> Iterator[Proposal | Refusal]:
    """Yield copies, or why not, where one rank is slower than the others all along; nothing elsewhere."""
    own_s = {
        rank: sum(row.get(bucket, 0) for bucket in OWN) / NS_PER_S / max(ledger.steps, 1)
        for rank, row in sorted(ledger.by_rank_ns.items())
    }
    if len(own_s) < 2 or not min(own_s.values()) > 0 or max(own_s.values()) < UNLIKE * min(own_s.values()):
        return
    slowest, late = max(own_s, key=lambda rank: own_s[rank]), ledger.lateness
    if by_chance(late.times_last.get(slowest, 0), late.num_collectives, len(own_s)) >= BY_CHANCE:
        return
    speeds = [1 / seconds for seconds in own_s.values()]
    command = f"headway cluster fork --speeds {','.join(f'{speed:.3g}' for speed in speeds)} -- train.py"
    if "lossy" not in setup.limits.allow:
        reason = (
            "ranks are of unlike speed; copies that train apart change results: grant --allow lossy to have it said"
        )
        yield Refusal(FORK, "cluster", reason)
        return
    models = () if program.run is None else models_of(program.run)
    state_bytes = STATE * sum(sum(model.parameter_bytes) for model in models)
    # One file is written and one of each copy is read, by all copies at a time.
    cost_s = state_bytes * (1 + len(own_s)) / FILE_BYTES_PER_S
    slot_s = slot_seconds(cost_s, min(speeds))
    without = sum(speeds) * program.measured_s / len(own_s)
    speedup = without * (1 - min(cost_s / slot_s, 1.0))
    if speedup < MIN_SPEEDUP:
        yield Refusal(FORK, "cluster", f"copies would do {speedup:.3f}x the batches per second")
        return
    yield Proposal(
        FORK, "cluster", (), speedup, (min(speedup, without * (1 - min(10 * cost_s / slot_s, 1.0))), without),
        applies=False, allow="lossy", cost="a file of the state per copy and slot",
        risk="copies train apart between averages, and a step has one rank's batch: compare the loss at equal examples",
        reason=f"Rank {slowest} takes {format_seconds(own_s[slowest])} of its own for a step, the fastest "
        f"{format_seconds(min(own_s.values()))}. Copies do not wait for each other: {command}, without "
        f"DistributedDataParallel; slots of {format_seconds(slot_s)}, of which averages take at most "
        f"{max(cost_s / slot_s, 0.0):.1%}.",
    )  # fmt: skip
