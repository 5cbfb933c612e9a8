"""Operation traces of large jobs, as published with the straggler study (ByteDance, OSDI'25): one row per operation.

Use it to read and write the Parquet files with columns dp_rank, stage, rank,
step, optype, start_ts, duration (seconds from the start of the step), seq_id,
mc, gmc, mb_id. In the `Trace` the name of an event is its operation type,
`seq` is seq_id, `microbatch` is mb_id, `stage` is the global stage (gmc),
`layer` is the stage among those of the rank (mc), the lane is the stream the
operation type runs on, and `ranks` says where a rank stands: {'dp', 'pp'}.

Times are kept to 1 ns. The published files hold float32 seconds; such a trace
is marked (`meta['seconds']`), because its ends must be formed in float32
again to be the published ones; all others are written as float64. Parallel sizes come from the file's
own metadata or from `meta-NAME.yaml` beside `trace-NAME.parquet`.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "trace-a.parquet"
>>> trace = operations({"rank": [0, 1], "start_ns": [0, 7], "duration_ns": [5, 5]}, optypes=["gc", "gc"],
...                    coordinates={0: (0, 0), 1: (0, 1)})
>>> write(trace, path)
>>> back = read(path)
>>> back.name_of(1), back.ranks[1], back.events["start_ns"].tolist()
('gc', {'dp': 0, 'pp': 1}, [0, 7])
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import decode_json, parquet_faults, parse_yaml, read_regular, whole_file
from headway.core.integers import narrowed
from headway.core.tables import suggestion
from headway.core.units import NS_PER_S
from headway.trace.events.parquet import check_rows
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND

OPTYPES: dict[str, tuple[str, str]] = {
    "forward-compute": ("COMPUTE", "compute"),
    "backward-compute": ("COMPUTE", "compute"),
    "forward-send": ("SEND", "forward-send"),
    "forward-recv": ("RECV", "forward-recv"),
    "backward-send": ("SEND", "backward-send"),
    "backward-recv": ("RECV", "backward-recv"),
    "params-all-gather": ("COLL", "dp"),
    "grads-reduce-scatter": ("COLL", "dp"),
    "separate-grads-all-reduce": ("COLL", "compute"),
    "layernorm-grads-all-reduce": ("COLL", "compute"),
    "embedding-grads-all-reduce": ("COLL", "compute"),
    "optimizer-clip-main-grad": ("COLL", "compute"),
    "optimizer": ("OPTIM", "compute"),
    "gc": ("HOST", "compute"),
}
"""Operation type -> (kind of event, lane it runs on). Any other type is read as kind MARK, lane 'compute'."""

LANES: tuple[str, ...] = tuple(dict.fromkeys(lane for _, lane in OPTYPES.values()))
"""The lanes of a rank, in the order of the trace's lane table."""

INTEGER_COLUMNS: dict[str, tuple[str, type[np.signedinteger[Any]]]] = {
    "rank": ("rank", np.int16),
    "step": ("step", np.int64),
    "seq_id": ("seq", np.int32),
    "mc": ("layer", np.int8),
    "mb_id": ("microbatch", np.int8),
    "gmc": ("stage", np.int16),
}
"""Column of the file -> (column of the trace, its type in the file, widened when a value needs it)."""

REQUIRED: tuple[str, ...] = ("dp_rank", "stage", *INTEGER_COLUMNS, "optype", "start_ts", "duration")
"""Every column that the file must have."""

SIZES_KEY = b"headway.sizes"
"""Key of the file's metadata entry that holds the parallel sizes as JSON."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes of the traced job, under the names of the published meta files.

    Raises `InputError` when a size is not a positive whole number.
    """

    dp_size: int
    """Data-parallel replicas seen in the trace."""

    pp_size: int
    """Pipeline ranks."""

    vpp_size: int = 1
    """Stages per pipeline rank (interleaving)."""

    tp_size: int = 1
    """Tensor-parallel ranks; the trace holds one of them."""

    dsp_size: int = 1
    """Further data-parallel sharding inside a replica of the trace."""

    world_size: int = 0
    """All ranks of the job; 0 = product of the above without vpp."""

    trial_name: str = ""
    """Name of the job, '' when unknown."""

    run_id: int = 0
    """Number of the run of that job."""

    def __post_init__(self) -> None:
        """Check each size; fill `world_size`."""
        for name in ("dp_size", "pp_size", "vpp_size", "tp_size", "dsp_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InputError(
                    f"{name} is {value!r}; it must be a whole number of at least 1. Correct the meta file."
                )
        if not self.world_size:
            object.__setattr__(self, "world_size", self.dp_size * self.pp_size * self.tp_size * self.dsp_size)

    def to_json(self) -> dict[str, object]:
        """Return the content of a meta file."""
        return asdict(self)


def operations(
    columns: Mapping[str, ArrayLike],
    *,
    optypes: Sequence[str],
    coordinates: Mapping[int, tuple[int, int]],
    sizes: Sizes | None = None,
    seconds: str = "float64",
) -> Trace:
    """Build an operation trace from columns of `headway.trace.events.trace.COLUMNS`, each [n].

    `optypes` gives the type of each event, `coordinates` rank -> (dp, pp);
    kinds and lanes follow from the type. `seconds` is 'float32' when the
    times were float32 seconds once. Raises `InputError` as `Trace.from_columns` does.
    """
    names, codes = np.unique(np.asarray(optypes, dtype=object), return_inverse=True)
    return _trace(columns, [str(name) for name in names], codes, coordinates, sizes, seconds)


def _trace(
    columns: Mapping[str, ArrayLike],
    names: list[str],
    codes: NDArray[Any],
    coordinates: Mapping[int, tuple[int, int]],
    sizes: Sizes | None,
    seconds: str,
) -> Trace:
    kinds = np.array([KIND[OPTYPES.get(name, ("MARK", "compute"))[0]] for name in names], dtype=np.uint8)
    lanes = np.array([LANES.index(OPTYPES.get(name, ("MARK", "compute"))[1]) for name in names], dtype=np.int16)
    meta: dict[str, Any] = {"source": "straggler", "seconds": seconds}
    if sizes is not None:
        meta["sizes"] = sizes.to_json()
    return Trace.from_columns(
        {**columns, "name": codes, "kind": kinds[codes], "lane": lanes[codes]},
        names=names,
        lanes=LANES,
        ranks={rank: {"dp": dp, "pp": pp} for rank, (dp, pp) in sorted(coordinates.items())},
        meta=meta,
    )


def sizes_of(trace: Trace) -> Sizes:
    """Return the parallel sizes that the trace carries, or those its rows show.

    Raises `InputError` when a rank of the rows has no coordinates.
    """
    if "sizes" in trace.meta:
        return Sizes(**trace.meta["sizes"])
    dp, pp = coordinates_of(trace)
    layers = trace.events["layer"]
    return Sizes(
        dp_size=len(np.unique(dp)) or 1,
        pp_size=int(pp.max(initial=0)) + 1,
        vpp_size=max(int(layers.max(initial=0)), 0) + 1,
    )


def coordinates_of(trace: Trace) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (dp [n], pp [n]) of each event's rank.

    Raises `InputError` when `trace.ranks` does not say where a rank stands.
    """
    seen, inverse = np.unique(trace.events["rank"], return_inverse=True)
    for rank in seen.tolist():
        known = trace.ranks.get(rank, {})
        if "dp" not in known or "pp" not in known:
            raise InputError(
                f"rank {rank} has no 'dp' and 'pp' coordinates, so this is no operation trace. "
                "Give trace.ranks[rank] = {'dp': ..., 'pp': ...} for every rank."
            )
    dp = np.array([trace.ranks[rank]["dp"] for rank in seen.tolist()], dtype=np.int64)
    pp = np.array([trace.ranks[rank]["pp"] for rank in seen.tolist()], dtype=np.int64)
    return dp[inverse], pp[inverse]


def read(path: str | Path) -> Trace:
    """Read an operation trace.

    Raises `FormatError` naming a missing column, a null, a duration that is
    negative or not a number, or a rank that stands in two places.
    """
    with parquet_faults(path):
        check_rows(pq.read_metadata(path).num_rows, path)
        table = pq.read_table(path, use_threads=False)
    for column in REQUIRED:
        if column not in table.column_names:
            raise FormatError(
                f"{path} lacks the column {column!r} of operation traces. {suggestion(table.column_names, column)} "
                "Rename it or write it."
            )
        if table[column].null_count:
            raise FormatError(
                f"{path} has {table[column].null_count} empty cells in {column!r}. Fill or drop the rows."
            )
    integers = {name: _integers(table, name, path) for name in ("dp_rank", "stage", *INTEGER_COLUMNS)}
    columns: dict[str, ArrayLike] = {ours: integers[theirs] for theirs, (ours, _) in INTEGER_COLUMNS.items()}
    columns["start_ns"] = _nanoseconds(table, "start_ts", path)
    columns["duration_ns"] = _nanoseconds(table, "duration", path)
    optype = table.select(["optype"]).unify_dictionaries()["optype"].combine_chunks()
    if not pa.types.is_dictionary(optype.type):
        optype = optype.dictionary_encode()
    return _trace(
        columns,
        [str(name) for name in optype.dictionary.to_pylist()],
        optype.indices.to_numpy(zero_copy_only=False),
        _coordinates(integers["rank"], integers["dp_rank"], integers["stage"], path),
        _sizes_beside(table, Path(path)),
        "float32" if table["start_ts"].type == pa.float32() else "float64",
    )


def _integers(table: Any, column: str, path: str | Path) -> NDArray[np.int64]:
    if not pa.types.is_integer(table[column].type):
        raise FormatError(f"{path}: column {column!r} holds {table[column].type}, not integers. Convert the column.")
    values: NDArray[np.int64] = table[column].to_numpy().astype(np.int64)
    return values


def _nanoseconds(table: Any, column: str, path: str | Path) -> NDArray[np.int64]:
    """Return seconds as whole nanoseconds, or say which row is no time."""
    if not pa.types.is_floating(table[column].type) and not pa.types.is_integer(table[column].type):
        raise FormatError(f"{path}: column {column!r} holds {table[column].type}, not seconds. Convert the column.")
    seconds = table[column].to_numpy().astype(np.float64)
    wrong = ~np.isfinite(seconds) | ((seconds < 0) if column == "duration" else False)
    if wrong.any():
        row = int(wrong.argmax())
        raise FormatError(
            f"{path}: {column} of row {row} ({table['optype'][row]}, step {table['step'][row]}, rank "
            f"{table['rank'][row]}) is {seconds[row]}; it must be a finite number of seconds, a duration not negative. "
            "Drop the row or record it again."
        )
    whole: NDArray[np.int64] = np.rint(seconds * NS_PER_S).astype(np.int64)
    return whole


def _coordinates(
    rank: NDArray[np.int64], dp: NDArray[np.int64], pp: NDArray[np.int64], path: str | Path
) -> dict[int, tuple[int, int]]:
    ranks, first = np.unique(rank, return_index=True)
    at = np.searchsorted(ranks, rank)
    astray = (dp[first][at] != dp) | (pp[first][at] != pp)
    if astray.any():
        row = int(astray.argmax())
        here = int(first[at[row]])
        raise FormatError(
            f"{path}: rank {rank[row]} is dp_rank {dp[here]}, stage {pp[here]} in row {here} but dp_rank {dp[row]}, "
            f"stage {pp[row]} in row {row}. A rank has one place; correct the rows."
        )
    return {int(r): (int(dp[i]), int(pp[i])) for r, i in zip(ranks, first, strict=True)}


def _sizes_beside(table: Any, path: Path) -> Sizes | None:
    """Return the sizes of the file's own metadata, else of the meta file beside it, else None."""
    own = (table.schema.metadata or {}).get(SIZES_KEY)
    if own is not None:
        return _sizes(decode_json(own, f"{SIZES_KEY.decode()} of {path}"), path)
    beside = path.with_name(path.stem.replace("trace", "meta", 1) + ".yaml")
    if beside == path or not path.stem.startswith("trace") or not beside.is_file():
        return None
    text = read_regular(beside).decode("utf-8", "replace")
    return _sizes(parse_yaml(text, str(beside)), beside)


def _sizes(facts: Any, path: Path) -> Sizes:
    known = {field.name for field in fields(Sizes)}
    if not isinstance(facts, dict) or not {"dp_size", "pp_size"} <= set(facts):
        raise FormatError(
            f"{path} holds no parallel sizes: 'dp_size' and 'pp_size' are required. Add or remove the file."
        )
    return Sizes(**{name: value for name, value in facts.items() if name in known})


def write(trace: Trace, path: str | Path) -> None:
    """Write `trace` as a published operation trace, whole or not at all; the inverse of `read` to 1 ns.

    Seconds are float64, but for a trace that was read from float32 seconds and whose times still are.
    Raises `InputError` when a rank has no coordinates or an event no name.
    """
    dp, pp = coordinates_of(trace)
    codes = trace.events["name"]
    if len(codes) and int(codes.min()) < 0:
        raise InputError(
            f"event {int(codes.argmin())} has no operation type. Name every event before writing the trace."
        )
    arrays: dict[str, Any] = {"dp_rank": pa.array(narrowed(dp, np.int8)), "stage": pa.array(narrowed(pp, np.int8))}
    for theirs, (ours, dtype) in INTEGER_COLUMNS.items():
        arrays[theirs] = pa.array(narrowed(trace.events[ours].astype(np.int64), dtype))
    arrays["optype"] = pa.DictionaryArray.from_arrays(
        pa.array(narrowed(codes.astype(np.int64), np.int8)), pa.array(list(trace.names), pa.string())
    )
    precision = _seconds_dtype(trace)
    for theirs, ours in (("start_ts", "start_ns"), ("duration", "duration_ns")):
        arrays[theirs] = pa.array((trace.events[ours] / NS_PER_S).astype(precision))
    table = pa.table(arrays)
    if "sizes" in trace.meta:
        table = table.replace_schema_metadata({SIZES_KEY: json.dumps(trace.meta["sizes"]).encode()})
    with whole_file(path) as draft:
        pq.write_table(table, draft, compression="zstd")


def _seconds_dtype(trace: Trace) -> type[np.floating[Any]]:
    """Return float32 only for a trace that was float32 and still is: its ends are formed in that precision."""
    if trace.meta.get("seconds") != "float32":
        return np.float64
    for column in ("start_ns", "duration_ns"):
        whole = trace.events[column]
        back = np.rint((whole / NS_PER_S).astype(np.float32).astype(np.float64) * NS_PER_S)
        if (np.abs(back - whole) > 1).any():
            return np.float64
    return np.float32
