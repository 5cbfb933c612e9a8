"""The objects of the `--json` contracts beside `headway.why/2`, typed, as screens and pages read them.

Here stands too how their figures are said and how buckets are coloured, so that the terminal and the page never
disagree; digits are those of `headway.core.units`.

>>> created(RunFacts()), created(RunFacts(realtime_ns=86_400_000_000_000))
('', '1970-01-02 00:00 UTC')
>>> bucket_style("input").light, bucket_style("a newer one") is UNKNOWN_STYLE
('#db7b16', True)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from headway.core.units import NS_PER_S, clean, finite, format_bytes, format_seconds, magnitude, percent
from headway.trace.events.loader_facts import AppliedRow
from headway.trace.events.trace import Trace
from headway.trace.recording.run_facts import RunExit, RunFacts
from headway.why.answer import Answer, Interval, LoaderRow, Verdict, Why


class VerifiedRow(Answer, frozen=True):
    """Batches under remedies, compared with the script's own."""

    batches: int = 0
    compared: int = 0
    equal: int = 0
    unequal: int = 0
    not_compared: dict[str, int] = msgspec.field(default_factory=dict)
    """Reason -> batches."""


class RunAnswer(Answer, frozen=True):
    """The `headway.run/1` object."""

    run: str = ""
    exit: RunExit | None = None
    steps_per_s: float | None = None
    goodput: float | None = None
    step_goodput: float | None = None
    baseline: str = ""
    applied: tuple[AppliedRow, ...] = ()
    verified: VerifiedRow | None = None


class LeftOutRow(Answer, frozen=True):
    """Why a proposal is not in the plan."""

    kind: str = ""
    reason: str = ""


class ProposalRow(Answer, frozen=True):
    """A remedy, or one that was refused: see `headway.plan.proposal`."""

    name: str = ""
    predicted_speedup: float | None = None
    interval: Interval | None = None
    applies: bool = False
    cost: str = ""
    risk: str = ""
    reason: str = ""
    allow: str = ""
    protects: bool = False
    unsafe: bool = False
    evaluation_share: float = 0.0
    left_out: LeftOutRow = LeftOutRow()

    @property
    def slows(self) -> bool:
        """Whether it is likely to make the job slower, and prevents nothing: it is considered, and not proposed."""
        return (self.predicted_speedup or 1.0) < 1 and not self.protects


class JobGain(Answer, frozen=True):
    """What a plan makes of a whole job, its start included."""

    steps: int = 0
    predicted_speedup: float = 1.0
    interval: Interval = (1.0, 1.0)


class FailuresRow(Answer, frozen=True):
    """What lost ranks would cost a pipeline with replicas."""

    note: str = ""


class PlanAnswer(Answer, frozen=True):
    """The `headway.plan/1` object."""

    proposals: tuple[ProposalRow, ...] = ()
    chosen: tuple[str, ...] = ()
    predicted_speedup: float | None = None
    interval: Interval | None = None
    verdict: Verdict = Verdict()
    loaders: tuple[LoaderRow, ...] = ()
    refused: tuple[ProposalRow, ...] = ()
    hidden: int = 0
    note: str = ""
    start_s: float = 0.0
    pays_from_steps: int = 0
    job: JobGain = JobGain()
    failures: FailuresRow = FailuresRow()
    in_script: tuple[str, ...] | None = None


NOTED_START_S = 0.5
"""What a plan costs at the start is said from so many seconds on..."""

NOTED_SHARE = 0.03
"""...or where it makes the gain of the whole job smaller by this share."""


def start_of(plan: PlanAnswer) -> str:
    """Return the sentence on what a plan costs at the start, and what is left of the gain; '' where that is little.

    >>> start_of(PlanAnswer.of({"start_s": 2.25, "pays_from_steps": 40}))
    ' Trying it costs about 2.25 s at the start, won back after 40 steps.'
    >>> job = {"steps": 120, "predicted_speedup": 4.2, "interval": [3.5, 5.0]}
    >>> start_of(PlanAnswer.of({"start_s": 0.3, "pays_from_steps": 9, "predicted_speedup": 6.9, "job": job}))[-67:]
    '9 steps: a job of 120 steps is 4.20x as fast in all (3.50 to 5.00).'
    """
    job = plan.job
    shrinks = job.steps > 0 and job.predicted_speedup < (1 - NOTED_SHARE) * (plan.predicted_speedup or 1.0)
    if plan.start_s < NOTED_START_S and not shrinks:
        return ""
    sentence = f" Trying it costs about {format_seconds(plan.start_s)} at the start, won back after "
    sentence += f"{plan.pays_from_steps:,} steps"
    if not shrinks:
        return f"{sentence}."
    low, high = job.interval
    of_job = f"a job of {job.steps:,} steps is {job.predicted_speedup:.2f}x as fast in all ({low:.2f} to {high:.2f})"
    return f"{sentence}: {of_job}."


def facts_of(meta: dict[str, Any], trace: Trace | None) -> dict[str, object]:
    """Return the facts at the foot of the page."""
    facts: dict[str, Any] = {"script": " ".join(map(str, meta.get("script") or []))} if meta else {}
    wanted = ("host", "device_type", "cores", "world_size", "headway_version", "dropped", "run_id")
    facts |= {key: meta[key] for key in wanted if meta.get(key) is not None}
    if isinstance(meta.get("bytes_per_step"), (int, float)):
        facts["events written"] = f"{format_bytes(meta['bytes_per_step'])} per step"
    loaders = meta.get("loaders")
    facts |= {f"loader {name}": row for name, row in (loaders if isinstance(loaders, dict) else {}).items()}
    if not meta and trace is not None:
        facts |= {key: trace.meta[key] for key in ("source", "device_type", "world_size") if key in trace.meta}
    return facts


def created(facts: RunFacts) -> str:
    """Return when the run started, as text."""
    if not facts.realtime_ns:
        return ""
    try:
        return datetime.fromtimestamp(facts.realtime_ns / NS_PER_S, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):  # no time that a clock has shown
        return ""


@dataclass(frozen=True, slots=True)
class BucketStyle:
    """How one bucket of the ledger is coloured, everywhere."""

    light: str
    """Colour on a light page, `#rrggbb`."""

    dark: str
    """Colour on a dark page, `#rrggbb`."""

    ansi: int
    """Colour of a 256-colour terminal, readable on both backgrounds."""

    hatched: bool = False
    """Drawn with stripes: tells greys and wines apart without relying on hue."""


BUCKET_STYLES: dict[str, BucketStyle] = {
    "useful": BucketStyle("#328ad4", "#4290dc", 68),
    "eval": BucketStyle("#7828e6", "#dca0fa", 141, hatched=True),
    "input": BucketStyle("#db7b16", "#f78f13", 208),
    "comm": BucketStyle("#f7c512", "#fed967", 178),
    "bubble": BucketStyle("#43c4e7", "#91e9f0", 80),
    "straggler": BucketStyle("#cd2b0b", "#e44f2e", 160),
    "checkpoint": BucketStyle("#772698", "#933da9", 133),
    "startup": BucketStyle("#979797", "#7e8084", 103),
    "restart": BucketStyle("#3b444d", "#56595d", 242),
    "rework": BucketStyle("#4b1b2a", "#63383c", 89, hatched=True),
    "host": BucketStyle("#317860", "#8bbc92", 35),
    "idle": BucketStyle("#dee1e3", "#2e2e2e", 248),
    "unknown": BucketStyle("#aaafb5", "#676d75", 245, hatched=True),
}
"""Bucket -> style, in the ledger's order. Colours keep apart under the three common colour deficiencies (tested)."""

UNKNOWN_STYLE = BUCKET_STYLES["unknown"]


def bucket_style(bucket: str) -> BucketStyle:
    """Return the style of a bucket, that of `unknown` for a name from a newer ledger."""
    return BUCKET_STYLES.get(bucket, UNKNOWN_STYLE)


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


TILES = {"wide": 8, "middle": 6, "narrow": 4}
"""The largest number of figures in a row, by the width of the page (page.css)."""


def columns(num_tiles: int, limit: int) -> int:
    """Return how many tiles, at most `limit`, a row takes so that no row is much shorter than the others.

    >>> [columns(9, limit) for limit in TILES.values()]
    [5, 5, 3]
    """
    return math.ceil(num_tiles / max(1, math.ceil(num_tiles / limit)))


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
