"""Headway's own file: a trace as Parquet, every column and every table, about 10 bytes per event.

Use it to keep a trace. What is read is what was written, bit for bit: columns
as zstd Parquet columns (times delta-coded), the names, lanes, groups, ranks
and facts as one JSON text in the file's key-value metadata. Times are int64
nanoseconds. Any Parquet tool can open the columns. A trace that lists its own
dependencies has one column more: the rows that each row comes after. pyarrow is
loaded with the first file: ranks and launchers import this module and may
never open one.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "a.parquet"
>>> write(Trace.from_columns({"start_ns": [0, 5], "duration_ns": [5, 7]}, names=["add"], name=[0, 0]), path)
>>> read(path).events["start_ns"].tolist()
[0, 5]

The small tables of a trace as plain values, ready for JSON.

Use it in a writer: what it returns holds only text, numbers, lists and dicts
with text keys, so that reading it back gives equal tables. Nothing is changed
silently: what has no JSON form is refused.

>>> plain_tables(Trace.from_columns({}, groups={0: {"name": "dp", "ranks": [0, 1]}}))["groups"]
{'0': {'name': 'dp', 'ranks': [0, 1]}}
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import check_regular, decode_json, parquet_faults, whole_file
from headway.trace.events.trace import COLUMNS, Trace


def plain_tables(trace: Trace) -> dict[str, object]:
    """Return lanes, groups, ranks and meta; the numbers that key groups and ranks become text.

    Raises `InputError` on a value without a JSON form and on a key that is no text.
    """
    return {
        "lanes": list(trace.lanes),
        "groups": {str(key): _plain(value, f"groups[{key}]") for key, value in trace.groups.items()},
        "ranks": {str(key): _plain(value, f"ranks[{key}]") for key, value in trace.ranks.items()},
        "meta": _plain(trace.meta, "meta"),
    }


def numbered(table: Mapping[str, Any]) -> dict[int, Any]:
    """Undo the text keys of groups and ranks."""
    return {int(key): value for key, value in table.items()}


def _plain(value: object, where: str) -> Any:
    """Return one value in JSON's terms."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InputError(f"{where} has the key {key!r}; JSON keys are text. Write it as {str(key)!r}.")
        return {key: _plain(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist(), where)
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise InputError(
        f"{where} is a {type(value).__name__}, which has no JSON form. Keep to text, numbers, lists and dicts."
    )


SCHEMA = "headway.trace/1"
"""Schema and version; a file of another version is refused."""

TABLES_KEY = b"headway.trace"
"""Key of the metadata entry that holds the tables and marks the file as ours."""

DELTA_CODED = ("start_ns", "duration_ns", "seq", "corr", "bytes")
"""Columns whose neighbours lie close together: differences take less room than a dictionary."""


ROW_GROUP = 1 << 17
"""Rows that are read together: a slice of the steps takes a few groups of a long trace, not all of it."""

FREE_ROWS = 300_000
"""Rows that a file of any size may have; beyond them it has a byte at least for each."""

AFTER = "after"
"""Column of the rows that each row comes after; only in traces that list their edges."""


def write(trace: Trace, path: str | Path) -> None:
    """Write `trace` to `path`, whole or not at all.

    Raises `InputError` when a table holds something JSON has no form for.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {column: pa.array(trace.events[column]) for column in COLUMNS}
    if trace.edges is not None:
        source, target = trace.edges
        columns[AFTER] = pa.LargeListArray.from_arrays(np.searchsorted(target, np.arange(len(trace) + 1)), source)
    table = pa.table(columns)
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
        writer.write_table(table, row_group_size=ROW_GROUP)
        writer.add_key_value_metadata({TABLES_KEY: text})


def read(path: str | Path) -> Trace:
    """Read what `write` wrote.

    Raises `FormatError` when the file is no Parquet, not ours, of another version, or damaged.
    """
    return StoredTrace(Path(path)).read()


class StoredTrace:
    """A file that `write` wrote, of which only the tables are read until rows are asked for.

    Raises `FormatError` as `read` does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._opened() as file:
            self._metadata = file.metadata
            check_rows(file.metadata.num_rows, path)
            tables = _tables(file.metadata.metadata or {}, path)
            self.lists_edges = AFTER in file.schema_arrow.names
            missing = [column for column in COLUMNS if column not in file.schema_arrow.names]
        if missing:
            raise FormatError(f"{path} lacks the columns {missing}. Write it again with Trace.save.")
        self.tables = Trace.from_columns(
            {},
            names=tables["names"],
            lanes=tables["lanes"],
            groups=numbered(tables["groups"]),
            ranks=numbered(tables["ranks"]),
            meta=tables["meta"],
        )
        """The trace without its rows."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._metadata.num_rows)

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have rows, in order."""
        bounds = [self.bounds("rank", group) for group in range(self._metadata.num_row_groups)]
        if all(low == high for low, high in bounds):
            return tuple(sorted({low for low, _ in bounds}))
        return tuple(np.unique(self.read(columns=["rank"]).events["rank"]).tolist())

    def bounds(self, column: str, group: int) -> tuple[int, int]:
        """Return bounds of the values of a column in one row group; those of int64 where the file says nothing."""
        place = list(COLUMNS).index(column)
        known = self._metadata.row_group(group).column(place).statistics
        if known is None or not known.has_min_max:
            widest = np.iinfo(np.int64)
            return int(widest.min), int(widest.max)
        return int(known.min), int(known.max)

    def read(self, ranges: Mapping[str, tuple[int, int]] | None = None, columns: Sequence[str] | None = None) -> Trace:
        """Return the rows whose columns lie in `ranges` (first, end excluded), of whole row groups only what may.

        Columns that `columns` leaves out hold their 'unknown' value and take no memory. Edges come with all rows only.
        """
        wanted = dict(ranges or {})
        groups = [
            group
            for group in range(self._metadata.num_row_groups)
            if all(
                low < end and high >= first
                for column, (first, end) in wanted.items()
                for low, high in [self.bounds(column, group)]
            )
        ]
        whole = not wanted and columns is None and self.lists_edges
        named = [*(columns or COLUMNS), *wanted, *([AFTER] if whole else [])]
        with self._opened() as file:
            table = file.read_row_groups(groups, columns=list(dict.fromkeys(named)), use_threads=False)
        events = {
            column: np.ascontiguousarray(table.column(column).to_numpy(), dtype=dtype)
            if column in table.column_names
            else np.broadcast_to(np.array(blank, dtype), table.num_rows)
            for column, (dtype, blank) in COLUMNS.items()
        }
        found = replace(self.tables, events=events, edges=_edges(table) if whole else None)
        mask = np.ones(len(found), bool)
        for column, (first, end) in wanted.items():
            mask &= (events[column] >= first) & (events[column] < end)
        return found if mask.all() else found.where(mask)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Open the file; what pyarrow says of damage becomes a `FormatError`."""
        import pyarrow.parquet as pq

        check_regular(self.path)
        faults = parquet_faults(self.path, fix="Record or convert the trace again.")
        with faults, pq.ParquetFile(self.path, page_checksum_verification=True) as file:
            yield file


def _edges(table: Any) -> NDArray[np.int64] | None:
    """Return the edges [2, e] that the file lists, None when it has no such column."""
    if AFTER not in table.column_names:
        return None
    column = table.column(AFTER).combine_chunks()
    lengths = np.diff(column.offsets.to_numpy())
    return np.stack([column.flatten().to_numpy(), np.repeat(np.arange(len(lengths)), lengths)])


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
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_regular(path)
    try:
        return pq.read_metadata(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return None


def check_rows(num_rows: int, path: str | Path) -> None:
    """Raise `FormatError` where a Parquet file claims more rows than its bytes can tell apart.

    Times differ from row to row, so an honest row takes at least a byte; a column of one value takes none.
    """
    size = Path(path).stat().st_size
    if not 0 <= num_rows <= FREE_ROWS + size:
        raise FormatError(
            f"{path} claims {num_rows} rows in {size} bytes: no program writes such a file. Copy it again."
        )


def _tables(metadata: Mapping[bytes, bytes], path: str | Path) -> dict[str, Any]:
    """Decode and check the tables of a file's metadata."""
    if TABLES_KEY not in metadata:
        raise FormatError(f"{path} is Parquet but not a headway trace: it has no {TABLES_KEY.decode()!r} entry.")
    try:
        tables = decode_json(metadata[TABLES_KEY], f"the tables of {path}")
    except FormatError as cause:
        raise FormatError(f"{path} holds damaged tables: {cause}. Record or convert the trace again.") from cause
    if not isinstance(tables, dict) or not isinstance(tables.get("schema"), str):
        raise FormatError(f"{path} holds damaged tables: they are no object. Record or convert the trace again.")
    if tables.get("schema") != SCHEMA:
        raise FormatError(
            f"{path} has the schema {tables.get('schema')!r}; this version reads {SCHEMA!r}. "
            "Open it with the version that wrote it."
        )
    return tables
