"""Choose the set of remedies that wins most, by replaying each combination of them.

Use `Plan.of(ledger, program, setup, advisers)`. A combination is predicted by
one replay with all its edits, never by multiplying speedups: two remedies for
the same loss do not win twice. Proposals are ranked by the device-hours they
win over a run as long as the recorded one.

>>> Plan(base_step_s=0.02, step_s=0.01, interval=(1.9, 2.1)).predicted_speedup
2.0

Why a proposal is not in the plan: the one reason that decided, and what would change it.

>>> row = Proposal("data.cache", "data", ("cache_fraction=1",), 1.75, (1.6, 1.9), applies=True, memory_bytes=2 * 10**9)
>>> reason_of(row, (), room_bytes=10**9, allowed=()).reason
'needs 2.0 GB per rank, 1.0 GB are free'
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol, cast

from headway.core.errors import InputError
from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.core.tables import resolved
from headway.core.units import NS_PER_S, format_bytes, format_seconds
from headway.ledger.cause import NOT_RESOLVED, RECORD_ANEW
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal, pays_from
from headway.plan.setup import Setup
from headway.sim.recorded.lane import LABEL
from headway.sim.recorded.program import Program
from headway.sim.whatif import Edit, Prediction, parse_edit
from headway.trace.events.loader_facts import GivenUp
from headway.trace.recording.run_facts import CTRL_C

KINDS = ("hand", "noise", "memory", "short", "grant", "excluded", "little")
"""Values of `LeftOut.kind`: only the user can do it; its gain is inside the noise; it needs more memory than is free;
it changes results without a grant; the job is too short to win back what it costs at the start; a remedy in the plan
excludes it; it adds little to those in the plan."""


IN_FORCE = "is in force already"
"""What a run made of a remedy that it had applied: it is not proposed again."""

GIVEN_UP = "was refused or withdrawn in this run"
"""What a run made of a remedy that it refused or withdrew: it is not proposed as it was given there."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A proposal that is not in the plan."""

    name: str
    """Name of the remedy."""

    kind: str
    """One of `KINDS`."""

    reason: str
    """The same in words, with the numbers that decided."""


CUT_OFF_STEPS = 100_000
"""Steps of a job whose recorded run was stopped, killed, or goes on yet: only its end would tell how many there are."""

ENDED_EARLY = {"infra": "was killed", "preempted": "was stopped"}
"""Exit class -> how a run of it ended before its job did."""

BUDGET = 0.01
"""Share of a step that recording may take once a job has started."""

SLOW_START = 1.5
"""Times as long as it usually does the start of a remedy may take: with other work on the cores, say; or as short."""


def reason_of(
    row: Proposal, chosen: Sequence[Proposal], *, room_bytes: int, allowed: Sequence[str], steps: float = math.inf,
    base_step_s: float = 1.0, recording_s: float = 0.0,
) -> LeftOut:  # fmt: skip
    """Return why `row` is not among `chosen`, where ranks may use `room_bytes` and the user granted `allowed`.

    The job has `steps` steps, each of `base_step_s` before; headway's own work takes `recording_s` of it.
    """
    gain = f"predicted {row.gain}"
    by_hand = f"; by hand {row.by_hand}" if row.by_hand is not None and row.by_hand.clear else ""
    rivals = [member.name for member in chosen if excludes(row, member)]
    if not row.applies:
        return LeftOut(row.name, "hand", "headway cannot apply it")
    if not row.clear and not row.protects:
        noise = "it costs time" if row.interval[1] <= 1 else "inside the noise of two runs"
        noise = f"{NOT_RESOLVED}; {RECORD_ANEW}" if row.gain.unresolved and not by_hand else noise
        return LeftOut(row.name, "noise", f"{gain}: {noise}{by_hand}")
    if row.memory_bytes > room_bytes:
        needs = f"needs {format_bytes(row.memory_bytes)} per rank, {format_bytes(room_bytes)} are free"
        return LeftOut(row.name, "memory", needs)
    if not row.protects and (short := _too_short(row, gain, steps, base_step_s, recording_s)):
        return LeftOut(row.name, "short", short + by_hand)  # before the grant, which would not bring it into the plan
    if row.allow is not None and row.allow not in allowed:
        risk = row.risk or "it changes results"
        if row.protects:
            return LeftOut(row.name, "grant", f"{row.reason}; --allow {row.allow} admits it: {risk}")
        return LeftOut(row.name, "grant", f"{gain} with --allow {row.allow}: {risk}")
    if rivals:
        return LeftOut(row.name, "excluded", f"{gain}, but it cannot be applied with {' and '.join(rivals)}")
    least = f"{100 * (MIN_SPEEDUP - 1):.0f} %"
    return LeftOut(row.name, "little", f"{gain} alone, less than {least} more beside the rest of the plan")


def _too_short(row: Proposal, gain: str, steps: float, base_step_s: float, recording_s: float) -> str:
    """Return why a job of `steps` steps is too short for `row`, whose gain is `gain` in words; '' where it is not."""
    before_s = base_step_s * steps
    after_s = job_s([row], base_step_s / row.predicted_speedup, steps)
    slowest_s = job_s([row], base_step_s / max(row.interval[0], 1e-9), steps) + (SLOW_START - 1) * row.start_s
    trial = f"trying it costs {format_seconds(row.start_s)} at the start"
    if MIN_SPEEDUP * after_s > before_s:
        won_back = f"won back after about {math.ceil(row.pays_from(base_step_s)):,} steps"
        return f"{trial}, {won_back}; it is planned for {steps:,} steps (--steps)"
    if MIN_SPEEDUP * (after_s + recording_s) > before_s:
        work = f"headway's own work takes {format_seconds(recording_s)} of a job of {steps:,} steps"
        return f"{gain}, and {work}: together no faster than plainly"
    if row.start_s and slowest_s + recording_s > before_s:
        return f"{gain}: at its low end a job of {steps:,} steps would be slower: {trial}"
    return ""


def job_s(members: Sequence[Proposal], step_s: float, steps: float) -> float:
    """Return the seconds of a job with `members` applied: what they cost at the start, and its steps."""
    return step_s * steps + sum(row.start_s for row in members)


def excludes(one: Proposal, other: Proposal) -> bool:
    """Say whether two proposals exclude each other, or edit the same target."""
    targets = [parse_edit(edit).target for row in (one, other) for edit in row.edits]
    return len(set(targets)) < len(targets) or other.name in one.conflicts or one.name in other.conflicts


def unless_in_force(row: Proposal | Refusal, given: Mapping[str, Any] | None) -> Proposal | Refusal:
    """Refuse a proposal that the run had applied with `given`, unless other parameters win more than the noise."""
    if given is None or isinstance(row, Refusal):
        return row
    changed = {key: value for key, value in row.parameters.items() if given.get(key) != value}
    if changed and row.clear:
        return row
    now = ", ".join(f"{key}={given[key]}" for key in row.parameters if key in given)
    reason = f"it {IN_FORCE}{f' ({now})' if now else ''}"
    if changed:
        new = ", ".join(f"{key}={value}" for key, value in changed.items())
        reason += f"; {new} is predicted {row.gain}: not clear of the noise"
    return _refused(row, reason, IN_FORCE)


def unless_excluded(row: Proposal | Refusal, in_force: Collection[str]) -> Proposal | Refusal:
    """Refuse a proposal that excludes a remedy which the run had: one way of doing a thing does not follow another."""
    if isinstance(row, Refusal) or row.name in in_force or not (rivals := sorted({*in_force} & {*row.conflicts})):
        return row
    known = f"excludes {' and '.join(rivals)}, which {IN_FORCE}; in its place predicted {row.gain}"
    return _refused(row, f"it {known}: plan the run before anew to choose it", known)


def unless_given_up(row: Proposal | Refusal, tried: GivenUp | None) -> Proposal | Refusal:
    """Refuse a proposal that the run `tried` with the same parameters and was without in the end."""
    if tried is None or isinstance(row, Refusal):
        return row
    if any(tried.parameters.get(key) != value for key, value in row.parameters.items()):
        return row
    given = ", ".join(f"{key}={value}" for key, value in row.parameters.items())
    reason = f"it {GIVEN_UP}{f' ({given})' if given else ''}: {tried.reason}"
    return _refused(row, reason, GIVEN_UP)


def _refused(row: Proposal, reason: str, known: str) -> Refusal:
    """Return the refusal of a proposal, for that reason also where loaders are asked."""
    left_alone = {**row.left_alone, **dict.fromkeys(row.loaders, reason)}
    return Refusal(row.name, row.room, reason, left_alone=left_alone, known=known)


MAX_EXHAUSTIVE = 8
"""Up to so many candidates every combination is replayed; beyond, the best ones are."""


TIE = 1.05
"""Jobs whose lengths differ by less are equally long: what a run says of them differs by as much from time to time."""


class Adviser(Protocol):
    """Shape of `propose` in each room's advise.py. Write a function of this shape and list it in the catalogue."""

    def __call__(self, ledger: Any, program: Program, setup: Setup) -> Iterable[Proposal | Refusal]:
        """Yield what the room would change, each with its own prediction, and what it would not, with the reason."""
        ...


SCHEMA = "headway.plan/1"


@dataclass(frozen=True, slots=True)
class Plan:
    """What was proposed, and which of it to apply."""

    base_step_s: float
    """Measured step time."""

    step_s: float
    """Predicted step time with all chosen remedies."""

    interval: tuple[float, float]
    """Range of the speedup of the chosen set."""

    proposals: tuple[Proposal, ...] = ()
    """All of them, by device-hours won."""

    chosen: tuple[str, ...] = ()
    """Names of those to apply together, in the order of `proposals`."""

    refused: tuple[Refusal, ...] = ()
    """What was considered and not proposed, with reasons; and what would be chosen with more memory or a grant."""

    left_out: tuple[LeftOut, ...] = ()
    """Of each proposal that is not chosen, the reason."""

    device_hours_won: float = 0.0
    """By the chosen set, over a run as long as the recorded one."""

    note: str = ""
    """What the prediction had to assume."""

    steps: int = 0
    """Steps of the job that is planned for."""

    recording_s: float = 0.0
    """Seconds of headway's own work on the training thread in the recorded run: a run with the plan has them, too."""

    @property
    def start_s(self) -> float:
        """Return the seconds that the chosen set costs once, at the start of a job."""
        return sum(row.start_s for row in self.proposals if row.name in self.chosen)

    @property
    def predicted_speedup(self) -> float:
        """Return steps per second after / before, all chosen remedies together."""
        return self.base_step_s / self.step_s

    def of_job(self, speedup: float, *, fixed: float = 1.0) -> float:
        """Return how many times as fast as plainly the planned job is, if its steps are `speedup` times as fast.

        With what headway costs: the start of the chosen remedies, `fixed` times as long, and its own work.
        """
        plain_s = self.base_step_s * self.steps
        planned_s = plain_s / speedup + fixed * self.start_s + self.recording_s
        return plain_s / planned_s if plain_s and self.chosen else speedup

    @property
    def pays_from_steps(self) -> int:
        """Return after how many steps the start is won back; 0 where it costs nothing, or nothing is chosen."""
        return math.ceil(pays_from(self.start_s, self.base_step_s, self.step_s)) if self.start_s else 0

    @classmethod
    def of(cls, ledger: Any, program: Program, setup: Setup, advisers: Mapping[str, str | Adviser]) -> Plan:
        """Ask every adviser ("module:function", or the function) and compose.

        Raises `BarMissedError` when the replay does not match the run: then
        there is no basis for a plan.
        """
        base = program.predict()
        advice = [row for adviser in advisers.values() for row in resolve(adviser)(ledger, program, setup)]
        found = [unless_in_force(row, setup.in_force.get(row.name)) for row in advice]
        found = [unless_excluded(row, setup.in_force) for row in found]
        found = [unless_given_up(row, setup.given_up.get(row.name)) for row in found]
        proposals = [row for row in found if isinstance(row, Proposal)]
        return compose(proposals, program, setup, base=base, refused=[row for row in found if isinstance(row, Refusal)])

    def plan_file(self, baseline: str | None = None, step_s: float | None = None) -> PlanFile:
        """Return what `headway run --apply` reads: the chosen remedies, the run they were made from, and its pace."""
        remedies = tuple(
            Remedy(row.name, dict(row.parameters), row.predicted_speedup, row.interval, row.allow)
            for row in self.proposals
            if row.name in self.chosen
        )
        return PlanFile(
            remedies, predicted_speedup=self.predicted_speedup, interval=self.interval, baseline=baseline, step_s=step_s
        )

    def save(self, path: str | Path, *, baseline: str | None = None, step_s: float | None = None) -> None:
        """Write the plan file; `baseline` is the run folder it was made from, `step_s` the pace of its steps."""
        write_plan(self.plan_file(baseline, step_s), path)

    def to_json(self) -> dict[str, object]:
        """Return the object of `headway plan --json`."""
        return {
            "schema": SCHEMA,
            "proposals": [{**row.to_json(), "left_out": self._reason(row.name)} for row in self.proposals],
            "chosen": list(self.chosen),
            "predicted_speedup": self.predicted_speedup,
            "interval": list(self.interval),
            "base_step_s": self.base_step_s,
            "step_s": self.step_s,
            "device_hours_won": self.device_hours_won,
            "start_s": self.start_s,
            "pays_from_steps": self.pays_from_steps,
            "job": {
                "steps": self.steps,
                "predicted_speedup": self.of_job(self.predicted_speedup),
                "interval": [
                    self.of_job(gain, fixed=fixed)
                    for gain, fixed in zip(self.interval, (SLOW_START, 1 / SLOW_START), strict=True)
                ],
            },
            "refused": [row.to_json() for row in self.refused],
            "note": self.note,
        }

    def _reason(self, name: str) -> dict[str, str] | None:
        """Return why a proposal is not chosen, None for one that is."""
        found = next((row for row in self.left_out if row.name == name), None)
        return {"kind": found.kind, "reason": found.reason} if found else None


def resolve(adviser: str | Adviser) -> Adviser:
    """Return the function that "module:function" names; functions pass through."""
    if not isinstance(adviser, str):
        return adviser
    if ":" not in adviser:
        raise InputError(f"{adviser!r} names no adviser. Write module:function.")
    return cast(Adviser, resolved(adviser))


def compose(
    proposals: Sequence[Proposal],
    program: Program,
    setup: Setup,
    *,
    base: Prediction | None = None,
    refused: Sequence[Refusal] = (),
) -> Plan:
    """Rank `proposals` and choose the combination with the shortest step, then drop what adds less than 2 % to it.

    What protects the job is chosen beside it, where nothing excludes that.
    """
    base = base or program.predict()
    hours = program.measured_s * program.recording.job_steps * setup.world_size / 3600
    ranked = sorted(proposals, key=lambda row: (-hours * (1 - 1 / row.predicted_speedup), row.name))
    room_bytes = setup.limits.memory_per_rank_bytes(setup)
    steps, job_note = (setup.limits.steps, "") if setup.limits.steps else _job_steps(program)
    recording_s = _recording_s(program, steps)
    why = partial(
        reason_of, room_bytes=room_bytes, allowed=setup.limits.allow, steps=steps, base_step_s=base.base_step_s,
        recording_s=recording_s,
    )  # fmt: skip
    able = [row for row in ranked if why(row, ()).kind == "little"][:MAX_EXHAUSTIVE]
    best = _best_set([row for row in able if not row.protects], program, room_bytes, steps)
    best += tuple(row for row in able if row.protects and not any(excludes(row, other) for other in best))
    left_out = tuple(why(row, best) for row in ranked if row not in best)
    rooms = {row.name: row.room for row in ranked}
    barred = [Refusal(row.name, rooms[row.name], row.reason) for row in left_out if row.kind in ("memory", "grant")]
    final = program.predict(_edits(best)) if best else base
    return Plan(
        base_step_s=base.base_step_s,
        step_s=final.step_s,
        interval=best[0].interval if len(best) == 1 else final.interval,  # of one, its own may know more than replay
        proposals=tuple(ranked),
        chosen=tuple(row.name for row in best),
        refused=(*refused, *barred),
        left_out=left_out,
        device_hours_won=hours * (1 - 1 / final.speedup),
        note=" ".join(filter(None, (job_note, final.note))),
        steps=steps,
        recording_s=recording_s,
    )


def _job_steps(program: Program) -> tuple[int, str]:
    """Return how many steps a job like the recorded one has, as far as that run tells, and what it does not tell."""
    end, steps = program.facts.exit, program.recording.job_steps
    if end is None:
        ended = "has not ended, or its launcher was killed"
    else:
        ended = "was stopped" if end.code == CTRL_C else ENDED_EARLY.get(end.cls, "")
    if program.run is None or not ended or steps >= CUT_OFF_STEPS:
        return steps, ""
    return CUT_OFF_STEPS, f"The run {ended}; planned as a job of {CUT_OFF_STEPS:,} steps (--steps: another number)."


def _recording_s(program: Program, steps: int) -> float:
    """Return the seconds of headway's own work on a training thread in a job of `steps` steps, the mean of the ranks.

    What the recorded steps had holds what is done once; steps beyond them take what is budgeted.
    """
    lanes, recorded = program.recording.lanes, max(program.recording.recorded_steps, 1)
    recording_ns = sum(int(lane.duration_ns[lane.label == LABEL["host.recording"]].sum()) for lane in lanes)
    recorded_s = recording_ns / NS_PER_S / max(len(lanes), 1)
    further_s = min(recorded_s / recorded, BUDGET * program.measured_s) * max(steps - recorded, 0)
    return recorded_s * min(steps / recorded, 1) + further_s


def _best_set(able: Sequence[Proposal], program: Program, room_bytes: int, steps: int) -> tuple[Proposal, ...]:
    """Return the combination with which a job of `steps` steps is shortest, without members that add less than 2 %.

    Of single remedies that tie it is the one that wins most at the low end of its interval.
    """
    sets = [
        members
        for size in range(1, len(able) + 1)
        for members in combinations(able, size)
        if sum(row.memory_bytes for row in members) <= room_bytes
        and not any(excludes(one, other) for one, other in combinations(members, 2))
    ]
    if not sets:
        return ()
    took_s = {
        _names(members): job_s(members, program.predict(_edits(members), interval=False).step_s, steps)
        for members in sets
    }
    best = min(sets, key=lambda members: (took_s[_names(members)], len(members)))
    while len(best) > 1:
        without = [tuple(row for row in best if row is not member) for member in best]
        cheapest = min(without, key=lambda members: took_s[_names(members)])
        if took_s[_names(cheapest)] >= MIN_SPEEDUP * took_s[_names(best)]:
            break
        best = cheapest
    ties = [row for row in able if took_s.get((row.name,), math.inf) <= TIE * took_s[_names(best)]]
    return best if len(best) > 1 else (max(ties, key=lambda row: row.interval[0]),)


def _names(members: Sequence[Proposal]) -> tuple[str, ...]:
    return tuple(row.name for row in members)


def _edits(members: Iterable[Proposal]) -> list[Edit | str]:
    return [edit for row in members for edit in row.edits]
