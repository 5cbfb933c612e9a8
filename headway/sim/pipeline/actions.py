"""What the ranks of a pipeline do, in which order: columns of actions, as text, JSON and torch's CSV.

A schedule is data. Its short form holds computations only (`Orders`: what an
order function returns); `headway.sim.pipeline.lower` adds the messages. Both
are a `PipelineProgram`: one row per action, rank after rank, each rank's
actions in the order in which it runs them.

>>> orders = ((Action(F, 0, 0), Action(B, 0, 0)), (Action(F, 1, 0), Action(B, 1, 0)))
>>> program = PipelineProgram.from_orders(orders)
>>> print(program.text())
rank 0: 0F0 0B0
rank 1: 1F0 1B0
>>> PipelineProgram.from_torch_csv(program.to_torch_csv()).orders() == orders
True
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import CycleError, FormatError, InputError
from headway.sim.graph.dag import Dag, replay

F, B, I, W, R, SEND, RECV, OPT = range(8)  # noqa: E741 - the names of the papers and of torch
"""Codes: forward, whole backward, gradient of input, of weights, forward again, messages, optimizer."""

OPS = ("F", "B", "I", "W", "R", "SEND", "RECV", "OPT")
"""Name of each code."""

COMPUTE = (F, B, I, W, R)
"""Actions that occupy the rank."""

MOST_IDLE = 1024
"""Ranks without an action that a file may have."""

TORCH_CELL = re.compile(r"(\d{1,9})(F|B|I|W)(\d{1,9})")
"""A computation in torch's CSV: stage, operation, microbatch."""

Ints = NDArray[np.int32]


class Action(NamedTuple):
    """A computation of one stage on one microbatch."""

    op: int
    """One of `F`, `B`, `I`, `W`, `R`, `OPT`."""

    stage: int
    """Stage, from 0."""

    microbatch: int
    """Microbatch, from 0; -1 for `OPT`."""

    def __str__(self) -> str:
        """Return it as torch writes it: 1F0."""
        return f"{self.stage}{OPS[self.op]}{'' if self.microbatch < 0 else self.microbatch}"


Orders = tuple[tuple[Action, ...], ...]
"""The computations of each rank, in order."""


@dataclass(frozen=True, slots=True)
class StageGraph:
    """Which stages feed which: a directed graph without cycles and with one last stage, whose output is the loss."""

    preds: tuple[tuple[int, ...], ...]
    """[stages] The stages that each stage takes its inputs from."""

    def __post_init__(self) -> None:
        """Raise `InputError` on an unknown, isolated or second last stage, `CycleError` on a cycle."""
        num_stages = len(self.preds)
        pairs = [(source, stage) for stage, sources in enumerate(self.preds) for source in sources]
        for source, stage in pairs:
            if not 0 <= source < num_stages:
                raise InputError(f"stage {stage} takes its input from stage {source}; give stages 0..{num_stages - 1}.")
        if num_stages == 0:
            raise InputError("the graph has no stage; give at least one.")
        alone = sorted(set(range(num_stages)) - {end for pair in pairs for end in pair}) if num_stages > 1 else []
        if alone:
            raise InputError(f"stage {alone[0]} is not connected to any other. Connect it, or remove it.")
        try:
            Dag.from_edges(num_stages, [source for source, _ in pairs], [stage for _, stage in pairs])
        except CycleError as cause:
            circle = " -> ".join(map(str, [*cause.operations, cause.operations[0]]))
            raise CycleError(f"stages {circle} feed each other. Drop one of these edges.", cause.operations) from None
        last = sorted(set(range(num_stages)) - {source for source, _ in pairs})
        if len(last) > 1:
            raise InputError(f"stages {last} are all last; the loss needs one. Join them in one more stage.")

    @classmethod
    def chain(cls, num_stages: int) -> StageGraph:
        """Return stages that each feed the next one."""
        return cls(tuple((stage - 1,) if stage else () for stage in range(num_stages)))

    def takers(self, stage: int) -> list[int]:
        """Return the stages that take an input from a stage, in order.

        >>> StageGraph(((), (0,), (0, 1))).takers(0)
        [1, 2]
        """
        return [target for target, sources in enumerate(self.preds) if stage in sources]

    def feeds(self) -> NDArray[np.bool_]:
        """Return [stages, stages] whether the row's stage feeds the column's."""
        table = np.zeros((len(self.preds), len(self.preds)), np.bool_)
        for stage, sources in enumerate(self.preds):
            table[list(sources), stage] = True
        return table

    def in_flight(self, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return [stages] what each stage has in flight at once, by GraphPipe's rule: its size + its takers' most.

        `sizes` [stages] is the examples of a stage's own turn, microbatch size times microbatches per turn (b and k in
        in flight(S) = k b + max over successors). Without it each counts 1, so that the answer is in microbatches: the
        number of stages on the longest path from a stage to the last one.

        >>> StageGraph(((), (0,), (0,), (2,), (1, 3))).in_flight()
        (4, 2, 3, 2, 1)
        """
        pairs = [(stage, source) for stage, sources in enumerate(self.preds) for source in sources]
        back = Dag.from_edges(len(self.preds), [stage for stage, _ in pairs], [source for _, source in pairs])
        return tuple(replay(back, sizes or [1] * len(self.preds)).end_ns.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class PipelineProgram:
    """The actions of all ranks: rank ascending, and each rank's actions in its order.

    A message is two rows: SEND on the rank of `stage`, with `peer_stage` the
    stage that takes it, and RECV on the other rank, with both exchanged. It is
    an activation where the sending stage feeds the other one, else a gradient.
    """

    rank: Ints
    """[n] Rank of each action, ascending."""

    op: Ints
    """[n] One of the codes above."""

    stage: Ints
    """[n] Stage that computes, sends or receives."""

    microbatch: Ints
    """[n] Microbatch; -1 for an optimizer step."""

    version: Ints
    """[n] Version of the weights that the action reads; for OPT the one that it makes. 0 = those at the start,
    -1 = those before them, which are the same unless the program goes on from an earlier one."""

    peer: Ints
    """[n] The other rank of a message; -1 for all else."""

    peer_stage: Ints
    """[n] The other stage of a message; -1 for all else."""

    num_ranks: int
    """Ranks, those without an action among them."""

    graph: StageGraph
    """Which stages feed which."""

    @classmethod
    def from_orders(cls, orders: Orders, graph: StageGraph | None = None) -> PipelineProgram:
        """Make the columns of computations; without a graph the stages are a chain.

        Raises `InputError` on an operation that computes nothing, a stage or microbatch out of range.
        """
        sizes = [len(actions) for actions in orders]
        flat = np.fromiter(
            itertools.chain.from_iterable(itertools.chain.from_iterable(orders)), np.int32, 3 * sum(sizes)
        ).reshape(-1, 3)
        op, stage, microbatch = np.ascontiguousarray(flat.T)
        if not op.size:
            raise InputError("the orders hold no action; give each rank what it computes.")
        # A stage or microbatch with a larger number than there are actions leaves others without any.
        graph = graph or StageGraph.chain(min(int(stage.max()) + 1, op.size))
        wrong = ~np.isin(op, (*COMPUTE, OPT)) | (stage < 0) | (stage >= len(graph.preds))
        wrong |= np.where(op == OPT, microbatch != -1, (microbatch < 0) | (microbatch >= op.size))
        rank = np.repeat(np.arange(len(orders), dtype=np.int32), sizes)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise InputError(
                f"rank {rank[row]}, step {row - sum(sizes[: rank[row]])}: the action is {tuple(flat[row].tolist())}; "
                f"give (operation, stage 0..{len(graph.preds) - 1}, microbatch 0..), no number left out."
            )
        none = np.full(op.size, -1, np.int32)
        return cls(rank, op, stage, microbatch, np.zeros(op.size, np.int32), none, none, len(orders), graph)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one step: one more than the largest."""
        return int(self.microbatch.max(initial=-1)) + 1

    @property
    def num_stages(self) -> int:
        """Stages of the graph."""
        return len(self.graph.preds)

    def orders(self) -> Orders:
        """Return the computations of each rank."""
        kept = np.isin(self.op, (*COMPUTE, OPT))
        columns = zip(*(column[kept].tolist() for column in (self.op, self.stage, self.microbatch)), strict=True)
        found: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        for rank, action in zip(self.rank[kept].tolist(), columns, strict=True):
            found[rank].append(Action(*action))
        return tuple(map(tuple, found))

    def positions(self) -> NDArray[np.int64]:
        """Return [5, stages, microbatches] the row of each computation F, B, I, W, R; -1 where there is none."""
        table = np.full((len(COMPUTE), self.num_stages, self.num_microbatches), -1, np.int64)
        rows = np.flatnonzero(self.op <= R)
        table[self.op[rows], self.stage[rows], self.microbatch[rows]] = rows
        return table

    def steps(self) -> NDArray[np.int64]:
        """Return [n] the place of each action in its rank's order, from 0."""
        first = np.searchsorted(self.rank, np.arange(self.num_ranks))
        return np.arange(self.rank.size) - first[self.rank]

    def name(self, row: int) -> str:
        """Return an action as text: 1F0, or 1SEND0>2."""
        suffix = f">{self.peer_stage[row]}" if self.op[row] in (SEND, RECV) else ""
        return f"{Action(int(self.op[row]), int(self.stage[row]), int(self.microbatch[row]))}{suffix}"

    def text(self, around: int | None = None, width: int = 4) -> str:
        """Return a line per rank; with `around`, only steps within `width` of that row, which is marked."""
        at = self.steps()
        lines = []
        for rank in range(self.num_ranks):
            rows = np.flatnonzero(self.rank == rank)
            if around is not None:
                rows = rows[np.abs(at[rows] - at[around]) <= width]
            words = [f"[{self.name(row)}]" if row == around else self.name(row) for row in rows.tolist()]
            lines.append(" ".join([f"rank {rank}:", *words]))
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """Return the program as one JSON object."""
        columns = {name: getattr(self, name).tolist() for name in _COLUMNS}
        preds = [list(sources) for sources in self.graph.preds]
        return {"schema": "headway.pipeline/1", "num_ranks": self.num_ranks, "preds": preds, **columns}

    @classmethod
    def from_json(cls, value: dict[str, Any] | str) -> PipelineProgram:
        """Read what `to_json` returned, or its text; raises `FormatError` on anything else."""
        try:
            fields = json.loads(value) if isinstance(value, str) else value
            if fields["schema"] != "headway.pipeline/1":
                raise FormatError(f"the schema is {fields['schema']!r}; give a headway.pipeline/1.")
            columns = [np.asarray(fields[name], np.int32) for name in _COLUMNS]
            graph = StageGraph(tuple(map(tuple, fields["preds"])))
            num_ranks = int(fields["num_ranks"])
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as cause:
            raise FormatError(f"this is not a pipeline program: {cause!r}. Write it with to_json.") from cause
        if len({column.shape for column in columns}) != 1 or columns[0].ndim != 1:
            raise FormatError("the columns of the program have different lengths. Write it with to_json.")
        rank, op, stage, microbatch, version, peer, peer_stage = columns
        inside = (rank >= 0) & (rank < num_ranks) & (op >= 0) & (op <= OPT) & (stage >= 0) & (stage < len(graph.preds))
        inside &= (microbatch >= np.where(op == OPT, -1, 0)) & (microbatch < rank.size)
        message = (op == SEND) | (op == RECV)
        inside &= ~message | ((peer >= 0) & (peer < num_ranks) & (peer_stage >= 0) & (peer_stage < len(graph.preds)))
        if not (rank.size and inside.all() and num_ranks <= rank.size + MOST_IDLE) or (np.diff(rank) < 0).any():
            raise FormatError("the program names a rank, operation, stage or microbatch that is out of range.")
        return cls(rank, op, stage, microbatch, version, peer, peer_stage, num_ranks, graph)

    def to_torch_csv(self) -> str:
        """Return torch's compute-only CSV: a row per rank, cells like 1F0. Updates, which are the script's there, are
        not in it. Raises `InputError` on forwards that are computed again."""
        again = self.op == R
        if again.any():
            raise InputError(f"torch's CSV has no R ({self.name(int(np.argmax(again)))}). Export a program without it.")
        cells = ([str(action) for action in actions if action.op != OPT] for actions in self.orders())
        return "".join(",".join(row) + "\n" for row in cells)

    @classmethod
    def from_torch_csv(cls, text: str) -> PipelineProgram:
        """Read a compute-only CSV; an empty cell is a pause. Raises `FormatError` naming the cell."""
        orders = []
        for rank, row in enumerate(csv.reader(io.StringIO(text))):
            actions = []
            for step, cell in enumerate(cell.strip() for cell in row):
                match = TORCH_CELL.fullmatch(cell)
                if match:
                    actions.append(Action(OPS.index(match[2]), int(match[1]), int(match[3])))
                elif cell:
                    raise FormatError(
                        f"rank {rank}, cell {step} is {cell!r}; write stage, F, B, I or W, microbatch: 1F0."
                    )
            orders.append(tuple(actions))
        return cls.from_orders(tuple(orders))


_COLUMNS = ("rank", "op", "stage", "microbatch", "version", "peer", "peer_stage")
