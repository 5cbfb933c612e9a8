"""Why a proposal is not in the plan: the one reason that decided, and what would change it.

>>> row = Proposal("data.cache", "data", ("cache_fraction=1",), 1.75, (1.6, 1.9), applies=True, memory_bytes=2 * 10**9)
>>> reason_of(row, (), room_bytes=10**9, allowed=()).reason
'needs 2.0 GB per rank, 1.0 GB are free'
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.core.units import format_bytes, format_seconds
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.sim.whatif import parse_edit
from headway.trace.events.active_settings import GivenUp

KINDS = ("hand", "noise", "memory", "grant", "short", "excluded", "little")
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


SLOW_START = 1.5
"""How many times as long as it usually does the start of a remedy may take: with other work on the cores, say."""


def reason_of(
    row: Proposal, chosen: Sequence[Proposal], *, room_bytes: int, allowed: Sequence[str], steps: float = math.inf,
    base_step_s: float = 1.0, recording_s: float = 0.0,
) -> LeftOut:  # fmt: skip
    """Return why `row` is not among `chosen`, where ranks may use `room_bytes` and the user granted `allowed`.

    The job has `steps` steps, each of `base_step_s` before; headway's own work takes `recording_s` of it.
    """
    gain = f"predicted {row.predicted_speedup:.2f}x ({row.interval[0]:.2f} to {row.interval[1]:.2f})"
    rivals = [member.name for member in chosen if excludes(row, member)]
    if not row.applies:
        return LeftOut(row.name, "hand", "headway cannot apply it")
    if not row.clear and not row.protects:
        slower = row.interval[1] <= 1
        return LeftOut(row.name, "noise", f"{gain}: {'it costs time' if slower else 'inside the noise of two runs'}")
    if row.memory_bytes > room_bytes:
        needs = f"needs {format_bytes(row.memory_bytes)} per rank, {format_bytes(room_bytes)} are free"
        return LeftOut(row.name, "memory", needs)
    if row.allow is not None and row.allow not in allowed:
        risk = row.risk or "it changes results"
        if row.protects:
            return LeftOut(row.name, "grant", f"{row.reason}; --allow {row.allow} admits it: {risk}")
        return LeftOut(row.name, "grant", f"{gain} with --allow {row.allow}: {risk}")
    if not row.protects and (short := _too_short(row, gain, steps, base_step_s, recording_s)):
        return LeftOut(row.name, "short", short)
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
        low, high = row.interval
        reason += f"; {new} is predicted {row.predicted_speedup:.2f}x ({low:.2f} to {high:.2f}): not clear of the noise"
    return _refused(row, reason, IN_FORCE)


def unless_excluded(row: Proposal | Refusal, in_force: Collection[str]) -> Proposal | Refusal:
    """Refuse a proposal that excludes a remedy which the run had: one way of doing a thing does not follow another."""
    if isinstance(row, Refusal) or row.name in in_force or not (rivals := sorted({*in_force} & {*row.conflicts})):
        return row
    low, high = row.interval
    gain = f"in its place predicted {row.predicted_speedup:.2f}x ({low:.2f} to {high:.2f})"
    known = f"excludes {' and '.join(rivals)}, which {IN_FORCE}; {gain}"
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
