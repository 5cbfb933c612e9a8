"""What a step would take if a group of operations were ideal, or alone were not.

Use it through `headway.ledger.operations.straggler`. Observed durations are recorded
compute and the pure transfer of communication (end minus the latest arrival
of its group); the ideal of an operation type is one number over all steps and
workers: the mean of computes, the median of communication. Every question is
one replay of one Dag (`headway.sim`), steps apart from each other.

>>> merged("forward-send"), merged("optimizer")
('forward-pp-comm', 'optimizer')
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.units import NS_PER_S
from headway.ledger.operations.dependencies import CompiledOperations, Dependencies, compile_dag
from headway.ledger.operations.operation_table import OperationTable
from headway.sim.graph.attribution import attribute
from headway.sim.graph.dag import replay

CLOCK_NOISE_S = 1e-2
"""A transfer or delay below minus this is a clock error and becomes 0; what is nearer to 0 is noise, also 0."""

COMMUNICATION = frozenset({
    "forward-send", "forward-recv", "backward-send", "backward-recv",
    "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce",
    "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "optimizer-clip-main-grad",
})  # fmt: skip
"""Types whose ideal is the median over all their operations; that of the others is the mean."""

_MERGED = {
    "forward-send": "forward-pp-comm",
    "forward-recv": "forward-pp-comm",
    "backward-send": "backward-pp-comm",
    "backward-recv": "backward-pp-comm",
}

_log = logging.getLogger(__name__)


def merged(optype: str) -> str:
    """Return the name under which an operation type is accounted: both ends of a transfer count as one."""
    return _MERGED.get(optype, optype)


def transfers(table: OperationTable, order: Dependencies) -> NDArray[np.floating]:
    """Return the transfer time [S, D, K] of communicating operations, 0 for the others, in the trace's precision."""
    result = np.zeros_like(table.duration_s)
    for group, joint in zip(order.groups, order.synchronised, strict=True):
        members = list(group)
        #     start ....... start .......... end        Members wait for the last one to start (in a joint group, of
        #     member 1      member 2 (arrival)          all DP ranks); only what follows is transfer.
        arrival = table.start_s[:, :, members].max(axis=2)
        if joint:
            arrival = np.broadcast_to(arrival.max(axis=1, keepdims=True), arrival.shape)
        result[:, :, members] = table.end_s[:, :, members] - arrival[:, :, None]
    return _without_noise(result, table, "transfer")


def launch_delays(table: OperationTable, order: Dependencies) -> NDArray[np.floating]:
    """Return how long after its last dependency each operation [S, D, K] started, in the trace's precision."""
    ready = np.zeros_like(table.start_s)
    for source, target in zip(order.source.tolist(), order.target.tolist(), strict=True):
        np.maximum(ready[:, :, target], table.end_s[:, :, source], out=ready[:, :, target])
    return _without_noise(table.start_s - ready, table, "launch delay")


def _without_noise(values: NDArray[np.floating], table: OperationTable, what: str) -> NDArray[np.floating]:
    wrong = values <= -CLOCK_NOISE_S
    if wrong.any():
        step, dp, op = np.argwhere(wrong)[0]
        _log.warning(
            "%d %ss are below -%g s and count as 0, the first is %s in step %s on DP rank %s: check the clocks",
            int(wrong.sum()), what, CLOCK_NOISE_S, table.label(op), table.steps[step], table.dp[dp],
        )  # fmt: skip
    return np.asarray(np.maximum(values, values.dtype.type(0)))


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A traced job that can be replayed with other durations. All durations are seconds."""

    table: OperationTable
    """The rows."""

    order: Dependencies
    """Their order."""

    compiled: CompiledOperations
    """The Dag of all steps."""

    transfer_s: NDArray[np.floating]
    """[S, D, K] Transfer time, 0 where nothing is transferred."""

    observed_s: NDArray[np.float64]
    """[S, D, K] What is replayed: recorded compute, pure transfers."""

    ideal_s: NDArray[np.float64]
    """[S, D, K] The ideal duration of each operation's type."""

    finish: NDArray[np.int64]
    """Ops of the Dag that end a step: the optimizers."""

    @classmethod
    def of(cls, table: OperationTable, order: Dependencies) -> WhatIf:
        """Prepare the replays of a traced job.

        Raises `InputError` when no operation is an 'optimizer', `CycleError` when the order is circular.
        """
        ends = table.of_type("optimizer")
        if not ends.any():
            raise InputError(
                "no operation is an 'optimizer', which is what ends a step. "
                "Trace the optimizer too, or rename the operation that ends a step to it."
            )
        compiled = compile_dag(table, order)
        moved = transfers(table, order)
        # A replay finds the waiting itself, so a communicating operation brings its transfer alone.
        observed = np.where(order.group_of >= 0, moved, table.duration_s).astype(np.float64)
        ideal = np.broadcast_to(_ideal(table, order, moved), observed.shape)
        return cls(table, order, compiled, moved, observed, ideal, compiled.index[:, :, ends].ravel())

    def step_s(self, durations_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the time [S] of each step with these durations [S, D, K]."""
        # Each step is a component of the Dag: one replay, then the latest of each step's own ends.
        times = replay(self.compiled.dag, self.compiled.spread(durations_s * NS_PER_S))
        return np.asarray(times.end_ns[self.finish].reshape(len(durations_s), -1).max(axis=1) / NS_PER_S)

    def by(self, code: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return step times [S, G + 2]: group g alone as observed; then all observed, all ideal.

        `code` [S, D, K] is the group of each operation, -1 = always ideal.
        """
        makespan = attribute(
            self.compiled.dag,
            base=self.compiled.spread(self.observed_s * NS_PER_S),
            ideal=self.compiled.spread(self.ideal_s * NS_PER_S),
            code=self.compiled.spread(code, -1),
            finish=self.finish,
            component=self.compiled.component,
        )
        return np.asarray(makespan / NS_PER_S)

    def explained(self, members: NDArray[np.bool_]) -> dict[str, float]:
        """Return how much of the slowdown the operations `members` [S, D, K] explain.

        Mean step times: `tori` all observed, `tideal` all ideal, `trem` with
        the members made ideal, `tadd` with only the members as observed; `rem`
        and `add` are the shares of the loss that removing, or adding, moves.
        """
        original, ideal = self.step_s(self.observed_s).mean(), self.step_s(self.ideal_s).mean()
        # tideal ... tadd ......... trem ... tori      rem = (tori - trem) / loss, add = (tadd - tideal) / loss
        removed = self.step_s(np.where(members, self.ideal_s, self.observed_s)).mean()
        added = self.step_s(np.where(members, self.observed_s, self.ideal_s)).mean()
        loss = original - ideal
        return {
            "trem": float(removed),
            "tadd": float(added),
            "tori": float(original),
            "tideal": float(ideal),
            "rem": float((original - removed) / loss) if loss else 0.0,
            "add": float((added - ideal) / loss) if loss else 0.0,
        }

    def delayed_by(self, code: NDArray[np.int64], delay_s: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return step times [S, G + 2]: group g alone keeps its launch delays; then all keep them, none does.

        `code`, `delay_s` are [S, D, K]; durations stay as observed.
        """
        compiled = compile_dag(self.table, self.order, arrivals=True)
        talks = self.order.group_of >= 0
        ideal, codes = compiled.spread(self.observed_s * NS_PER_S), compiled.spread(code, -1)
        base = compiled.spread((self.observed_s + np.where(talks, 0.0, delay_s)) * NS_PER_S)
        arrivals = compiled.start_index[:, :, talks]
        # A communicating operation is late before its barrier, where it keeps others waiting; one that computes is late
        # at its own end.
        base[arrivals] = delay_s[:, :, talks] * float(NS_PER_S)
        codes[arrivals] = code[:, :, talks]
        finish = compiled.index[:, :, self.table.of_type("optimizer")].ravel()
        makespan = attribute(
            compiled.dag, base=base, ideal=ideal, code=codes, finish=finish, component=compiled.component
        )
        return np.asarray(makespan / NS_PER_S)

    def ideal_times(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (start, end) [S, D, K] in the ideal timeline, seconds from the start of the step."""
        compiled = compile_dag(self.table, self.order, arrivals=True)
        times = replay(compiled.dag, compiled.spread(self.ideal_s * NS_PER_S))
        # With arrivals, an operation that talks has begun when its arrival op ends.
        start = np.where(self.order.group_of >= 0, times.end_ns[compiled.start_index], times.start_ns[compiled.index])
        return start / NS_PER_S, times.end_ns[compiled.index] / NS_PER_S


def _ideal(table: OperationTable, order: Dependencies, moved: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the ideal duration [K] of each operation: one number per type."""
    ideal = np.zeros(len(table.optype))
    for code, name in enumerate(table.names):
        members = table.optype == code
        if not members.any():
            continue
        talks = bool((order.group_of[members] >= 0).any())
        values = (moved if talks else table.duration_s)[:, :, members]
        ideal[members] = np.median(values) if name in COMMUNICATION else values.astype(np.float64).mean()
    return ideal
