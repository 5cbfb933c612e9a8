"""The six applications that Pollux was simulated with: their measured times, gradients and progress, and its workloads.

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
from numpy.typing import NDArray

from headway.cluster.adaptive.speed import NEEDS_SCIPY, BatchLimits
from headway.core.errors import InputError
from headway.core.files.regular_file import parquet_faults
from headway.core.tables import pick

Values = NDArray[np.float64]

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
