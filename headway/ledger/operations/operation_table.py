"""The rows of an operation trace as one block [steps, dp, operations].

Use it before any analysis of an operation trace: it checks that every step
and DP rank ran the same operations (identity: type, seq, pipeline rank) and
puts their times side by side, in seconds from the start of the step. A trace
that was float32 stays float32, because ends and transfer times of the
published results are formed in that precision.

>>> from headway.trace.readers.straggler import operations
>>> trace = operations({"rank": [0, 0], "step": [3, 4], "seq": [0, 0], "start_ns": [5, 9], "duration_ns": [2, 2]},
...                    optypes=["optimizer"] * 2, coordinates={0: (0, 0)})
>>> arrange(trace).shape
(2, 1, 1)
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.tables import suggestion
from headway.core.units import NS_PER_S
from headway.trace.events.trace import Trace
from headway.trace.readers.straggler import OPTYPES, coordinates_of
from headway.trace.sync.clocks import common_ns


@dataclass(frozen=True, slots=True)
class OperationTable:
    """Times [S, D, K] of K operations in S steps on D DP ranks; facts of an operation are [K]."""

    steps: NDArray[np.int64]
    """[S] Step numbers, ascending."""

    dp: NDArray[np.int64]
    """[D] DP ranks, ascending."""

    num_stages: int
    """Pipeline ranks; they are numbered 0..num_stages-1."""

    num_layers: int
    """Stages per pipeline rank (1 without interleaving)."""

    names: tuple[str, ...]
    """Operation types that occur."""

    unknown: tuple[str, ...]
    """Those of `names` that are none of the known types; they are treated as compute."""

    optype: NDArray[np.int64]
    """[K] Index into `names`."""

    stage: NDArray[np.int64]
    """[K] Pipeline rank."""

    seq: NDArray[np.int64]
    """[K] n-th operation of its type on that pipeline rank."""

    layer: NDArray[np.int64]
    """[K] Stage among those of the pipeline rank."""

    global_stage: NDArray[np.int64]
    """[K] Stage in the model, -1 = not applicable."""

    microbatch: NDArray[np.int64]
    """[K] Micro-batch, -1 = not applicable."""

    rank: NDArray[np.int64]
    """[D, P] Rank number of each worker."""

    start_s: NDArray[Any]
    """[S, D, K] Start, seconds after the first start of the step (float32 or float64)."""

    duration_s: NDArray[Any]
    """[S, D, K] Recorded duration, seconds."""

    end_s: NDArray[Any]
    """[S, D, K] Start plus duration, in their precision."""

    row: NDArray[np.int64]
    """[S, D, K] Row of the trace."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (steps, DP ranks, operations of one step of one DP rank)."""
        steps, dp, ops = self.start_s.shape
        return steps, dp, ops

    def optype_of(self, op: int) -> str:
        """Return the type of operation `op`."""
        return str(self.names[self.optype[op]])

    def label(self, op: int) -> str:
        """Return operation `op` in words: type, number, place."""
        return f"{self.optype_of(op)} {self.seq[op]} on stage {self.stage[op]}"

    def of_type(self, *optypes: str) -> NDArray[np.bool_]:
        """Return bool [K]: operations of one of these types."""
        return np.isin(self.optype, [i for i, name in enumerate(self.names) if name in optypes])

    def find(self, stage: int, optype: str, seq: int) -> int | None:
        """Return the operation with that identity, None when there is none."""
        found = np.flatnonzero(self.of_type(optype) & (self.stage == stage) & (self.seq == seq))
        return int(found[0]) if len(found) else None

    def by_seq(self, stage: int, optype: str) -> list[int]:
        """Return the operations of a type on pipeline rank `stage`, by number."""
        found = np.flatnonzero(self.of_type(optype) & (self.stage == stage))
        return [int(op) for op in found[np.argsort(self.seq[found])]]

    def by_start(self, stage: int, optypes: Sequence[str]) -> list[int]:
        """Return the operations of these types on pipeline rank `stage`, by start in the first step and DP rank."""
        found = np.flatnonzero(self.of_type(*optypes) & (self.stage == stage))
        kinds = [self.names[self.optype[op]] for op in found]
        if not len(found):
            return []
        order = np.lexsort((kinds, self.seq[found], self.start_s[0, 0, found]))
        return [int(op) for op in found[order]]


def arrange(trace: Trace, *, unknown_as_compute: bool = False) -> OperationTable:
    """Arrange the rows of an operation trace.

    `unknown_as_compute` admits operation types that are not in `OPTYPES`, as
    compute, with a warning. Raises `InputError` on them otherwise, and on a DP
    rank that misses a step, unequal operations, duplicates, or a pipeline
    rank without rows.
    """
    if not len(trace):
        raise InputError("the trace has no operations. Record at least 2 steps.")
    dp_of, stage_of = coordinates_of(trace)
    unknown = _unknown(trace, unknown_as_compute)
    steps, step = np.unique(trace.events["step"].astype(np.int64), return_inverse=True)
    dps, dp = np.unique(dp_of, return_inverse=True)
    seq = trace.events["seq"].astype(np.int64)
    if int(seq.min()) < 0:
        raise InputError(f"row {int(seq.argmin())} has seq {seq.min()}. Number the operations of a type from 0.")
    num_stages = int(stage_of.max()) + 1
    _check_stages(stage_of, num_stages)
    code = trace.events["name"].astype(np.int64)
    # Two integers per row: `identity` has (pipeline rank, type, seq) as its digits, `block` has (step, DP rank). Sorted
    # by both, every block lists the same K operations in the same order, so that `order` reshapes to [S, D, K].
    identity = (stage_of * len(trace.names) + code) * (int(seq.max()) + 1) + seq
    block = step * len(dps) + dp
    order = np.lexsort((identity, block))
    present = np.bincount(block, minlength=len(steps) * len(dps))
    _check_presence(present.reshape(len(steps), len(dps)), steps, dps)
    num_ops = int(present[0])
    _check_equal(order, identity, block, present, trace, steps, dps, stage_of)
    row = order.reshape(len(steps), len(dps), num_ops)
    first = row[0, 0]
    start_s, duration_s, end_s = _times(trace, row)
    layer = trace.events["layer"][first].astype(np.int64)
    rank = np.full((len(dps), num_stages), -1, dtype=np.int64)
    rank[dp, stage_of] = trace.events["rank"]
    return OperationTable(
        steps, dps, num_stages, max(int(layer.max()), 0) + 1, trace.names, unknown,
        code[first], stage_of[first], seq[first], layer,
        trace.events["stage"][first].astype(np.int64), trace.events["microbatch"][first].astype(np.int64),
        rank, start_s, duration_s, end_s, row,
    )  # fmt: skip


def _unknown(trace: Trace, admitted: bool) -> tuple[str, ...]:
    used = np.unique(trace.events["name"])
    unknown = tuple(trace.names[code] for code in used.tolist() if trace.names[code] not in OPTYPES)
    if unknown and not admitted:
        raise InputError(
            f"operation type {unknown[0]!r} is unknown, so its place in the order is too. "
            f"{suggestion(OPTYPES, unknown[0])} Rename it, or pass unknown_as_compute=True to treat it as compute."
        )
    if unknown:
        warnings.warn(f"unknown operation types {list(unknown)} are treated as compute", stacklevel=3)
    return unknown


def _check_stages(stage: NDArray[np.int64], num_stages: int) -> None:
    missing = sorted(set(range(num_stages)) - set(np.unique(stage).tolist()))
    if missing:
        raise InputError(f"pipeline rank {missing[0]} of {num_stages} has no rows. Add its trace to the file.")


def _check_presence(present: NDArray[np.int64], steps: NDArray[np.int64], dps: NDArray[np.int64]) -> None:
    absent = np.argwhere(present == 0)
    if len(absent):
        step, dp = absent[0]
        raise InputError(
            f"DP rank {dps[dp]} is missing in step {steps[step]}; every step needs rows of every DP rank. "
            "Drop the step from the trace or add the rank's rows."
        )


def _check_equal(
    order: NDArray[np.int64],
    identity: NDArray[np.int64],
    block: NDArray[np.int64],
    present: NDArray[np.int64],
    trace: Trace,
    steps: NDArray[np.int64],
    dps: NDArray[np.int64],
    stage: NDArray[np.int64],
) -> None:
    """Check that all blocks hold the same operations, each once."""
    # `order` sorts by block (step * D + dp), then by identity: the rows of a block are one run of it, duplicates are
    # neighbours, and blocks are equal exactly if `ordered` repeats its first run.
    ordered, blocks = identity[order], block[order]
    twice = np.flatnonzero((ordered[1:] == ordered[:-1]) & (blocks[1:] == blocks[:-1]))
    if len(twice):
        row = int(order[twice[0]])
        raise InputError(
            f"{trace.name_of(row)} {trace.events['seq'][row]} of rank {trace.events['rank'][row]} stands twice in step "
            f"{trace.events['step'][row]}. Number the operations of a type apart."
        )
    wanted = ordered[: present[0]]
    if (present == present[0]).all() and np.array_equal(
        ordered.reshape(-1, present[0]), np.tile(wanted, (len(present), 1))
    ):
        return
    first = np.concatenate(([0], np.cumsum(present)))
    for index in range(len(present)):
        found = ordered[first[index] : first[index + 1]]
        odd = np.setxor1d(wanted, found)
        if len(odd):
            row = int(np.flatnonzero(identity == odd[0])[0])
            same = (stage == stage[row]) & (trace.events["name"] == trace.events["name"][row])
            counts = [int((same & (block == b)).sum()) for b in (0, index)]
            here = f"on DP rank {dps[index % len(dps)]} in step {steps[index // len(dps)]}"
            there = f"on DP rank {dps[0]} in step {steps[0]}"
            number, has = trace.events["seq"][row], ("no", "one") if odd[0] in wanted else ("a", "none")
            unlike = (
                f"{counts[1]} {trace.name_of(row)} operations {here} but {counts[0]} {there}"
                if counts[0] != counts[1]
                else f"{has[0]} {trace.name_of(row)} operation number {number} {here} but {has[1]} {there}"
            )
            raise InputError(
                f"stage {stage[row]} has {unlike}; all steps and DP ranks must run the same operations. "
                "Drop the step from the trace or add the missing rows."
            )


def clock_ns(trace: Trace) -> NDArray[np.int64]:
    """Return the starts [n] on one clock: each rank's own, moved by what `trace.ranks` knows of it."""
    return common_ns(trace)[0]


def _times(trace: Trace, row: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return start, duration and end in seconds [S, D, K] in the precision of the trace."""
    start_ns = clock_ns(trace)[row]
    start_ns -= start_ns.min(axis=(1, 2), keepdims=True)
    duration_ns = trace.events["duration_ns"][row]
    if trace.meta.get("seconds") == "float32":
        start = (start_ns / NS_PER_S).astype(np.float32)
        duration = (duration_ns / NS_PER_S).astype(np.float32)
        return start, duration, start + duration
    return start_ns / NS_PER_S, duration_ns / NS_PER_S, (start_ns + duration_ns) / NS_PER_S
