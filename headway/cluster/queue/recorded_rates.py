"""Rates that recordings measured: steps per second of a script on the devices that it ran on.

Runs of one kind (name and number of devices) on one device type count with
their median. What was not measured is filled in from what was: where other
kinds ran on both types, by `fit_rates`; otherwise by the relative speeds of
the two types, the caller's or the makers' peaks. Each rate says which.

Rates of jobs that were never run on a device type, from those that were: a low-rank table, completed.

log rates[m, j] is nearly a sum of a few products a_m . b_j: how heavy the job
is, how fast the type is, and how well the two suit each other. Rank `rank`,
by alternating ridge regressions (each solves for one side with the other
fixed), from several seeded starts: their spread says how far to trust it.
Gavel completes co-location tables likewise (OSDI 2020, section 6).

>>> rates, spread = fit_rates([[4.0, 2.0, 1.0], [8.0, 4.0, float("nan")], [2.0, 1.0, 0.5]])
>>> bool(1.8 < rates[1, 2] < 2.2)
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.cluster.model import Cluster, Jobs, Rates, Values, parse_numbers
from headway.cluster.queue.logs import RateTable, RecordedQueue, generate, read_queue, read_trace, relative_speed
from headway.core.errors import InputError
from headway.core.rng import stream
from headway.core.tables import pick, suggestion
from headway.core.units import NS_PER_S
from headway.ledger.answers.compare import steps_per_s
from headway.ledger.answers.ledger import Ledger
from headway.trace.recording.runs import Run

# Rates of jobs that were never run on a device type, from those that were: a low-rank table, completed.

SWEEPS, RESTARTS = 60, 5


def fit_rates(samples: ArrayLike, *, rank: int = 1, ridge: float = 1e-3, seed: int = 0) -> tuple[Values, Values]:
    """Complete `samples` [n, W] (steps/s, NaN = not measured): rates [n, W], relative spread over restarts [n, W].

    Measured rates are returned as they are, with spread 0. A type measured on no
    job, or a job measured nowhere, is an `InputError`, as is a rate <= 0.
    """
    table = np.asarray(samples, np.float64)
    known = ~np.isnan(table)
    if table.ndim != 2 or not table.size:
        raise InputError(f"samples have shape {list(table.shape)}; pass rates [jobs, types], NaN = not measured.")
    if (table[known] <= 0).any() or np.isinf(table[known]).any():
        raise InputError("a measured rate is not a finite number above 0; leave out (NaN) what does not run.")
    for axis, what in ((1, "job"), (0, "type")):
        if not known.any(axis=axis).all():
            raise InputError(f"{what} {int(known.any(axis=axis).argmin())} was measured nowhere; measure it once.")
    logs = np.where(known, np.log(np.where(known, table, 1.0)), 0.0)
    # Row and column effects first: they are exact when types differ by a factor only.
    rows, columns = np.zeros(len(table)), np.zeros(table.shape[1])
    for _ in range(SWEEPS):
        rows = (known * (logs - columns)).sum(axis=1) / known.sum(axis=1)
        columns = (known * (logs - rows[:, None])).sum(axis=0) / known.sum(axis=0)
    rest = logs - rows[:, None] - columns
    fits = []
    for start in range(RESTARTS):
        b = stream(seed, "fit_rates", start).normal(size=(table.shape[1], rank)) * 0.1
        for _ in range(SWEEPS):
            a = _ridge(rest, known, b, ridge)
            b = _ridge(rest.T, known.T, a, ridge)
        fits.append(a @ b.T)
    found = np.exp(rows[:, None] + columns + np.mean(fits, axis=0))
    return np.where(known, table, found), np.where(known, 0.0, np.std(fits, axis=0))


def _ridge(rest: Values, known: NDArray[np.bool_], other: Values, ridge: float) -> Values:
    """Solve each row [rank] for the entries that are known: (O' O + ridge n) a = O' rest."""
    parts = known[:, :, None] * other
    gram = np.einsum("mjr,js->mrs", parts, other) + ridge * known.sum(axis=1)[:, None, None] * np.eye(other.shape[1])
    return np.asarray(np.linalg.solve(gram, np.einsum("mjr,mj->mr", parts, rest)[:, :, None])[:, :, 0])


MEASURED, FITTED, BY_SPEED = "measured", "fitted to other jobs", "by relative speed"
"""Where a rate is from."""


@dataclass(frozen=True, slots=True)
class RunRate:
    """What one run says."""

    model: str
    """Name of the job, as a queue has it."""

    scale: int
    """Devices that it ran on together."""

    device_type: str
    """Their type, as a cluster names it: a100."""

    steps_per_s: float
    """Of the whole job, start-up left out."""

    start_s: float = math.nan
    """What one of its starts took before its first step, the mean over attempts: what each move costs it."""


def device_name(reported: str) -> str:
    """Return a device type as clusters and price lists name it.

    >>> device_name("NVIDIA A100-SXM4-80GB"), device_name("Tesla V100-SXM2-16GB"), device_name("cpu")
    ('a100', 'v100', 'cpu')
    """
    words = reported.lower().replace("tesla", " ").replace("nvidia", " ").replace("-", " ").split()
    return words[0] if words else reported


def run_rate(run: Run, name: str = "") -> RunRate:
    """Return what a run measured; without a name it is that of its script. Raises `InputError` without a step."""
    ledger, script = Ledger.of(run), run.facts.script
    rate = steps_per_s(ledger)
    if not rate > 0:
        raise InputError(f"{run.path} has no step: its speed is unknown. Record a run that trains.")
    own = next((Path(word).stem for word in script if word.endswith(".py")), script[0] if script else run.path.name)
    lost_s = (ledger.ledger_ns["startup"] + ledger.ledger_ns["restart"]) / NS_PER_S / ledger.devices
    own_device = device_name(run.facts.device_type)
    return RunRate(name or own, ledger.devices, own_device, rate, lost_s / len(run.attempts()))


@dataclass(frozen=True, slots=True, eq=False)
class RunRates:
    """Rates of kinds of jobs on `W` device types."""

    names: tuple[str, ...]
    """[W] Device types."""

    kinds: tuple[tuple[str, int], ...]
    """[k] Name and number of devices."""

    rates: Values
    """[k, W] Steps per second of the whole job."""

    source: tuple[tuple[str, ...], ...]
    """[k, W] `MEASURED`, `FITTED` or `BY_SPEED`."""

    @classmethod
    def of(cls, found: Iterable[RunRate], names: Sequence[str], speed: Mapping[str, float]) -> RunRates:
        """Put runs together; raises `InputError` where a type was measured by no run and has no known speed."""
        cells: dict[tuple[str, int], dict[str, list[float]]] = {}
        for run in found:
            cells.setdefault((run.model, run.scale), {}).setdefault(run.device_type, []).append(run.steps_per_s)
        # Types that only runs have seen tie kinds together, too.
        types = (*names, *sorted({kind for row in cells.values() for kind in row} - set(names)))
        samples = np.array([[median(row.get(name, [math.nan])) for name in types] for row in cells.values()])
        rates, source = _completed(samples, types, speed)
        width = len(names)
        return cls(tuple(names), tuple(cells), rates[:, :width], tuple(row[:width] for row in source))

    def row(self, model: str, scale: int) -> Values | None:
        """[W] Rates of a job: those of its kind, else of the same name with the nearest number of devices; or None."""
        near = [k for k, kind in enumerate(self.kinds) if kind[0] == model]
        return self.rates[min(near, key=lambda k: abs(math.log(self.kinds[k][1] / scale)))] if near else None

    def exact(self, model: str, scale: int) -> Values:
        """[W] Rates of a job of a kind that was measured; raises `InputError` for another."""
        if (model, scale) not in self.kinds:
            known = [f"{name} on {size}" for name, size in self.kinds]
            raise InputError(
                f"no run measured {model!r} on {scale} devices. {suggestion(known, f'{model} on {scale}')} "
                f"Name a run of it: --runs {model}=FOLDER."
            )
        return np.asarray(self.rates[self.kinds.index((model, scale))])

    def rows(self) -> list[dict[str, object]]:
        """Return a row per kind and type, as commands print them."""
        return [
            {"model": model, "scale": scale, "device_type": name, "steps_per_s": float(rate), "source": source}
            for (model, scale), rates, sources in zip(self.kinds, self.rates, self.source, strict=True)
            for name, rate, source in zip(self.names, rates, sources, strict=True)
        ]


def queue_rates(
    queue: RecordedQueue, cluster: Cluster, speed: Mapping[str, float], runs: Sequence[RunRate]
) -> tuple[Values, RunRates]:  # fmt: skip
    """Return the rates [n, W] of a queue, where runs measured some of its jobs, and the rates that were used.

    Jobs of a recorded queue have seconds for steps: a job goes as many times as
    fast on a type as its kind does there, over the type that it ran on. Of a
    queue in steps each kind has to be measured. Jobs that no run has the name
    of follow the speeds of the types. Raises `InputError`.
    """
    width, lone = len(cluster.names), cluster.names[0] if len(cluster.names) == 1 else ""
    types = (*cluster.names, *sorted({name for name in queue.device_type if name} - set(cluster.names)))
    kinds = list(zip(queue.jobs.model, queue.jobs.scale.tolist(), strict=True))
    measured = RunRates.of(runs, types, speed)
    shown = RunRates(
        cluster.names, measured.kinds, measured.rates[:, :width], tuple(row[:width] for row in measured.source)
    )  # fmt: skip
    if queue.in_steps:
        return np.array([shown.exact(*kind) for kind in kinds]), shown
    rates = np.ones((len(kinds), width))
    for m, (kind, here) in enumerate(zip(kinds, queue.device_type, strict=True)):
        row, own = measured.row(*kind), here or lone
        if own and row is not None:
            rates[m] = row[:width] / row[types.index(own)]
        elif own and own != lone:
            rates[m] = [relative_speed(name, speed) / relative_speed(own, speed) for name in cluster.names]
    return rates, shown


def _completed(
    samples: Values, types: Sequence[str], speed: Mapping[str, float]
) -> tuple[Values, list[tuple[str, ...]]]:  # fmt: skip
    """Fill in rates [k, T] that are NaN, and say where each is from.

    Kinds that share types, directly or through others, are fitted together: nothing ties the others to them.

                 v100  p100  k80
        a      [  8     4     . ]     b on p100 is fitted: a ran on v100, where b did, and on p100
        b      [  2     .     . ]
        c      [  .     .     1 ]     c on v100, and a on k80, follow the speeds of the types
    """
    known, rates = ~np.isnan(samples), samples.copy()
    source = np.where(known, MEASURED, FITTED).astype(object)
    open_ = np.ones(len(samples), np.bool_)
    while open_.any():
        rows = np.arange(len(samples)) == int(open_.argmax())
        while True:
            columns = known[rows].any(axis=0)
            tied = known[:, columns].any(axis=1)
            if (tied == rows).all():
                break
            rows = tied
        rates[np.ix_(rows, columns)] = fit_rates(samples[np.ix_(rows, columns)])[0]
        first = int(columns.argmax())
        for j in np.flatnonzero(~columns).tolist():
            ratio = relative_speed(types[j], speed) / relative_speed(types[first], speed)
            rates[rows, j], source[rows, j] = rates[rows, first] * ratio, BY_SPEED
        open_ &= ~rows
    return rates, [tuple(map(str, row)) for row in source]


# The jobs of a trace or a log, with their rates.

GENERATED = {"gavel:single": (False, False), "gavel:multi": (True, False), "gavel:static": (True, True)}
"""Generated trace -> gangs of several devices, all jobs at time 0."""

SPARE_JOBS = 3000
"""Jobs generated behind the window: the queue goes on while its last jobs are served."""


def jobs_of(
    trace: str, cluster: Cluster, data: Path | None, jobs_per_hour: float, num_jobs: int, seed: int,
    window: tuple[int, int] | None, speed: str, runs: str, open_run: Callable[[Path], Run],
) -> tuple[Jobs, Rates, RunRates | None]:  # fmt: skip
    """Return the jobs of a trace, their rates, and those that runs measured."""
    if trace not in GENERATED and not trace.endswith(".trace"):
        if trace.startswith("gavel:"):
            pick(GENERATED, trace, "trace")
        queue = read_queue(Path(trace))
        given, measured, _ = log_rates(queue, cluster, speed, runs, open_run)
        return queue.jobs, Rates.of(given, queue.jobs, cluster), measured
    if runs:
        raise InputError(f"--runs gives rates to jobs of a log; {trace} has a table of its own. Leave --runs out.")
    if data is None:
        raise InputError(f"--trace {trace} needs measured rates; pass --data FOLDER with cluster/gavel in it.")
    places = (data / "data/cluster/gavel", data / "cluster/gavel", data / "gavel", data)
    folder = next((place for place in places if (place / "throughputs.parquet").exists()), data)
    table = RateTable.read(folder / "throughputs.parquet")
    if trace not in GENERATED:
        jobs = read_trace(Path(trace), table.alone["v100"])
        return jobs, table.of(jobs, cluster), None
    multi, static = GENERATED[trace]
    if not static and not 0 < jobs_per_hour < 1e6:
        raise InputError(f"--jobs-per-hour is {jobs_per_hour:g}; pass a rate above 0.")
    size = num_jobs or (window[1] + SPARE_JOBS * (not static) if window else 100)
    jobs = generate(size, seed, table.alone["v100"], jobs_per_hour=0.0 if static else jobs_per_hour, multi=multi)
    return jobs, table.of(jobs, cluster), None


def log_rates(
    queue: RecordedQueue, cluster: Cluster, speed: str, runs: str, open_run: Callable[[Path], Run]
) -> tuple[Values, RunRates | None, list[float]]:  # fmt: skip
    """Return the rates of a log's jobs, those that `runs` (NAME=FOLDER,...) measured, and seconds of a start."""
    speeds = parse_numbers(speed, "speeds")
    if not runs:
        return queue.rates(cluster, speeds), None, []
    named = (part.strip().rpartition("=") for part in runs.split(",") if part.strip())
    found = [run_rate(open_run(Path(path)), name) for name, _, path in named]
    rates, measured = queue_rates(queue, cluster, speeds, found)
    names, models = sorted({run.model for run in found}), sorted(set(queue.jobs.model))
    if not set(names) & set(models):
        raise InputError(
            f"no job of the log has the name of a run ({', '.join(names)}); its jobs are "
            f"{', '.join(map(repr, models[:5]))}. Write --runs NAME=FOLDER with one of these names."
        )
    return rates, measured, [run.start_s for run in found]
