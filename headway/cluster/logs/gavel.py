"""Gavel's files: the table of rates, with jobs that share devices, and its traces of jobs.

`throughputs.parquet`: device_type, model, scale, other_model, other_scale,
steps_per_s, other_steps_per_s; `other_model` null = alone. A trace is text,
one job a line, tab-separated: model, command, folder, name of the steps
argument, whether it needs data, steps, scale, weight, SLO (-1 = none), arrival s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet

from headway.cluster.model import Cluster, Jobs, Rates
from headway.core.errors import FormatError, InputError
from headway.core.files.bounds import MOST, number_of
from headway.core.files.regular_file import read_lines
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
        try:
            table = pyarrow.parquet.read_table(path, columns=list(COLUMNS))
        except (OSError, pyarrow.ArrowException) as fault:
            raise FormatError(
                f"{path} is no table of rates ({fault}). Pass the folder with throughputs.parquet."
            ) from None
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
