"""The objects of the `--json` contracts, typed, as screens and pages read them.

Each is made once, at the door of a screen or a page. A figure that is missing,
null or of another type has its default, so that it is written '-' and never
guessed; keys of a newer version are ignored. Times in seconds.

>>> why = Why.of({"devices": 2, "goodput": None, "steps": "many", "causes": [{"cause": "host.gc", "fix": None}]})
>>> why.devices, why.goodput, why.steps, why.causes[0].cause, why.causes[0].fix
(2.0, None, None, 'host.gc', '')

The facts of a run as a page shows them: what ran where, and when it began.

From run.json, whose secrets were replaced when it was written.

>>> created(RunFacts()), created(RunFacts(realtime_ns=86_400_000_000_000))
('', '1970-01-02 00:00 UTC')
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Self

import msgspec

from headway.core.files.safe_files import converted
from headway.core.units import NS_PER_S, format_bytes, format_seconds
from headway.ledger.machines import Creation
from headway.plan.loader_rows import LoaderRow
from headway.trace.events.active_settings import AppliedRow
from headway.trace.events.trace import Trace
from headway.trace.recording.run_facts import RunExit, RunFacts

Json = Mapping[str, Any]
"""One parsed JSON object of the `--json` contracts."""

Interval = tuple[float, float]
"""Low and high end of a prediction."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A `--json` object, or an entry of one."""

    @classmethod
    def of(cls, row: Json | Self | None) -> Self:
        """Return the object typed; one that is typed already as it is."""
        return row if isinstance(row, cls) else converted(_known(row or {}), cls)[0]


def _known(value: Any) -> Any:
    """Return JSON without the entries that are null."""
    if isinstance(value, Mapping):
        return {key: _known(inner) for key, inner in value.items() if inner is not None}
    return [_known(inner) for inner in value] if isinstance(value, (list, tuple)) else value


class CauseRow(Answer, frozen=True):
    """One of the `causes` of `headway why`: see `headway.ledger.cause.Cause`."""

    cause: str = ""
    where: str = ""
    lost_device_s: float | None = None
    evidence: str = ""
    fix: str = ""
    predicted_speedup: float | None = None
    interval: Interval | None = None
    at_most: bool = False
    script: str = ""
    remedy: str | None = None
    """'' where the user applies the fix; None where that is not said."""
    allow: str = ""
    together_with: int = 0
    """Place of the cause that says the fix and its gain; 0 = this one."""


class Verdict(Answer, frozen=True):
    """The answer in one breath."""

    sentence: str = ""
    """Where the time went: '62 % of 2 devices x 41.3 s went to waiting for input.'"""
    fix: str = ""
    """What to do about it; '' when there is nothing to do."""
    gain: str = ""
    """Predicted gain: '1.90x (1.75 to 2.02)'; '' without a prediction."""
    cause: str = ""
    """The cause that the sentence is about; '' where it is about none."""
    remedy: str = ""
    """The remedy by which headway applies the fix; '' where the user does."""
    allow: str = ""
    """The consent that it needs; '' where it needs none."""
    script: str = ""
    """What the user can write in the script instead, a line to copy; '' where the fix says all that is known."""
    command: str = ""
    """What to type next."""

    @property
    def confidence(self) -> str:
        """How sure the fix is: 'predicted', 'upper bound', 'not resolved' or 'no prediction'; '' without a fix.

        >>> [Verdict(fix="use workers", gain=gain).confidence for gain in ("1.90x (1.75 to 2.02)", "at most 1.2x")]
        ['predicted', 'upper bound']
        """
        if not self.fix:
            return ""
        if self.fix.startswith(NOT_RESOLVED):
            return NOT_RESOLVED
        if "(" in self.gain:
            return "predicted"
        return "upper bound" if self.gain else "no prediction"


NOT_RESOLVED = "not resolved"
"""What a fix says whose gain this run is too short or too disturbed to tell."""


class StragglerRow(Answer, frozen=True, rename={"m_w": "M_W", "m_s": "M_S"}):
    """The what-if analysis of an operation trace."""

    slowdown: float | None = None
    waste: float | None = None
    m_w: float | None = None
    m_s: float | None = None
    by: dict[str, dict[str, Any]] = {}
    """'worker', 'optype', 'dp' or 'pp' -> group -> slowdown."""
    step_slowdown: dict[str, Any] = {}


class MfuRow(Answer, frozen=True):
    """How much of the devices' peak a model uses."""

    mfu: float | None = None
    hfu: float | None = None
    flops_per_s_per_device: float = 0.0
    peak_flops_per_s: float = 0.0
    formula: str = ""
    reason: str = ""
    """Why `mfu` is not known."""
    recompute: str = "none"
    device: str = ""


class ComputeRow(Answer, frozen=True):
    """Operations of a recorded run, counted by shapes: see `headway.verbs.shared.model_flops`."""

    mfu: float | None = None
    flops_per_step: float | None = None
    flops_per_s: float | None = None
    """Of one rank."""
    peak_flops_per_s: float | None = None
    """Of `dtype`, which the products are computed in."""
    dtype: str = ""
    device: str = ""
    best_dtype: str = ""
    """The dtype in which the device is fastest."""
    best_flops_per_s: float | None = None


class OutlierRow(Answer, frozen=True):
    """A machine that computes slower than others: see `headway.ledger.machines.Outlier`."""

    machine: str = ""
    ranks: tuple[int, ...] = ()
    slowdown: float | None = None
    lost_s: float | None = None


class MachinesRow(Answer, frozen=True):
    """Machines by speed."""

    basis: str = ""
    slowdown: dict[str, Any] = {}
    outliers: tuple[OutlierRow, ...] = ()


class Why(Answer, frozen=True):
    """The `headway.why/2` object."""

    devices: float | None = None
    steps: float | None = None
    wall_s: float | None = None
    goodput: float | None = None
    step_goodput: float | None = None
    coverage: float | None = None
    fidelity: float | None = None
    ledger: dict[str, float] = {}
    sub: dict[str, float] = {}
    basis: dict[str, str] = {}
    causes: tuple[CauseRow, ...] = ()
    notes: tuple[str, ...] = ()
    exit: RunExit | None = None
    verdict: Verdict = Verdict()
    straggler: StragglerRow | None = None
    mfu: MfuRow | None = None
    compute: ComputeRow = ComputeRow()
    group_creation: Creation | None = None
    machines: MachinesRow = MachinesRow()
    hang: dict[str, Any] = {}

    @property
    def total_device_s(self) -> float:
        """Devices x wall, in seconds."""
        return (self.devices or 0.0) * (self.wall_s or 0.0)


class VerifiedRow(Answer, frozen=True):
    """Batches under remedies, compared with the script's own."""

    batches: int = 0
    compared: int = 0
    equal: int = 0
    unequal: int = 0
    not_compared: dict[str, int] = {}
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


def facts_of(meta: dict[str, Any], trace: Trace | None) -> dict[str, Any]:
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
