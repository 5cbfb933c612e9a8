"""Slurm's accounting: `sacct --json`, and `sacct -P` with a header line.

    sacct -a -S 2026-01-01 --json > sacct.json
    sacct -a -S 2026-01-01 -P -o JobID,JobName,User,Submit,Start,End,State,AllocTRES > sacct.txt

Numbers in JSON are plain in older versions and {"set", "infinite", "number"}
in newer ones; a state is a word or a list of words. Devices are the TRES
gres/gpu, with a type where the site has one: gres/gpu:a100=4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headway.cluster.logs.record import JobRecord, RecordedQueue
from headway.core.errors import FormatError
from headway.core.files.bounded_json import read_json
from headway.core.files.regular_file import read_table

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
    return JobRecord(name, count, submit, end - start, start, kind, owner, str(job.get("name") or ""))


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
            records.append(JobRecord(row["JobID"], count, submit, end - start, start, kind, owner, name))
        else:
            skipped += 1
    return RecordedQueue.of(records, path, skipped)


def _time(text: str) -> float:
    """Return seconds since 1970 of Slurm's local time; NaN where it has not happened."""
    if text in ("Unknown", "None", ""):
        return math.nan
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
