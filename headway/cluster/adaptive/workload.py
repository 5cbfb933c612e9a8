"""Jobs of measured applications while they run: batch size, speed, progress, and what they report to a policy.

A job advances by gain / (seconds per step) initial steps per second, epoch by
epoch; it is done once it has passed its last epoch. A job that adapts notes
the time of each (hosts, replicas, micro-batch) that it meets, fits its speed
anew, and chooses its batch at each epoch and placement; one that does not keeps
its tuned batch. Times of completion are whole seconds, as in the published simulator.

The six applications that Pollux was simulated with: their measured times, gradients and progress, and its workloads.

Tables of a folder `pollux/` (Parquet): `placements` and `scalability` hold
seconds of a step and of its synchronisation by placement or by (hosts,
replicas), and by micro-batch; `validation` holds, per batch size and epoch,
progress in initial steps, steps, and the gradients' square and variance;
`workloads` the jobs. Source: the simulator released with Pollux (Apache-2.0).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from headway.cluster.adaptive.speed import NEEDS_SCIPY, BatchLimits, Speed, best_batch, fit_speed, gain
from headway.cluster.model import Indices, Jobs, Values
from headway.core.errors import InputError
from headway.core.files.safe_files import parquet_faults
from headway.core.tables import pick

DEVICE_MEMORY = {"yolov3": 8}
"""Largest micro-batch where it is less than the largest one measured."""

MOST_HOSTS = 16
"""Measurements end here; a job on more hosts is as fast as on these."""


@dataclass(eq=False)
class Application:
    """One model that was measured. Times are seconds."""

    name: str
    """What the workloads call it."""

    placements: Mapping[str, Values]
    """Digits of the smallest rotation (replicas per host) -> [k, 3] micro-batch, step, synchronisation; ascending."""

    points: Values
    """[p, 5] Hosts, replicas, micro-batch, step, synchronisation: all of it, for interpolation."""

    epochs: Mapping[int, Values]
    """Batch size, ascending -> [e, 4] progress and steps at the end of each epoch; gradients' square and variance."""

    limits: BatchLimits
    """Batch sizes that it may use."""

    _times: dict[tuple[tuple[int, ...], int], tuple[float, float]] = field(default_factory=dict)
    _between: Any = None

    @property
    def num_epochs(self) -> int:
        """Epochs until it is done."""
        return min(len(table) for table in self.epochs.values())

    def progress(self, epoch: int) -> float:
        """Initial steps at the beginning of an epoch (0 = the first)."""
        return min(float(table[epoch - 1, 0]) for table in self.epochs.values()) if epoch else 0.0

    def at(self, batch_size: int, epoch: int, column: int) -> float:
        """Return a column of `epochs`, linear between the measured batch sizes; raises `InputError` outside them."""
        sizes = list(self.epochs)
        if not sizes[0] <= batch_size <= sizes[-1]:
            raise InputError(f"{self.name} was measured with batches of {sizes[0]} to {sizes[-1]}, not {batch_size}.")
        return float(np.interp(batch_size, sizes, [table[epoch, column] for table in self.epochs.values()]))

    def times_s(self, placement: tuple[int, ...], microbatch_size: int) -> tuple[float, float]:
        """Seconds of a step and of its synchronisation, on hosts with so many replicas each.

        A measured placement is looked up by its smallest rotation and interpolated in the micro-batch; others are
        interpolated linearly over a triangulation of (hosts, replicas, micro-batch).
        """
        key = placement, microbatch_size
        if key not in self._times:
            self._times[key] = self._times_s(placement, microbatch_size)
        return self._times[key]

    def triangulate(self) -> None:
        """Prepare the interpolation, once; raises `InputError` without scipy."""
        if self._between is None:
            try:
                from scipy.interpolate import LinearNDInterpolator
            except ImportError as error:
                raise InputError(NEEDS_SCIPY) from error
            self._between = LinearNDInterpolator(self.points[:, :3], self.points[:, 3:])

    def _times_s(self, placement: tuple[int, ...], size: int) -> tuple[float, float]:
        turn = min(placement[i:] + placement[:i] for i in range(len(placement)))
        table = self.placements.get("".join(map(str, turn)))
        if table is not None and table[0, 0] <= size <= table[-1, 0]:
            found = [float(np.interp(size, table[:, 0], table[:, column])) for column in (1, 2)]
        else:
            self.triangulate()
            found = self._between([min(len(placement), MOST_HOSTS), sum(placement), size])[0].tolist()
        if not all(map(math.isfinite, found)):
            raise InputError(
                f"{self.name} was not measured near {sum(placement)} replicas on {len(placement)} hosts with "
                f"micro-batches of {size}. Use a cluster of up to 16 hosts of 4 devices."
            )
        return found[0], found[1]


def _rows(path: Path) -> list[dict[str, Any]]:
    """Read a table; raises `InputError` where there is none."""
    if not path.exists():
        raise InputError(f"there is no {path}. Pass --data FOLDER with cluster/pollux/{path.name} in it.")
    with parquet_faults(path):
        return list(pq.read_table(path).to_pylist())


@cache
def read_applications(folder: Path) -> dict[str, Application]:
    """Read the applications of a folder, by name."""
    placed, scaled, valid = (_rows(folder / f"{name}.parquet") for name in ("placements", "scalability", "validation"))
    found = {}
    for name in sorted({row["application"] for row in placed}):
        own = [row for row in placed if row["application"] == name]
        tables: dict[str, list[list[float]]] = {}
        groups: dict[tuple[int, int, int], list[list[float]]] = {}
        for row in own:
            digits, size, times = row["placement"], row["local_bsz"], [row["step_time"], row["sync_time"]]
            tables.setdefault(digits, []).append([size, *times])
            # The digits of a placement are replicas per host. Placements of equal (hosts, replicas, micro-batch) are
            # one point of the interpolation, with their mean times; `tables` keeps them apart.
            groups.setdefault((len(digits), sum(map(int, digits)), size), []).append(times)
        points = [[*key, *np.mean(times, axis=0)] for key, times in sorted(groups.items())]
        keys = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
        points += [[row[key] for key in keys] for row in scaled if row["application"] == name]
        epochs: dict[int, list[list[float]]] = {}
        for row in sorted((row for row in valid if row["application"] == name), key=lambda row: row["batch_size"]):
            epochs.setdefault(row["batch_size"], []).append(
                [row["progress"], row["iteration"], row["grad_sqr"], row["grad_var"]]
            )
        micro = [row["local_bsz"] for row in own]
        limits = BatchLimits(min(epochs), max(epochs), min(micro), DEVICE_MEMORY.get(name, max(micro)))
        found[name] = Application(
            name, {digits: np.array(sorted(rows)) for digits, rows in tables.items()}, np.array(points, np.float64),
            {size: np.array(rows) for size, rows in epochs.items()}, limits,
        )  # fmt: skip
    return found


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job of a workload."""

    name: str
    """Unique within the workload."""

    arrival_s: float
    """When it was submitted."""

    application: str
    """What it trains."""

    num_replicas: int
    """Tuned number of devices, for policies that do not choose it."""

    batch_size: int
    """Tuned batch size."""


def read_workload(folder: Path, workload: int, load: float) -> Sequence[Submitted]:
    """Read the jobs of one workload in order of arrival; raises `InputError` that names those there are."""
    path = folder / "workloads.parquet"
    rows = _rows(path)
    pick({f"{row['load']:g}": None for row in rows}, f"{load:g}", "load")
    pick({str(row["workload"]): None for row in rows}, str(workload), "workload")
    return [
        Submitted(row["name"], float(row["time"]), row["application"], row["num_replicas"], row["batch_size"])
        for row in rows if row["workload"] == workload and row["load"] == load
    ]  # fmt: skip


def published_jct_s(folder: Path, policy: str, workload: int, *, load: float, interval_s: float) -> float | None:
    """Return the published mean completion time of a workload, where `published.csv` has it."""
    path = folder / "published.csv"
    if not path.exists():
        return None
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            same = row["policy"] == policy and row["workload"] == str(workload) and row["interference"] == "avoided"
            if same and float(row["load"]) == load and float(row["interval_s"]) == interval_s:
                return float(row["mean_jct_s"])
    return None


RESTART_S = 30.0
"""Time lost at each start and each move."""

MOST_DEVICES = 64
"""Devices of a job: the published measurements end there."""

FIXED = {"ncf": 32768}
"""Applications that do not adapt: they keep this batch and one device."""


@dataclass(slots=True, eq=False)
class _TrainingJob:
    """The state of one job."""

    application: Application
    tuned_batch: int | None
    placement: tuple[int, ...] = ()
    microbatch_size: int = 0
    accumulation: int = 0
    epoch: int = 0
    progress: float = 0.0
    seen: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)
    speed: Speed | None = None
    sqr: float = 0.0
    var: float = 0.0
    useful: dict[tuple[int, int], float] = field(default_factory=dict)
    """(hosts, replicas) -> useful examples/s of the best batch, by the present fit."""


class MeasuredJobs:
    """A workload of measured applications; `simulate` asks it instead of a table of rates (model.Adapting)."""

    aligned = True

    def __init__(
        self, submitted: Sequence[Submitted], applications: dict[str, Application], *, adaptive: bool,
        slowdown: float = 0.0,
    ) -> None:  # fmt: skip
        """Prepare the jobs. `adaptive`: they choose their batches. `slowdown`: fraction lost to a host in common.

        Two jobs that each span hosts slow each other down where they share one.
        """
        self.submitted, self.adaptive, self.slowdown = submitted, adaptive, slowdown
        self.running = [
            _TrainingJob(applications[job.application], FIXED.get(job.application) if adaptive else job.batch_size)
            for job in submitted
        ]
        self._fits: dict[tuple[str, tuple[tuple[int, int, int], ...]], Speed] = {}
        self._asked: list[tuple[int, int]] = []
        """(hosts, replicas) that the last decision asked for: jobs work them out before the next one."""
        for job in self.running:
            job.application.triangulate()

    def jobs(self) -> Jobs:
        """Return the queue; steps are initial steps, and the gang is the tuned one."""
        return Jobs(
            [job.name for job in self.submitted], np.array([job.num_replicas for job in self.submitted]),
            np.array([job.application.progress(job.application.num_epochs) for job in self.running]),
            np.array([job.arrival_s for job in self.submitted]), [job.application for job in self.submitted],
            restart_s=np.full(len(self.submitted), RESTART_S),
        )  # fmt: skip

    def rates(self, num_hosts: int) -> Values:
        """[n, hosts] Steps per second of each job alone as it was tuned: what waiting is measured against."""
        found = []
        for submitted, job in zip(self.submitted, self.running, strict=True):
            sizes = [min(4, submitted.num_replicas - first) for first in range(0, submitted.num_replicas, 4)]
            step_s = _step_s(job.application, tuple(sizes), submitted.batch_size)
            steps = job.application.at(submitted.batch_size, job.application.num_epochs - 1, 1)
            found.append(job.application.progress(job.application.num_epochs) / (steps * step_s))
        return np.repeat(np.array(found)[:, None], num_hosts, axis=1)

    def work(self, jobs: Indices, devices: Values, seconds: Values) -> tuple[Values, Values]:
        """Let jobs [k] run on devices [k, hosts] for a time [k]; return the steps and the seconds that they took."""
        spans = np.count_nonzero(devices, axis=1) > 1
        crowded = ((devices > 0) & spans[:, None]).sum(axis=0) > 1
        slowed = spans & ((devices > 0) & crowded).any(axis=1)
        steps, used_s = np.zeros(len(jobs)), np.zeros(len(jobs))
        for row, index in enumerate(jobs.tolist()):
            job = self.running[index]
            placement = tuple(sorted((int(size) for size in devices[row] if size), reverse=True))
            if placement != job.placement:
                job.placement = placement
                self._choose(job)
            before = job.progress
            used_s[row] = self._run(job, float(seconds[row]), self.slowdown if slowed[row] else 0.0)
            steps[row] = job.progress - before
            self._report(job)
            if job.epoch >= job.application.num_epochs:
                steps[row] = math.inf  # all that is left
        return steps, used_s

    def most(self, jobs: Indices) -> Indices:
        """[m] Most devices of each: what its batch allows, and where it adapts twice as many as it has tried."""
        found = []
        for index in jobs.tolist():
            job = self.running[index]
            limits, tried = job.application.limits, max((key[1] for key in job.seen), default=0)
            allowed = (limits.largest if self.adaptive else job.tuned_batch or 0) // limits.micro_least
            explored = max(2 * tried, 1) if self.adaptive else allowed
            found.append(1 if job.application.name in FIXED else min(explored, MOST_DEVICES, allowed))
        return np.array(found, np.int64)

    def speedup(self, jobs: Indices, num_hosts: Indices, num_devices: Indices, fair: int) -> Values:
        """[m, c] Useful examples/s on each configuration over those on `fair` devices of one host."""
        found = np.empty((len(jobs), len(num_devices)))
        configurations = [*zip(num_hosts.tolist(), num_devices.tolist(), strict=True), (1, fair)]
        self._asked = [key for key in configurations if key[1]]
        for row, index in enumerate(jobs.tolist()):
            job = self.running[index]
            if job.speed is None:  # nothing is known yet: as fast as it is large
                found[row] = num_devices / fair
                continue
            self._report(job)
            base = job.useful[1, fair]
            found[row] = [job.useful[key] / base if key[1] else 0.0 for key in configurations[:-1]]
        return found

    def left_s(self, job: int, num_devices: int) -> float:
        """Seconds to the end with the tuned batch on so many devices, packed: the true time (Optimus' oracle)."""
        state = self.running[job]
        batch, last = state.tuned_batch or state.application.limits.initial, state.application.num_epochs - 1
        steps = state.application.at(batch, last, 1) - state.application.at(batch, min(state.epoch, last), 1)
        sizes = tuple(min(4, num_devices - first) for first in range(0, num_devices, 4))
        return (steps or 1.0) * _step_s(state.application, sizes, batch, oracle=True)

    def _run(self, job: _TrainingJob, seconds: float, slowdown: float) -> float:
        """Advance a job; return the seconds that it used."""
        application, left_s = job.application, seconds
        hosts, replicas = len(job.placement), sum(job.placement)
        while left_s > 0 and job.epoch < application.num_epochs:
            batch = replicas * job.microbatch_size * (job.accumulation + 1)
            step_s, sync_s = application.times_s(job.placement, job.microbatch_size)
            sqr, var = (application.at(batch, job.epoch, column) for column in (2, 3))
            if self.adaptive:
                self._learn(job, (hosts, replicas, job.microbatch_size), (step_s - sync_s, step_s), sqr, var)
            total_s = step_s + (step_s - sync_s) * job.accumulation
            per_s = float(gain(batch / application.limits.initial, sqr=sqr, var=var)) / total_s * (1 - slowdown)
            target = application.progress(job.epoch + 1)
            if job.progress + per_s * left_s < target:
                job.progress += per_s * left_s
                left_s = 0.0
            else:
                left_s -= round((target - job.progress) / per_s)
                job.progress = target
                job.epoch += 1
            self._choose(job)
        return seconds - max(left_s, 0.0)

    def _report(self, job: _TrainingJob) -> None:
        """Work out the useful examples/s of the configurations that a policy asks for."""
        missing = [key for key in self._asked if key not in job.useful]
        if missing and job.speed is not None:
            hosts, devices = np.array(missing).T
            best = best_batch(job.speed, job.application.limits, hosts, devices, sqr=job.sqr, var=job.var)
            job.useful.update(zip(missing, best.useful_per_s.tolist(), strict=True))

    def _learn(
        self, job: _TrainingJob, key: tuple[int, int, int], times: tuple[float, float], sqr: float, var: float
    ) -> None:
        """Note a measurement, and fit the speed anew where the configuration is a new one."""
        if (sqr, var) != (job.sqr, job.var):
            job.sqr, job.var = sqr, var
            job.useful.clear()
        if key in job.seen:
            return
        job.seen[key] = times
        # The times of a configuration are one per application: jobs that met the same ones share the fit.
        name = job.application.name, tuple(job.seen)
        if name not in self._fits:
            hosts, replicas, size = zip(*job.seen, strict=True)
            self._fits[name] = fit_speed(hosts, replicas, size, *zip(*job.seen.values(), strict=True))
        job.speed = self._fits[name]
        job.useful.clear()

    def _choose(self, job: _TrainingJob) -> None:
        """Choose the batch for the present placement."""
        limits, hosts, replicas = job.application.limits, len(job.placement), sum(job.placement)
        batch = job.tuned_batch
        if batch is None and job.speed is None:
            batch = max(limits.initial, limits.micro_least * replicas)
        if batch is None and job.speed is not None:
            best = best_batch(job.speed, limits, np.array([hosts]), np.array([replicas]), sqr=job.sqr, var=job.var)
            job.microbatch_size, job.accumulation = int(best.microbatch_size[0]), int(best.accumulation[0])
        elif batch is not None:
            more = replicas == 1 and batch > limits.initial
            job.microbatch_size, job.accumulation = _split(limits.micro_most, batch, replicas, at_least=int(more))
        count = replicas * (job.accumulation + 1)
        job.microbatch_size = min(job.microbatch_size, limits.largest // count)


def _split(micro_most: int, batch: int, replicas: int, *, at_least: int) -> tuple[int, int]:
    """Return micro-batch and accumulation of a batch over replicas."""
    each = math.ceil(batch / replicas - 1e-8)
    accumulation = max(math.ceil(each / micro_most - 1e-8) - 1, at_least)
    return math.ceil(each / (accumulation + 1) - 1e-8), accumulation


def _step_s(application: Application, placement: tuple[int, ...], batch: int, *, oracle: bool = False) -> float:
    """Seconds of a step of a batch; the oracle always accumulates on one device, as the published one."""
    replicas = sum(placement)
    size, accumulation = _split(application.limits.micro_most, batch, replicas, at_least=int(oracle and replicas == 1))
    size = min(size, application.limits.largest // (replicas * (accumulation + 1)))
    step_s, sync_s = application.times_s(placement, size)
    return step_s + (step_s - sync_s) * accumulation
