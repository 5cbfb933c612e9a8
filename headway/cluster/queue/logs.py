"""A queue as it was recorded: who asked for what, when each job started and ended, on which devices.

Gavel's files: the table of rates, with jobs that share devices, and its traces of jobs.

`throughputs.parquet`: device_type, model, scale, other_model, other_scale,
steps_per_s, other_steps_per_s; `other_model` null = alone. A trace is text,
one job a line, tab-separated: model, command, folder, name of the steps
argument, whether it needs data, steps, scale, weight, SLO (-1 = none), arrival s.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet

from headway.cluster.model import MOST_DEVICES, Cluster, Jobs, Rates, Values
from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import MOST, number_of, parquet_faults, read_json, read_lines, read_table
from headway.core.tables import suggestion
from headway.cost.specs import shipped


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job of a log; times in seconds on one clock."""

    id: str
    """Unique name."""

    scale: int
    """Devices."""

    arrival_s: float
    """When it was submitted."""

    run_s: float
    """How long it ran."""

    start_s: float = math.nan
    """When it started; NaN = the log does not say."""

    device_type: str = ""
    """What it ran on; empty = the log does not say."""

    owner: str = ""
    """Who submitted it."""

    model: str = ""
    """What it was, for people."""

    limit_s: float = math.inf
    """Time limit that its submitter gave it; infinity = none, or the log does not say."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedQueue:
    """The jobs of a log that ran, in order of arrival from second 0 on."""

    jobs: Jobs
    """[n] One step of a job is a second on what it ran on."""

    start_s: Values
    """[n] When each started; NaN = not known."""

    device_type: tuple[str, ...]
    """[n] What each ran on, or empty."""

    skipped: int = 0
    """Jobs of the log that never ran or asked for no devices."""

    in_steps: bool = False
    """A step of a job is one of its training: only runs say how long it takes."""

    @classmethod
    def of(
        cls, records: Iterable[JobRecord], source: object, skipped: int = 0, in_steps: bool = False
    ) -> RecordedQueue:
        """Sort records by arrival; raises `FormatError` when there are none, and on numbers that no log has."""
        rows = list(records)
        for row in rows:
            where = f"{source}: job {row.id!r}"
            number_of(row.scale, where, least=1, most=MOST_DEVICES)
            for value in (row.arrival_s, row.run_s, *([] if math.isnan(row.start_s) else [row.start_s])):
                number_of(value, where, least=-MOST)
        rows.sort(key=attrgetter("arrival_s"))
        if not rows:
            raise FormatError(f"{source} holds no job that ran on devices. Export finished jobs that asked for some.")
        first_s = rows[0].arrival_s
        jobs = Jobs(
            [row.id for row in rows], np.array([row.scale for row in rows]), np.array([row.run_s for row in rows]),
            np.array([row.arrival_s - first_s for row in rows]), [row.model for row in rows],
            [row.owner for row in rows], limit_s=np.array([row.limit_s for row in rows]),
        )  # fmt: skip
        start_s = np.array([row.start_s - first_s for row in rows])
        early = start_s < jobs.arrival_s - 1
        if early.any():
            raise FormatError(
                f"{source}: job {jobs.ids[int(early.argmax())]!r} starts before it is submitted. Remove it."
            )
        return cls(jobs, start_s, tuple(row.device_type for row in rows), skipped, in_steps)

    def rates(self, cluster: Cluster, speed: Mapping[str, float]) -> Values:
        """[n, W] Steps (seconds as recorded) per second on each type, by relative speeds of types.

        A job whose type is not known runs equally fast everywhere: nothing is
        gained by moving it. Raises `InputError` for a type without a speed,
        and for a queue in steps, whose rates only runs can say (`runs.queue_rates`).
        """
        if self.in_steps:
            raise InputError("the queue has num_steps; how long a step takes, runs say. Pass --runs NAME=FOLDER,...")
        if len(cluster.names) == 1 and not speed:
            return np.ones((len(self.jobs), 1))
        fast = np.array([relative_speed(name, speed) for name in cluster.names])
        own = {name: relative_speed(name, speed) for name in set(self.device_type) if name}
        base = np.array([own.get(name, math.nan) for name in self.device_type])
        return np.where(np.isnan(base)[:, None], 1.0, fast / base[:, None])


def relative_speed(name: str, given: Mapping[str, float]) -> float:
    """Relative speed of a device type: as given, or the makers' peak of 16-bit arithmetic."""
    if name in given:
        return given[name]
    specs = shipped().devices
    near = [device for key, device in specs.items() if key.lower().split("-")[0] == name.lower().split("-")[0]]
    peaks = [device.flops_per_s.get("fp16") or device.flops_per_s.get("bf16") for device in near]
    known = [peak for peak in peaks if peak]
    if not known:
        raise InputError(
            f"no speed of device type {name!r} is known. Pass --speed {name}=1.0,... "
            f"{suggestion({key.split('-')[0].lower() for key in specs}, name)}"
        )
    return min(known)


# Slurm's accounting: `sacct --json`, and `sacct -P` with a header line.
#
#     sacct -a -S 2026-01-01 --json > sacct.json
#     sacct -a -S 2026-01-01 -P -o JobID,JobName,User,Submit,Start,End,State,AllocTRES,TimelimitRaw > sacct.txt
#
# Time limits are minutes, by which backfill reserves devices; a log may lack them.
# Numbers in JSON are plain in older versions and {"set", "infinite", "number"}
# in newer ones; a state is a word or a list of words. Devices are the TRES
# gres/gpu, with a type where the site has one: gres/gpu:a100=4.

PIPED = ("JobID", "Submit", "Start", "End", "AllocTRES")
"""Columns that `sacct -P` has to have."""

GPU = re.compile(r"gres/gpu(?::([\w.-]+))?=(\d+)")


def read_sacct(path: Path) -> RecordedQueue:
    """Read `sacct --json`; raises `FormatError` that names Slurm's version where the shape is not a known one."""
    tree = read_json(path)
    jobs = tree.get("jobs") if isinstance(tree, dict) else None
    if not isinstance(jobs, list):
        raise FormatError(f"{path} has no list 'jobs': it is not what `sacct --json` prints. Export it again.")
    records = []
    for number, job in enumerate(jobs):
        try:
            records.append(_record(job))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as fault:
            raise FormatError(
                f"{path}: job {number} of Slurm {_version(tree)} has another shape than known ones ({fault!r}). "
                f"Export with `sacct -P -o {','.join(PIPED)},User,State,JobName` instead."
            ) from None
    return RecordedQueue.of([r for r in records if r], path, sum(r is None for r in records))


def _version(tree: Mapping[str, Any]) -> str:
    """Return what the export says about its version."""
    meta = tree.get("meta")
    slurm = (meta.get("slurm") or meta.get("Slurm") or {}) if isinstance(meta, dict) else {}
    version = slurm.get("release") or slurm.get("version") if isinstance(slurm, dict) else None
    return str(version or "of unknown version")


def _number(value: Any) -> float:
    """Return a number that is plain, or {"set": true, "infinite": false, "number": n}; NaN where it is not set."""
    if isinstance(value, dict):
        return float(value["number"]) if value["set"] and not value.get("infinite") else math.nan
    return float(value)


def _record(job: Mapping[str, Any]) -> JobRecord | None:
    """Return a job, or None where it ran not at all, has not ended, or used no devices."""
    when = job["time"]
    submit, start, end = (_number(when[name]) for name in ("submission", "start", "end"))
    count, kind = _devices(
        f"{entry['type']}/{entry.get('name') or ''}={int(_number(entry['count']))}"
        for entry in job["tres"]["allocated"]
    )
    if not count or not start > 0 or not end > start:
        return None
    name = str(int(_number(job["job_id"])))
    array = (
        _number((job.get("array") or {}).get("task_id", math.nan)) if isinstance(job.get("array"), dict) else math.nan
    )
    name = name if math.isnan(array) else f"{name}_{int(array)}"
    owner = str(job.get("user") or (job.get("association") or {}).get("user") or "")
    limit_s = 60 * _number(when["limit"]) if when.get("limit") else math.nan
    return JobRecord(name, count, submit, end - start, start, kind, owner, str(job.get("name") or ""), _limit(limit_s))


def _limit(seconds: float) -> float:
    """Return a time limit; infinity where the log has none."""
    return seconds if seconds > 0 else math.inf


def _devices(entries: Iterable[str]) -> tuple[int, str]:
    """Return the number of devices and their type, from TRES entries; one with a type says more than one without."""
    found = [match.groups() for entry in entries for match in GPU.finditer(entry)]
    typed = [(int(count), kind) for kind, count in found if kind]
    if typed:
        return sum(count for count, _ in typed), typed[0][1].lower()
    return max((int(count) for _, count in found), default=0), ""


def read_piped(path: Path) -> RecordedQueue:
    """Read `sacct -P`; raises `FormatError` on missing columns or a time that is none."""
    records, skipped = [], 0
    for number, row in read_table(path, PIPED, "|", fix=f"Export with `sacct -P -o {','.join(PIPED)},User`."):
        if "." in row["JobID"]:  # a step of a job
            continue
        try:
            submit, start, end = (_time(row[name]) for name in ("Submit", "Start", "End"))
        except (ValueError, OverflowError) as fault:
            raise FormatError(f"{path}:{number}: {fault}. Write times as 2026-01-31T12:00:00.") from None
        count, kind = _devices([row["AllocTRES"]])
        if count and end > start:
            owner, name = row.get("User", ""), row.get("JobName", "")
            minutes = row.get("TimelimitRaw") or ""
            limit_s = _limit(60.0 * int(minutes) if minutes.isdecimal() else math.nan)
            records.append(JobRecord(row["JobID"], count, submit, end - start, start, kind, owner, name, limit_s))
        else:
            skipped += 1
    return RecordedQueue.of(records, path, skipped)


def _time(text: str) -> float:
    """Return seconds since 1970 of Slurm's local time; NaN where it has not happened."""
    if text in ("Unknown", "None", ""):
        return math.nan
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


# Microsoft's Philly trace, and queues as CSV.
#
# Philly (Jeon et al., ATC 2019), as a Parquet file with the columns
# submitted_unix_s, duration_s, num_devices, virtual_cluster: when jobs started
# is not part of it. A CSV has a header; columns id, arrival_s, run_s and
# num_devices, and, where known, start_s, device_type, owner, model, limit_s. Jobs that
# have not run have num_steps in place of run_s, and a model that runs measured.

PHILLY = ("submitted_unix_s", "duration_s", "num_devices", "virtual_cluster")
NEEDED = ("id", "arrival_s", "run_s", "num_devices")


def read_philly(path: Path, virtual_cluster: str = "") -> RecordedQueue:
    """Read the Philly trace, all of it or one virtual cluster; raises `FormatError`."""
    with parquet_faults(path, fix="Pass jobs.parquet of Philly's queue."):
        table = pyarrow.parquet.read_table(path, columns=list(PHILLY))
    rows = zip(*(table.column(name).to_pylist() for name in PHILLY), strict=True)
    records = [
        JobRecord(str(number), int(count), float(submit), float(run_s), owner=owner)
        for number, (submit, run_s, count, owner) in enumerate(rows)
        if virtual_cluster in ("", owner) and run_s > 0 and count > 0
    ]
    return RecordedQueue.of(records, f"{path} {virtual_cluster}".strip(), table.num_rows - len(records))


def read_csv(path: Path) -> RecordedQueue:
    """Read a queue from CSV; raises `FormatError` that names file and line."""
    records, in_steps = [], False
    for number, row in read_table(path, [name for name in NEEDED if name != "run_s"]):
        in_steps = "num_steps" in row and "run_s" not in row
        if not in_steps and "run_s" not in row:
            raise FormatError(f"{path} has no column run_s. Write a header with {', '.join(NEEDED)}.")
        try:
            numbers = (
                int(row["num_devices"]),
                float(row["arrival_s"]),
                float(row["num_steps" if in_steps else "run_s"]),
            )
            start_s = math.nan if in_steps else float(row.get("start_s") or math.nan)
            limit_s = _limit(float(row.get("limit_s") or math.nan))
        except ValueError as fault:
            raise FormatError(f"{path}:{number}: {fault}. Write num_devices and seconds as numbers.") from None
        words = (row.get("device_type", ""), row.get("owner", ""), row.get("model", ""))
        records.append(JobRecord(row["id"], *numbers, start_s, *words, limit_s))
    return RecordedQueue.of(records, path, in_steps=in_steps)


def read_queue(path: Path, virtual_cluster: str = "") -> RecordedQueue:
    """Read a log by its ending: .json (sacct), .parquet (Philly), .csv, anything else `sacct -P`."""
    if not path.is_file():
        raise FormatError(f"{path} does not exist or is no file. Pass what `sacct --json` printed.")
    if path.suffix == ".parquet":
        return read_philly(path, virtual_cluster)
    readers = {".json": read_sacct, ".csv": read_csv}
    return readers.get(path.suffix, read_piped)(path)


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
