"""Gavel's files: the table of rates, with jobs that share devices, and its traces of jobs.

`throughputs.parquet`: device_type, model, scale, other_model, other_scale,
steps_per_s, other_steps_per_s; `other_model` null = alone. A trace is text,
one job a line, tab-separated: model, command, folder, name of the steps
argument, whether it needs data, steps, scale, weight, SLO (-1 = none), arrival s.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet

from headway.cluster.model import Cluster, Jobs, Rates
from headway.core.errors import FormatError, InputError
from headway.core.files.bounds import MOST, number_of
from headway.core.files.regular_file import parquet_faults, read_lines
from headway.core.tables import suggestion

Kind = tuple[str, int]
"""Model and gang size."""

COLUMNS = ("device_type", "model", "scale", "other_model", "other_scale", "steps_per_s", "other_steps_per_s")
FIELDS = 10


@dataclass(frozen=True, slots=True, eq=False)
class RateTable:
    """Measured rates of kinds of jobs on device types."""

    alone: Mapping[str, Mapping[Kind, float]]
    """Device type -> kind -> steps per second of the whole job."""

    shared: Mapping[str, Mapping[tuple[Kind, Kind], tuple[float, float]]]
    """Device type -> two kinds on the same devices -> steps per second of either."""

    @classmethod
    def read(cls, path: Path) -> RateTable:
        """Read `throughputs.parquet`; raises `FormatError` when it is not such a file."""
        with parquet_faults(path, fix="Pass the folder with throughputs.parquet, Gavel's table of rates."):
            table = pyarrow.parquet.read_table(path, columns=list(COLUMNS))
        alone: dict[str, dict[Kind, float]] = {}
        shared: dict[str, dict[tuple[Kind, Kind], tuple[float, float]]] = {}
        for device, model, scale, other, other_scale, rate, other_rate in zip(
            *(table.column(name).to_pylist() for name in COLUMNS), strict=True
        ):
            if other is None:
                alone.setdefault(device, {})[model, scale] = rate
            else:
                shared.setdefault(device, {})[(model, scale), (other, other_scale)] = (rate, other_rate)
        return cls(alone, shared)

    def of(self, jobs: Jobs, cluster: Cluster) -> Rates:
        """Return the rates of jobs on the types of a cluster; raises `InputError` where the table has none."""
        missing = [name for name in cluster.names if name not in self.alone]
        if missing:
            raise InputError(f"no rates of device type {missing[0]!r}. {suggestion(self.alone, missing[0])}")
        keys = list(zip(jobs.model, (int(scale) for scale in jobs.scale), strict=True))
        kinds = sorted(set(keys))
        known = self.alone[cluster.names[0]]
        strange = [kind for kind in kinds if kind not in known]
        if strange:
            model, scale = strange[0]
            raise InputError(f"no rates of {model!r} on {scale} devices. {suggestion({m for m, _ in known}, model)}")
        kind_of = {kind: index for index, kind in enumerate(kinds)}
        rates = np.array([[self.alone[name].get(kind, 0.0) for name in cluster.names] for kind in kinds])
        shared = np.zeros((len(kinds), len(kinds), len(cluster.names)))
        for j, name in enumerate(cluster.names):
            for (first, second), (rate, _) in self.shared.get(name, {}).items():
                if first in kind_of and second in kind_of and first[1] == second[1]:
                    shared[kind_of[first], kind_of[second], j] = rate
        # Neither runs where one of the two does not: a pair is worth its devices only if both make progress.
        shared = np.where((shared > 0) & (shared.transpose(1, 0, 2) > 0), shared, 0.0)
        kind = np.array([kind_of[key] for key in keys], np.int64)
        return Rates(rates[kind].reshape(-1, len(cluster.names)), kind, shared)


def read_trace(path: Path, v100: Mapping[Kind, float]) -> Jobs:
    """Read a trace of Gavel's; raises `FormatError` with the line whose fields are wrong.

    An SLO is a factor of the time alone on a v100, whose rates `v100` gives.
    """
    rows = []
    for number, line in enumerate(read_lines(path), 1):
        fields = line.rstrip("\r\n").split("\t")
        if len(fields) != FIELDS:
            raise FormatError(
                f"{path}:{number} has {len(fields)} fields; a trace has {FIELDS}, separated by tabs. Add them."
            )
        steps, scale, weight, slo, arrival_s = (number_of(cell, f"{path}:{number}", least=-MOST) for cell in fields[5:])
        rows.append((fields[0], steps, scale, weight, slo, arrival_s))
    return _jobs(rows, v100)


def _jobs(rows: Sequence[tuple[str, float, float, float, float, float]], v100: Mapping[Kind, float]) -> Jobs:
    """Return jobs of (model, steps, scale, weight, SLO, arrival)."""
    columns = list(zip(*rows, strict=True)) or [()] * 6
    steps, scale, weight, slo, arrival_s = (np.array(column, np.float64) for column in columns[1:])
    rate = np.array([v100.get((model, int(size)), math.nan) for model, size in zip(columns[0], scale, strict=True)])
    deadline_s = np.where(slo > 0, arrival_s + slo * steps / rate, math.inf)
    ids = [str(index) for index in range(len(rows))]
    return Jobs(ids, scale.astype(np.int64), steps, arrival_s, columns[0], (), weight, deadline_s)


# Gavel's generator of jobs: any seed, equal bit for bit to the published one.
#
# Per job, in this order (random.Random(seed + 2)): the gang size from uniform
# (0, 1), drawn even when all jobs have one device; random() >= 0.8 for a long
# job of 60 * 10^U(3, 4) seconds, otherwise 60 * 10^U(1.5, 3); one of 26 models,
# again until it can be distributed where the gang is larger than 1. Steps are
# seconds times the rate on a v100. Gaps between arrivals come from
# random.Random(seed + 3): -ln(1 - U) hours at one job per hour, the first job
# at 0. Source: Narayanan et al., OSDI 2020, and the code released with it.

FAMILIES = (
    ("ResNet-18", (16, 32, 64, 128, 256)), ("ResNet-50", (16, 32, 64, 128)), ("Transformer", (16, 32, 64, 128, 256)),
    ("LM", (5, 10, 20, 40, 80)), ("Recommendation", (512, 1024, 2048, 4096, 8192)),
)  # fmt: skip
MODELS = (*(f"{name} (batch size {size})" for name, sizes in FAMILIES for size in sizes), "A3C", "CycleGAN")
"""26 models, in the order in which they are drawn from."""

NUM_DISTRIBUTED = 19
"""The first ones, four families, may run on more than one device."""

Scale = tuple[tuple[float, int], ...]
SCALES: Scale = ((0.7, 1), (0.8, 2), (0.95, 4), (math.inf, 8))
"""Gang sizes by the draw below which they are chosen: 70 % one device, 10 % two, 15 % four, 5 % eight."""


def generate(
    num_jobs: int, seed: int, v100: Mapping[tuple[str, int], float], *, jobs_per_hour: float, multi: bool
) -> Jobs:
    """Return jobs of the generator; `v100` maps (model, scale) to steps/s there. 0 jobs per hour: all at time 0."""
    rng, gaps = random.Random(seed + 2), random.Random(seed + 3)
    models, scales, steps = [], [], []
    for _ in range(num_jobs):
        draw = rng.uniform(0, 1)
        # The published rule has 0.8 itself in the lower class; elsewhere borders belong to the upper one.
        scale = 2 if draw == 0.8 else next(size for border, size in SCALES if draw < border)
        long = rng.random() >= 0.8
        duration_s = 60 * 10 ** (rng.uniform(3, 4) if long else rng.uniform(1.5, 3))
        scale = scale if multi else 1
        model = rng.choice(MODELS)
        while scale > 1 and MODELS.index(model) >= NUM_DISTRIBUTED:
            model = rng.choice(MODELS)
        models.append(model)
        scales.append(scale)
        steps.append(duration_s * v100[model, scale])
    # Seconds are added up with the rate as the published code divides by it: 1 / (3600 / rate), rounding included.
    per_s = 1.0 / (3600.0 / jobs_per_hour) if jobs_per_hour > 0 else math.inf
    gaps_s = (-math.log(1.0 - gaps.random()) / per_s for _ in range(num_jobs - 1))
    arrival_s = np.array(list(itertools.accumulate(gaps_s, initial=0.0))[:num_jobs])
    return Jobs(
        [str(index) for index in range(num_jobs)], np.array(scales, np.int64), np.array(steps), arrival_s, models
    )
