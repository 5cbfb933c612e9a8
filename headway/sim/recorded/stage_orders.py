"""A recorded pipeline under another order of its computations, and without its bubbles.

`rescheduled` maps a recording to a recording: in each pass (one call of the
schedule's step) the segments of the computations change places, with what
follows each of them until the next one; waits for messages are dropped, and
messages are made anew from the stages' dependencies. Each computation keeps
its own recorded time. A backward that was recorded whole is split by a rule,
because an unmodified run never shows its parts apart:

    first stage     input 0, weights all: torch makes no gradient of the pipeline's input
    other stages    input 1/2, weights 1/2: the two matrix products of a linear layer cost the same

All durations are ns.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.sim.pipeline.actions import OPT, Action, B, F, I, Orders, StageGraph, W
from headway.sim.pipeline.lower import lower, peak_activations
from headway.sim.pipeline.orders import PipelineShape
from headway.sim.pipeline.schedules import SCHEDULES
from headway.sim.pipeline.simulate import StageCosts
from headway.sim.pipeline.split_backward import zero_bubble
from headway.sim.pipeline.weight_versions import FLUSH_FREE, step_loop
from headway.sim.recorded.lane import LABEL, Lane
from headway.sim.recorded.recording import Recording
from headway.sim.recorded.stage_work import MessagePoints, StageWork
from headway.sim.whatif import ResolvedEdits

Ints = NDArray[np.int64]

INPUT_SHARE = 0.5
"""Share of a whole backward that is taken to make the gradient of the input, on every stage but the first."""

INPUT_SHARES = (1 / 3, 2 / 3)
"""What it may be: a range of the gain holds both."""

MOST_STARVED = 0.1
"""Share of compute in which ranks were ready to run but had no core, above which a gain of an order is no promise: with
less bubble more of them compute at once."""

MESSAGES = (LABEL["comm.send"], LABEL["comm.recv"])


@dataclass(frozen=True, slots=True)
class RecordedPipeline:
    """The shape and the times of a recorded pipeline with one stage per rank."""

    orders: Orders
    """What each rank computed in a pass, in order."""

    rank_index: tuple[int, ...]
    """[stages] Index of the lane of each stage's rank."""

    costs: StageCosts
    """Median times of each stage's computations, and of a message."""

    num_microbatches: int
    """Microbatches of a pass."""

    cap: int
    """Most activations that a rank holds at once."""

    split: bool
    """Whether backwards were recorded in two parts; else `costs` splits them by the rule."""

    graph: StageGraph | None = None
    """Which stages feed which, where they are no chain; None: each feeds the next one."""

    @classmethod
    def of(cls, recording: Recording) -> RecordedPipeline:
        """Find it; raises `InputError` with the reason where the run has none, or one that cannot be reordered."""
        found = {int(work.stage[0]): index for index, work in enumerate(recording.stages) if work is not None}
        if not found:
            raise InputError("the run recorded no pipeline of torch.distributed.pipelining. Record a run of one.")
        works = [work for work in recording.stages if work is not None]
        if any(len(np.unique(work.stage)) > 1 for work in works):
            raise InputError("ranks have several stages each; an order is predicted for one stage per rank.")
        if len(works) > len(found) or sorted(found) != list(range(len(found))):
            names = ", ".join(str(int(work.stage[0])) for work in works)
            raise InputError(f"ranks have the stages {names}; an order is predicted for one pipeline from stage 0.")
        if any(work is not None for work in recording.devices):
            raise InputError("the stages ran on devices, whose work in a pass was not recorded. Record a run on CPUs.")
        stages = [found[stage] for stage in range(len(found))]
        orders = tuple(_order(_work(recording, index)) for index in stages)
        if len(stages) < 2 or len({int(_work(recording, index).turn.max()) for index in stages}) > 1:
            raise InputError("the pipeline has one stage, or its ranks recorded different numbers of passes.")
        count = 1 + max(action.microbatch for action in orders[0])
        times = np.array([_times(recording, index) for index in stages])
        shares = np.array([0.0] + [INPUT_SHARE] * (len(stages) - 1))
        split = bool(any(action.op == I for actions in orders for action in actions))
        backward = times[:, B]
        costs = StageCosts(
            times[:, F], np.where(backward > 0, np.rint(backward * shares), times[:, I]).astype(np.int64),
            np.where(backward > 0, backward - np.rint(backward * shares), times[:, W]).astype(np.int64),
            _message_ns(recording),
        )  # fmt: skip
        graph = recording.stage_graph
        if graph is not None and len(graph.preds) != len(stages):
            raise InputError(f"the graph has {len(graph.preds)} stages, {len(stages)} were recorded. Record all ranks.")
        cap = int(peak_activations(lower(orders, graph)).max())
        return cls(orders, tuple(stages), costs, count, cap, split, graph)

    @property
    def shape(self) -> PipelineShape:
        """The shape; its cap is what the run held. A chain's has the mean times of the stages, a graph's each one's."""
        costs = self.costs
        if self.graph is not None:
            times = (costs.forward_ns.tolist(), costs.input_ns.tolist(), costs.weight_ns.tolist())
            return PipelineShape.of_graph(
                self.graph, self.num_microbatches, *times, comm_ns=costs.comm_ns, cap=self.cap
            )  # fmt: skip
        forward, inputs, weights = (int(one.mean()) for one in (costs.forward_ns, costs.input_ns, costs.weight_ns))
        return PipelineShape(
            len(self.rank_index), self.num_microbatches, 1, forward, inputs, weights, costs.comm_ns, self.cap
        )

    def reordered(self, name: str) -> Orders:
        """Return the order called `name` for this pipeline, with no more activations than it held.

        'zero_bubble' is searched under the recorded times. Raises `InputError` for an unknown name, or an order that
        needs another placement.
        """
        if name == "zero_bubble":
            costs = self.costs
            return _searched(
                self.shape, tuple(costs.forward_ns.tolist()), tuple(costs.input_ns.tolist()),
                tuple(costs.weight_ns.tolist()), costs.comm_ns,
            )  # fmt: skip
        order = pick(SCHEDULES, name, "schedule")
        if name == "async_1f1b":
            raise InputError("async_1f1b updates after every micro-batch, which was not recorded. Choose two_buffer.")
        return order(self.shape)

    def passes(self, name: str, count: int) -> list[list[list[tuple[int, Action]]]]:
        """Return [stages, passes] what each pass runs under an order: (pass that it is of, computation).

        Without a flush a pass begins with backwards of the one before it, and the last one ends with its own.
        """
        orders = self.reordered(name)
        if name not in FLUSH_FREE:
            return [[[(turn, action) for action in order] for turn in range(count)] for order in orders]
        streams = []
        for rank in range(len(orders)):
            loop, m = step_loop(name, self.shape, rank), self.num_microbatches
            rows = [loop.step(turn).computations for turn in range(count)]
            rows[-1] = rows[-1] + loop.drain(count).computations
            streams.append([
                [(j // m, Action(op, stage, j % m)) for op, stage, j, _ in some if op != OPT] for some in rows
            ])  # fmt: skip
        return streams


@functools.lru_cache(maxsize=8)
def _searched(
    shape: PipelineShape, forward: tuple[int, ...], inputs: tuple[int, ...], weights: tuple[int, ...], comm_ns: int
) -> Orders:
    """Search an order with split backwards; the same question is asked for every combination of remedies."""
    forward_ns, input_ns, weight_ns = (np.array(times, np.int64) for times in (forward, inputs, weights))
    return zero_bubble(shape, StageCosts(forward_ns, input_ns, weight_ns, comm_ns))


def _work(recording: Recording, index: int) -> StageWork:
    """Return the work of a rank that has some."""
    work = recording.stages[index]
    assert work is not None
    return work


def _order(work: StageWork) -> tuple[Action, ...]:
    """Return the order that every pass of a rank follows but maybe the first; raises `InputError` where they differ.

    A plan changes the order after the first pass: of that one it only matters that it is complete.
    """
    columns = np.stack([work.op, work.stage, work.microbatch], axis=1)
    num_passes = int(work.turn.max()) + 1
    first, last = columns[work.turn == 0], columns[work.turn == num_passes - 1]
    begins = 0 if len(first) == len(last) and (first == last).all() else 1
    rest, repeats = columns[work.turn >= begins], num_passes - begins
    if work.turn.min() < 0 or len(rest) != len(last) * repeats or (rest != np.tile(last, (repeats, 1))).any():
        passes = [columns[work.turn == turn] for turn in range(begins, num_passes - 1)]
        raise InputError(
            f"passes of the pipeline differ from each other: stage {work.stage[0]}, {_difference(work, passes, last)}. "
            "Record a run that repeats one order."
        )
    whole = np.arange((last[:, 0] == F).sum())
    if not all(np.array_equal(np.sort(one[one[:, 0] == F, 2]), whole) for one in (first, last)):
        raise InputError("a pass of the pipeline lacks a microbatch. Record a run of whole passes.")
    return tuple(Action(*row) for row in last.tolist())


def _difference(work: StageWork, passes: Sequence[Ints], last: Ints) -> str:
    """Say which pass is the first that differs from the last one, and in what; `passes` end with the one before it."""
    if work.turn.min() < 0:
        return f"pass 0 begins with {Action(work.op[0], work.stage[0], work.microbatch[0])}, not with microbatch 0"
    index = next(index for index, rows in enumerate(passes) if not np.array_equal(rows, last))
    rows, number = passes[index], int(work.turn.max()) - len(passes) + index
    if len(rows) != len(last):
        return f"pass {number} has {len(rows)} computations, the last one {len(last)}"
    first = int((rows != last).any(axis=1).argmax())
    then, now = Action(*rows[first].tolist()), Action(*last[first].tolist())
    return f"computation {first} of pass {number} is {then}, that of the last one {now}"


def _times(recording: Recording, index: int) -> Ints:
    """Return [5] median time of F, B, I, W (and none) of the stage on a rank, what else interrupted it included.

    Those of the first pass count only where there is no other.
    """
    lane, work = recording.lanes[index], _work(recording, index)
    inside = work.part >= 0
    total = np.bincount(work.part[inside], lane.duration_ns[inside], work.op.size)
    later = (work.turn > 0) | (work.turn.max() == 0)
    each = [total[later & (work.op == op)] for op in range(5)]
    return np.array([int(np.median(times)) if times.size else 0 for times in each], np.int64)


def _message_ns(recording: Recording) -> int:
    """Return the median time of a message: what a receive takes once both ends are there."""
    messages = recording.messages
    found = []
    for index, lane in enumerate(recording.lanes):
        mine = np.flatnonzero((messages.rank_index == index) & messages.waits)
        receives = lane.label[messages.segment[mine]] == LABEL["comm.recv"]
        found.append(messages.own_ns[mine[receives]])
    taken = np.concatenate(found)
    return int(np.median(taken)) if taken.size else 0


def reordered(recording: Recording, scenario: ResolvedEdits) -> Recording:
    """Return the recording with the order that `scenario` asks for, and without bubbles where it says so."""
    found = recording
    if scenario.schedule is not None:
        found = rescheduled(recording, scenario.schedule, input_share=scenario.input_share)
    return found if scenario.bubble else without_bubbles(found)


def rescheduled(recording: Recording, name: str, *, input_share: float = INPUT_SHARE) -> Recording:
    """Return the recording as it would have been under the order `name`.

    The order is made for `INPUT_SHARE` and replayed with `input_share`. Raises `InputError` as `RecordedPipeline` does.
    """
    known = RecordedPipeline.of(recording)
    count = 1 + int(_work(recording, known.rank_index[0]).turn.max())
    lanes, batches, stages = list(recording.lanes), list(recording.batches), list(recording.stages)
    place = {index: np.arange(lane.label.size) for index, lane in enumerate(lanes)}
    built = [
        _Built.of(lanes[index], _work(recording, index), order, stage, known, input_share=input_share if stage else 0.0)
        for stage, (index, order) in enumerate(zip(known.rank_index, known.passes(name, count), strict=True))
    ]
    for index, made in zip(known.rank_index, built, strict=True):
        old, lane = made.old, lanes[index]
        moved = np.flatnonzero(old >= 0)
        place[index] = np.full(lane.label.size, -1, np.int64)
        place[index][old[moved]] = moved
        lanes[index] = made.lane(lane)
        stages[index] = replace(_work(recording, index), part=made.part)
        own = batches[index]
        first, end = (np.where(at >= 0, place[index][at], -1) for at in (own.iter_segment, own.end_segment))
        batches[index] = replace(own, segment=place[index][own.segment], iter_segment=first, end_segment=end)
    meetings = tuple(
        replace(
            one, segment=np.array([place[i][at] for i, at in zip(one.rank_index.tolist(), one.segment, strict=True)])
        )
        for one in recording.meetings
    )
    return replace(
        recording, lanes=tuple(lanes), batches=tuple(batches), stages=tuple(stages), meetings=tuple(meetings),
        messages=_messages(known, built),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Built:
    """The lane of one rank put together anew."""

    old: Ints
    """[k] Segment that each new one was; -1 for the wait of a message."""

    duration_ns: NDArray[np.float64]
    """[k] Duration."""

    step: Ints
    """[k] Step."""

    part: Ints
    """[k] Computation that it is part of, -1 for none."""

    posts: dict[tuple[int, bool, int], int]
    """(pass, whether a gradient, microbatch) -> the segment before which the rank posts it."""

    waits: list[tuple[int, bool, int, int, int]]
    """(pass, whether a gradient, microbatch, stage that sends it, segment that waits for it)."""

    @classmethod
    def of(
        cls, lane: Lane, work: StageWork, passes: Sequence[Sequence[tuple[int, Action]]], stage: int,
        known: RecordedPipeline, *, input_share: float,
    ) -> _Built:  # fmt: skip
        """Put the work of a rank into the order of `passes`; what lies between two passes stays where it is."""
        kept = ~np.isin(lane.label, MESSAGES)
        blocks = _blocks(lane, work, kept)
        graph = known.graph or StageGraph.chain(len(known.rank_index))
        before, after = graph.preds[stage], graph.takers(stage)
        pieces: list[tuple[Ints, float, int, int]] = []  # segments, scale, computation, step where it is another one
        posts: dict[tuple[int, bool, int], int] = {}
        waits: list[tuple[int, bool, int, int, int]] = []
        count = 0

        def add(segments: Ints, scale: float, part: int, step: int = -1) -> None:
            nonlocal count
            pieces.append((segments, scale, part, step))
            count += segments.size

        done = 0
        for turn, by_action in enumerate(blocks):
            begin = min(int(block.body[0]) for block in by_action.values())
            add(done + np.flatnonzero(kept[done:begin]), 1.0, -1)
            step = int(lane.step[begin])
            for owner, action in passes[turn]:
                body, tail, scale, part = _taken(blocks[owner], action, input_share)
                gradient = action.op != F
                for source in (after if gradient else before) if action.op in (F, B, I) else ():
                    waits.append((owner, gradient, action.microbatch, source, count))
                    add(np.array([-1 - step]), 1.0, -1)
                add(body, scale, part, step)
                if action.op in (F, B, I):
                    posts[owner, gradient, action.microbatch] = count
                add(tail, 1.0, -1, step)
            done = 1 + max(int(block.end) for block in by_action.values())
        add(done + np.flatnonzero(kept[done:]), 1.0, -1)
        old = np.concatenate([segments for segments, *_ in pieces])
        share_of = np.concatenate([np.full(segments.size, scale) for segments, scale, _, _ in pieces])
        part_of = np.concatenate([np.full(segments.size, part) for segments, _, part, _ in pieces])
        moved_to = np.concatenate([np.full(segments.size, step) for segments, _, _, step in pieces])
        wait, source = old < 0, np.maximum(old, 0)
        duration = np.where(wait, known.costs.comm_ns, lane.duration_ns[source] * share_of)
        # The wait of a message is written as -1 - step until here.
        steps = np.where(wait, -1 - old, np.where(moved_to >= 0, moved_to, lane.step[source]))
        return cls(np.maximum(old, -1), duration, steps, part_of, posts, waits)

    def lane(self, lane: Lane) -> Lane:
        """Return the new lane."""
        wait, source = self.old < 0, np.maximum(self.old, 0)
        duration = np.rint(self.duration_ns).astype(np.int64)
        return Lane(
            rank=lane.rank,
            label=np.where(wait, LABEL["comm.recv"], lane.label[source]),
            step=self.step,
            start_ns=int(lane.start_ns[0]) + np.cumsum(duration) - duration,
            duration_ns=duration,
            row=np.where(wait, -1, lane.row[source]),
            step_end_ns=lane.step_end_ns,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """A computation and what follows it until the next one, waits for messages left out."""

    part: int
    """Its index in `StageWork`."""

    body: Ints
    """Its segments."""

    tail: Ints
    """Those behind it."""

    end: int
    """Last segment of it."""


def _blocks(lane: Lane, work: StageWork, kept: NDArray[np.bool_]) -> list[dict[Action, _Block]]:
    """Return the blocks of each pass; behind the last one of a pass follows what is not the pass's."""
    of_part = np.flatnonzero(work.part >= 0)
    #     segments   | body of 0 | waits, other work | body of 1 | ...
    #                ^ begins[0] ^ last[0]           ^ begins[1]
    # Computations are numbered along the lane, so that `work.part` ascends over the segments that have one. What
    # follows a body up to the next one of its pass is its tail, without the waits; the last body of a pass has none.
    first = np.searchsorted(work.part[of_part], np.arange(work.op.size), side="left")
    begins = of_part[np.minimum(first, of_part.size - 1)]
    last = of_part[np.searchsorted(work.part[of_part], np.arange(work.op.size), side="right") - 1]
    blocks: list[dict[Action, _Block]] = [{} for _ in range(int(work.turn.max()) + 1)]
    actions = zip(work.op.tolist(), work.stage.tolist(), work.microbatch.tolist(), work.turn.tolist(), strict=True)
    for part, (op, stage, microbatch, turn) in enumerate(actions):
        inner = part + 1 < work.op.size and work.turn[part + 1] == turn
        end = int(begins[part + 1]) - 1 if inner else int(last[part])
        behind = np.arange(int(last[part]) + 1, end + 1)
        body = np.arange(int(begins[part]), int(last[part]) + 1)
        blocks[turn][Action(op, stage, microbatch)] = _Block(part, body, behind[kept[behind]], end)
    return blocks


NOTHING = np.zeros(0, np.int64)


def _taken(blocks: dict[Action, _Block], action: Action, share: float) -> tuple[Ints, Ints, float, int]:
    """Return (body, tail, factor on the body's duration, part) of a computation, from how it was recorded."""
    block = blocks.get(action)
    if block is not None:
        return block.body, block.tail, 1.0, block.part
    if action.op == B:
        inputs, weights = (blocks[Action(op, action.stage, action.microbatch)] for op in (I, W))
        tail = np.concatenate([inputs.tail, weights.tail])
        return np.concatenate([inputs.body, weights.body]), tail, 1.0, inputs.part
    whole = blocks[Action(B, action.stage, action.microbatch)]
    if action.op == I:
        return whole.body, NOTHING, share, whole.part
    return whole.body, whole.tail, 1.0 - share, whole.part


def _messages(known: RecordedPipeline, built: list[_Built]) -> MessagePoints:
    """Return the messages between stages that feed each other: posted behind the computation that makes them."""
    entries = []
    for stage, made in enumerate(built):
        for turn, gradient, microbatch, source, segment in made.waits:
            post = built[source].posts[turn, gradient, microbatch]
            # The receive is posted ahead, so that only the sender's post counts.
            entries.append((known.rank_index[source], post, 0, False, -1))
            entries.append((known.rank_index[stage], 0, segment, True, known.costs.comm_ns))
    return _of_entries([(number // 2, *entry) for number, entry in enumerate(entries)])


def _of_entries(entries: list[tuple[int, int, int, int, bool, int]]) -> MessagePoints:
    """Return messages from (point, rank index, post, segment, waits, own ns) of each end."""
    table = np.array(entries, np.int64).reshape(-1, 6)
    return MessagePoints(table[:, 0], table[:, 1], table[:, 2], table[:, 3], table[:, 4] > 0, table[:, 5])


def without_bubbles(recording: Recording) -> Recording:
    """Return the recording without waits for other stages: a pass takes what its busiest rank works.

    Raises `InputError` where no message was recorded between the ranks of a pipeline.
    """
    works = [(index, work) for index, work in enumerate(recording.stages) if work is not None]
    if not works or not recording.messages.point.size:
        raise InputError("the run recorded no messages between stages: there is no bubble. Record a pipeline.")
    messages = recording.messages
    # What holds the ranks together instead is that each pass begins on all of them at once.
    num_passes, point = min(int(work.turn.max()) + 1 for _, work in works), int(messages.point.max()) + 1
    entries = []
    for index, work in works:
        of_part = np.flatnonzero(work.part >= 0)
        begins = of_part[np.searchsorted(work.turn[work.part[of_part]], np.arange(num_passes))]
        entries += [(point + turn, index, at, at, True, -1) for turn, at in enumerate(begins.tolist())]
    held = _of_entries(entries)
    alone = replace(messages, waits=np.zeros_like(messages.waits))
    joined = {
        one.name: np.concatenate([getattr(alone, one.name), getattr(held, one.name)]) for one in fields(MessagePoints)
    }
    return replace(recording, messages=MessagePoints(**joined))


def check_stages(recording: Recording, scenario: ResolvedEdits) -> None:
    """Raise `InputError` where an edit names a stage that was not recorded."""
    known = sorted({int(stage) for work in recording.stages if work is not None for stage in work.stage})
    for stage, *_ in scenario.stages:
        if stage not in known:
            names = ", ".join(map(str, known)) or "none"
            raise InputError(f"the run recorded no stage {stage} of a pipeline. Choose among: {names}.")
