"""Public measurements that lie beside the checkout: clusters (queues, throughputs, prices) and latencies of networks.

They are facts to check against, not part of the package; the README beside them names their sources and licences.

    jobs = cluster_table("gavel/jobs_seed0_multi.parquet")     # column -> array, one entry per row
    latencies().latency_ms[3]                                  # [5000] float32: setting 3, each architecture
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv, parquet

from headway.core.errors import InputError

FOLDER = Path(__file__).resolve().parent.parent.parent.parent / "shared" / "data"
"""Where they lie."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Measured latencies of FBNet architectures on several devices (HELP, NeurIPS 2021)."""

    ops: NDArray[np.uint8]
    """[architectures, layers] Operator of each layer, index into `op_names`."""

    op_names: tuple[str, ...]
    """[operators]"""

    settings: tuple[str, ...]
    """[settings] Device and batch size: '1080ti_32'."""

    latency_ms: NDArray[np.float32]
    """[settings, architectures] As published, in milliseconds."""


def public(relative: str) -> Path:
    """Return the path of a file; raises `InputError` where it does not lie beside the checkout."""
    path = FOLDER / relative
    if not path.is_file():
        raise InputError(f"public data {relative} is not in {FOLDER}. Put it there, or leave this check out.")
    return path


def cluster_table(relative: str) -> dict[str, NDArray[np.generic]]:
    """Return the columns of a table below cluster/ (Parquet or CSV): numbers, or text as objects; NaN, None = absent.

    Raises `InputError` on another kind of file, and as `public` does.
    """
    path = public(f"cluster/{relative}")
    readers = {".parquet": parquet.read_table, ".csv": csv.read_csv}
    if path.suffix not in readers:
        raise InputError(f"{relative} is no table; name one of {' or '.join(readers)}.")
    table: pa.Table = readers[path.suffix](path)
    return {name: table[name].to_numpy() for name in table.column_names}


def latencies() -> Latencies:
    """Return the latencies; raises `InputError` as `public` does."""
    with np.load(public("latency/fbnet.npz"), allow_pickle=False) as found:
        names, settings = (tuple(map(str, found[key])) for key in ("op_names", "settings"))
        return Latencies(found["ops"], names, settings, found["latency_ms"])
