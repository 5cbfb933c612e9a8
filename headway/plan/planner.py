"""Choose the set of remedies that wins most, by replaying each combination of them.

Use `Plan.of(ledger, program, setup, advisers)`. A combination is predicted by
one replay with all its edits, never by multiplying speedups: two remedies for
the same loss do not win twice. Proposals are ranked by the device-hours they
win over a run as long as the recorded one.

>>> Plan(base_step_s=0.02, step_s=0.01, interval=(1.9, 2.1)).predicted_speedup
2.0
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol, cast

from headway.core.errors import InputError
from headway.core.planfile import PlanFile, Remedy, write_plan
from headway.core.units import format_bytes
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.edits import Edit, parse_edit
from headway.sim.program import Prediction, Program

MAX_EXHAUSTIVE = 8
"""Up to so many candidates every combination is replayed; beyond, the best ones are."""


class Adviser(Protocol):
    """Shape of `propose` in each room's advise.py. Write a function of this shape and list it in the catalogue."""

    def __call__(self, ledger: Any, program: Program, setup: Setup) -> Iterable[Proposal | Refusal]:
        """Yield what the room would change, each with its own prediction, and what it would not, with the reason."""
        ...


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
    """What was considered and not proposed, with reasons."""

    device_hours_won: float = 0.0
    """By the chosen set, over a run as long as the recorded one."""

    note: str = ""
    """What the prediction had to assume."""

    @property
    def predicted_speedup(self) -> float:
        """Return steps per second after / before, all chosen remedies together."""
        return self.base_step_s / self.step_s

    @classmethod
    def of(cls, ledger: Any, program: Program, setup: Setup, advisers: Mapping[str, str | Adviser]) -> Plan:
        """Ask every adviser ("module:function", or the function) and compose.

        Raises `BarMissedError` when the replay does not match the run: then
        there is no basis for a plan.
        """
        base = program.predict()
        found = [row for adviser in advisers.values() for row in resolve(adviser)(ledger, program, setup)]
        proposals = [row for row in found if isinstance(row, Proposal)]
        return compose(proposals, program, setup, base=base, refused=[row for row in found if isinstance(row, Refusal)])

    def plan_file(self, baseline: str | None = None) -> PlanFile:
        """Return what `headway run --apply` reads: the chosen remedies, and the run they were made from."""
        remedies = tuple(
            Remedy(row.name, dict(row.parameters), row.predicted_speedup, row.interval, row.allow)
            for row in self.proposals
            if row.name in self.chosen
        )
        return PlanFile(remedies, predicted_speedup=self.predicted_speedup, interval=self.interval, baseline=baseline)

    def save(self, path: str | Path, *, baseline: str | None = None) -> None:
        """Write the plan file; `baseline` is the run folder it was made from."""
        write_plan(self.plan_file(baseline), path)

    def to_json(self) -> dict[str, Any]:
        """Return the object of `headway plan --json`."""
        return {
            "schema": "headway.plan/1",
            "proposals": [row.to_json() for row in self.proposals],
            "chosen": list(self.chosen),
            "predicted_speedup": self.predicted_speedup,
            "interval": list(self.interval),
            "base_step_s": self.base_step_s,
            "step_s": self.step_s,
            "device_hours_won": self.device_hours_won,
            "refused": [row.to_json() for row in self.refused],
            "note": self.note,
        }


def resolve(adviser: str | Adviser) -> Adviser:
    """Return the function that "module:function" names; functions pass through."""
    if not isinstance(adviser, str):
        return adviser
    module, colon, name = adviser.partition(":")
    if not colon:
        raise InputError(f"{adviser!r} names no adviser. Write module:function.")
    return cast(Adviser, getattr(importlib.import_module(module), name))


def compose(
    proposals: Sequence[Proposal],
    program: Program,
    setup: Setup,
    *,
    base: Prediction | None = None,
    refused: Sequence[Refusal] = (),
) -> Plan:
    """Rank `proposals` and choose the combination with the shortest step, then drop what adds less than 2 % to it."""
    base = base or program.predict()
    hours = _device_hours(program, setup)
    ranked = sorted(proposals, key=lambda row: (-hours * (1 - 1 / row.predicted_speedup), row.name))
    able, barred = _admissible(ranked, setup)
    best = _best_set(able, program, setup)
    final = program.predict(_edits(best)) if best else base
    return Plan(
        base_step_s=base.base_step_s,
        step_s=final.step_s,
        interval=final.interval,
        proposals=tuple(ranked),
        chosen=tuple(row.name for row in best),
        refused=(*refused, *barred),
        device_hours_won=hours * (1 - 1 / final.speedup),
        note=final.note,
    )


def _device_hours(program: Program, setup: Setup) -> float:
    """Return what the recorded steps took on all devices."""
    return program.measured_s * program.recording.recorded_steps * setup.world_size / 3600


def _admissible(ranked: Sequence[Proposal], setup: Setup) -> tuple[list[Proposal], list[Refusal]]:
    """Split the proposals into those that may be chosen, and reasons why others may not."""
    able, barred = [], []
    room_bytes = setup.limits.memory_per_rank_bytes(setup)
    for row in ranked:
        if not row.applies or not row.clear:
            continue
        if row.memory_bytes > room_bytes:
            reason = f"needs {format_bytes(row.memory_bytes)} per rank, {format_bytes(room_bytes)} are free"
            barred.append(Refusal(row.name, row.room, reason))
        elif row.allow is not None and row.allow not in setup.limits.allow:
            barred.append(Refusal(row.name, row.room, f"{row.risk or 'it changes results'}: grant --allow {row.allow}"))
        else:
            able.append(row)
    return able[:MAX_EXHAUSTIVE], barred


def _best_set(able: Sequence[Proposal], program: Program, setup: Setup) -> tuple[Proposal, ...]:
    """Return the combination with the shortest step, without members that add less than the least gain."""
    room_bytes = setup.limits.memory_per_rank_bytes(setup)
    sets = [
        members
        for size in range(1, len(able) + 1)
        for members in combinations(able, size)
        if sum(row.memory_bytes for row in members) <= room_bytes and not _clash(members)
    ]
    if not sets:
        return ()
    step_s = {_names(members): _step_s(members, program) for members in sets}
    best = min(sets, key=lambda members: (step_s[_names(members)], len(members)))
    while len(best) > 1:
        without = [tuple(row for row in best if row is not member) for member in best]
        cheapest = min(without, key=lambda members: step_s[_names(members)])
        if step_s[_names(cheapest)] >= MIN_SPEEDUP * step_s[_names(best)]:
            break
        best = cheapest
    return best


def _names(members: Sequence[Proposal]) -> tuple[str, ...]:
    return tuple(row.name for row in members)


def _step_s(members: Sequence[Proposal], program: Program) -> float:
    return program.predict(_edits(members), interval=False).step_s


def _clash(members: Sequence[Proposal]) -> bool:
    """Say whether two members exclude each other, or edit the same target."""
    names = {row.name for row in members}
    targets = [parse_edit(edit).target for row in members for edit in row.edits]
    return len(set(targets)) < len(targets) or any(names & set(row.conflicts) for row in members)


def _edits(members: Iterable[Proposal]) -> list[Edit | str]:
    return [edit for row in members for edit in row.edits]
