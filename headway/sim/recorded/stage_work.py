"""What the stages of a recorded pipeline computed, and the messages that hold their ranks together.

A lane (the training thread of one rank, cut into segments) is cut at every
computation of a stage and where a message is posted. A message is a point in
time, as a collective is: both ends have posted it. Who waits for it goes on
then, after what the message itself takes.

    rank 0   |-- 0F0 --|post ............... wait|
                           \\
                            point ---+
                           /          \\
    rank 1            |post ......... wait| own |-- 1F0 --|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.sim.pipeline.actions import B, F, I, W
from headway.sim.recorded.lane import Lane
from headway.trace.events.intervals import number_alike
from headway.trace.events.trace import Trace
from headway.trace.sync.meetings import message_key, posted_ns

Ints = NDArray[np.int64]

OPS = {"stage.forward": F, "stage.backward": B, "stage.input": I, "stage.weight": W}
"""Recorded name -> operation of `headway.sim.pipeline.actions`."""


@dataclass(frozen=True, slots=True, eq=False)
class StageWork:
    """The computations of the stages on one rank, in the order in which they ran."""

    op: Ints
    """[s] F, B, I or W."""

    stage: Ints
    """[s] Stage."""

    microbatch: Ints
    """[s] Microbatch."""

    turn: Ints
    """[s] Pass it belongs to: calls of the schedule's step, from 0 in the kept steps."""

    part: Ints
    """[m] The computation that each segment of the lane is part of, -1 for none."""

    @classmethod
    def of(cls, rows: Trace, lane: Lane) -> StageWork | None:
        """Return the computations in the steps of the lane; None where no stage was recorded there."""
        table = np.array([OPS.get(name, -1) for name in rows.names] + [-1])
        start = rows.events["start_ns"]
        # The first step may begin with the module's own call, a moment behind the computation that it is in.
        inside = start + rows.events["duration_ns"] > lane.start_ns[0]
        inside &= start < lane.start_ns[-1] + lane.duration_ns[-1]
        found = np.flatnonzero((table[rows.events["name"]] >= 0) & inside)
        if not found.size:
            return None
        begin, end = start[found], start[found] + rows.events["duration_ns"][found]
        op, stage = table[rows.events["name"][found]].astype(np.int64), rows.events["corr"][found].astype(np.int64)
        microbatch = rows.events["seq"][found].astype(np.int64)
        # A pass opens with micro-batch 0 on the rank's first stage, so the running count of these numbers the passes. A
        # segment is part of the computation that began last before it, if that one is not over.
        opens = (op == F) & (microbatch == 0) & (stage == stage.min())
        part = np.searchsorted(begin, lane.start_ns, side="right") - 1
        part = np.where((part >= 0) & (lane.start_ns < end[np.maximum(part, 0)]), part, -1)
        return cls(op, stage, microbatch, np.cumsum(opens) - 1, part)


@dataclass(frozen=True, slots=True, eq=False)
class MessagePoints:
    """Points at which ranks have all posted a message; [n] one entry per rank and point."""

    point: Ints
    """[n] Which point, from 0."""

    rank_index: Ints
    """[n] Index of the rank's `Lane`."""

    post: Ints
    """[n] Its segment before which the rank posted it."""

    segment: Ints
    """[n] Its segment that waits for the point: the last one of its wait."""

    waits: NDArray[np.bool_]
    """[n] Whether it does: a send into a buffer may be through before the other end is there."""

    own_ns: Ints
    """[n] What is left of the wait after the point; -1 where the segment is no wait, and keeps its duration."""

    @classmethod
    def of(cls, own: Sequence[Trace], lanes: Sequence[Lane]) -> MessagePoints:
        """Match the sends and receives of all ranks in the kept steps; one whose other end is not there is left out."""
        found = [
            _sides(rows, lane, index, names)
            for index, (rows, lane) in enumerate(zip(own, lanes, strict=True))
            for names in (("comm.send", 0), ("comm.recv", 1))
        ]
        # Columns: key of the message [4] (group, sequence, sender, receiver), rank index, post, segment, start, end,
        # time of the post.
        table = np.concatenate(found) if found else np.zeros((0, 10), np.int64)
        code = number_alike(table[:, :4]) if len(table) else np.zeros(0, np.int64)
        order = np.argsort(code, kind="stable")
        table, code = table[order], code[order]
        both = np.flatnonzero((np.bincount(code) if code.size else code) == 2)
        table = table[np.isin(code, both)]
        ranks, sizes = np.array([lane.rank for lane in lanes]), np.array([lane.label.size for lane in lanes])
        posted = table[:, 9].reshape(-1, 2)
        arrival = np.repeat(posted.max(axis=1), 2) if len(table) else np.zeros(0, np.int64)
        other = posted[:, ::-1].ravel()
        start, end = table[:, 7], table[:, 8]
        taken = end > start  # a wait that took no time has no segment: the one behind it waits
        waits = (end >= other) & (taken | (table[:, 3] == ranks[table[:, 4]])) & (table[:, 6] < sizes[table[:, 4]])
        own_ns = np.where(waits, end - np.clip(arrival, start, end), end - start)
        own_ns[~taken] = -1
        point = np.arange(len(table)) // 2
        return cls(point, table[:, 4], table[:, 5], table[:, 6], waits, own_ns)

    def of_rank(self, index: int) -> Ints:
        """Return the entries of one rank that are waits."""
        return np.flatnonzero((self.rank_index == index) & (self.own_ns >= 0))


def cuts_of(rows: Trace) -> Ints:
    """Return the times at which a lane is cut so that stages and posts lie between its segments."""
    start, duration = rows.events["start_ns"], rows.events["duration_ns"]
    stages = np.zeros(len(rows), bool)
    for name in OPS:
        stages |= rows.named(name)
    moves = rows.named("comm.post") | rows.named("comm.send") | rows.named("comm.recv")
    found: Ints = np.unique(np.concatenate([start[stages], (start + duration)[stages], start[moves]])).astype(np.int64)
    return found


def _sides(rows: Trace, lane: Lane, index: int, names: tuple[str, int]) -> Ints:
    """Return [n, 10] the sends, or the receives, of one rank, as `MessagePoints.of` joins them."""
    name, receives = names
    events = rows.events
    row = np.flatnonzero(rows.named(name) & (events["seq"] >= 0) & (events["peer"] >= 0))
    posts = np.flatnonzero(rows.named("comm.post") & (events["corr"] == receives))
    group, seq, peers = events["group"], events["seq"], events["peer"]
    key = message_key(group[row], seq[row], np.full(row.size, bool(receives)), peers[row])
    post_key = message_key(group[posts], seq[posts], np.full(posts.size, bool(receives)), peers[posts])
    start = events["start_ns"][row].astype(np.int64)
    posted = posted_ns(key, start, post_key, events["start_ns"][posts])
    # A wait ends with its last segment; one that took no time owns none, and the first segment behind it waits instead.
    behind = np.searchsorted(lane.start_ns, start, side="left")
    segment = np.where(events["duration_ns"][row] > 0, lane.last_segment(row), behind)
    mine, peer = np.full(row.size, lane.rank, np.int64), events["peer"][row].astype(np.int64)
    ends = (peer, mine) if receives else (mine, peer)
    post = np.searchsorted(lane.start_ns, posted, side="left")
    columns = [
        events["group"][row], events["seq"][row], *ends, np.full(row.size, index), post, segment, start,
        start + events["duration_ns"][row], posted,
    ]  # fmt: skip
    inside = (segment >= 0) & (posted >= lane.start_ns[0]) & (start <= lane.start_ns[-1] + lane.duration_ns[-1])
    table: Ints = np.stack(columns, axis=1).astype(np.int64)[inside]
    return table
