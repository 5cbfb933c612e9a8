"""What the checkpoint room would change in a recorded run: how often it saves, and what training waits for.

Each proposal is a replay with the recorded saves made rarer or shorter, and
says what a failure would then cost: a rarer save loses more work, a save in
the background is worth nothing until it is durable. Applies to stock saves
(`torch.save`, DCP, safetensors) and to those of `headway.Checkpointer` alike.
Seconds, steps and bytes.

>>> exposure(40, 0.5), exposure(40, 0.5, late_s=3.0)
('a failure loses 10 s of work on average, 20 s at worst', 'a failure loses 13 s of work on average, 23 s at worst')

Ways to save one job's state, side by side: what each costs, and what a failure loses under it.

Use it when there is no recorded run to replay, or to lay the exposure of each
way beside its cost: as now, at the interval that the budget or the failure
rate asks for, and with a copy in memory that another process writes. Closed
forms; the redundancy of what is stored costs bytes, not time. Seconds, bytes.

>>> job = SavingJob(step_s=0.5, save_s=20.0, every_steps=100, state_bytes=10**10)
>>> [(way.name, way.every_steps, round(way.overhead_fraction, 3)) for way in ways(job)]
[('as now', 100, 0.4), ('interval', 1143, 0.035), ('async', 144, 0.035)]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headway.checkpoint.costs import (
    CALL_S,
    DURABLE_S,
    Goal,
    behind_steps,
    best_steps,
    overlap_steps,
    positive,
    wall_factor,
)
from headway.core.errors import InputError
from headway.core.tables import pick
from headway.core.units import NS_PER_S, format_bytes, format_fraction, format_seconds, parse_bytes
from headway.ledger.answers.ledger import Ledger
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.recorded.lane import LABEL
from headway.sim.recorded.program import Program
from headway.sim.whatif import Prediction
from headway.storage.redundancy.erasure import scheme_of
from headway.trace.events.intervals import Ints

BUDGET = 0.035
"""Share of the training time that saves may cost where no failure rate is known (CheckFreq's)."""

COPY_BYTES_PER_S = 4e9
"""Rate at which a state is copied to host memory, where nobody measured it: half of what one core of 2020 does."""

TAKE_BYTES_PER_S = 1e9
"""Rate at which the memory of the first copy comes from the system, which clears its pages: half of one such core."""

START_S = 0.3
"""What the first save of `headway.Checkpointer` holds training up for besides: the start of its agent."""

WRITE_BYTES_PER_S = 1e9
"""Bytes that one such core checks and hands to storage, in the background, per second of its own."""

SYNC_BYTES_PER_S = 5e8
"""Bytes that a local disk makes durable: what saves that were never synced left for later, and ours wait for."""

SPREAD = 2.0
"""Factor either way by which what such rates say may be wrong."""

BEGINS = tuple(LABEL[f"checkpoint.{name}"] for name in ("save", "snapshot"))
COLUMNS = ("name", "lane", "start_ns", "duration_ns", "bytes", "corr", "seq")
DCP = 1
"""`corr` of a checkpoint.save by torch's distributed checkpoint."""


@dataclass(frozen=True, slots=True)
class RecordedSaves:
    """The saves of a run."""

    num_saves: int
    """Of the rank that saved most often, in the replayed steps."""

    every_steps: int
    """Steps between two of them, the median."""

    cost_s: float
    """What one of them costs the job: the time that a replay without saves wins, per save."""

    step_s: float
    """A step without saves."""

    own: bool
    """Whether headway's Checkpointer made them."""

    num_bytes: int
    """Bytes of the state that the rank with most of them would copy per save; 0 = not recorded."""

    written_bytes: int
    """Bytes that all ranks together write per save."""

    synced: bool
    """Whether they were made durable before training went on."""

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
    mtbf_s = measured_mtbf_s(ledger)
    yield interval(program, saves, mtbf_s)
    yield asynchronous(program, saves, setup, mtbf_s)


def recorded_saves(program: Program) -> RecordedSaves | None:
    """Return what the run shows of its saves; None when the replayed steps have none."""
    steps = [_saving_steps(lane.label, lane.step, lane.row) for lane in program.recording.lanes]
    most = max(range(len(steps)), key=lambda index: len(steps[index]))
    found = steps[most]
    if not len(found):
        return None
    gaps = np.sort(np.diff(found))
    every = max(int(gaps[(len(gaps) - 1) // 2]), 1) if len(gaps) else program.recording.num_steps
    without = program.predict(["checkpoint=none"], interval=False)
    per_save = (program.recording.num_steps - program.warm) / max(1, int((found >= program.warm).sum()))
    cost_s = max(0.0, without.base_step_s - without.step_s) * per_save
    own = bool(np.isin(LABEL["checkpoint.snapshot"], program.recording.lanes[most].label))
    copied, written, dcp, late_s = _written(program)
    synced = dcp or any((lane.label == LABEL["checkpoint.sync"]).any() for lane in program.recording.lanes)
    return RecordedSaves(len(found), every, cost_s, without.step_s, own, copied, written, synced, dcp, late_s)


def measured_mtbf_s(ledger: object) -> float | None:
    """Return the run's wall time per failed attempt; None when none failed (or the run is not known)."""
    failures = ledger.facts.attempt if isinstance(ledger, Ledger) else 0
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
        reason=f"Save every {steps} steps rather than {saves.every_steps}: that {why}. {prediction.note}".strip(),
        conflicts=("checkpoint.async",),
    )


def asynchronous(
    program: Program, saves: RecordedSaves, setup: Setup, mtbf_s: float | None = None
) -> Proposal | Refusal:
    """Propose to wait for a copy in memory only, and to write it behind the steps.

    The remedy leaves the script its own interval; where the saves would overtake each other, or the script has to be
    changed anyway, the interval is the best one.
    """
    if saves.own:
        return Refusal("checkpoint.async", "checkpoint", "headway's Checkpointer saves behind the steps already")
    if not saves.num_bytes:
        return Refusal("checkpoint.async", "checkpoint", "the size of the saves was not recorded: save to a path")
    late_s = saves.cost_s + DURABLE_S + (0.0 if saves.synced else saves.num_bytes / SYNC_BYTES_PER_S)
    stall_s, once_s = behind_s(program, saves, setup)
    applies = saves.dcp and overlap_steps(stall_s=0, duration_s=late_s, step_s=saves.step_s) <= saves.every_steps
    goal: Goal = {"step_s": saves.step_s, "budget": BUDGET, "mtbf_s": mtbf_s}
    best = behind_steps(stall_s, late_s=late_s, now=saves.every_steps, goal=goal)
    every = saves.every_steps if applies else best
    per_save_s = stall_s + once_s * every / program.recording.recorded_steps
    slow, likely, fast = (
        _with_stall(program, saves, every, seconds)
        for seconds in (SPREAD * per_save_s, per_save_s, per_save_s / SPREAD)
    )
    if likely.speedup < MIN_SPEEDUP:
        copied = format_bytes(saves.num_bytes)
        reason = f"copying {copied}, and writing them on cores that the steps need, costs as much: nothing to win"
        return Refusal("checkpoint.async", "checkpoint", reason)
    note = f"A copy at {format_bytes(COPY_BYTES_PER_S)}/s is assumed: headway ckpt bench measures it."
    how, writer = f"headway.Checkpointer(root, model=..., opt=...) copies and goes on, every {every} steps", "process"
    if applies:
        how, writer = "The script's own dcp.save copies and goes on, as often as now", "thread"
    return Proposal(
        name="checkpoint.async",
        room="checkpoint",
        edits=likely.edits,
        predicted_speedup=likely.speedup,
        interval=(min(slow.interval[0], likely.interval[0]), max(fast.interval[1], likely.interval[1])),
        applies=applies,
        allow="result-equivalent" if applies else None,
        parameters={"every_steps": every},
        cost=f"{format_bytes(2 * saves.num_bytes)} of host memory per rank, and one {writer} beside it",
        risk=exposure(every, saves.step_s, late_s=late_s) + "; writing takes cores and storage from the steps",
        reason=f"{how}: the save before must be durable. {note} {likely.note}".strip(),
        memory_bytes=2 * saves.num_bytes,
        conflicts=("checkpoint.interval",),
    )


def behind_s(program: Program, saves: RecordedSaves, setup: Setup) -> tuple[float, float]:
    """Return what each save behind the steps would cost the job, its copy and its crowding, and the first one besides.

    Memory is taken, and an agent started, once. Writing costs the steps what of it finds no idle core: ranks that
    compute on an accelerator leave nearly all cores idle, ranks that compute on the host their number of threads less.
    """
    copy_s = saves.num_bytes / COPY_BYTES_PER_S + CALL_S
    threads = 1
    if not setup.accelerated:
        told = program.facts.env.get("OMP_NUM_THREADS", "").partition(",")[0]
        threads = int(told) if told.isdigit() else program.cores
    idle = max(0.0, program.cores - threads * setup.ranks_per_host * float(program.busy.mean()))
    work_s = saves.written_bytes * setup.ranks_per_host / setup.world_size / WRITE_BYTES_PER_S
    crowding_s = max(0.0, work_s - idle * saves.cost_s) / program.cores
    return copy_s + crowding_s, saves.num_bytes / TAKE_BYTES_PER_S + (0.0 if saves.dcp else START_S)


def exposure(every_steps: float, step_s: float, *, late_s: float = 0.0) -> str:
    """Say what a failure loses when a save comes every so many steps and is durable `late_s` after its copy."""
    whole_s = every_steps * step_s
    mean, worst = format_seconds(whole_s / 2 + late_s), format_seconds(whole_s + late_s)
    return f"a failure loses {mean} of work on average, {worst} at worst"


def _with_stall(program: Program, saves: RecordedSaves, every: int, stall_s: float) -> Prediction:
    """Predict saves that stop training for `stall_s` every so many steps."""
    factor = min(1.0, stall_s / saves.cost_s * saves.every_steps / every)
    return program.predict([f"checkpoint={factor:.4g}x"])


def _saving_steps(label: Ints, step: Ints, row: Ints) -> Ints:
    """Return the steps in which a save began, in order."""
    begins = np.isin(label, BEGINS)
    first = np.unique(row[begins], return_index=True)[1]
    return np.unique(step[begins][first])


def _written(program: Program) -> tuple[int, int, bool, float]:
    """Return the bytes per save that a rank copies and that all write, whether DCP writes them, and how late they are
    committed. Of a bare trace nothing is known: (0, 0, False, 0).
    """
    if program.run is None:
        return 0, 0, False, 0.0
    most, num_writers, dcp, lanes = 0, 0, False, program.recording.lanes
    begun_ns: dict[int, int] = {}
    ended_ns: dict[int, int] = {}
    for lane in lanes:
        rows = program.run.parts.read({"rank": (lane.rank, lane.rank + 1)}, COLUMNS)
        start, seq = rows.events["start_ns"], rows.events["seq"]
        saved = rows.named("checkpoint.save", "checkpoint.snapshot") & (start >= lane.step_end_ns[0])
        if saved.any():
            most, num_writers = max(most, int(np.median(rows.events["bytes"][saved]))), num_writers + 1
            dcp |= bool((rows.events["corr"][saved] == DCP).any())
        copies, commits = rows.named("checkpoint.snapshot") & saved, rows.named("checkpoint.commit")
        begun_ns |= dict(zip(seq[copies].tolist(), start[copies].tolist(), strict=True))
        ended = (start + rows.events["duration_ns"])[commits].tolist()
        ended_ns |= dict(zip(seq[commits].tolist(), ended, strict=True))
    lags_s = [(ended_ns[number] - begun_ns[number]) / NS_PER_S for number in ended_ns.keys() & begun_ns.keys()]
    late_s = max(0.0, float(np.median(lags_s))) if lags_s else 0.0
    if not dcp:
        return most, most * num_writers, dcp, late_s
    # What is recorded of a DCP save is its folder, which all ranks write into. Under DDP each of them holds all of it.
    replicated = any((lane.label == LABEL["comm.wait"]).any() for lane in lanes)
    return most if replicated else most // len(lanes), most, dcp, late_s


REDUNDANCIES = ("none", "+1", "+2")
"""Schemes that are laid side by side."""


@dataclass(frozen=True, slots=True)
class SavingJob:
    """What must be known of a job to choose how it saves."""

    step_s: float
    """A step without saves."""
    save_s: float
    """What a save stops training for today."""
    every_steps: int
    """Steps between saves today."""
    state_bytes: int = 0
    """What one rank would copy per save; 0 = not known."""
    copy_bytes_per_s: float = COPY_BYTES_PER_S
    """Rate of a copy to host memory, per rank."""
    mtbf_s: float | None = None
    """Mean time between failures of the whole job; None = not known."""
    budget: float = BUDGET
    """Share of the time that saves may cost where no failure rate is known."""
    ranks: int = 1
    hosts: int = 1
    late_s: float = 0.0
    """How long after its copy a save is durable today; 0 = at once, as it is in stock saves."""

    def __post_init__(self) -> None:
        """Raise `InputError` on a job that cannot be."""
        for name in ("step_s", "every_steps", "copy_bytes_per_s", "budget"):
            positive(name, getattr(self, name))
        positive("save_s", self.save_s, zero=True)
        positive("late_s", self.late_s, zero=True)
        positive("state_bytes", self.state_bytes, zero=True)
        if self.mtbf_s is not None:
            positive("mtbf_s", self.mtbf_s)
        if not 1 <= self.hosts <= self.ranks:
            raise InputError(f"{self.ranks} ranks on {self.hosts} hosts: pass at least one rank per host.")

    @property
    def copy_s(self) -> float:
        """What a save behind the steps stops training for."""
        return self.state_bytes / self.copy_bytes_per_s + CALL_S


@dataclass(frozen=True, slots=True)
class SaveMethod:
    """One way to save."""

    name: str
    every_steps: int
    stall_s: float
    """What a save stops training for."""
    late_s: float
    """How long after that its bytes are durable."""
    overhead_fraction: float
    """Time of saves over that of steps."""
    speedup: float
    """Steps per second, over those of today's way."""
    exposure_s: float
    """Work that a failure loses on average."""
    worst_exposure_s: float
    """Work that it loses at worst."""
    lost_fraction: float | None
    """Share of the wall time that saves and work done twice take; None while no failure rate is known."""


@dataclass(frozen=True, slots=True)
class Protection:
    """What a redundancy scheme costs and survives, where every rank keeps its part on its host's own disk."""

    redundancy: str
    bytes_fraction: float
    """Parity bytes over saved bytes."""
    lost_ranks: int
    """Ranks whose parts may be lost at once, any of them."""
    lost_hosts: int
    """Hosts that may be lost at once, any of them, with stripes spread over all hosts."""


def ways(job: SavingJob) -> list[SaveMethod]:
    """Return today's way, the better interval for it, and a copy written in the background.

    The last one only where saves are not written so already, and their size is known.
    """
    goal: Goal = {"step_s": job.step_s, "budget": job.budget, "mtbf_s": job.mtbf_s}
    now = _way(job, "as now", job.every_steps, job.save_s, job.late_s)
    found = [now, _way(job, "interval", best_steps(job.save_s, **goal), job.save_s, job.late_s)]
    if job.state_bytes and not job.late_s:
        stall_s = min(job.copy_s, job.save_s)
        late_s = job.save_s + DURABLE_S
        every = behind_steps(stall_s, late_s=late_s, now=job.every_steps, goal=goal)
        found.append(_way(job, "async", every, stall_s, late_s))
    return [replace(way, speedup=(1 + now.overhead_fraction) / (1 + way.overhead_fraction)) for way in found]


def protections(job: SavingJob) -> list[Protection]:
    """Return what each of `REDUNDANCIES` costs and survives; those that the ranks are too few for are left out."""
    found = []
    for redundancy in REDUNDANCIES:
        scheme = scheme_of(redundancy, job.ranks)
        if scheme is None:
            found.append(Protection(redundancy, 0.0, 0, 0))
        elif scheme[1] < job.ranks:
            k, m = scheme
            found.append(Protection(redundancy, m / k, m, m // -(-(k + m) // job.hosts)))
    return found


def _way(job: SavingJob, name: str, every_steps: int, stall_s: float, late_s: float) -> SaveMethod:
    interval_s = every_steps * job.step_s
    lost = None
    if job.mtbf_s is not None:
        lost = 1 - 1 / wall_factor(interval_s, stall_s=stall_s, mtbf_s=job.mtbf_s, restart_s=late_s)
    return SaveMethod(
        name, every_steps, stall_s, late_s, stall_s / interval_s, 1.0, interval_s / 2 + late_s,
        interval_s + late_s, lost,
    )  # fmt: skip


SETTINGS: Mapping[str, tuple[str, str]] = {
    "step_s": ("step_s", "seconds of a step without saves"),
    "save_s": ("save_s", "seconds for which a save stops training"),
    "every": ("every_steps", "steps between saves"),
    "state": ("state_bytes", "bytes that a rank saves, such as 12GB"),
    "copy": ("copy_bytes_per_s", "bytes per second of a copy to host memory, such as 8GB"),
    "mtbf_s": ("mtbf_s", "mean seconds between failures of the job"),
    "budget": ("budget", "share of the time that saves may cost, such as 0.035"),
    "ranks": ("ranks", "ranks of the job"),
    "hosts": ("hosts", "hosts of the job"),
}
"""What `--set` takes -> the field of `SavingJob`, and one line for a person."""

_BYTES = ("state", "copy")
_COUNTS = ("every", "ranks", "hosts")


def job_with(settings: list[str], recorded: SavingJob | None = None) -> SavingJob:
    """Return the job that `settings` ("step_s=0.5") describe, on top of a recorded one.

    Raises `InputError` for a setting that is none, or when nothing says what a step and a save take.
    """
    given: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"{text!r} is no setting. Write name=value, for example step_s=0.5.")
        given[pick(SETTINGS, name.strip(), "setting")[0]] = _value(name.strip(), value.strip())
    if recorded is not None:
        return replace(recorded, **given)
    missing = [name for name in ("step_s", "save_s", "every") if SETTINGS[name][0] not in given]
    if missing:
        raise InputError(
            f"without a recorded run {', '.join(missing)} must be given. Pass --set {missing[0]}=..., or name a run."
        )
    return SavingJob(**given)


def _value(name: str, text: str) -> float | int:
    if name in _BYTES:
        return parse_bytes(text)
    try:
        return int(text) if name in _COUNTS else float(text)
    except ValueError:
        raise InputError(f"{name} is {text!r}, no number. Write {SETTINGS[name][1]}.") from None
