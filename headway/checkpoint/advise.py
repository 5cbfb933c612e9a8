"""What the checkpoint room would change in a recorded run: how often it saves, and what training waits for.

Each proposal is a replay with the recorded saves made rarer or shorter, and
says what a failure would then cost: a rarer save loses more work, a save in
the background is worth nothing until it is durable. Applies to stock saves
(`torch.save`, DCP, safetensors) and to those of `headway.Checkpointer` alike.
Seconds, steps and bytes.

>>> exposure(40, 0.5), exposure(40, 0.5, late_s=3.0)
('a failure loses 10 s of work on average, 20 s at worst', 'a failure loses 13 s of work on average, 23 s at worst')
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headway.checkpoint.costs import DURABLE_S, best_steps, overlap_steps
from headway.core.units import NS_PER_S, format_bytes, format_fraction, format_seconds
from headway.ledger.ledger import Ledger
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.program import Prediction, Program
from headway.sim.recording import LABEL
from headway.trace.sweep import Ints

BUDGET = 0.035
"""Share of the training time that saves may cost where no failure rate is known (CheckFreq's)."""

COPY_BYTES_PER_S = 4e9
"""Rate at which a state is copied to host memory, where nobody measured it: half of what one core of 2020 does."""

COPY_SPREAD = 2.0
"""Factor either way by which that may be wrong."""

SAVING = tuple(LABEL[f"checkpoint.{name}"] for name in ("save", "sync", "rename", "snapshot", "wait"))
BEGINS = tuple(LABEL[f"checkpoint.{name}"] for name in ("save", "snapshot"))
COLUMNS = ("name", "lane", "start_ns", "duration_ns", "bytes", "corr", "seq")
DCP = 1
"""`corr` of a checkpoint.save by torch's distributed checkpoint."""


@dataclass(frozen=True, slots=True)
class RecordedSaves:
    """The saves of a run."""

    num_saves: int
    """Of the rank that saved most often, in the replayed steps."""

    every_steps: float
    """Steps between two of them, the median."""

    cost_s: float
    """What one of them costs the job: the time that a replay without saves wins, per save."""

    step_s: float
    """A step without saves."""

    own: bool
    """Whether headway's Checkpointer made them."""

    num_bytes: int
    """Bytes that the rank with most of them writes per save; 0 = not recorded."""

    dcp: bool
    """Whether torch's distributed checkpoint made them."""

    late_s: float
    """How long after the start of its copy a save of headway's own was committed, the median; 0 for stock saves."""

    @property
    def overhead_fraction(self) -> float:
        """Share of the time of the steps that saves cost."""
        return self.cost_s / (self.every_steps * self.step_s)


def propose(ledger: object, program: Program, setup: Setup) -> Iterator[Proposal | Refusal]:
    """Yield what the recorded saves suggest, or why nothing is to be won."""
    saves = recorded_saves(program)
    bound = program.predict(["checkpoint=none"])
    if saves is None or bound.speedup < MIN_SPEEDUP:
        won = format_fraction(max(0.0, 1 - bound.step_s / bound.base_step_s))
        yield Refusal(
            "checkpoint.interval", "checkpoint", f"checkpoints cost {won} of a step: too little to pay for a change"
        )
        return
    yield interval(program, saves, measured_mtbf_s(ledger))
    yield asynchronous(program, saves, shares_cores=not setup.accelerated)


def recorded_saves(program: Program) -> RecordedSaves | None:
    """Return what the run shows of its saves; None when the replayed steps have none."""
    steps = [_saving_steps(lane.label, lane.step, lane.row) for lane in program.recording.lanes]
    most = max(range(len(steps)), key=lambda index: len(steps[index]))
    found = steps[most]
    if not len(found):
        return None
    gap = float(np.median(np.diff(found))) if len(found) > 1 else float(program.recording.num_steps)
    every = max(gap, 1.0)
    without = program.predict(["checkpoint=none"], interval=False)
    cost_s = max(0.0, without.base_step_s - without.step_s) * every
    own = bool(np.isin(LABEL["checkpoint.snapshot"], program.recording.lanes[most].label))
    num_bytes, dcp, late_s = _written(program)
    return RecordedSaves(len(found), every, cost_s, without.step_s, own, num_bytes, dcp, late_s)


def measured_mtbf_s(ledger: object) -> float | None:
    """Return the run's wall time per failed attempt; None when none failed (or the run is not known)."""
    failures = int(ledger.meta.get("attempt") or 0) if isinstance(ledger, Ledger) else 0
    return ledger.wall_ns / NS_PER_S / failures if failures and isinstance(ledger, Ledger) else None


def interval(program: Program, saves: RecordedSaves, mtbf_s: float | None) -> Proposal | Refusal:
    """Propose to save less often: as the budget says, or as the measured failure rate does."""
    steps = best_steps(saves.cost_s, step_s=saves.step_s, budget=BUDGET, mtbf_s=mtbf_s)
    share = format_fraction(saves.overhead_fraction)
    if steps <= saves.every_steps:
        rule = "the failure rate asks for it" if mtbf_s else f"within the budget of {format_fraction(BUDGET)}"
        return Refusal("checkpoint.interval", "checkpoint", f"saves cost {share} of the steps' time: {rule}")
    edit = f"checkpoint={saves.every_steps / steps:.4g}x"
    prediction = program.predict([edit])
    why = "loses least to saves and failures" if mtbf_s else f"keeps saves within {format_fraction(BUDGET)} of the time"
    return Proposal(
        name="checkpoint.interval",
        room="checkpoint",
        edits=(edit,),
        predicted_speedup=prediction.speedup,
        interval=prediction.interval,
        applies=False,
        parameters={"every_steps": steps},
        cost="none",
        risk=f"{exposure(steps, saves.step_s, late_s=saves.late_s)}, not "
        f"{format_seconds(saves.every_steps * saves.step_s / 2 + saves.late_s)}",
        reason=f"Save every {steps} steps rather than {saves.every_steps:.0f}: that {why}. {prediction.note}".strip(),
        conflicts=("checkpoint.async",),
    )


def asynchronous(program: Program, saves: RecordedSaves, *, shares_cores: bool) -> Proposal | Refusal:
    """Propose to wait for a copy in memory only, and to write it behind the steps.

    `shares_cores`: steps compute on the host's cores, and the low end assumes that half of the writing hits them.
    """
    if saves.own:
        return Refusal("checkpoint.async", "checkpoint", "headway's Checkpointer saves behind the steps already")
    if not saves.num_bytes:
        return Refusal("checkpoint.async", "checkpoint", "the size of the saves was not recorded: save to a path")
    copy_s = saves.num_bytes / COPY_BYTES_PER_S
    late_s = saves.cost_s + DURABLE_S
    rare = overlap_steps(stall_s=0.0, duration_s=late_s, step_s=saves.step_s)
    every = max(saves.every_steps, float(rare))
    slow_s = COPY_SPREAD * copy_s + (saves.cost_s / 2 if shares_cores else 0.0)
    slow, likely, fast = (
        _with_copy(program, saves, every, stall_s) for stall_s in (slow_s, copy_s, copy_s / COPY_SPREAD)
    )
    if likely.speedup < MIN_SPEEDUP:
        reason = f"a copy of {format_bytes(saves.num_bytes)} takes as long as the save: nothing to win"
        return Refusal("checkpoint.async", "checkpoint", reason)
    note = f"A copy at {format_bytes(COPY_BYTES_PER_S)}/s is assumed: headway ckpt bench measures it."
    return Proposal(
        name="checkpoint.async",
        room="checkpoint",
        edits=likely.edits,
        predicted_speedup=likely.speedup,
        interval=(min(slow.interval[0], likely.interval[0]), max(fast.interval[1], likely.interval[1])),
        # The remedy leaves the script's own interval: where that is too short, the change is the user's.
        applies=saves.dcp and rare <= saves.every_steps,
        allow="result-equivalent" if saves.dcp and rare <= saves.every_steps else None,
        parameters={"every_steps": round(every)},
        cost=f"{format_bytes(2 * saves.num_bytes)} of host memory per rank, and one process beside it",
        risk=exposure(every, saves.step_s, late_s=late_s) + "; writing takes cores and storage from the steps",
        reason=f"headway.Checkpointer(root, model=..., opt=...) copies and goes on, every {every:.0f} steps: the save "
        f"before must be durable. {note} {likely.note}".strip(),
        memory_bytes=2 * saves.num_bytes,
        conflicts=("checkpoint.interval",),
    )


def exposure(every_steps: float, step_s: float, *, late_s: float = 0.0) -> str:
    """Say what a failure loses when a save comes every so many steps and is durable `late_s` after its copy."""
    whole_s = every_steps * step_s
    mean, worst = format_seconds(whole_s / 2 + late_s), format_seconds(whole_s + late_s)
    return f"a failure loses {mean} of work on average, {worst} at worst"


def _with_copy(program: Program, saves: RecordedSaves, every: float, copy_s: float) -> Prediction:
    """Predict saves that stop training for `copy_s` every so many steps."""
    factor = min(1.0, copy_s / saves.cost_s * saves.every_steps / every)
    return program.predict([f"checkpoint={factor:.4g}x"])


def _saving_steps(label: Ints, step: Ints, row: Ints) -> Ints:
    """Return the steps in which a save began, in order."""
    begins = np.isin(label, BEGINS)
    first = np.unique(row[begins], return_index=True)[1]
    return np.unique(step[begins][first])


def _written(program: Program) -> tuple[int, bool, float]:
    """Return the bytes that a rank writes per save, whether DCP writes them, and how late they are committed.

    Of a bare trace nothing is known: (0, False, 0).
    """
    if program.run is None:
        return 0, False, 0.0
    most, dcp = 0, False
    begun_ns: dict[int, int] = {}
    ended_ns: dict[int, int] = {}
    for lane in program.recording.lanes:
        rows = program.run.parts.read({"rank": (lane.rank, lane.rank + 1)}, COLUMNS)
        start, seq = rows.events["start_ns"], rows.events["seq"]
        saved = rows.named("checkpoint.save", "checkpoint.snapshot") & (start >= lane.step_end_ns[0])
        if saved.any():
            most = max(most, int(np.median(rows.events["bytes"][saved])))
            dcp |= bool((rows.events["corr"][saved] == DCP).any())
        copies, commits = rows.named("checkpoint.snapshot") & saved, rows.named("checkpoint.commit")
        begun_ns |= dict(zip(seq[copies].tolist(), start[copies].tolist(), strict=True))
        ended = (start + rows.events["duration_ns"])[commits].tolist()
        ended_ns |= dict(zip(seq[commits].tolist(), ended, strict=True))
    lags_s = [(ended_ns[number] - begun_ns[number]) / NS_PER_S for number in ended_ns.keys() & begun_ns.keys()]
    # What is recorded of a DCP save is its folder, which all ranks write into.
    share = most // len(program.recording.lanes) if dcp else most
    return share, dcp, max(0.0, float(np.median(lags_s))) if lags_s else 0.0
