"""The `headway.why/2` object, typed, as screens and pages read it.

It is made once, at the door of a screen or a page. A figure that is missing,
null or of another type has its default, so that it is written '-' and never
guessed; keys of a newer version are ignored. Times in seconds.

>>> why = Why.of({"devices": 2, "goodput": None, "steps": "many", "causes": [{"cause": "host.gc", "fix": None}]})
>>> why.devices, why.goodput, why.steps, why.causes[0].cause, why.causes[0].fix
(2.0, None, None, 'host.gc', '')
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import msgspec

from headway.core.files.safe_files import converted
from headway.ledger.cause import NOT_RESOLVED
from headway.ledger.machines import Creation
from headway.trace.recording.run_facts import RunExit

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
    """Operations of a recorded run, counted by shapes: see `headway.why.model_flops`."""

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


class LoaderRow(msgspec.Struct, frozen=True):
    """One entry of `loaders` in `headway plan --json`."""

    loader: int
    """Its group."""
    line: str | None = None
    """Where the script makes it."""
    dataset: str = ""
    """Class of its dataset."""
    used_by: str = ""
    """'training' or 'evaluation'."""
    remedies: tuple[str, ...] = ()
    """The chosen ones that are for it."""
    reason: str = ""
    """Why it takes none."""
