"""Microsoft's Philly trace, and queues as CSV.

Philly (Jeon et al., ATC 2019), as a Parquet file with the columns
submitted_unix_s, duration_s, num_devices, virtual_cluster: when jobs started
is not part of it. A CSV has a header; columns id, arrival_s, run_s and
num_devices, and, where known, start_s, device_type, owner, model. Jobs that
have not run have num_steps in place of run_s, and a model that runs measured.
"""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow.parquet

from headway.cluster.logs.record import JobRecord, RecordedQueue
from headway.cluster.logs.slurm import read_piped, read_sacct
from headway.core.errors import FormatError
from headway.core.files.regular_file import read_table

PHILLY = ("submitted_unix_s", "duration_s", "num_devices", "virtual_cluster")
NEEDED = ("id", "arrival_s", "run_s", "num_devices")


def read_philly(path: Path, virtual_cluster: str = "") -> RecordedQueue:
    """Read the Philly trace, all of it or one virtual cluster; raises `FormatError`."""
    try:
        table = pyarrow.parquet.read_table(path, columns=list(PHILLY))
    except (OSError, pyarrow.ArrowException) as fault:
        raise FormatError(f"{path} is no queue of Philly's ({fault}). Pass its jobs.parquet.") from None
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
        except ValueError as fault:
            raise FormatError(f"{path}:{number}: {fault}. Write num_devices and seconds as numbers.") from None
        words = (row.get("device_type", ""), row.get("owner", ""), row.get("model", ""))
        records.append(JobRecord(row["id"], *numbers, start_s, *words))
    return RecordedQueue.of(records, path, in_steps=in_steps)


def read_queue(path: Path, virtual_cluster: str = "") -> RecordedQueue:
    """Read a log by its ending: .json (sacct), .parquet (Philly), .csv, anything else `sacct -P`."""
    if not path.is_file():
        raise FormatError(f"{path} does not exist or is no file. Pass what `sacct --json` printed.")
    if path.suffix == ".parquet":
        return read_philly(path, virtual_cluster)
    readers = {".json": read_sacct, ".csv": read_csv}
    return readers.get(path.suffix, read_piped)(path)
