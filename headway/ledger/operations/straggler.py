"""Straggler what-if analysis of an operation trace: how much slower than without stragglers, and whose fault.

Use it on traces of pipeline- and data-parallel jobs (`headway.trace.readers.straggler`).
S, the slowdown, compares the job replayed as it was with the job replayed
with every operation at the ideal of its type; the same replay with one DP
rank, stage or operation type as it was gives that one's share. All
dependencies are inferred from the trace. Numbers are those of the published
study (arXiv 2505.05713); lists of causes are ours (`root_cause`).

>>> from benchmarks._synthetic import SyntheticJob, generate
>>> report = analyse(generate(SyntheticJob(dp=2, pp=2, num_microbatches=4, num_steps=2), seed=1).trace)
>>> 1.0 <= report.slowdown < 1.2, sorted(report.by)
(True, ['dp', 'optype', 'pp', 'worker'])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.units import NS_PER_S
from headway.ledger.cause import Cause
from headway.ledger.operations.compute_factors import aligned
from headway.ledger.operations.dependencies import blocks, infer
from headway.ledger.operations.operation_table import OperationTable, arrange, clock_ns
from headway.ledger.operations.root_cause import Correlation, correlation, find_causes
from headway.ledger.operations.whatif_groups import WhatIf, launch_delays, merged
from headway.trace.events.trace import Trace
from headway.trace.readers.straggler import Sizes, sizes_of

DECOMPOSED_FROM = 1.03
"""A slowdown below this is not taken apart in `detail` (the published files hold null there)."""

WORST_WORKERS_PERCENT = 3
"""M_W asks how much of the loss the worst so many percent of the workers explain."""

FIRST = "first-op"
"""Name under which the first forward, or its receive, is accounted when launch delays are taken apart."""


@dataclass(frozen=True, slots=True)
class StragglerReport:
    """What stragglers cost a traced job. Step times are seconds, slowdowns ratios >= about 1."""

    slowdown: float
    """S: mean step time without launch delays / mean ideal step time."""

    waste: float
    """1 - 1/S: share of the device time that stragglers took."""

    M_W: float
    """Share of the loss that goes when the worst 3 % of the workers become ideal."""

    M_S: float
    """Share of the loss that goes when the last pipeline rank becomes ideal."""

    by: Mapping[str, Mapping[str, float]]
    """'optype', 'dp', 'pp', 'worker' -> name -> slowdown with only that one as observed."""

    step_slowdown: Mapping[int, float]
    """Step -> its own slowdown, worst first."""

    detail: Mapping[str, Any]
    """Every number of the published result files under its name; 'ms', 'mw' hold those of ms-*.json, mw-*.json."""

    heat: NDArray[np.float64]
    """[dp, pp] Slowdown score of each worker: the smaller of its DP rank's and its stage's."""

    fidelity: float
    """Mean observed step time / mean replayed one: what launch delays and the model leave out."""

    launch_share: float
    """Share of the observed step time that is launch delay."""

    sequence: Correlation
    """Forward-backward correlation and spread per worker, and the verdict on sequence-length imbalance."""

    devices: int
    """Ranks seen in the rows."""

    sizes: Sizes
    """Parallel sizes of the job."""

    whatif: WhatIf = field(repr=False)
    """The replays behind the numbers; ask it further questions."""

    def to_json(self) -> dict[str, object]:
        """Return the 'straggler' object of schema `headway.why/2`; every key is a string."""
        return {
            "slowdown": self.slowdown,
            "waste": self.waste,
            "M_W": self.M_W,
            "M_S": self.M_S,
            "by": {kind: dict(values) for kind, values in self.by.items()},
            "step_slowdown": {str(step): value for step, value in self.step_slowdown.items()},
            "detail": dict(self.detail),
        }


def analyse(trace: Trace, *, sizes: Sizes | None = None, unknown_as_compute: bool = False) -> StragglerReport:
    """Run the whole what-if analysis of an operation trace.

    `sizes` default to those of the trace or its rows; `unknown_as_compute`
    admits unknown operation types. Clocks that contradict the communication are
    aligned first (`compute_factors`). Raises `InputError` (its message says what
    to do) on traces that are no steps of one job: fewer than 2 steps, a DP
    rank missing in a step, sends without receives, circular order, no optimizer.
    """
    trace = aligned(trace, unknown_as_compute=unknown_as_compute)
    table = arrange(trace, unknown_as_compute=unknown_as_compute)
    if table.shape[0] < 2:
        raise InputError(f"the trace has {table.shape[0]} step; stragglers show between steps. Record at least 2.")
    sizes = _checked(sizes or sizes_of(trace), table)
    whatif = WhatIf.of(table, infer(table))
    groups = _GroupTimes.of(whatif)
    # [dp, pp]: a slow worker slows its DP rank and its stage; the smaller of both slowdowns is what can be its own.
    heat = np.minimum(groups.slowdown("dp_rank")[:, None], groups.slowdown("stage")[None, :])
    mw = whatif.explained(_worst(table, heat))
    ms = whatif.explained(np.broadcast_to(table.stage == table.num_stages - 1, whatif.observed_s.shape))
    base = _observed_step_s(table)
    # Observed over replayed: what the replay leaves out is the time in which nothing was launched.
    launch = float(base.mean() / groups.base.mean())
    uneven = correlation(whatif)
    detail = {
        "job_meta": sizes.to_json(),
        **_published(groups, base, launch, table),
        "fidelity": launch,
        "sequence_r": uneven.r,
        "sequence_cv": uneven.cv,
        "ms": {**ms, "Ms": ms["rem"]},
        "mw": {**mw, "Mw": mw["rem"]},
    }
    slowdown = float(groups.base.mean() / groups.ideal.mean())
    return StragglerReport(
        slowdown=slowdown,
        waste=1 - 1 / slowdown,
        M_W=mw["rem"],
        M_S=ms["rem"],
        by=_by(groups, heat, table),
        step_slowdown={int(k): v for k, v in detail["blocking_step_slowdown"].items()},
        detail=detail,
        heat=heat,
        fidelity=launch,
        launch_share=max(0.0, 1 - 1 / launch),
        sequence=uneven,
        devices=len(np.unique(trace.events["rank"])),
        sizes=sizes,
        whatif=whatif,
    )


def root_causes(report: StragglerReport) -> list[Cause]:
    """Return the causes of the loss, largest first, each with what its removal would win.

    A sequence-length verdict explains the last stage away: `straggler.last_stage` then stands below it.
    Where receives block, the replays behind the gains know it; the published numbers of the report do not.
    """
    table = report.whatif.table
    whatif = WhatIf.of(table, infer(table, blocking=True)) if blocks(table) else report.whatif
    return find_causes(
        whatif,
        devices=report.devices,
        observed_s=_observed_step_s(table).astype(np.float64),
        shares={"M_W": report.M_W, "M_S": report.M_S},
        sequence=report.sequence,
    )


def ideal_trace(trace: Trace, report: StragglerReport) -> Trace:
    """Return the ideal timeline of `trace`, the one `report` was made from: the same rows at their ideal times.

    A communication starts, there, when its rank is ready for it; its last peer may come later.
    """
    table = report.whatif.table
    start_s, end_s = report.whatif.ideal_times()
    # [S, 1, 1] The first start of each step, which ideal times are counted from.
    begin = clock_ns(trace)[table.row].min(axis=(1, 2), keepdims=True)
    start_ns, duration_ns = trace.events["start_ns"].copy(), trace.events["duration_ns"].copy()
    start_ns[table.row] = begin + np.rint(start_s * NS_PER_S).astype(np.int64)
    duration_ns[table.row] = np.rint((end_s - start_s) * NS_PER_S).astype(np.int64)
    ranks = {rank: {k: v for k, v in known.items() if k != "offset_ns"} for rank, known in trace.ranks.items()}
    return replace(
        trace, events={**trace.events, "start_ns": start_ns, "duration_ns": duration_ns}, ranks=ranks,
        meta={**trace.meta, "seconds": "float64"},
    )  # fmt: skip


def _checked(sizes: Sizes, table: OperationTable) -> Sizes:
    """Refuse sizes that contradict the rows."""
    for name, said, seen in (
        ("dp_size", sizes.dp_size, len(table.dp)),
        ("pp_size", sizes.pp_size, table.num_stages),
        ("vpp_size", sizes.vpp_size, table.num_layers),
    ):
        if said != seen:
            raise InputError(f"{name} is {said} but the rows show {seen}. Correct the sizes or add the missing ranks.")
    return sizes


def _observed_step_s(table: OperationTable) -> NDArray[np.floating[Any]]:
    """Return the recorded time [S] of each step, first start to last end, in the trace's precision."""
    return np.asarray(table.end_s.max(axis=(1, 2)) - table.start_s.min(axis=(1, 2)))


def _worst(table: OperationTable, heat: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return bool [S, D, K]: operations of the worst 3 % of the workers (at least one; ties: lowest rank)."""
    # Rounded up: of 8 workers 3 percent are one.
    count = -(-heat.size * WORST_WORKERS_PERCENT // 100)
    worst = np.lexsort((table.rank.ravel(), -heat.ravel()))[:count]
    chosen = np.zeros(heat.size, dtype=bool)
    chosen[worst] = True
    # [dp, pp] -> [dp, K] by the stage of each operation -> [S, dp, K] for all steps, without a copy.
    members = chosen.reshape(heat.shape)[:, table.stage]
    return np.broadcast_to(members, table.start_s.shape)


@dataclass(frozen=True, slots=True)
class _GroupTimes:
    """Step times with each group alone as observed."""

    base: NDArray[np.float64]
    """[S] All operations as observed, no launch delay."""

    ideal: NDArray[np.float64]
    """[S] All operations ideal."""

    alone: Mapping[str, tuple[tuple[str, ...], NDArray[np.float64]]]
    """Kind -> (names [G], step times [S, G] with that group alone as observed)."""

    whatif: WhatIf

    @classmethod
    def of(cls, whatif: WhatIf) -> _GroupTimes:
        """Replay every group of every kind."""
        alone, times = {}, np.empty((0, 2))
        for kind, (names, code) in _codes(whatif.table).items():
            times = whatif.by(code)
            alone[kind] = (names, times[:, :-2])
        # `WhatIf.by` appends two columns: everything as observed, and everything ideal.
        return cls(times[:, -2], times[:, -1], alone, whatif)

    def slowdown(self, kind: str) -> NDArray[np.float64]:
        """Return [G] the slowdown of each group of that kind."""
        return np.asarray(self.alone[kind][1].mean(axis=0) / self.ideal.mean())


def _codes(table: OperationTable) -> dict[str, tuple[tuple[str, ...], NDArray[np.int64]]]:
    """Return, per kind of group, its names and the group [S, D, K] of each operation."""
    shape = table.start_s.shape
    used = np.unique(table.optype)
    optypes = sorted({merged(table.names[code]) for code in used})
    # Code of a name -> its place among the merged types: sends and receives of one direction are one type.
    of_code = np.array([optypes.index(merged(name)) if merged(name) in optypes else -1 for name in table.names])
    return {
        "optype": (tuple(optypes), np.broadcast_to(of_code[table.optype], shape)),
        "dp_rank": (_texts(table.dp), np.broadcast_to(np.arange(len(table.dp))[:, None], shape)),
        "stage": (_texts(range(table.num_stages)), np.broadcast_to(table.stage, shape)),
    }


def _texts(numbers: Sequence[int] | NDArray[np.int64] | range) -> tuple[str, ...]:
    return tuple(str(int(number)) for number in numbers)


def _sorted(names: Sequence[str], values: NDArray[np.float64]) -> dict[str, float]:
    """Return name -> value, largest first."""
    return {names[i]: float(values[i]) for i in np.argsort(-values, kind="stable")}


def _by(groups: _GroupTimes, heat: NDArray[np.float64], table: OperationTable) -> dict[str, dict[str, float]]:
    workers = [f"{dp}/{pp}" for dp in table.dp for pp in range(table.num_stages)]
    names = {"optype": "optype", "dp": "dp_rank", "pp": "stage"}
    by = {ours: _sorted(groups.alone[kind][0], groups.slowdown(kind)) for ours, kind in names.items()}
    return {**by, "worker": _sorted(workers, heat.ravel())}


def _published(
    groups: _GroupTimes, base: NDArray[np.floating[Any]], launch: float, table: OperationTable
) -> dict[str, Any]:
    """Return the content of a published result file, under its names."""
    steps = _texts(table.steps)
    slowdown = float(groups.base.mean() / groups.ideal.mean())
    blocking = _decomposed("blocking", groups.alone, groups.ideal, steps, slowdown >= DECOMPOSED_FROM)
    delays: Mapping[str, tuple[tuple[str, ...], NDArray[np.float64]]] = groups.alone
    if launch >= DECOMPOSED_FROM:
        delay = launch_delays(table, groups.whatif.order)
        delays = {
            kind: (names, groups.whatif.delayed_by(code, delay)[:, :-2])
            for kind, (names, code) in _launch_codes(table).items()
        }
    return {
        "step_t_base": dict(zip(steps, base.astype(float).tolist(), strict=True)),
        "step_t_nodelay": dict(zip(steps, groups.base.tolist(), strict=True)),
        "step_t_noblk": dict(zip(steps, groups.ideal.tolist(), strict=True)),
        "launch_slowdown": launch,
        "blocking_slowdown": slowdown,
        "blocking_step_slowdown": _sorted(steps, groups.base / groups.ideal),
        "launch_step_slowdown": _sorted(steps, base / groups.base),
        **blocking,
        **_decomposed("launch", delays, groups.base, steps, launch >= DECOMPOSED_FROM),
    }


def _launch_codes(table: OperationTable) -> dict[str, tuple[tuple[str, ...], NDArray[np.int64]]]:
    """Return `_codes` with the first forward (its receive, behind the first stage) as a type of its own."""
    codes = _codes(table)
    names, code = codes["optype"]
    # Behind the first stage a step begins with a receive, which its launch delay is booked to.
    leads = np.where(table.stage == 0, table.of_type("forward-compute"), table.of_type("forward-recv"))
    first = leads & (table.seq == 0)
    return {**codes, "optype": ((*names, FIRST), np.where(first, len(names), code))}


def _decomposed(
    method: str,
    alone: Mapping[str, tuple[tuple[str, ...], NDArray[np.float64]]],
    ideal: NDArray[np.float64],
    steps: Sequence[str],
    wanted: bool,
) -> dict[str, Any]:
    """Return slowdowns per group and per step and group; null when the slowdown is too small to take apart."""
    result: dict[str, Any] = {}
    for kind, (names, times) in alone.items():
        ratio = times / ideal[:, None]
        key = f"{method}_decompose_by_{kind}"
        result[key] = _sorted(names, times.mean(axis=0) / ideal.mean()) if wanted else None
        per_step = {step: _sorted(names, ratio[i]) for i, step in enumerate(steps)} if wanted else None
        result[f"{key}_per_step"] = per_step
    return result
