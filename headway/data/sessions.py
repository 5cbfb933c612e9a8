"""Rows of one user session kept together: on disk, and in the order in which a job reads them.

Use it before `headway.data.jagged`: rows repeat each other inside a session,
so a batch deduplicates only if it holds sessions whole (RecD's second step).
`cluster_parquet` sorts a table by session, in time order inside, in bounded
memory. Clustered rows are not independent of each other; so what is shuffled
is the sessions (`session_order`), and `sessions_per_batch` says how many
different ones a batch still mixes.

>>> sessions = np.array([4, 4, 9, 9, 9, 1])
>>> session_order(sessions, seed=3, epoch=0).tolist()
[2, 3, 4, 5, 0, 1]
>>> sessions_per_batch(sessions, 3)
2.0
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.files.safe_files import check_regular, parquet_faults, whole_file
from headway.data.bytes.order import permute

Ints = NDArray[np.int64]

ROW_GROUP = 1 << 14
"""Rows of a row group: what a reader takes at once, and what a list column is compressed in."""

MEMORY_BYTES = 1 << 30
"""Uncompressed table that is sorted in memory at once; a larger one goes through files beside the target."""

BATCH = 1024
"""Rows of the batches that the sessions per batch are reported for."""


@dataclass(frozen=True, slots=True)
class Clustered:
    """What clustering did to a table."""

    num_rows: int
    num_sessions: int
    batch_size: int
    """Rows of the batches of the next two figures."""
    sessions_per_batch_before: float
    """Different sessions in a batch of consecutive rows, on average, as the table was."""
    sessions_per_batch_after: float
    bytes_before: int
    """Size of the file that was read."""
    bytes_after: int

    @property
    def rows_per_session(self) -> float:
        """S of RecD's model; 0 for an empty table."""
        return self.num_rows / self.num_sessions if self.num_sessions else 0.0

    def to_json(self) -> dict[str, object]:
        """Return the figures, the derived one too."""
        return {**asdict(self), "rows_per_session": self.rows_per_session}


def session_order(sessions: ArrayLike, seed: int, epoch: int) -> Ints:
    """Return [n] row numbers: sessions in the random order of (seed, epoch), the rows of each in the order they have.

    `sessions` [n] is the session of each row, of any sortable type. Pass the result as a loader's `sampler`.
    """
    number, count = _numbers(np.asarray(sessions))
    return np.argsort(permute(count, seed, epoch)(number), kind="stable")


def sessions_per_batch(sessions: ArrayLike, batch_size: int) -> float:
    """Return how many different sessions a batch of consecutive rows holds, on average; 0 without rows."""
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}; it must be 1 or more.")
    number, count = _numbers(np.asarray(sessions))
    if not len(number):
        return 0.0
    batch = np.arange(len(number)) // batch_size
    return len(np.unique(batch * count + number)) / (int(batch[-1]) + 1)


def cluster_parquet(
    source: str | Path,
    target: str | Path,
    *,
    by: str = "session",
    time: str | None = None,
    shuffle: int | None = None,
    batch_size: int = BATCH,
    memory_bytes: int = MEMORY_BYTES,
) -> Clustered:
    """Write the rows of Parquet file `source` to `target` with those of one session (column `by`) side by side.

    Inside a session rows follow column `time`, and where that is equal or not
    given, the order they had. Sessions stand in the order of their first rows,
    or with a seed `shuffle` in a random one. List columns are written without
    a dictionary, which would cost most of what clustering wins. Beside the
    key columns it holds about `memory_bytes`; `target` appears whole or not at
    all. Raises `InputError` on a missing column, a row without session or
    time, or a target that is the source; `FormatError` on what is no Parquet.
    """
    source, target = Path(source), Path(target)
    if target.exists() and source.exists() and target.samefile(source):
        raise InputError(f"{target} is the file that is read. Choose another target.")
    if not source.exists():
        raise InputError(f"there is no file {source}. Pass a Parquet file.")
    check_regular(source)
    with parquet_faults(source):
        table = pq.ParquetFile(source, memory_map=True)
    with table:
        with parquet_faults(source):
            number, count = _numbers(_key(table, by))
            place = permute(count, shuffle, 0)(number) if shuffle is not None else number
            keys = [place] if time is None else [_key(table, time), place]
        order = np.lexsort(keys)  # the last key decides first, and equal rows stay as they were
        before, after = (sessions_per_batch(rows, batch_size) for rows in (number, number[order]))
        _write(table, source, target, order, memory_bytes)
    return Clustered(len(order), count, batch_size, before, after, source.stat().st_size, target.stat().st_size)


def _numbers(values: NDArray[Any]) -> tuple[Ints, int]:
    """Return [n] a whole number per value, in the order of first appearance, and how many values differ."""
    found, first, number = np.unique(values, return_index=True, return_inverse=True)
    place = np.empty(len(found), np.int64)
    place[np.argsort(first)] = np.arange(len(found))
    return place[number.reshape(-1)], len(found)


def _key(table: pq.ParquetFile, name: str) -> NDArray[Any]:
    """Return a key column as [n] whole numbers that sort as its values do."""
    if name not in table.schema_arrow.names:
        raise InputError(f"there is no column {name!r}. Choose one of: {', '.join(table.schema_arrow.names)}.")
    column = table.read([name]).column(0)
    if column.null_count:
        raise InputError(f"column {name!r} is empty in {column.null_count} rows. Drop or fill them first.")
    try:
        ranks: pa.Array = pc.rank(column, sort_keys="ascending", tiebreaker="dense")
    except pa.ArrowNotImplementedError:
        raise InputError(
            f"column {name!r} is {column.type}, which has no order. Use a column of numbers or text."
        ) from None
    key: Ints = ranks.to_numpy(zero_copy_only=False).astype(np.int64)
    return key


def _write(table: pq.ParquetFile, source: Path, target: Path, order: Ints, memory_bytes: int) -> None:
    """Write the rows of `table` in `order`, part by part."""
    schema = table.schema_arrow
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    plain = [column.name for column in schema if not any(is_one(column.type) for is_one in lists)]
    metadata = table.metadata
    size = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
    num_parts = max(1, min(-(-size // max(1, memory_bytes)), len(order)))
    with (
        whole_file(target) as draft,
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".cluster-") as folder,
        pq.ParquetWriter(draft, schema, compression="zstd", use_dictionary=plain) as writer,
    ):
        for part in _parts(table, source, order, num_parts, Path(folder)):
            writer.write_table(part, row_group_size=ROW_GROUP)


def _batches(table: pq.ParquetFile, source: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows in their order; what fails between two batches is not the source's."""
    batches = table.iter_batches(ROW_GROUP)
    while True:
        with parquet_faults(source):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _parts(table: pq.ParquetFile, source: Path, order: Ints, num_parts: int, folder: Path) -> Iterator[pa.Table]:
    """Yield the rows in `order`, a part at a time; with several, each row is first routed to its part's file."""
    if num_parts == 1:
        with parquet_faults(source):
            rows = table.read()
        yield rows.take(order)
        return
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    width = -(-len(order) // num_parts)
    files = [folder / f"{part}.arrow" for part in range(num_parts)]
    with ExitStack() as stack:
        writers = [stack.enter_context(pa.ipc.new_stream(str(file), table.schema_arrow)) for file in files]
        seen = 0
        for batch in _batches(table, source):
            part = place[seen : seen + len(batch)] // width
            seen += len(batch)
            for index in np.unique(part).tolist():
                writers[index].write_batch(batch.take(np.flatnonzero(part == index)))
    for index, file in enumerate(files):
        # Routing kept the rows of a part in the order of the source, so their places are in that order too.
        with pa.ipc.open_stream(str(file)) as reader:
            rows = reader.read_all()
        file.unlink()
        yield rows.take(np.argsort(place[place // width == index]))
