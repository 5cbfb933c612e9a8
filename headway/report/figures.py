"""Figures as words: how numbers, buckets and verdicts are written, on every screen and page.

One place decides how many digits a share has, what a bucket is called and
which colour it wears, so that the terminal and the HTML report never
disagree. Inputs are plain floats in the units of `headway.core.units`.

>>> percent(0.6199), speedup(1.904), interval((1.75, 2.02)), device_seconds(4031.2)
('62.0 %', '1.90x', '1.75 to 2.02', '4,031 s')
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headway.core import units
from headway.core.tracebacks import raised
from headway.core.units import format_seconds
from headway.ledger.cause import RECORD_LONGER
from headway.report.answers import NOT_RESOLVED, CauseRow, Json, PlanAnswer, ProposalRow, RunAnswer, Verdict, Why
from headway.trace.events.active_settings import AppliedRow
from headway.trace.recording.run_facts import RunExit

GAIN_THAT_LEADS = 1.05
"""From here on what a remedy wins leads the verdict, however large the losses that none wins back."""

LEAST_HEADLINE = 0.02
"""Share of the device time below which a loss is no headline: two runs of one script differ by as much."""

NOTHING_PAYS = "none that pays is known"
"""How the fix of a cause begins against which the planner tried everything in vain."""

GAIN_WORTH_NAMING = 1.02
"""A predicted speedup below this is not offered as a win: it drowns in the noise of two runs."""


@dataclass(frozen=True, slots=True)
class BucketStyle:
    """How one bucket of the ledger is named and coloured, everywhere."""

    losing: str
    """What losing time to it is called, to follow 'went to'."""

    light: str
    """Colour on a light page, `#rrggbb`."""

    dark: str
    """Colour on a dark page, `#rrggbb`."""

    ansi: int
    """Colour of a 256-colour terminal, readable on both backgrounds."""

    short: str = ""
    """The same in a list of shares; '' where `losing` is short enough."""

    hatched: bool = False
    """Drawn with stripes: tells greys and wines apart without relying on hue."""


BUCKET_STYLES: dict[str, BucketStyle] = {
    "useful": BucketStyle("useful work", "#328ad4", "#4290dc", 68),
    "eval": BucketStyle("evaluation", "#7828e6", "#dca0fa", 141, hatched=True),
    "input": BucketStyle("waiting for input", "#db7b16", "#f78f13", 208),
    "comm": BucketStyle("exposed communication", "#f7c512", "#fed967", 178),
    "bubble": BucketStyle("pipeline bubbles", "#43c4e7", "#91e9f0", 80),
    "straggler": BucketStyle("waiting for stragglers", "#cd2b0b", "#e44f2e", 160),
    "checkpoint": BucketStyle("checkpoint stalls", "#772698", "#933da9", 133),
    "startup": BucketStyle("start-up", "#979797", "#7e8084", 103),
    "restart": BucketStyle("restarts", "#3b444d", "#56595d", 242),
    "rework": BucketStyle("work lost in failed attempts", "#4b1b2a", "#63383c", 89, hatched=True),
    "host": BucketStyle(
        "host work (GC, logging, the script's own code, launch gaps)", "#317860", "#8bbc92", 35, short="host work"
    ),
    "idle": BucketStyle("idle devices", "#dee1e3", "#2e2e2e", 248),
    "unknown": BucketStyle("time nobody recorded", "#aaafb5", "#676d75", 245, hatched=True),
}
"""Bucket -> style, in the ledger's order. Colours keep apart under the three common colour deficiencies (tested)."""

UNKNOWN_STYLE = BUCKET_STYLES["unknown"]


def bucket_style(bucket: str) -> BucketStyle:
    """Return the style of a bucket, that of `unknown` for a name from a newer ledger."""
    return BUCKET_STYLES.get(bucket, UNKNOWN_STYLE)


def finite(value: object) -> float | None:
    """Return `value` as a float, None when it is missing, not a number or infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def percent(fraction: object) -> str:
    """Write a fraction in percent with one decimal; '-' when it is missing.

    >>> percent(0.00004), percent(1.0), percent(None)
    ('< 0.1 %', '100.0 %', '-')
    """
    value = finite(fraction)
    if value is None:
        return "-"
    return "< 0.1 %" if 0 < value < 0.0005 else f"{100 * value:.1f} %"


def operation_lines(why: Why) -> list[str]:
    """Return MFU by the operations that were counted, beside the peaks of the dtype in use and of the fastest one."""
    row = why.compute
    if row.flops_per_step is None or not row.flops_per_s:
        return []
    done = f"{magnitude(row.flops_per_s)}FLOP/s per rank, {magnitude(row.flops_per_step)}FLOP a step"
    if row.mfu is None or not row.peak_flops_per_s:
        return [f"Operations by shapes: {done}; no peak of {clean(row.dtype)} is listed for {clean(row.device)}"]
    best = ""
    if row.best_flops_per_s and row.best_dtype != row.dtype:
        of_best = percent(row.flops_per_s / row.best_flops_per_s)
        best = f"; {of_best} of the {magnitude(row.best_flops_per_s)}FLOP/s that it has in {clean(row.best_dtype)}"
    peak = f"{magnitude(row.peak_flops_per_s)}FLOP/s in {clean(row.dtype)} of {clean(row.device)}"
    return [f"MFU {percent(row.mfu)} of the {peak}{best}; {done}, by shapes"]


def magnitude(value: float) -> str:
    """Write a number with three digits and the prefix of its unit.

    >>> magnitude(989.4e12), magnitude(35520512.0), magnitude(274_000.0)
    ('989 T', '35.5 M', '274 k')
    """
    size, prefix = next(
        ((size, name) for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= size), (1, "")
    )
    return f"{value / size:.3g} {prefix}"


TILES = {"wide": 8, "middle": 6, "narrow": 4}
"""The largest number of figures in a row, by the width of the page (page.css)."""


def columns(num_tiles: int, limit: int) -> int:
    """Return how many tiles, at most `limit`, a row takes so that no row is much shorter than the others.

    >>> [columns(9, limit) for limit in TILES.values()]
    [5, 5, 3]
    """
    return math.ceil(num_tiles / max(1, math.ceil(num_tiles / limit)))


def speedup(value: object) -> str:
    """Write a ratio of speeds: '1.90x', '12.4x'; '-' when it is missing."""
    ratio = finite(value)
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x" if ratio < 100 else f"{ratio:,.0f}x"


def interval(bounds: object) -> str:
    """Write the bounds of a prediction: '1.75 to 2.02'; '' when there are none."""
    if not isinstance(bounds, Sequence) or isinstance(bounds, str) or len(bounds) != 2:
        return ""
    low, high = finite(bounds[0]), finite(bounds[1])
    return "" if low is None or high is None else f"{low:.2f} to {high:.2f}"


def predicted(row: CauseRow | ProposalRow | AppliedRow | PlanAnswer) -> str:
    """Write a row's `predicted_speedup` with its `interval`: '1.90x (1.75 to 2.02)'; '-' when there is none.

    >>> predicted(CauseRow(predicted_speedup=1.9, interval=(1.75, 2.02), at_most=True))
    'at most 1.90x'
    """
    gain = finite(row.predicted_speedup)
    if isinstance(row, CauseRow) and row.at_most and gain is not None:
        return f"at most {speedup(gain)}"
    text, bounds = speedup(gain), interval(row.interval)
    return f"{text} ({bounds})" if bounds and text != "-" else text


def seconds(value: object) -> str:
    """Write a time in seconds with a fitting unit; '-' when it is missing."""
    time_s = finite(value)
    return "-" if time_s is None else "0 s" if time_s == 0 else format_seconds(time_s)


SHORT_S = 0.5  # traces of a few steps are shorter: their amounts are written in milliseconds


def device_seconds(value: object, beside: float | None = None) -> str:
    """Write device-seconds in one unit, so that a column of them compares at a glance.

    `beside` is the largest figure of the column: all of it is written as suits that one, of short traces in ms.

    >>> [device_seconds(x) for x in (0.0, 0.004, 1.0, 40.31, 86400.0)]
    ['0 s', '< 0.01 s', '1.00 s', '40.3 s', '86,400 s']
    >>> [device_seconds(x, beside=51.2) for x in (0.004, 1.0, 51.2)]
    ['< 0.1 s', '1.0 s', '51.2 s']
    >>> [device_seconds(x, beside=0.0498) for x in (0.0, 0.00001, 0.004, 0.0498)]
    ['0 ms', '< 0.1 ms', '4.0 ms', '49.8 ms']
    """
    amount = finite(value)
    if amount is None:
        return "-"
    scale = abs(amount if beside is None else beside)
    unit, factor = ("ms", 1e3) if beside is not None and 0 < scale < SHORT_S else ("s", 1.0)
    if amount == 0:
        return f"0 {unit}"
    digits = 2 if scale * factor < 10 else 1 if scale * factor < 1000 else 0
    smallest = 10.0**-digits
    number = f"{amount * factor:,.{digits}f}" if abs(amount) * factor >= smallest / 2 else f"< {smallest:g}"
    return f"{number} {unit}"


def count(value: object) -> str:
    """Write a whole number with thousands separators; '-' when it is missing.

    >>> count(20000), count(None)
    ('20,000', '-')
    """
    number = finite(value)
    return "-" if number is None else f"{number:,.0f}"


def plural(number: object, noun: str) -> str:
    """Write a number with its noun: '1 step', '2 devices'."""
    known = finite(number)
    return f"- {noun}s" if known is None else units.plural(round(known), noun)


def clean(text: object) -> str:
    """Return `text` without characters that could steer a terminal or reorder a page; each becomes a space.

    >>> clean("train\\x1b[31m.py\\n")
    'train [31m.py'
    """
    raw = str(text)
    if raw.isascii() and raw.isprintable():  # nearly always, and a live page writes a hundred such texts a second
        return " ".join(raw.split())
    kept = (" " if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in raw)
    return " ".join("".join(kept).split())


def share(part: object, whole: float) -> float | None:
    """Return part / whole, None when either is missing or `whole` is zero."""
    amount = finite(part)
    return None if amount is None or whole <= 0 else amount / whole


def verdict(answer: Json | Why) -> Verdict:
    """Say in one sentence where the time of a `headway.why/2` object went, and what to do first.

    The largest loss that a remedy wins back, or may win back, leads where that is 5 % or more, else the largest loss
    that advice may mend, or one that is `FAR_LARGER` and that nothing known mends: its bucket gives the share. A run
    without a loss above the noise is told so, and what headway's recording took is never what to mend. How a run ended
    that did not end well comes before everything else. A host without free cores leads where that lost most: the rest
    is said of a busy host. What took more of the time than the headline's loss (useful work, the start-up of a short
    run) is said behind it.
    """
    why = Why.of(answer)
    devices, wall = plural(why.devices, "device"), seconds(why.wall_s)
    end = ending(why.exit, why.steps)
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
        return Verdict(sentence=f"{sentence} {useful}.", fix=HUNG)
    named = [c for c in why.causes if worth_naming(c, why) and not c.fix.startswith(RECORD_LONGER)]
    known = [c for c in named if c.remedy or c.fix.startswith(NOT_RESOLVED)]
    first = next((c for c in known if _gain(c) >= GAIN_THAT_LEADS), None)
    largest = max(named, key=_lost_s, default=None)
    if largest is not None and (largest.cause == "host.cpu_wait" or _outweighs(largest, first)):
        first = largest  # what else the run shows is of a busy host, or small beside what one line wins
    if first is None:
        first = next((c for c in named if headline(c, why)), None)
        first = largest if first and largest and _lost_s(largest) > FAR_LARGER * _lost_s(first) else first
    if first is None:
        return Verdict(sentence=f"{end}{useful}{_larger_loss(why, '') or '; no loss stands out'}.")
    rest = _larger_loss(why, first.cause.partition(".")[0])
    return Verdict(
        sentence=f"{end}{_lost_share(first, why)} of {devices} x {wall} {_losing(first)}{rest}.",
        fix=clean(first.fix),
        gain=predicted(first) if _gain(first) >= GAIN_WORTH_NAMING and not first.fix.startswith(NOT_RESOLVED) else "",
        cause=first.cause,
        remedy=first.remedy or "",
        allow=first.allow,
        script=first.script,
    )


def _outweighs(largest: CauseRow, first: CauseRow | None) -> bool:
    """Whether a line of the script wins far more of the job than the remedy that would lead."""
    return first is not None and bool(largest.script) and _lost_s(largest) > FAR_LARGER * _lost_s(first)


def _gain(cause: CauseRow) -> float:
    """Return the predicted speedup of a cause, 0 where nothing predicted it."""
    return finite(cause.predicted_speedup) or 0.0


def goodput_of(facts: Why | RunAnswer) -> str:
    """Write the goodput of a run, and that of its steps where start-up and the like make it another; '' without it.

    >>> goodput_of(Why(goodput=0.388, step_goodput=0.91)), goodput_of(Why(goodput=0.9, step_goodput=0.91))
    ('goodput 38.8 % (in its steps 91.0 %)', 'goodput 90.0 %')
    """
    whole, steps = finite(facts.goodput), finite(facts.step_goodput)
    if whole is None:
        return ""
    apart = steps is not None and steps - whole >= STARTS_SHOW
    return f"goodput {percent(whole)}" + (f" (in its steps {percent(steps)})" if apart else "")


STARTS_SHOW = 0.05
"""Difference of the goodput of a run and that of its steps from which both are said."""


def ending(end: RunExit | None, steps: object = None) -> str:
    """Say how a run ended; '' when well, or when it is not known.

    >>> text = 'Traceback (most recent call last):\\n  File "/jobs/a.py", line 5, in main\\nKeyError: 7'
    >>> ending(RunExit(code=1, cls="user", first_rank=0, traceback=text), 3)
    'Rank 0 failed after 3 steps (exit code 1): KeyError: 7 (a.py, line 5).'
    >>> ending(RunExit(code=143, cls="preempted")), ending(RunExit(code=0))
    ('The run was stopped from outside (exit code 143).', '')
    """
    if end is None or not end.code:
        return ""
    after = f" after {plural(steps, 'step')}" if finite(steps) else ""
    if end.code == CTRL_C:
        return f"The run was stopped by Ctrl-C{after}."
    what = ENDINGS.get(end.cls, "failed")
    is_one = end.first_rank is not None and what != ENDINGS["preempted"]
    who, why = f"Rank {end.first_rank}" if is_one else "The run", clean(raised(end.traceback or ""))
    return f"{who} {what}{after} (exit code {end.code}){': ' * bool(why)}{why}."


CTRL_C = 130
"""Exit code of a run that was interrupted: nobody failed."""

ENDINGS: dict[str, str] = {
    "oom": "ran out of memory",
    "hang": "made no more progress",
    "preempted": "was stopped from outside",
}
"""Exit class -> what a run or its first failing rank did, in words; any other class failed."""

HUNG = "look at the rank that the others wait for: headway hang shows where it stands"
"""What to do first about a run that a hang ended."""

OVERSHADOWED = 0.2
"""Share of the device time from which another bucket is named beside the first cause."""


def _larger_loss(why: Why, bucket: str) -> str:
    """Return '; start-up took 43 %, useful work 36 %' of the buckets that took more than `bucket` and much; else ''."""
    total_s, amounts = why.total_device_s, _not_lent(why)
    least = amounts.get(bucket, 0.0)
    others = sorted(((amount, name) for name, amount in amounts.items() if name != bucket), reverse=True)
    if not bucket:  # the sentence is about useful work then
        others = [row for row in others if row[1] != "useful"]
    larger = [row for row in others if row[0] > least and (share(row[0], total_s) or 0.0) >= OVERSHADOWED][:2]
    said = [f"{100 * amount / total_s:.0f} %" for amount, _ in larger]
    said = [f"{bucket_style(name).short or bucket_style(name).losing} {'' if at else 'took '}{part}"
            for at, ((_, name), part) in enumerate(zip(larger, said, strict=True))]  # fmt: skip
    return f"; {', '.join(said)}" if said else ""


def _not_lent(why: Why) -> dict[str, float]:
    """Return bucket -> device-seconds without what another job used: time in a bubble that was filled is not lost.

    >>> _not_lent(Why(ledger={"bubble": 5.0}, sub={"bubble.filled": 3.0}))
    {'bubble': 2.0}
    """
    return {name: amount - why.sub.get(f"{name}.filled", 0.0) for name, amount in why.ledger.items()}


FAR_LARGER = 3.0
"""So many times a loss that advice may mend is one that leads although no remedy pays."""


def _lost_s(cause: CauseRow) -> float:
    """Return the device-seconds that a cause lost."""
    return finite(cause.lost_device_s) or 0.0


def headline(cause: CauseRow, why: Why) -> bool:
    """Tell whether a cause may be what a verdict is about: above the noise, and to be mended."""
    lost = share(cause.lost_device_s, why.total_device_s) or 0.0
    return lost >= LEAST_HEADLINE and not cause.fix.startswith(NOTHING_PAYS)


def named_causes(answer: Json | Why) -> list[CauseRow]:
    """Return the causes that are worth naming, in order; those that one fix answers follow the first of them.

    The fix and its gain are said once, with the first: of the others `together_with` is that one's place.
    """
    groups: dict[object, list[CauseRow]] = {}
    why = Why.of(answer)
    for place, cause in enumerate(cause for cause in why.causes if worth_naming(cause, why)):
        wins = _gain(cause) >= GAIN_WORTH_NAMING
        groups.setdefault((cause.fix, cause.script) if wins else place, []).append(cause)
    named: list[CauseRow] = []
    for first, *others in groups.values():
        one = {"fix": f"as for cause {len(named) + 1}", "script": "", "together_with": len(named) + 1}
        named += [first, *(msgspec.structs.replace(cause, **one) for cause in others)]
    return named


def gain_words(cause: CauseRow) -> str:
    """Say what the fix of one of `named_causes` wins, and who applies it where that is the user.

    >>> links = CauseRow(fix="faster links", predicted_speedup=1.2, interval=(1.1, 1.3), remedy="")
    >>> gain_words(links), gain_words(CauseRow(predicted_speedup=1.2, together_with=1))
    ('by hand, predicted 1.20x (1.10 to 1.30)', 'won with cause 1')
    """
    if cause.together_with:
        return f"won with cause {cause.together_with}"
    if cause.fix.startswith(NOT_RESOLVED):
        return NOT_RESOLVED
    if finite(cause.predicted_speedup) is None:
        return "no prediction"
    return f"{'by hand, ' if cause.remedy == '' and not cause.at_most else ''}predicted {predicted(cause)}"


def is_win(cause: CauseRow) -> bool:
    """Whether the fix of one of `named_causes` has a gain of its own that is worth naming."""
    is_own = not cause.together_with and not cause.fix.startswith(NOT_RESOLVED)
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


def worth_naming(cause: CauseRow, why: Why) -> bool:
    """Tell whether a cause lost at least 0.5 % of the device time, promises a gain, or says what will go wrong."""
    return (
        cause.cause in WARNINGS
        or (share(cause.lost_device_s, why.total_device_s) or 0.0) >= 0.005
        or _gain(cause) >= GAIN_WORTH_NAMING
    )


WARNINGS = ("memory.grow", "input.repeats")
"""Causes that lose no time: they end jobs, or train on the wrong examples."""

CAUSE_PHRASES: dict[str, str] = {
    "straggler.worker": "slow workers",
    "straggler.last_stage": "a slow last pipeline stage",
    "straggler.sequence": "sequence-length imbalance",
    "straggler.rank": "a slow rank",
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


def _losing(cause: CauseRow) -> str:
    phrase = CAUSE_PHRASES.get(cause.cause)
    return f"was lost to {phrase}" if phrase else f"went to {bucket_style(cause.cause.partition('.')[0]).losing}"


def _lost_share(cause: CauseRow, why: Why) -> str:
    """Return the share of the cause's whole bucket, or of the cause itself where the bucket holds others too."""
    booked = None if cause.cause in CAUSE_PHRASES else _not_lent(why).get(cause.cause.partition(".")[0])
    fraction = share(booked or cause.lost_device_s, why.total_device_s)
    return "-" if fraction is None else f"{100 * fraction:.0f} %" if fraction >= 0.1 else percent(fraction)
