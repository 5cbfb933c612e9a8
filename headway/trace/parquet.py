"""Headway's own file: a trace as Parquet, every column and every table, about 10 bytes per event.

Use it to keep a trace. What is read is what was written, bit for bit: columns
as zstd Parquet columns (times delta-coded), the names, lanes, groups, ranks
and facts as one JSON text in the file's key-value metadata. Times are int64
nanoseconds. Any Parquet tool can open the columns.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "a.parquet"
>>> write(Trace.from_columns({"start_ns": [0, 5], "duration_ns": [5, 7]}, names=["add"], name=[0, 0]), path)
>>> read(path).events["start_ns"].tolist()
[0, 5]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headway.core.errors import FormatError
from headway.core.whole_file import whole_file
from headway.trace.tables import numbered, plain_tables
from headway.trace.trace import COLUMNS, Trace

SCHEMA = "headway.trace/1"
"""Schema and version; a file of another version is refused."""

TABLES_KEY = b"headway.trace"
"""Key of the metadata entry that holds the tables and marks the file as ours."""

DELTA_CODED = ("start_ns", "duration_ns", "seq", "corr", "bytes")
"""Columns whose neighbours lie close together: differences take less room than a dictionary."""


def write(trace: Trace, path: str | Path) -> None:
    """Write `trace` to `path`, whole or not at all.

    Raises `InputError` when a table holds something JSON has no form for.
    """
    arrays = [pa.array(trace.events[column]) for column in COLUMNS]
    table = pa.Table.from_arrays(arrays, names=list(COLUMNS))
    tables = {"schema": SCHEMA, "names": list(trace.names), **plain_tables(trace)}
    text = json.dumps(tables, separators=(",", ":")).encode()
    coding: dict[str, Any] = {
        "compression": "zstd",
        "compression_level": 6,
        "use_dictionary": [column for column in COLUMNS if column not in DELTA_CODED],
        "column_encoding": dict.fromkeys(DELTA_CODED, "DELTA_BINARY_PACKED"),
        "write_page_checksum": True,
        "store_schema": False,  # It would store the tables a second time.
    }
    with whole_file(path) as draft, pq.ParquetWriter(draft, table.schema, **coding) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({TABLES_KEY: text})


def read(path: str | Path) -> Trace:
    """Read what `write` wrote.

    Raises `FormatError` when the file is no Parquet, not ours, of another version, or damaged.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            tables = _tables(file.metadata.metadata or {}, path)
            table = file.read(use_threads=False)
    except (pa.ArrowException, OSError) as cause:
        raise FormatError(f"{path} cannot be read as Parquet: {cause}. Record or convert the trace again.") from cause
    missing = [column for column in COLUMNS if column not in table.column_names]
    if missing:
        raise FormatError(f"{path} lacks the columns {missing}. Write it again with Trace.save.")
    events = {
        column: np.ascontiguousarray(table.column(column).to_numpy(), dtype=dtype)
        for column, (dtype, _) in COLUMNS.items()
    }
    return Trace(
        events,
        tuple(tables["names"]),
        tuple(tables["lanes"]),
        numbered(tables["groups"]),
        numbered(tables["ranks"]),
        tables["meta"],
    )


def is_ours(path: str | Path) -> bool:
    """Return whether the Parquet file at `path` carries our tables; False for anything else."""
    footer = _footer(path)
    return footer is not None and TABLES_KEY in (footer.metadata or {})


def columns_of(path: str | Path) -> tuple[str, ...]:
    """Return the column names of a Parquet file, () when it is none."""
    footer = _footer(path)
    return tuple(footer.schema.names) if footer is not None else ()


def _footer(path: str | Path) -> Any:
    """Return the file's Parquet metadata, None when the file is no readable Parquet."""
    try:
        return pq.read_metadata(path)
    except (pa.ArrowException, OSError):
        return None


def _tables(metadata: Mapping[bytes, bytes], path: str | Path) -> dict[str, Any]:
    """Decode and check the tables of a file's metadata."""
    if TABLES_KEY not in metadata:
        raise FormatError(f"{path} is Parquet but not a headway trace: it has no {TABLES_KEY.decode()!r} entry.")
    try:
        tables: dict[str, Any] = json.loads(metadata[TABLES_KEY])
    except ValueError as cause:
        raise FormatError(f"{path} holds damaged tables: {cause}. Record or convert the trace again.") from cause
    if tables.get("schema") != SCHEMA:
        raise FormatError(
            f"{path} has the schema {tables.get('schema')!r}; this version reads {SCHEMA!r}. "
            "Open it with the version that wrote it."
        )
    return tables
