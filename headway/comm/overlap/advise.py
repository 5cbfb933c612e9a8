"""Whether matmuls that hide their collective would pay: forms are measured, the recorded step is replayed with them.

The run notes the shapes of its tensor-parallel matmuls and how long it waits for the collective of each. This host
measures the forms of those shapes once (a child process, RUN/overlap.json); a replay of chunks against transfers says
what the form makes of the recorded wait, and a replay of the run what that makes of a step. Times are seconds.

>>> overlapped_s(MatmulShape("ag", 512, 512, 512), "ring:W", 2, 0.010, 0.010)  # own half beside the transfer
0.015
>>> overlapped_s(MatmulShape("rs", 512, 512, 512), "ring:2W", 4, 0.008, 0.006)
0.008

The forms of a matmul beside its collective, and which one a shape gets: plain unless another is 5 % faster.

Use `measure` to time every form of some shapes on ranks of this host, `fastest` to choose from times. Times are
seconds. Forms and shapes are those of `headway.cost.collectives`.

>>> fastest({"plain": [1.0] * 7, "ring:W": [0.93] * 7, "ring:2W": [0.8, 0.7, 0.8, 0.8, 0.8, 0.8, 0.9]})
'ring:2W'
>>> fastest({"plain": [1.0] * 7, "ring:W": [0.96] * 7, "ring:2W": [0.8, 1.2, 0.8, 1.2, 0.8, 1.2, 0.8]})
'plain'
"""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from headway.core.errors import BarMissedError, InputError
from headway.core.files.safe_files import read_json
from headway.core.machine.child import run_measurement
from headway.core.tables import pick
from headway.core.units import NS_PER_S, format_seconds
from headway.cost.collectives import GATHER, OVERLAPS, PLAIN, MatmulShape, read_shape
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.graph.dag import Dag, replay
from headway.sim.recorded.program import Program
from headway.trace.rings.rank_tables import MatmulsSeen, rank_tables

LEAST_GAIN = 1.05
"""A form is taken where plain takes at least so many times as long (the median over rounds of measurement)."""

BY_CHANCE = 0.05
"""A form that wins no more rounds than a form as fast as plain does with this probability is not taken."""

ROUNDS = 31
"""Rounds of a measurement, in which the forms take turns."""

LONGEST_S = 300.0
"""A measurement may take this long."""

SCHEMA = "headway.comm-overlap/1"

OVERLAP_FILE = "overlap.json"
"""File of a run folder: what was measured for its shapes (`headway comm overlap`)."""


def fastest(times: Mapping[str, Sequence[float]]) -> str:
    """Return the form to take, of the seconds of each form by round; all forms were timed in each round.

    Rounds are compared one by one: what slows the host down slows both down. A form's gain is the smaller of the median
    ratio and the ratio of the medians. It counts from `LEAST_GAIN` on, and only where so many rounds were won that a
    form as fast as plain would win them once in twenty times (a sign test: 7 of 7, 12 of 15, 21 of 31). The largest
    gain decides.
    """
    if PLAIN not in times:
        raise InputError(f"times of {', '.join(times) or 'no form'} say nothing without those of plain. Time it too.")
    gains, plain = {PLAIN: 1.0}, times[PLAIN]
    for name, seconds in times.items():
        ratios = [before / after for before, after in zip(plain, seconds, strict=True)]
        gain = min(statistics.median(ratios), statistics.median(plain) / statistics.median(seconds))
        wins, rounds = sum(ratio > 1 for ratio in ratios), len(ratios)
        by_chance = sum(math.comb(rounds, count) for count in range(wins, rounds + 1)) / 2**rounds
        if name != PLAIN and gain >= LEAST_GAIN and by_chance <= BY_CHANCE:
            gains[name] = gain
    return max(gains, key=lambda name: gains[name])


class OverlapTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The forms of one shape, on the ranks and the link that measured them."""

    shape: str
    """What `read_shape` takes."""
    forms: dict[str, list[float]]
    """Form -> seconds of each round, the slowest rank's; forms that these ranks cannot run are not in it."""
    matmul_s: float
    """Median seconds of the matmul without its collective."""
    collective_s: float
    """Median seconds of the collective without its matmul."""

    @property
    def chosen(self) -> str:
        """The form to take."""
        return fastest(self.forms)

    def seconds(self, form: str) -> float:
        """Return the median seconds of a form."""
        return statistics.median(pick(self.forms, form, "measured form"))

    @property
    def ideal_s(self) -> float:
        """Seconds of the longer of both, all of the other hidden; never more than a form was measured with."""
        return min(max(self.matmul_s, self.collective_s), *(self.seconds(form) for form in self.forms))


class OverlapTable(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured on one link, as it is kept in a file."""

    ranks: int
    """Ranks that took part."""
    device: str
    """Type of their device."""
    dtype: str
    """Type of the numbers."""
    rows: list[OverlapTimes]
    """The shapes."""

    def of(self, shape: MatmulShape) -> OverlapTimes | None:
        """Return what is known of a shape."""
        return next((row for row in self.rows if row.shape == str(shape)), None)


def read_table(path: Path) -> OverlapTable:
    """Read what `measure` has written; raises `InputError` for any other file."""
    try:
        return msgspec.convert(read_json(path, fix="Measure anew: headway comm overlap --again."), OverlapTable)
    except msgspec.ValidationError as cause:
        raise InputError(f"{path} is no table of overlaps: {cause}. Delete it, and measure anew.") from cause


def measure(shapes: Iterable[MatmulShape], path: Path, *, ranks: int = 2, again: bool = False) -> OverlapTable:
    """Time all forms of the shapes that the file does not have yet, on gloo processes of this host; return the table.

    The file keeps the rows of one number of ranks: other rows are measured again. A rank that a launcher has started
    measures with all ranks of the launcher, each of which calls this; the first one writes the file. Raises
    `InputError` where the processes fail, and for fewer than two ranks.
    """
    if "RANK" in os.environ:
        ranks = int(os.environ["WORLD_SIZE"])
    if ranks < 2:
        raise InputError(f"--ranks is {ranks}; one rank gathers from nobody. Pass 2 or more.")
    names = list(dict.fromkeys(map(str, shapes)))
    before = read_table(path) if path.exists() and not again else None
    kept = [] if before is None or before.ranks != ranks else before.rows
    missing = [name for name in names if name not in {row.shape for row in kept}]
    if not missing:
        assert before is not None
        return before
    printed = run_measurement(
        "headway.comm.overlap.torch_measure", [str(ranks), ",".join(missing)], what="matmuls", longest_s=LONGEST_S,
        too_late=f"{len(missing)} shapes were not measured within {LONGEST_S:g} s. Pass fewer.",
    )  # fmt: skip
    made = msgspec.json.decode(printed.strip().splitlines()[-1], type=OverlapTable)
    table = OverlapTable(
        ranks=ranks, device=made.device, dtype=made.dtype,
        rows=[*(row for row in kept if row.shape not in missing), *made.rows],
    )  # fmt: skip
    if os.environ.get("RANK", "0") != "0":
        return table
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(table))
    return table


NAME, GRANT = "comm.overlap", "result-equivalent"

ITEM_BYTES = 4
"""Bytes of a number: forms are measured in float32."""

COMPUTE, LINK = 0, 1
"""Lanes of a rank."""


@dataclass(frozen=True, slots=True)
class RecordedWaits:
    """The collectives of one size in a recorded run, of the rank that waits least: others wait for it as well."""

    per_step: float
    """Calls per step."""
    wait_s: float
    """Mean seconds that the training thread waits for one."""


def matmuls_of(program: Program) -> MatmulsSeen | None:
    """Return the matmuls beside a collective that the run's first rank noted."""
    if program.run is None:
        return None
    return next((table.matmuls for table in rank_tables(program.run.path).values() if table.matmuls), None)


def propose_overlap(program: Program, setup: Setup, matmuls: MatmulsSeen) -> Proposal | Refusal:
    """Return the forms of the run's matmuls and what they win, or why none is proposed."""
    if GRANT not in setup.limits.allow:
        return Refusal(
            NAME, "comm", f"partial sums are added in another order: grant --allow {GRANT} to have it measured"
        )
    if setup.accelerated:
        reason = "measure on the job's devices first: headway comm overlap under its launcher, -o RUN/overlap.json"
        return Refusal(NAME, "comm", reason)
    assert program.run is not None
    shapes = _with_backwards(matmuls)
    try:
        waits, exposed_s = recorded_waits(program, shapes, matmuls.ranks)
        table = measure(waits, program.run.path / OVERLAP_FILE, ranks=matmuls.ranks)
        rows = {shape: row for shape in waits if (row := table.of(shape)) is not None and row.chosen != PLAIN}
        measured = ", ".join(f"{row.shape} {row.seconds(PLAIN) / row.seconds(row.chosen):.2f}x" for row in table.rows)
        if not rows:
            return Refusal(NAME, "comm", f"plain is the fastest form of all {len(waits)} shapes on this host's link")
        slow, mid, fast = (
            program.predict([_edit(1 - saved_s(rows, waits, matmuls.ranks, quantile) / exposed_s)])
            for quantile in (0.75, 0.5, 0.25)
        )
    except (InputError, BarMissedError) as cause:
        return Refusal(NAME, "comm", f"what overlapped matmuls would win is not known: {cause}")
    if mid.speedup < MIN_SPEEDUP:
        return Refusal(NAME, "comm", f"hiding collectives behind matmuls wins little: {mid.speedup:.3f}x ({measured})")
    waited_s = sum(row.per_step * row.wait_s for row in waits.values())
    return Proposal(
        name=NAME,
        room="comm",
        edits=(mid.edits[0],),
        predicted_speedup=mid.speedup,
        interval=(min(slow.interval[0], mid.interval[0]), max(fast.interval[1], mid.interval[1])),
        applies=True,
        parameters={"shapes": {str(shape): row.chosen for shape, row in rows.items()}},
        cost="none: the gathered rows are kept for backward as before",
        risk="partial sums are added in another order: losses differ in their last bits",
        allow=GRANT,
        reason=f"{format_seconds(waited_s)} of a step wait for the rows of {len(waits)} shapes of matmuls; measured "
        f"against plain on this host's link: {measured}. {mid.note}".strip(),
    )


def saved_s(
    rows: Mapping[MatmulShape, OverlapTimes], waits: Mapping[MatmulShape, RecordedWaits], ranks: int, quantile: float
) -> float:
    """Return the seconds of a step that the chosen forms save; `quantile` of their measured times, 0.5 = median.

    A form's replay knows neither that smaller matmuls are less efficient nor that a backend's transfers differ from its
    collective: what it measured as, over its replay with the measured parts, is that factor. It is taken to the replay
    with the wait of the run.
    """
    total = 0.0
    for shape, row in rows.items():
        recorded, form = waits[shape], row.chosen
        taken_s = float(np.quantile(row.forms[form], quantile))
        factor = taken_s / overlapped_s(shape, form, ranks, row.matmul_s, row.collective_s)
        after_s = factor * overlapped_s(shape, form, ranks, row.matmul_s, recorded.wait_s)
        total += recorded.per_step * max(row.matmul_s + recorded.wait_s - after_s, 0.0)
    return total


def overlapped_s(shape: MatmulShape, form: str, ranks: int, matmul_s: float, collective_s: float) -> float:
    """Return how long a ring takes by replay, of the seconds of its matmul and of its collective.

    ag   compute  |0 0|1 1|2 2|     chunk c of shard s is multiplied once it is here
         link     |1 1|2 2|         and passed on once it has come

    rs   compute  |0 0|1 1|2 2|     chunk c of step s leaves once it is multiplied
         link       |1 1|2 2|       and what was summed before has come
    """
    chunks, steps = max(OVERLAPS[form], 1), ranks
    compute = np.arange(steps * chunks).reshape(steps, chunks)
    travel = compute.size + np.arange((steps - 1) * chunks).reshape(steps - 1, chunks)
    passed_on = [(travel[:-1], travel[1:])]
    needs = [(travel, compute[1:])] if shape.way == GATHER else [(compute[:-1], travel)]
    src, dst = (np.concatenate([pair[end].ravel() for pair in passed_on + needs]) for end in (0, 1))
    lane = np.repeat([COMPUTE, LINK], [compute.size, travel.size])
    op_ns = [round(matmul_s * NS_PER_S / compute.size), round(collective_s * NS_PER_S / travel.size)]
    dag = Dag.from_edges(lane.size, src, dst, lane=lane)
    return float(replay(dag, np.take(op_ns, lane)).makespan_ns) / NS_PER_S


def recorded_waits(
    program: Program, shapes: Mapping[MatmulShape, int], ranks: int
) -> tuple[dict[MatmulShape, RecordedWaits], float]:
    """Return the waits for the collective of each shape, and the seconds per step of all collectives.

    A collective is known by its bytes; shapes of equal bytes share its calls by how many linears have them. Raises
    `InputError` where none is found.
    """
    assert program.run is not None
    by_rank = []
    for lane in program.recording.lanes:
        rows = program.run.parts.read({"rank": (lane.rank, lane.rank + 1)}, COLUMNS)
        called = rows.named("comm.collective") & (rows.events["start_ns"] >= lane.step_end_ns[0])
        by_rank.append((rows.events["bytes"][called], rows.events["duration_ns"][called]))
    steps = program.recording.recorded_steps
    of_bytes = Counter[int]()
    for shape, count in shapes.items():
        of_bytes[_result_bytes(shape, ranks)] += count
    waits = {}
    for shape, count in shapes.items():
        size = _result_bytes(shape, ranks)
        durations = [duration_ns[sizes == size] for sizes, duration_ns in by_rank]
        if all(duration.size for duration in durations):
            share = count / of_bytes[size]
            least_ns = min(float(duration.mean()) for duration in durations)
            waits[shape] = RecordedWaits(durations[0].size / steps * share, least_ns / NS_PER_S)
    if not waits:
        raise InputError("no float32 collective of the noted matmuls was recorded.")
    return waits, statistics.fmean(float(duration_ns.sum()) for _, duration_ns in by_rank) / NS_PER_S / steps


COLUMNS = ("rank", "name", "start_ns", "duration_ns", "bytes")


def _with_backwards(matmuls: MatmulsSeen) -> Counter[MatmulShape]:
    """Return the shapes of forward and backward -> linears that have them."""
    counts = Counter[MatmulShape]()
    for name, count in matmuls.shapes.items():
        shape = read_shape(name)
        counts.update({shape: count})
        counts.update({shape.backward: count})
    return counts


def _result_bytes(shape: MatmulShape, ranks: int) -> int:
    """Return the bytes of what a rank gets from the collective: all rows of a gather, its share of a scatter."""
    return shape.travels * ITEM_BYTES // (1 if shape.way == GATHER else ranks)


def _edit(factor: float) -> str:
    return f"comm={max(factor, 0.01):.4f}x"
