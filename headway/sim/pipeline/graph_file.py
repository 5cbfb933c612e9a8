"""A graph of stages, or of layers, in a JSON file.

    {"stages": [{"name": "text", "forward_ns": 10, "backward_ns": 20},
                {"name": "image", "forward_ns": 12, "backward_ns": 24},
                {"name": "join", "preds": ["text", "image"], "forward_ns": 5, "backward_ns": 10}]}

`preds` are names or numbers of those that a stage takes its input from. Times
are those of one microbatch. What is to be cut into stages says "layers" in
the place of "stages", and may have `output_bytes` and `parameter_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from headway.core.errors import InputError
from headway.core.files.bounded_json import decode_json
from headway.core.files.regular_file import read_text
from headway.core.tables import suggestion
from headway.sim.pipeline.actions import StageGraph
from headway.sim.pipeline.orders import PipelineShape

Nanoseconds = Annotated[int, Meta(ge=0, le=1 << 60)]


class GraphRow(msgspec.Struct, frozen=True):
    """A stage or a layer."""

    name: str
    """Its name."""

    forward_ns: Nanoseconds
    """Forward of one microbatch."""

    backward_ns: Nanoseconds
    """Its backward."""

    preds: tuple[str | int, ...] = ()
    """Names, or places from 0, of those that feed it."""

    output_bytes: Annotated[float, Meta(ge=0, le=1e18)] = 0.0
    """Output of one microbatch."""

    parameter_bytes: Annotated[float, Meta(ge=0, le=1e18)] = 0.0
    """Weights."""


class _Rows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stages: tuple[GraphRow, ...] = ()
    layers: tuple[GraphRow, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphFile:
    """What a file says."""

    rows: tuple[GraphRow, ...]
    """[n] Stages or layers."""

    preds: tuple[tuple[int, ...], ...]
    """[n] Those that each takes its input from."""

    @classmethod
    def read(cls, path: Path) -> GraphFile:
        """Read a file; raises `FormatError` on another format, `InputError` on no file and on bad names."""
        fix = 'Write {"stages": [{"name", "preds", "forward_ns", "backward_ns"}, ..]}.'
        content = decode_json(read_text(path, "a graph of stages as JSON"), str(path), _Rows, fix=fix)
        rows = content.stages or content.layers
        if bool(content.stages) == bool(content.layers):
            raise InputError(f'{path} has {"both" if rows else "no"} stages and layers; give one list: "stages".')
        index: dict[str | int, int] = {}
        for number, row in enumerate(rows):
            if row.name in index:
                raise InputError(f"{path} has two stages called {row.name!r}. Rename one.")
            index |= {row.name: number, number: number}
        for row in rows:
            for name in row.preds:
                if name not in index:
                    raise InputError(
                        f"{path}: {row.name!r} takes its input from {name!r}, which is no stage. "
                        f"{suggestion((stage.name for stage in rows), str(name))}"
                    )
        return cls(rows, tuple(tuple(sorted({index[name] for name in row.preds})) for row in rows))

    def shape(self, num_microbatches: int, *, comm_ns: int = 0, cap: float | None = None) -> PipelineShape:
        """Return the shape of these stages; half of a backward is taken to be the gradient of the input."""
        back = [row.backward_ns for row in self.rows]
        return PipelineShape.of_graph(
            StageGraph(self.preds), num_microbatches, [row.forward_ns for row in self.rows],
            [ns - ns // 2 for ns in back], [ns // 2 for ns in back], comm_ns=comm_ns, cap=cap,
        )  # fmt: skip
