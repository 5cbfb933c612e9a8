"""Orders of a pipeline step: pure functions from a shape to what each rank computes, in which order.

Here are the orders with a closed form; those that split the backward are in
`split_backward`. Every rank has `interleave` stages. With p ranks, m
microbatches, v stages per rank, forward and backward F and B per rank, equal
ranks and free transfers (Megatron-LM, SC'21, and PipeDream-2BW, ICML'21):

    order         makespan - m (F + B)     activations of rank r, in shares of a rank
    gpipe         (p - 1)(F + B)           m
    1f1b          (p - 1)(F + B)           min(m, p - r)
    interleaved   (p - 1)(F + B) / v       min(m, (2(p - r - 1) + (v - 1)p + 1) / v)

>>> " ".join(map(str, one_f_one_b(PipelineShape(num_ranks=2, num_microbatches=3))[0]))
'0F0 0F1 0B0 0F2 0B1 0B2'

Stages may form a graph (`PipelineShape.of_graph`), one per rank. With D stages on its longest path, a stage from which
d stages lead to the last one does what rank D - d of a chain of D does: in such a chain every stage that feeds it is
earlier, so no order waits for itself, and (D - 1) takes the place of (p - 1) above.

>>> diamond = PipelineShape.of_graph(StageGraph(((), (0,), (0,), (1, 2))), 2, [1] * 4, [1] * 4, [1] * 4)
>>> [" ".join(map(str, actions)) for actions in one_f_one_b(diamond)[1:3]]
['1F0 1F1 1B0 1B1', '2F0 2F1 2B0 2B1']

A graph of stages, or of layers, in a JSON file.

    {"stages": [{"name": "text", "forward_ns": 10, "backward_ns": 20},
                {"name": "image", "forward_ns": 12, "backward_ns": 24},
                {"name": "join", "preds": ["text", "image"], "forward_ns": 5, "backward_ns": 10}]}

`preds` are names or numbers of those that a stage takes its input from. Times
are those of one microbatch. What is to be cut into stages says "layers" in
the place of "stages", and may have `output_bytes` and `parameter_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from headway.core.errors import InputError
from headway.core.files.safe_files import decode_json, read_text
from headway.core.tables import suggestion
from headway.sim.pipeline.actions import Action, B, F, Orders, StageGraph

MOST_ACTIONS = 1 << 18
"""Microbatches x stages of one step: each takes 40 us."""

MOST_NS = 1 << 60
"""Nanoseconds of a step without overlap, times the stages of a rank."""


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """What an order is made for. Times are those of a whole rank and one microbatch: a stage takes 1/interleave."""

    num_ranks: int
    """p: ranks."""

    num_microbatches: int
    """m: microbatches of one step."""

    interleave: int = 1
    """v: stages per rank."""

    forward_ns: int = 1
    """tF: forward."""

    input_ns: int = 1
    """tI: backward, gradient of the input."""

    weight_ns: int = 1
    """tW: backward, gradient of the weights."""

    comm_ns: int = 0
    """One message between stages."""

    cap: float | None = None
    """Activations that a rank may hold, in shares of a whole rank; None = no limit."""

    graph: StageGraph | None = None
    """Which stages feed which, stage s on rank s; None = each feeds the next one."""

    stage_ns: tuple[tuple[int, int, int], ...] | None = None
    """[stages] tF, tI, tW of each stage; None = they are equal. The times above are then the largest."""

    num_steps: int = 1
    """Steps that a schedule without a flush runs as one stream; all others make one."""

    def __post_init__(self) -> None:
        """Raise `InputError` on counts below 1, negative times, and a cap below one activation."""
        for name in ("num_ranks", "num_microbatches", "interleave", "num_steps"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give at least 1.")
        for name in ("forward_ns", "input_ns", "weight_ns", "comm_ns"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}; give nanoseconds >= 0.")
        actions, all_ns = (
            self.num_stages * self.num_microbatches * self.num_steps,
            self.forward_ns + self.input_ns + self.weight_ns,
        )
        if actions > MOST_ACTIONS or actions * self.interleave * (all_ns + self.comm_ns) > MOST_NS:
            raise InputError(
                f"{actions:.3g} microbatches on all stages, {all_ns + self.comm_ns:.3g} ns each; at most "
                f"{MOST_ACTIONS:,}, and {MOST_NS:.0e} ns in all, are computed. Give fewer, or larger units."
            )
        if self.forward_ns + self.input_ns + self.weight_ns == 0:
            raise InputError("forward and backward both take 0 ns; give the time of at least one.")
        if self.graph is not None and (self.interleave, self.num_ranks) != (1, len(self.graph.preds)):
            raise InputError(
                f"{len(self.graph.preds)} stages of a graph on {self.num_ranks} ranks, {self.interleave} on each; "
                "give as many ranks as stages."
            )
        if self.cap is not None and not self.cap >= 1:
            raise InputError(
                f"infeasible: stage 0 needs 1 activation, cap {self.cap:g}. Raise the cap or make microbatches smaller."
            )

    @classmethod
    def of_graph(
        cls,
        graph: StageGraph,
        num_microbatches: int,
        forward_ns: Sequence[int],
        input_ns: Sequence[int],
        weight_ns: Sequence[int],
        *,
        comm_ns: int = 0,
        cap: float | None = None,
    ) -> PipelineShape:
        """Return the shape of a graph of stages, one per rank; times are [stages].

        Raises `InputError` as the class does, and on times of another number of stages.
        """
        times = {"forward_ns": forward_ns, "input_ns": input_ns, "weight_ns": weight_ns}
        for name, values in times.items():
            if len(values) != len(graph.preds) or min(values) < 0:
                raise InputError(f"{name} is {list(values)}; give {len(graph.preds)} times >= 0, one for each stage.")
        return cls(
            len(graph.preds), num_microbatches, 1, max(forward_ns), max(input_ns), max(weight_ns), comm_ns, cap, graph,
            tuple(zip(forward_ns, input_ns, weight_ns, strict=True)),
        )  # fmt: skip

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.num_ranks * self.interleave

    @property
    def stages(self) -> StageGraph:
        """Which stages feed which."""
        return self.graph or StageGraph.chain(self.num_stages)


class OrderFn(Protocol):
    """An order of a pipeline step. Write a function of this shape and add a line to `SCHEDULES`."""

    def __call__(self, shape: PipelineShape) -> Orders:
        """Return the computations of each rank, in order."""
        ...


def gpipe(shape: PipelineShape) -> Orders:
    """Run all forwards, then all backwards (GPipe), each in the order of microbatches, as torch does."""
    one_stage_per_rank(shape, "gpipe")
    all_of = range(shape.num_microbatches)
    return tuple(tuple(Action(op, rank, j) for op in (F, B) for j in all_of) for rank in range(shape.num_ranks))


def one_f_one_b(shape: PipelineShape) -> Orders:
    """Alternate one backward, one forward after p - rank forwards (PipeDream-Flush)."""
    one_stage_per_rank(shape, "1f1b")
    m = shape.num_microbatches
    orders = []
    for rank, in_flight in enumerate(shape.stages.in_flight()):
        warm_up = min(m, in_flight)
        actions = [Action(F, rank, j) for j in range(warm_up)]
        for j in range(m):
            actions.append(Action(B, rank, j))
            if warm_up + j < m:
                actions.append(Action(F, rank, warm_up + j))
        orders.append(tuple(actions))
    return tuple(orders)


def interleaved(shape: PipelineShape) -> Orders:
    """Run v stages per rank, p microbatches of each in turn (Megatron-LM, SC'21); stage s is on rank s mod p.

    Forward k of a rank is microbatch (k // pv) p + k mod p of its stage (k mod pv) // p; backwards take the stages
    the other way round. Raises `InputError` where m is no multiple of p.
    """
    p, m, v = shape.num_ranks, shape.num_microbatches, shape.interleave
    if shape.graph is not None:
        raise InputError("interleaved needs stages that each feed the next one. Choose 'graph_1f1b' for a graph.")
    if m % p:
        near = max(p, round(m / p) * p)
        raise InputError(f"{m} microbatches are no multiple of {p} ranks; interleaving needs one. Give {near}.")
    total = m * v
    order = [((k % (p * v)) // p, k // (p * v) * p + k % p) for k in range(total)]
    orders = []
    for rank in range(p):
        forwards = [Action(F, part * p + rank, j) for part, j in order]
        backwards = [Action(B, (v - 1 - part) * p + rank, j) for part, j in order]
        # The first backward of the last rank follows (v - 1)p + 1 forwards; each rank before it runs two more ahead.
        warm_up = min(total, 2 * (p - rank - 1) + (v - 1) * p + 1)
        actions = forwards[:warm_up]
        for k in range(total):
            actions.append(backwards[k])
            actions += forwards[warm_up + k : warm_up + k + 1]
        orders.append(tuple(actions))
    return tuple(orders)


def one_stage_per_rank(shape: PipelineShape, name: str) -> None:
    """Refuse interleaving where the order has none."""
    if shape.interleave != 1:
        raise InputError(f"{name} has one stage per rank, not {shape.interleave}. Choose 'interleaved' for several.")


Nanoseconds = Annotated[int, Meta(ge=0, le=1 << 60)]


class GraphRow(msgspec.Struct, frozen=True):
    """A stage or a layer."""

    name: str
    """Its name."""

    forward_ns: Nanoseconds
    """Forward of one microbatch."""

    backward_ns: Nanoseconds
    """Its backward."""

    preds: tuple[str | int, ...] = ()
    """Names, or places from 0, of those that feed it."""

    output_bytes: Annotated[float, Meta(ge=0, le=1e18)] = 0.0
    """Output of one microbatch."""

    parameter_bytes: Annotated[float, Meta(ge=0, le=1e18)] = 0.0
    """Weights."""


class _Rows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stages: tuple[GraphRow, ...] = ()
    layers: tuple[GraphRow, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphFile:
    """What a file says."""

    rows: tuple[GraphRow, ...]
    """[n] Stages or layers."""

    preds: tuple[tuple[int, ...], ...]
    """[n] Those that each takes its input from."""

    @classmethod
    def read(cls, path: Path) -> GraphFile:
        """Read a file; raises `FormatError` on another format, `InputError` on no file and on bad names."""
        fix = 'Write {"stages": [{"name", "preds", "forward_ns", "backward_ns"}, ..]}.'
        content = decode_json(read_text(path, "a graph of stages as JSON"), str(path), _Rows, fix=fix)
        rows = content.stages or content.layers
        if bool(content.stages) == bool(content.layers):
            raise InputError(f'{path} has {"both" if rows else "no"} stages and layers; give one list: "stages".')
        index: dict[str | int, int] = {}
        for number, row in enumerate(rows):
            if row.name in index:
                raise InputError(f"{path} has two stages called {row.name!r}. Rename one.")
            index |= {row.name: number, number: number}
        for row in rows:
            for name in row.preds:
                if name not in index:
                    raise InputError(
                        f"{path}: {row.name!r} takes its input from {name!r}, which is no stage. "
                        f"{suggestion((stage.name for stage in rows), str(name))}"
                    )
        return cls(rows, tuple(tuple(sorted({index[name] for name in row.preds})) for row in rows))

    def shape(self, num_microbatches: int, *, comm_ns: int = 0, cap: float | None = None) -> PipelineShape:
        """Return the shape of these stages; half of a backward is taken to be the gradient of the input."""
        back = [row.backward_ns for row in self.rows]
        return PipelineShape.of_graph(
            StageGraph(self.preds), num_microbatches, [row.forward_ns for row in self.rows],
            [ns - ns // 2 for ns in back], [ns // 2 for ns in back], comm_ns=comm_ns, cap=cap,
        )  # fmt: skip
