"""The walk through a pipeline schedule behind `benchmarks._synthetic`: integer ns, all steps and DP ranks at once.

Use it only through `synthetic.play`. A receive is posted when the compute
before its own in that direction is over (in any, when it blocks), a send when its compute is over; a
transfer ends for both its transfer time after the later of the two. Sends,
and receives, of a direction follow each other. Collectives over the DP ranks
end for all of them at once.

>>> from benchmarks._synthetic import durations
>>> job = SyntheticJob(dp=1, pp=1, num_microbatches=2, num_steps=1, noise=0.0, collective_s=0.0)
>>> Play(job, durations(job, 0, ())).run([]).tolist()  # two forwards, two backwards, the optimizer
[610000000]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError

Ints = NDArray[np.int64]
Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class SyntheticJob:
    """A pipeline- and data-parallel job. Raises `InputError` on a shape that no schedule has."""

    dp: int = 4
    """DP ranks."""

    pp: int = 4
    """Pipeline ranks."""

    vpp: int = 1
    """Stages per pipeline rank; above 1 the schedule is interleaved."""

    num_microbatches: int = 8
    """Micro-batches per step and DP rank; a multiple of `pp` when interleaved."""

    num_steps: int = 8
    """Steps in the trace."""

    overlap_dp: bool = False
    """Gradients are reduced as soon as a stage's last backward is over, not at the end of the step."""

    blocking: bool = False
    """A receive is posted only when the rank computes nothing; else as soon as the one before it is used up."""

    forward_s: float = 0.1
    """Forward of one micro-batch through one stage; a backward takes twice that."""

    transfer_s: float = 0.002
    """Transfer of activations or gradients between two stages."""

    collective_s: float = 0.03
    """Gather or reduction of one stage over the DP ranks."""

    noise: float = 0.01
    """Standard deviation of the logarithm of every duration."""

    launch_s: float = 0.0
    """Mean delay, exponential, with which the host launches each compute."""

    def __post_init__(self) -> None:
        """Check the shape."""
        for name in ("dp", "pp", "vpp", "num_microbatches", "num_steps"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1. Pass a positive number.")
        if self.vpp > 1 and (self.pp < 2 or self.num_microbatches % self.pp):
            raise InputError(
                f"{self.num_microbatches} micro-batches cannot be interleaved over {self.pp} pipeline ranks; "
                "use at least 2 ranks and a multiple of them as micro-batches."
            )

    @property
    def num_stages(self) -> int:
        """Return the stages of the model: pipeline ranks x stages per rank."""
        return self.pp * self.vpp

    @property
    def devices(self) -> int:
        """Return the number of ranks."""
        return self.dp * self.pp


@dataclass(slots=True)
class Durations:
    """Durations of one job in ns, indexed [step, dp, stage, micro-batch] with the stages of the model in order."""

    forward: Ints
    """[S, D, G, M] Forward computes."""

    backward: Ints
    """[S, D, G, M] Backward computes."""

    forward_transfer: Ints
    """[S, D, G, M] Activations from a stage to the next one."""

    backward_transfer: Ints
    """[S, D, G, M] Gradients from a stage to the one before it."""

    gather: Ints
    """[S, 1, G] Parameter all-gathers."""

    reduction: Ints
    """[S, 1, G] Gradient reduce-scatters."""

    closing: Mapping[str, Ints]
    """Operation type -> [S, D, P]: what ends a step."""

    launch: Ints
    """[S, D, G, M, 2] Host delay before each forward and backward."""


@dataclass(frozen=True, slots=True)
class Row:
    """One operation over all steps and DP ranks."""

    optype: str
    rank: int
    """Pipeline rank."""

    layer: int
    stage: int
    seq: int
    microbatch: int
    start: Ints
    """[S, D] ns from the start of the step."""

    end: Ints
    """[S, D] ns from the start of the step."""


def actions(job: SyntheticJob, rank: int) -> list[tuple[str, int, int]]:
    """Return what pipeline rank `rank` computes, in order: (direction, layer, micro-batch).

    1F1B, or Megatron's interleaved schedule when the job has more than one stage per rank.
    """
    total = job.num_microbatches * job.vpp
    warmup = job.pp - rank - 1
    if job.vpp > 1:
        warmup = 2 * warmup + (job.vpp - 1) * job.pp
    warmup = min(warmup, total)

    def place(k: int, direction: str) -> tuple[str, int, int]:
        layer = k % job.num_stages // job.pp
        microbatch = k // job.num_stages * job.pp + k % job.pp if job.vpp > 1 else k
        return direction, layer if direction == "forward" or job.vpp == 1 else job.vpp - 1 - layer, microbatch

    order = [place(k, "forward") if job.vpp > 1 else ("forward", 0, k) for k in range(warmup)]
    for k in range(total):
        if warmup + k < total:
            order.append(place(warmup + k, "forward") if job.vpp > 1 else ("forward", 0, warmup + k))
        order.append(place(k, "backward") if job.vpp > 1 else ("backward", 0, k))
    return order


class Play:
    """One walk; the state is when everything ended so far, [S, D] each."""

    def __init__(self, job: SyntheticJob, draw: Durations) -> None:
        self.job, self.draw = job, draw
        zero = np.zeros((job.num_steps, job.dp), dtype=np.int64)
        self.zero = zero
        self.order = [actions(job, rank) for rank in range(job.pp)]
        self.rows: list[Row] = []
        self.cursor = [zero] * job.pp
        """When the compute stream of a rank is free."""
        self.ended: dict[Key, Ints] = {}
        """(direction, stage, micro-batch) -> end of that compute."""
        self.last: dict[tuple[int, str], Ints] = {}
        """(rank, direction or stream) -> end of its last compute or transfer."""
        self.count: dict[tuple[int, str], int] = defaultdict(int)
        """(rank, operation type) -> how many were recorded."""
        self.gathered: dict[int, Ints] = {}
        """Stage -> when its parameters are there."""
        self.seq_of: dict[Key, int] = {}
        """Compute -> its number among those of its direction on its rank."""
        for rank, order in enumerate(self.order):
            for direction in ("forward", "backward"):
                same = [action for action in order if action[0] == direction]
                for seq, (_, layer, microbatch) in enumerate(same):
                    self.seq_of[direction, layer * job.pp + rank, microbatch] = seq

    def run(self, rows: list[Row]) -> Ints:
        """Walk; append the operations to `rows` and return the time [S] of each step in ns."""
        for rank in range(self.job.pp):
            self._gather(rank)
        at = [0] * self.job.pp
        total = sum(len(order) for order in self.order)
        while (before := sum(at)) < total:
            for rank in range(self.job.pp):
                while at[rank] < len(self.order[rank]) and self._ready(rank, at[rank]):
                    self._compute(rank, at[rank])
                    at[rank] += 1
            assert sum(at) > before, "the schedule waits for itself"
        step_ns = self._close()
        rows.extend(_in_stream_order(self.rows) if self.job.vpp > 1 else self.rows)
        return step_ns

    def _record(
        self, optype: str, rank: int, start: Ints, end: Ints, *, layer: int = -1, stage: int = -1, microbatch: int = -1,
        seq: int | None = None,
    ) -> None:  # fmt: skip
        number = self.count[rank, optype] if seq is None else seq
        self.count[rank, optype] += 1
        self.rows.append(Row(optype, rank, layer, stage, number, microbatch, start, end))

    def _gather(self, rank: int) -> None:
        """Gather the parameters of the rank's stages one after the other."""
        start = self.zero
        for layer in range(self.job.vpp):
            stage = layer * self.job.pp + rank
            end = start.max(axis=1, keepdims=True) + self.draw.gather[:, :, stage] + self.zero
            self._record("params-all-gather", rank, start, end, layer=layer)
            self.gathered[stage] = start = end

    def _source(self, rank: int, index: int) -> tuple[Key | None, int]:
        """Return the compute whose result an action needs from another rank, None if none, and the action's stage."""
        direction, layer, microbatch = self.order[rank][index]
        stage = layer * self.job.pp + rank
        before = stage - 1 if direction == "forward" else stage + 1
        if 0 <= before < self.job.num_stages:
            return (direction, before, microbatch), stage
        return None, stage

    def _ready(self, rank: int, index: int) -> bool:
        source, _ = self._source(rank, index)
        return source is None or source in self.ended

    def _compute(self, rank: int, index: int) -> None:
        direction, layer, microbatch = self.order[rank][index]
        source, stage = self._source(rank, index)
        ready = self._received(rank, index, direction, source)
        if direction == "forward" and not any(self.order[rank][i][:2] == ("forward", layer) for i in range(index)):
            ready = np.maximum(ready, self.gathered[stage])
        late = self.draw.launch[:, :, stage, microbatch, int(direction == "backward")]
        start = np.maximum(self.cursor[rank], ready) + late
        spent = self.draw.forward if direction == "forward" else self.draw.backward
        end = start + spent[:, :, stage, microbatch]
        self._record(f"{direction}-compute", rank, start, end, layer=layer, stage=stage, microbatch=microbatch)
        self.cursor[rank] = end
        self.ended[direction, stage, microbatch] = end
        self.last[rank, direction] = end
        goes_to = stage + (1 if direction == "forward" else -1)
        if self.job.vpp > 1 and not 0 <= goes_to < self.job.num_stages:
            self._record(f"{direction}-send", rank, end, end, seq=self.seq_of[direction, stage, microbatch])

    def _posted(self, rank: int, index: int, direction: str) -> Ints:
        """Return when the receive of an action is posted."""
        if self.job.blocking:
            return self.cursor[rank]
        if (rank, direction) in self.last:
            return self.last[rank, direction]
        if direction == "backward" and index >= 2:
            _, layer, microbatch = self.order[rank][index - 2]
            return self.ended["forward", layer * self.job.pp + rank, microbatch]
        return self.zero

    def _received(self, rank: int, index: int, direction: str, source: Key | None) -> Ints:
        """Return when an action's input is there; record its transfer at both ends."""
        stream = f"{direction}-recv"
        posted = np.maximum(self._posted(rank, index, direction), self.last.get((rank, stream), self.zero))
        if source is None:
            if self.job.vpp > 1:
                self._record(stream, rank, posted, posted)
                self.last[rank, stream] = posted
            return self.zero
        _, stage, microbatch = source
        sender = stage % self.job.pp
        sent = np.maximum(self.ended[source], self.last.get((sender, f"{direction}-send"), self.zero))
        forward = direction == "forward"
        moved = (self.draw.forward_transfer if forward else self.draw.backward_transfer)[:, :, stage, microbatch]
        end = np.maximum(sent, posted) + moved
        self._record(stream, rank, posted, end)
        self._record(f"{direction}-send", sender, sent, end, seq=self.seq_of[source])
        self.last[rank, stream] = self.last[sender, f"{direction}-send"] = end
        return end

    def _close(self) -> Ints:
        """Reduce the gradients, clip and step; return the time [S] of each step."""
        job, draw = self.job, self.draw
        ready = []
        for rank in range(job.pp):
            self._record("gc", rank, self.cursor[rank], self.cursor[rank], microbatch=0)
            free = np.maximum(self.cursor[rank], self._reduced_early(rank)) if job.overlap_dp else self.cursor[rank]
            end = free + draw.closing["layernorm-grads-all-reduce"][:, :, rank]
            self._record("layernorm-grads-all-reduce", rank, free, end)
            ready.append(end)
        ends = sorted({0, job.pp - 1})
        arrival = np.maximum.reduce([ready[rank] for rank in ends])
        for rank in ends:
            end = arrival + draw.closing["embedding-grads-all-reduce"][:, :, rank]
            self._record("embedding-grads-all-reduce", rank, ready[rank], end)
            ready[rank] = end
        for rank in range(job.pp):
            ready[rank] = self._reduced_late(rank, ready[rank])
        joint = np.maximum.reduce(ready).max(axis=1, keepdims=True)
        clipped = joint + draw.closing["optimizer-clip-main-grad"][:, :, 0] + self.zero
        last = self.zero
        for rank in range(job.pp):
            self._record("optimizer-clip-main-grad", rank, ready[rank], clipped)
            end = clipped + draw.closing["optimizer"][:, :, rank]
            self._record("optimizer", rank, clipped, end)
            last = np.maximum(last, end)
        return np.asarray(last.max(axis=1))

    def _reduced_early(self, rank: int) -> Ints:
        """Reduce each stage's gradients behind its last backward; return when the last one is over."""
        free = self.gathered[(self.job.vpp - 1) * self.job.pp + rank]
        for layer in reversed(range(self.job.vpp)):
            stage = layer * self.job.pp + rank
            last = np.maximum.reduce([self.ended["backward", stage, m] for m in range(self.job.num_microbatches)])
            start = np.maximum(free, last)
            free = start.max(axis=1, keepdims=True) + self.draw.reduction[:, :, stage] + self.zero
            self._record("grads-reduce-scatter", rank, start, free, layer=layer)
        return free

    def _reduced_late(self, rank: int, ready: Ints) -> Ints:
        """Reduce what is left of the gradients; return when that is over."""
        if self.job.overlap_dp:
            spent = self.draw.closing["separate-grads-all-reduce"][:, :, rank]
            end = ready.max(axis=1, keepdims=True) + spent + self.zero
            self._record("separate-grads-all-reduce", rank, ready, end)
            return np.asarray(end)
        for layer in range(self.job.vpp):
            spent = self.draw.reduction[:, :, layer * self.job.pp + rank]
            end = ready.max(axis=1, keepdims=True) + spent + self.zero
            self._record("grads-reduce-scatter", rank, ready, end, layer=layer)
            ready = end
        return ready


def _in_stream_order(rows: list[Row]) -> list[Row]:
    """Start a send that goes nowhere no earlier than the sends before it: a stream records them in order."""
    latest: dict[tuple[int, str], Ints] = {}
    result = []
    for row in sorted(rows, key=lambda row: row.seq):
        if row.optype.endswith("send"):
            before = latest.get((row.rank, row.optype), row.start)
            if row.start is row.end:
                start = np.maximum(row.start, before)
                row = replace(row, start=start, end=start)
            latest[row.rank, row.optype] = np.maximum(row.start, before)
        result.append(row)
    return result
