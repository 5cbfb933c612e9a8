"""What a rank says of itself in RUN/tables/r<rank>.json, typed; what a damaged file says otherwise counts as missing.

>>> RankTables.of({"loops": {"0": 1}, "groups": "none", "device_type": "cuda"})
RankTables(device_type='cuda', groups={}, loops={0: 1}, memory={}, threads=0, bad_losses=[], losses=[], ddp=(), \
compute=None, matmuls=None)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import InputError
from headway.core.files.safe_files import converted, read_json
from headway.trace.rings.compute_facts import CallFlops, ComputeFacts


class DdpModel(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a DistributedDataParallel model: see `headway.runtime.recorder.ddp_facts`."""

    parameter_bytes: list[int]
    parameter_types: list[str]
    parameter_names: list[str] = []
    order: list[int]
    """Indices of parameters in the order in which their gradients become ready; [] = not known."""
    first_bucket_bytes: int
    bucket_bytes: int
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    can_set_static_graph: bool = False


class MatmulsSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Linears whose rows are gathered before them or scattered after them (tensor parallelism)."""

    ranks: int
    """Ranks of their mesh."""
    shapes: dict[str, int]
    """Shape as `headway.cost.overlaps.read_shape` takes it -> linears that have it."""


class RankTables(msgspec.Struct, frozen=True, kw_only=True):
    """The tables that headway computes with; others are copied into the trace as they are."""

    device_type: str = "cpu"
    groups: dict[int, dict[str, Any]] = {}
    """Process groups that the rank met: {'name', 'ranks'} each."""
    loops: dict[int, int] = {}
    """Optimizer -> depth of the loop that steps it."""
    memory: dict[str, Any] = {}
    threads: int = 0
    """Threads of one operator (torch's intra-op pool) at the first step; 0 = not known."""
    bad_losses: list[Any] = []
    losses: list[tuple[int, float]] = []
    """(step, loss) as far as they were recorded."""
    ddp: tuple[DdpModel, ...] = ()
    compute: ComputeFacts | None = None
    matmuls: MatmulsSeen | None = None

    @classmethod
    def of(cls, tables: Mapping[str, Any]) -> RankTables:
        """Return what can be read of the content of such a file."""
        return converted(tables, cls)[0]


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, {} where it holds something else or cannot be read."""
    try:
        found = read_json(path)
    except (OSError, InputError):
        return {}
    return found if isinstance(found, dict) else {}


def rank_tables(run: Path) -> dict[int, RankTables]:
    """Return rank -> its tables, in the order of the files."""
    files = sorted((run / "tables").glob("r*.json"))
    return {int(file.stem[1:]): RankTables.of(json_object(file)) for file in files if file.stem[1:].isdecimal()}


def counted_calls(run: Path) -> tuple[CallFlops, ...]:
    """Return the operations of models' calls that children of the recording have counted, in the order of models."""
    calls = []
    for path in sorted((run / "flops").glob("r*-m*.json")):
        model = path.stem.rpartition("-m")[2]
        if model.isdecimal():
            calls.append(converted({**json_object(path), "model": int(model)}, CallFlops)[0])
    return tuple(calls)
