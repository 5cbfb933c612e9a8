"""The verdict on a run: which of its causes leads, what to do first, and how both are said.

A verdict is about one cause; the others are named behind it where they are worth it.

>>> why = {"devices": 2, "steps": 9, "wall_s": 10.0, "goodput": 0.9, "ledger": {"useful": 18.0, "input": 2.0}}
>>> verdict(why).sentence
'90.0 % of 2 devices x 10 s was useful work; no loss stands out.'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from headway.core.errors import raised
from headway.core.units import (
    SHORT_S,
    clean,
    device_seconds,
    finite,
    interval,
    percent,
    plural,
    seconds,
    share,
    speedup,
)
from headway.ledger.cause import NOT_RESOLVED, RECORD_LONGER
from headway.plan.proposal import GAIN_THAT_LEADS
from headway.trace.recording.run_facts import CTRL_C, CUT, RunExit
from headway.why.answer import CauseRow, Json, Verdict, Why

LEAST_HEADLINE = 0.02
"""Share of the device time below which a loss is no headline: two runs of one script differ by as much."""

NOTHING_PAYS = "none that pays is known"
"""How the fix of a cause begins against which the planner tried everything in vain."""

GAIN_WORTH_NAMING = 1.02
"""A predicted speedup below this is not offered as a win: it drowns in the noise of two runs."""

BUCKET_PHRASES = {
    "useful": "useful work",
    "eval": "evaluation",
    "input": "waiting for input",
    "comm": "exposed communication",
    "bubble": "pipeline bubbles",
    "straggler": "waiting for stragglers",
    "checkpoint": "checkpoint stalls",
    "startup": "start-up",
    "restart": "restarts",
    "rework": "work lost in failed attempts",
    "host": "host work (GC, logging, the script's own code, launch gaps)",
    "idle": "idle devices",
    "unknown": "time nobody recorded",
}
"""Bucket -> what losing time to it is called, to follow 'went to'."""

SHORT_PHRASES = {**BUCKET_PHRASES, "host": "host work"}
"""The same in a list of shares."""

FAR_LARGER = 3.0
"""So many times a loss that advice may mend is one that leads although no remedy pays."""

OVERSHADOWED = 0.2
"""Share of the device time from which another bucket is named beside the first cause."""

CHANGES_TRAINING = ("compute.batch", "compute.padding")
"""Causes whose fix trains another model: one leads where nothing else is worth a headline, or as `FAR_LARGER`."""

WARNINGS = {
    "memory.grow": "memory grows from step to step",
    "input.repeats": "workers repeat examples",
    "input.ranks": "all ranks train on the same batches",
}
"""Causes that lose no time, in words: they end jobs, or train on the wrong examples."""

LEAST_STILL_S, STEPS_STILL = 5.0, 20.0
"""A run that was stopped may have hung where nothing was recorded for so many seconds, and steps, before its end."""

ENDINGS: dict[str, str] = {
    "oom": "ran out of memory",
    "hang": "made no more progress",
    "preempted": "was stopped from outside",
}
"""Exit class -> what a run or its first failing rank did, in words; any other class failed."""

HUNG = "look at the rank that the others wait for: headway hang shows where it stands"
"""What to do first about a run that a hang ended."""

CAUSE_PHRASES: dict[str, str] = {
    "straggler.worker": "slow workers",
    "straggler.last_stage": "a slow last pipeline stage",
    "straggler.sequence": "sequence-length imbalance",
    "straggler.rank": "a slow rank",
    "comm.calls": "collectives that the script calls in each step",
    "host.cpu_wait": "waiting for a CPU core",
    "rollout": "a policy that acts in its environment",
    "host.gc": "garbage collection",
    "host.script": "the script's own code between steps",
    "host.logging": "logging",
    "host.recording": "headway's own work",
    "host.launch": "launch gaps",
    "startup.compile": "start-up and compilation",
    "steps.grow": "steps that get slower",
    "compute.optimizer": "an optimizer that loops over its tensors",
    "compute.gradients": "the script's own work on gradients",
    "compute.foreign": "the script's own work inside of steps, without torch",
    "compute.loop": "Python loops over what one call computes",
    "compute.anomaly": "anomaly detection",
    "compute.embedding": "updates of rows that no batch looked up",
    "compute.padding": "positions that fill short examples up",
    "compute.unused": "gradients that no update uses",
    "compute.frozen": "outputs that are the same in each pass",
    "compute.repeat": "calls on a batch that was computed already",
    "compute.threads": "cores that torch computes without",
    "compute.precision": "products in more bits than the matrix units want",
    "compute.unfused": "passes over memory that a compiler would fuse",
    "compute.layout": "conversions of layout",
    "compute.autotune": "convolutions that were not tuned",
    "compute.alignment": "matrix products of odd sizes",
    "compute.recompute": "forwards that are computed twice",
    "compute.attention": "attention that writes its scores to memory",
    "compute.batch": "batches of few examples",
    "compute.sync": "lines that wait for the device",
}
"""Cause -> what time was lost to, where the cause costs more or less than its bucket holds."""


def verdict(answer: Json | Why) -> Verdict:
    """Say in one sentence where the time of a `headway.why/2` object went, and what to do first.

    The largest loss that a remedy wins back, or may win back, leads where that is 5 % or more, else the largest loss
    that advice may mend, or one that is `FAR_LARGER` and that nothing known mends: its bucket gives the share. Advice
    that changes training stands back behind a like loss that is mended without. A run without a loss above the noise is
    told so, and what headway's recording took is never what to mend. How a run ended that did not end well comes before
    everything else. A host without free cores leads where that lost most: the rest is said of a busy host. What took
    more of the time than the headline's loss (useful work, the start-up of a short run) is said behind it.
    """
    why = Why.of(answer)
    devices, wall = plural(why.devices, "device"), seconds(why.wall_s)
    end = ending(why.exit, why.steps)
    end += _stood_still(why) if " was stopped " in end else ""
    end += " " * bool(end)
    if not finite(why.steps):
        earlier = why.ledger.get("restart")
        what = "No step of the last attempt" if earlier else "No training step"
        rest = _larger_loss(why, "") if earlier else ""
        return Verdict(sentence=f"{end}{what} was recorded in {devices} x {wall}{rest}.")
    share = f"{percent(why.goodput)} of" if finite(why.goodput) is not None else "an unknown share of"
    useful = f"{share} {devices} x {wall} was useful work"
    if why.hang.get("ended_the_run"):
        sentence = f"The run made no more progress after {plural(why.steps, 'step')} and was ended: it hung."
        stands = next((f"rank {rank} is at {place}" for rank, place in why.hang.get("explained", {}).items()), HUNG)
        return Verdict(sentence=f"{sentence} {useful}.", fix=clean(stands))
    named = [c for c in why.causes if worth_naming(c, why) and not c.fix.startswith(RECORD_LONGER)]
    known = [c for c in named if c.remedy or c.fix.startswith(NOT_RESOLVED)]
    first = next((c for c in known if _gain(c) >= GAIN_THAT_LEADS), None)
    largest = max(named, key=_lost_s, default=None)
    if largest is not None and (largest.cause == "host.cpu_wait" or _outweighs(largest, first)):
        first = largest  # what else the run shows is of a busy host, or small beside what one line wins
    if first is None:
        worth = [c for c in named if headline(c, why)]
        first = next((c for c in worth if c.cause not in CHANGES_TRAINING), next(iter(worth), None))
        first = largest if first and largest and _lost_s(largest) > FAR_LARGER * _lost_s(first) else first
    if first is None:
        return Verdict(sentence=f"{end}{useful}{_larger_loss(why, '') or '; no loss stands out'}{_warned(why)}.")
    rest = _larger_loss(why, first.cause.partition(".")[0]) + _warned(why)
    return Verdict(
        sentence=f"{end}{_lost_share(first, why)} of {devices} x {wall} {_losing(first)}{rest}.",
        fix=clean(first.fix),
        gain=predicted(first) if is_win(first) else "",
        cause=first.cause,
        remedy=first.remedy or "",
        allow=first.allow,
        script=first.script,
    )


def _stood_still(why: Why) -> str:
    """Return ' Nothing was recorded of its last 16 s: it may have hung.' of a run that ended so; else ''."""
    rest_s = why.sub.get("unknown.cut_short", 0.0) / max(finite(why.devices) or 1.0, 1.0)
    step_s = ((finite(why.wall_s) or 0.0) - rest_s) / max(finite(why.steps) or 0.0, 1.0)
    if rest_s < max(LEAST_STILL_S, STEPS_STILL * step_s):
        return ""
    return f" Nothing was recorded of its last {seconds(rest_s)}: it may have hung."


def _outweighs(largest: CauseRow, first: CauseRow | None) -> bool:
    """Whether a line of the script, or what was predicted, wins far more of the job than the remedy that would lead."""
    tells = bool(largest.script or largest.interval)
    return first is not None and tells and _lost_s(largest) > FAR_LARGER * _lost_s(first)


def _larger_loss(why: Why, bucket: str) -> str:
    """Return '; start-up took 43 %, useful work 36 %' of the buckets that took more than `bucket` and much; else ''."""
    total_s, amounts = why.total_device_s, _not_lent(why)
    least = amounts.get(bucket, 0.0)
    others = sorted(((amount, name) for name, amount in amounts.items() if name != bucket), reverse=True)
    if not bucket:  # the sentence is about useful work then
        others = [row for row in others if row[1] != "useful"]
    larger = [row for row in others if row[0] > least and (share(row[0], total_s) or 0.0) >= OVERSHADOWED][:2]
    said = [f"{100 * amount / total_s:.0f} %" for amount, _ in larger]
    said = [f"{_in_words(name, SHORT_PHRASES)} {'' if at else 'took '}{part}"
            for at, ((_, name), part) in enumerate(zip(larger, said, strict=True))]  # fmt: skip
    return f"; {', '.join(said)}" if said else ""


def _warned(why: Why) -> str:
    """Return '; memory grows from step to step' where a cause that loses no time says so; else ''."""
    return "".join(f"; {WARNINGS[cause.cause]}" for cause in why.causes if cause.cause in WARNINGS)


def _not_lent(why: Why) -> dict[str, float]:
    """Return bucket -> device-seconds without what another job used: time in a bubble that was filled is not lost.

    >>> _not_lent(Why(ledger={"bubble": 5.0}, sub={"bubble.filled": 3.0}))
    {'bubble': 2.0}
    """
    return {name: amount - why.sub.get(f"{name}.filled", 0.0) for name, amount in why.ledger.items()}


def _in_words(bucket: str, phrases: Mapping[str, str] = BUCKET_PHRASES) -> str:
    return phrases.get(bucket, BUCKET_PHRASES["unknown"])


def _losing(cause: CauseRow) -> str:
    phrase = CAUSE_PHRASES.get(cause.cause)
    return f"was lost to {phrase}" if phrase else f"went to {_in_words(cause.cause.partition('.')[0])}"


def _lost_share(cause: CauseRow, why: Why) -> str:
    """Return the share of the cause's whole bucket, or of the cause itself where the bucket holds others too.

    Of the cause itself what the ledger has under its name, where a replay without it wins less.
    """
    if cause.cause in CAUSE_PHRASES:
        booked = max(why.sub.get(cause.cause, 0.0), _lost_s(cause))
    else:
        booked = _not_lent(why).get(cause.cause.partition(".")[0]) or _lost_s(cause)
    fraction = share(booked, why.total_device_s)
    return "-" if fraction is None else f"{100 * fraction:.0f} %" if fraction >= 0.1 else percent(fraction)


def headline(cause: CauseRow, why: Why) -> bool:
    """Tell whether a cause may be what a verdict is about: above the noise, and to be mended."""
    lost = share(cause.lost_device_s, why.total_device_s) or 0.0
    return lost >= LEAST_HEADLINE and not cause.fix.startswith(NOTHING_PAYS)


def worth_naming(cause: CauseRow, why: Why) -> bool:
    """Tell whether a cause lost at least 0.5 % of the device time, promises a gain, or says what will go wrong."""
    return (
        cause.cause in WARNINGS
        or (share(cause.lost_device_s, why.total_device_s) or 0.0) >= 0.005
        or _gain(cause) >= GAIN_WORTH_NAMING
    )


def named_causes(answer: Json | Why) -> list[CauseRow]:
    """Return the causes that are worth naming, in order; those that one fix answers follow the first of them.

    The fix and its gain are said once, with the first: of the others `together_with` is that one's place.
    """
    groups: dict[object, list[CauseRow]] = {}
    why = Why.of(answer)
    for place, cause in enumerate(cause for cause in why.causes if worth_naming(cause, why)):
        wins = _gain(cause) >= GAIN_WORTH_NAMING
        same = (cause.script or cause.fix, cause.predicted_speedup)  # one edit, in whatever words its causes advise it
        groups.setdefault(same if wins else place, []).append(cause)
    named: list[CauseRow] = []
    for first, *others in groups.values():
        one = {"fix": f"as for cause {len(named) + 1}", "script": "", "together_with": len(named) + 1}
        named += [first, *(msgspec.structs.replace(cause, **one) for cause in others)]
    return named


def ending(end: RunExit | None, steps: object = None) -> str:
    """Say how a run ended; '' when well, or when it is not known.

    >>> text = 'Traceback (most recent call last):\\n  File "/jobs/a.py", line 5, in main\\nKeyError: 7'
    >>> ending(RunExit(code=1, cls="user", first_rank=0, traceback=text), 3)
    'Rank 0 failed after 3 steps (exit code 1): KeyError: 7 (a.py, line 5).'
    >>> ending(RunExit(code=143, cls="preempted")), ending(RunExit(code=0))
    ('The run was stopped from outside (exit code 143, signal 15).', '')
    """
    if end is None or not end.code:
        return ""
    after = f" after {plural(steps, 'step')}" if finite(steps) else ""
    if end.code == CTRL_C:
        return f"The run was stopped by Ctrl-C{after}."
    if end.cls == CUT:
        return f"The run was cut off{after}: its launcher was killed."
    what = ENDINGS.get(end.cls, "failed")
    is_one = end.first_rank is not None and what != ENDINGS["preempted"]
    who, why = f"Rank {end.first_rank}" if is_one else "The run", clean(raised(end.traceback or ""))
    signal = f", signal {end.code - 128}" if end.code > 128 and end.cls != "user" else ""  # not one of `sys.exit(137)`
    return f"{who} {what}{after} (exit code {end.code}{signal}){': ' * bool(why)}{why}."


class Predicted(Protocol):
    """A row with a prediction: a cause, a proposal, an applied remedy, a plan."""

    @property
    def predicted_speedup(self) -> float | None:
        """Steps per second after / before."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Range of that."""


def predicted(row: Predicted) -> str:
    """Write a row's `predicted_speedup` with its `interval`: '1.90x (1.75 to 2.02)'; '-' without a prediction.

    >>> predicted(CauseRow(predicted_speedup=1.9, interval=(1.75, 2.02), at_most=True))
    'at most 1.90x'
    """
    gain = finite(row.predicted_speedup)
    if isinstance(row, CauseRow) and row.at_most and gain is not None:
        return f"at most {speedup(gain)}"
    text, bounds = speedup(gain), interval(row.interval)
    return f"{text} ({bounds})" if bounds and text != "-" else text


def gain_words(cause: CauseRow) -> str:
    """Say what the fix of one of `named_causes` wins, and who applies it where that is the user.

    >>> links = CauseRow(fix="faster links", predicted_speedup=1.2, interval=(1.1, 1.3), remedy="")
    >>> gain_words(links), gain_words(msgspec.structs.replace(links, interval=(0.9, 1.4), remedy=None))
    ('by hand, predicted 1.20x (1.10 to 1.30)', 'may win 1.20x (0.90 to 1.40)')
    """
    if cause.together_with:
        return f"won with cause {cause.together_with}"
    if cause.fix.startswith(NOT_RESOLVED):
        return NOT_RESOLVED
    if finite(cause.predicted_speedup) is None:
        return "no prediction"
    by_hand = "by hand, " if cause.remedy == "" and not cause.at_most else ""
    return f"{by_hand}{'may win' if _may_win(cause) else 'predicted'} {predicted(cause)}"


def _may_win(cause: CauseRow) -> bool:
    """Tell whether a prediction is within the noise of the run: `headway plan` leaves such an edit out."""
    return not cause.at_most and cause.interval is not None and cause.interval[0] < 1


def is_win(cause: CauseRow) -> bool:
    """Whether the fix of one of `named_causes` has a gain of its own that is worth naming."""
    is_own = not cause.together_with and not cause.fix.startswith(NOT_RESOLVED) and not _may_win(cause)
    return is_own and _gain(cause) >= GAIN_WORTH_NAMING


def lost_words(cause: CauseRow, total_s: float | None = None) -> str:
    """Return the device-seconds that a cause lost, and their share of `total_s`; of a warning, that it is one.

    >>> lost_words(CauseRow(cause="memory.grow", lost_device_s=0.0), 9.0)
    'loses no time'
    """
    if cause.cause in WARNINGS:
        return "loses no time"
    percentage = "" if total_s is None else f" · {percent(share(cause.lost_device_s, total_s))}"
    short = total_s if total_s is not None and total_s < SHORT_S else None
    return f"{device_seconds(cause.lost_device_s, short)} lost{percentage}"


def _gain(cause: CauseRow) -> float:
    """Return the predicted speedup of a cause, 0 where nothing predicted it."""
    return finite(cause.predicted_speedup) or 0.0


def _lost_s(cause: CauseRow) -> float:
    """Return the device-seconds that a cause lost."""
    return finite(cause.lost_device_s) or 0.0
