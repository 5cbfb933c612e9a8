"""The objects of the `--json` contracts beside `headway.why/2`, typed, as screens and pages read them.

The facts of a run as a page shows them: what ran where, and when it began.

From run.json, whose secrets were replaced when it was written.

>>> created(RunFacts()), created(RunFacts(realtime_ns=86_400_000_000_000))
('', '1970-01-02 00:00 UTC')
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from headway.core.units import NS_PER_S, format_bytes, format_seconds
from headway.trace.events.loader_facts import AppliedRow
from headway.trace.events.trace import Trace
from headway.trace.recording.run_facts import RunExit, RunFacts
from headway.why.answer import Answer, Interval, LoaderRow, Verdict


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


# The facts of a run as a page shows them: what ran where, and when it began.


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
