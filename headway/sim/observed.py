"""A Dag from a profiler trace: which recorded operation waited for which, inferred class by class.

Use it on Kineto windows (CUDA, ROCm or CPU with gloo), of one rank or several.
Operations are the leaves of host threads and the rows of device streams.
`EDGE_CLASSES` lists the dependencies. What a
dependency does not explain, the residual gap before an operation, is a lag: on
host threads it is Python at work and stays, after a launch it is the launch
gap and stays, elsewhere it is dropped unless `delays="all"`, with which the
replay reproduces the trace to the nanosecond. Times are int64 ns.

>>> trace = Trace.from_columns({"start_ns": [0, 9], "duration_ns": [5, 2], "kind": [0, 0]}, names=["a"], name=[0, 0])
>>> seen = observe(trace)
>>> seen.edges["program"], seen.dag.fidelity, seen.dag.coverage
(1, 1.0, 1.0)

Dependencies between the rows of a trace: written down from what `observe` infers, or taken as a Dag as they stand.

Use `listed` before handing a trace to a format that carries dependencies
(Chakra): every kernel then names what it waits for, and what waits for it on
its stream or at a synchronising call. Edges stay within a rank; ranks meet in
the collective itself. `listed_dag` is for traces that hold dependencies but no
times. Times are int64 ns.

>>> trace = Trace.from_columns({"start_ns": [0, 9], "duration_ns": [5, 2], "kind": [0, 0]}, names=["a"], name=[0, 0])
>>> listed(trace).edges.tolist(), listed_dag(listed(trace)).indices.tolist()
([[0], [1]], [1])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.sim.ddp.ddp_replay import ddp_dag
from headway.sim.ddp.ddp_window import runs_on_threads
from headway.sim.graph.dag import Dag, replay
from headway.sim.observed_edges import EDGE_CLASSES, FINDERS, Ints, Operations
from headway.sim.recorded.program import Program
from headway.trace.events.trace import Trace, in_order
from headway.trace.events.vocabulary import KIND
from headway.trace.sync.clocks import on_common_clock


def listed(trace: Trace) -> Trace:
    """Return `trace` with its dependencies in `edges`; one that lists its own is returned as it is.

    Raises `InputError` as `observe` does.
    """
    if trace.edges is not None:
        return trace
    ops = Operations.of(trace)
    pairs = [finder(ops) for finder in FINDERS.values()]
    src, dst = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    good = (ops.end[src] <= ops.came[dst]) & (ops.rank[src] == ops.rank[dst])
    src, dst = src[good], _behind_calls(ops, src[good], dst[good])
    known = dst >= 0
    source, target = ops.row[src[known]], ops.row[dst[known]]
    place = _order(trace)
    forward = place[source] < place[target]
    return replace(trace, edges=in_order(np.stack([source[forward], target[forward]]), len(trace)))


def _behind_calls(ops: Operations, src: Ints, dst: Ints) -> Ints:
    """Return targets that are whole rows, -1 where there is none.

    A call that launches stands for two operations. What its second half waits for (a blocking copy waits for the copy
    that it launched itself) cannot come before the whole row, so the next operation of the thread waits instead.
    """
    n = ops.row.size
    follows = np.full(n + 1, -1, np.int64)
    for own in ops.by_lane.values():
        follows[own[:-1]] = own[1:]
    second = np.zeros(n, bool)
    second[1:] = (ops.row[1:] == ops.row[:-1]) & (ops.launches[:-1] >= 0)
    moved: Ints = np.where(second[dst] & (ops.row[src] != ops.row[dst]), follows[dst], dst)
    return moved


def _order(trace: Trace) -> Ints:
    """Return each row's place by start, then end, then row: an order that no dependency may contradict."""
    start = trace.events["start_ns"]
    place = np.empty(len(trace), np.int64)
    place[np.lexsort((start + trace.events["duration_ns"], start))] = np.arange(len(trace))
    return place


def listed_dag(trace: Trace) -> Dag:
    """Return the Dag of the edges that `trace` lists, an operation per row, on no lane; durations are the rows' own.

    Raises `InputError` when it lists none, `CycleError` when they form a cycle.
    """
    if trace.edges is None:
        raise InputError("the trace lists no dependencies. Use Dag.from_trace, which infers them from its times.")
    return Dag.from_edges(len(trace), *trace.edges)


DELAYS: tuple[str, ...] = ("none", "host", "all")
"""Which residual gaps stay: launch gaps only; those of host threads too; all of them."""

MODELS: tuple[str, ...] = ("auto", "observed", "ddp", "recorded")
"""Names that `Dag.from_trace` takes: 'ddp' insists on collectives, and where threads of the host run them (gloo) lays
out the step of all ranks with the link they share; 'recorded' is for headway's own runs."""


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """What was inferred from a trace. Build it with `observe`."""

    dag: Dag
    """The order, with `.coverage` and `.fidelity`; operation 0 is the origin of time."""

    row: Ints
    """[n] Row of the trace that each operation stands for, -1 for origin and meeting points. A launch has two."""

    duration_ns: Ints
    """[n] Durations as observed; a synchronising call counts from the end of what it waited for."""

    start_ns: Ints
    """[n] Observed starts, from 0."""

    edges: Mapping[str, int]
    """Class -> dependencies found."""

    trace: Trace
    """What it was made from."""


def observe(trace: Trace, *, delays: str = "host") -> Observed:
    """Infer the order of a profiler trace.

    `delays` is one of `DELAYS`. Raises `InputError` for other names, a trace without operations, and collectives whose
    sizes or counts do not match over ranks.
    """
    pick(dict.fromkeys(DELAYS), delays, "choice of delays")
    trace = on_common_clock(trace)
    ops = Operations.of(trace)
    found: list[tuple[str, Ints, Ints]] = [
        (name, src, dst) for name, finder in FINDERS.items() for src, dst in [finder(ops)]
    ]
    return _assemble(trace, ops, found, delays)


def from_trace(trace: Trace, model: str = "auto") -> Dag:
    """Return the Dag of a trace: what `Dag.from_trace` calls.

    `model` is one of `MODELS`; 'auto' takes 'recorded' for rows of headway's
    own recorder (steps with optimizer steps), else 'observed'. A 'recorded'
    Dag is for `greedy`; its durations are `Program.unrolled().duration_ns`. So is that of 'ddp' on gloo, with
    `ddp_link.compiled`.
    """
    pick(dict.fromkeys(MODELS), model, "model")
    if trace.edges is not None and trace.meta.get("timed") is False:
        return listed_dag(trace)  # Nothing can be inferred from times that are not there.
    own = trace.named("step").any() and trace.named("optimizer.step").any()
    if model == "recorded" or (model == "auto" and own):
        program = Program.from_trace(trace, trace.meta)
        return replace(program.unrolled().dag, coverage=1.0, fidelity=program.fidelity)
    if model == "ddp" and not (trace.events["kind"] == KIND["COLL"]).any():
        raise InputError("the trace has no collective, so there is nothing of DDP in it. Use model='observed'.")
    if model == "ddp" and runs_on_threads(trace):
        return ddp_dag(trace)
    return observe(trace).dag


def _assemble(trace: Trace, ops: Operations, found: list[tuple[str, Ints, Ints]], delays: str) -> Observed:
    """Drop what the times contradict, turn residual gaps into lags, and compile."""
    names, n = list(EDGE_CLASSES), ops.row.size
    code = np.concatenate([np.full(src.size, names.index(name)) for name, src, _ in found])
    src, dst = np.concatenate([src for _, src, _ in found]), np.concatenate([dst for _, _, dst in found])
    good = (ops.end[src] <= ops.came[dst]) & (src != dst)
    counts = {name: int((good & (code == index)).sum()) for index, name in enumerate(names)}
    src, dst, code = src[good], dst[good], code[good]
    residual, explained = _residuals(ops, src, dst, code == names.index("launch"))
    keep = {"all": np.ones(src.size, bool), "host": explained, "none": code == names.index("launch")}[delays]
    zero = int(ops.came.min())  # Not `begin`: the first operation of a rank may wait for others.
    roots = np.setdiff1d(np.arange(n), dst)
    # Operation 0 is the origin; then the observed ones; then the points at which ranks meet, which stand for the
    # arrival of their members: what a member waits for, the point waits for.
    point = np.full(n, -1, np.int64)
    for index, members in enumerate(ops.points):
        point[members] = n + 1 + index
        counts["collective" if ops.column("kind")[members[0]] == KIND["COLL"] else "p2p"] += members.size
    arrives = np.where(point >= 0, point, np.arange(n) + 1)
    met = np.flatnonzero(point >= 0)
    dag = Dag.from_edges(
        n + 1 + len(ops.points),
        np.concatenate([src + 1, np.zeros(roots.size, np.int64), point[met]]),
        np.concatenate([arrives[dst], arrives[roots], met + 1]),
        lane=np.concatenate([[-1], ops.lane, np.full(len(ops.points), -1)]).astype(np.int64),
        lag_ns=np.concatenate([np.where(keep, residual, 0), ops.came[roots] - zero, np.zeros(met.size, np.int64)]),
        lane_order=False,
    )
    blank = np.zeros(len(ops.points), np.int64)
    duration = np.concatenate([[0], ops.end - ops.begin, blank])
    meets = np.array([ops.came[members].max() - zero for members in ops.points], dtype=np.int64)
    simulated = int(replay(dag, duration).end_ns.max())
    whole = int(duration.sum() + residual.sum())
    return Observed(
        dag=replace(
            dag,
            coverage=1.0 - float(residual[~explained].sum()) / whole if whole else 1.0,
            fidelity=(int(ops.end.max()) - zero) / simulated if simulated else 1.0,
        ),
        row=np.concatenate([[-1], ops.row, blank - 1]),
        duration_ns=duration,
        start_ns=np.concatenate([[0], ops.begin - zero, meets]),
        edges=counts,
        trace=trace,
    )


def _residuals(ops: Operations, src: Ints, dst: Ints, launch: NDArray[np.bool_]) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the gap that each edge leaves unexplained, and whether it is explained all the same.

    The predecessor that ended last binds, and the whole gap hangs on it; a
    gap is Python at work on a host thread, the launch gap after a launch.
    """
    gap = ops.came[dst] - ops.end[src]
    order = np.lexsort((launch, gap, dst))
    binding = order[np.diff(dst[order], prepend=-1) != 0]
    residual = np.zeros(src.size, np.int64)
    residual[binding] = gap[binding]
    return residual, ~ops.device[dst] | launch
