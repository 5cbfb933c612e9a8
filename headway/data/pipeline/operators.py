r"""Operators as their author declares them, and which of them may change places.

A stage says what it does to an example (`kind`), whether it draws random
numbers, and whether it looks at its example alone. Two stages may change
places when every result stays the same bit by bit: one that picks pixels
(crop, flip) and one that treats each pixel by itself (colour, conversion).
All others keep their order; a function that nothing is known about also keeps
all others on their sides.

>>> stages = [Stage("to_float", "dtype", id=1), Stage("jitter", "photometric", id=2), Stage("crop", "geometric", id=3)]
>>> [(op.name, op.depends_on) for op in planned_ops("files", stages)]
[('files', ()), ('to_float', (0,)), ('jitter', (0, 1)), ('crop', (0,))]

Files of the pipeline planner: profiles (YAML, cedar's layout) and operators (TOML).

A profile holds, per operator id, nanoseconds and bytes per example of one
in-process run (`baseline`), and under `offloads` the throughput with only
that operator run elsewhere. An operator file has one `[[op]]` row per
operator, in the order of the pipeline: `id`, `name`, and where needed
`depends_on` (ids), `fixed`, `random`, `source`, `fusable`.

>>> ops = parse_ops('[[op]]\nid = 1\nname = "read"\nsource = true\n[[op]]\nid = 0\nname = "to_tensor"')
>>> [(op.id, op.name, op.source, op.fusable) for op in ops]
[(1, 'read', True, True), (0, 'to_tensor', False, False)]

Measure and plan an input pipeline: the functions, for any object that knows how to run its examples.

`headway.data.Pipeline` is that object; what needs torch is in `runtime/`.

>>> from headway.data.pipeline.optimize import Op
>>> class Two:
...     def ops(self): return (Op(0, "read", source=True), Op(1, "crop"))
...     def timed(self, index): return {0: (0.001, 0, 100), 1: (0.003, 100, 10)}
...     def __len__(self): return 4
>>> measured = profile(Two(), n=8)
>>> measured.examples_per_s, measured.out_bytes[1], plan(Two(), measured).order
(250.0, 10.0, (0, 1))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import yaml

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import parse_toml, parse_yaml, read_regular
from headway.core.machine.host import host_cores
from headway.core.tables import pick
from headway.core.units import NS_PER_S
from headway.data.bytes.order import permute
from headway.data.pipeline import optimize
from headway.data.pipeline.optimize import Op, PipelinePlan, PipelineProfile, Resources

KINDS: dict[str, tuple[str, ...]] = {
    "geometric": ("photometric", "dtype"),
    "photometric": ("geometric",),
    "dtype": ("geometric",),
    "resample": (),
    "neighbourhood": (),
    "decode": (),
    "filter": (),
    "cache": (),
    "opaque": (),
}
"""What a stage does -> the kinds it changes places with. geometric: picks or moves pixels; photometric: computes each
pixel from itself alone; dtype: converts each value; resample: computes other pixels from neighbours (resize);
neighbourhood: computes the same pixels from neighbours (blur); opaque: unknown."""

PROMISED: dict[str, tuple[str, ...]] = {
    "resample": ("photometric", "dtype"),
    "neighbourhood": ("geometric", "dtype"),
}
"""Kind -> the kinds that it may pass on its author's word (`commutes=True`). Results differ then: by rounding and
clipping where a resize passes colours, at the border where a blur passes a crop; `check` says by how much."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One operator of a pipeline: `function(example, rng)` for a random one, `function(example)` otherwise."""

    name: str
    kind: str
    function: Callable[..., Any] | None = None
    random: bool = False
    row_pure: bool = True
    """Whether the result depends on the example alone; what does not is never cached."""
    commutes: bool = False
    """The author's word that it may change places although results differ a little: see `PROMISED`."""
    cache_bytes: int = 0
    """Room of a cache stage."""
    id: int = -1
    """Place in the pipeline as written, from 1; it decides the stage's random numbers wherever it runs."""

    def __post_init__(self) -> None:
        """Raise `UnknownNameError` on an unknown kind, `InputError` on a wrong promise."""
        pick(KINDS, self.kind, "kind of operator")
        if self.commutes and self.kind not in PROMISED:
            raise InputError(f"{self.name} is {self.kind}; commutes=True is for {', '.join(PROMISED)}. Drop it.")


def may_swap(one: Stage, other: Stage) -> bool:
    """Return whether two stages may change places.

    >>> may_swap(Stage("flip", "geometric"), Stage("normalise", "photometric"))
    True
    >>> may_swap(Stage("grey", "photometric"), Stage("jitter", "photometric"))
    False
    """
    exact = other.kind in KINDS[one.kind]
    return exact or other.kind in _promised(one) or one.kind in _promised(other)


def _promised(stage: Stage) -> tuple[str, ...]:
    return PROMISED[stage.kind] if stage.commutes else ()


def planned_ops(source: str, stages: Sequence[Stage]) -> tuple[Op, ...]:
    """Return what the planner is told: the source (id 0) and the stages, each after all it may not pass."""
    found = [Op(0, source, source=True)]
    for place, stage in enumerate(stages):
        earlier = tuple(other.id for other in stages[:place] if not may_swap(other, stage))
        random = stage.random or not stage.row_pure
        # What changes places with nothing keeps its own.
        fixed = not any(may_swap(stage, other) for other in stages)
        found.append(Op(stage.id, stage.name, (0, *earlier), random=random, fixed=fixed))
    return tuple(found)


def check_stages(stages: Sequence[Stage]) -> None:
    """Raise `InputError` where a cache would keep random draws, or what depends on more than its example."""
    for place, stage in enumerate(stages):
        if stage.kind != "cache":
            continue
        for other in stages[:place]:
            if other.random or not other.row_pure:
                why = "is random: every epoch would see the same draw" if other.random else "is not row-pure"
                raise InputError(f"cache() stands behind {other.name}, which {why}. Put cache() before it.")


# Files of the pipeline planner: profiles (YAML, cedar's layout) and operators (TOML).

OP_FIELDS: dict[str, type] = {
    "id": int,
    "name": str,
    "depends_on": list,
    "fixed": bool,
    "random": bool,
    "source": bool,
    "fusable": bool,
}
"""Keys of an `[[op]]` row and their types; the first two are needed."""


def read_ops(path: str | Path) -> tuple[Op, ...]:
    """Return the operators of the TOML file at `path`. Raises `InputError`, or `FormatError` on its rows."""
    return parse_ops(_text(path, "--ops"), str(path))


def parse_ops(text: str, where: str = "the operator file") -> tuple[Op, ...]:
    """Return the operators that TOML `text` lists. Raises `FormatError` naming the row of a mistake."""
    rows = parse_toml(text, where).get("op")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise FormatError(f"{where} lists no operators. Write one [[op]] table per operator, the source first.")
    return tuple(_op(row, f"[[op]] row {number} of {where}") for number, row in enumerate(rows, start=1))


def _op(row: Mapping[str, Any], where: str) -> Op:
    for key, value in row.items():
        kind = pick(OP_FIELDS, key, f"key in {where}")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise FormatError(f"{where}: {key} is {value!r}; write a value of type {kind.__name__}.")
    missing = [key for key in ("id", "name") if key not in row]
    if missing:
        raise FormatError(f"{where} has no {missing[0]}. Add it.")
    # What turns examples into tensors stays with the process that trains (published rule, told by the name there too).
    tensor = "totensor" in row["name"].lower().replace("_", "").replace("-", "")
    depends = tuple(row.get("depends_on", ()))
    if not all(isinstance(other, int) for other in depends):
        raise FormatError(f"{where}: depends_on is {list(depends)}; list ids of operators.")
    return Op(**{"fusable": not tensor, **row, "depends_on": depends})


def read_stats(path: str | Path) -> PipelineProfile:
    """Return the profile in the YAML file at `path`. Raises `InputError` when missing, `FormatError` on its content."""
    text = _text(path, "--stats")
    table = parse_yaml(text, str(path))
    if not isinstance(table, dict) or not isinstance(table.get("baseline"), dict):
        raise FormatError(f"{path} has no `baseline`. Pass a profile as `headway data profile` or cedar writes it.")
    run = table["baseline"]
    parts = {key: _numbers(run.get(key), f"baseline.{key} of {path}") for key in _SIZES}
    latency = parts.pop("latencies")
    away = {
        str(variant): {
            int(op): _number(_of(one, path, op).get("throughput"), f"{variant}.{op}.throughput of {path}")
            for op, one in _of(runs or {}, path, variant).items()
        }
        for variant, runs in _of(table.get("offloads") or {}, path, "offloads").items()
    }
    return PipelineProfile(
        in_bytes=parts["input_sizes"],
        out_bytes=parts["output_sizes"],
        seconds={op: value / NS_PER_S for op, value in latency.items()},
        examples_per_s=_number(run.get("throughput"), f"baseline.throughput of {path}"),
        offloaded=away,
        read_s_per_byte=_number((table.get("disk_info") or {}).get("read_latency", 0.0), f"disk_info of {path}"),
    )  # fmt: skip


_SIZES = ("input_sizes", "output_sizes", "latencies")


def stats_text(profile: PipelineProfile) -> str:
    """Return the YAML text that `read_stats` reads as `profile` (to the nanosecond)."""
    run = {
        "input_sizes": dict(profile.in_bytes),
        "output_sizes": dict(profile.out_bytes),
        "latencies": {op: value * NS_PER_S for op, value in profile.seconds.items()},
        "throughput": profile.examples_per_s,
    }
    away = {v: {op: {"throughput": rate} for op, rate in runs.items()} for v, runs in profile.offloaded.items()}
    disk = {"read_latency": profile.read_s_per_byte}
    return str(yaml.safe_dump({"baseline": run, "offloads": away, "disk_info": disk}))


def ops_text(ops: Sequence[Op]) -> str:
    """Return the TOML text that `parse_ops` reads as `ops`."""
    rows = []
    for op in ops:
        name = op.name.replace("\\", "\\\\").replace('"', '\\"')
        row = [f"id = {op.id}", f'name = "{name}"', f"fusable = {str(op.fusable).lower()}"]
        row += [f"depends_on = {list(op.depends_on)}"] if op.depends_on else []
        row += [f"{key} = true" for key in ("fixed", "random", "source") if getattr(op, key)]
        rows.append("\n".join(["[[op]]", *row]))
    return "\n\n".join(rows) + "\n"


def _text(path: str | Path, option: str) -> str:
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path} ({error}). Pass a readable text file to {option}.") from error


def _of(value: Any, path: object, key: object) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{key} of {path} is {value!r}, not a table. Profile again.")
    return value


def _numbers(value: Any, where: str) -> dict[int, float]:
    if not isinstance(value, dict):
        raise FormatError(f"{where} is {value!r}; it must map operator ids to numbers. Profile again.")
    return {int(op): _number(one, f"{where}, operator {op},") for op, one in value.items()}


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FormatError(f"{where} is {value!r}, not a number. Profile again.")
    return float(value)


# Measure and plan an input pipeline: the functions, for any object that knows how to run its examples.

MEMORY_S_PER_BYTE = 1e-10
"""Of a cache in memory: one copy at 10 GB/s, which any host of today reaches on one core."""


class Timed(Protocol):
    """What can be profiled."""

    def __len__(self) -> int:
        """Return the number of examples."""
        ...

    def ops(self) -> tuple[Op, ...]:
        """Return the operators, the source first."""
        ...

    def timed(self, index: int) -> Mapping[int, tuple[float, float, float]]:
        """Run example `index`; return operator -> (seconds, bytes in, bytes out), without those that did not run."""
        ...


def profile(pipeline: Timed, n: int = 256) -> PipelineProfile:
    """Run `n` examples in this thread and return what each operator cost. Raises `InputError` when none comes through.

    Operators count their CPU time, the source its wall time: so other load
    on the host does not move the figures, and slow storage does.
    """
    if n < 1 or not len(pipeline):
        raise InputError(f"{n} examples of {len(pipeline)} are to be profiled; both must be 1 or more.")
    order = permute(len(pipeline), seed=0, epoch=0)
    pipeline.timed(order(0))  # what is loaded on first use is no cost of an example
    ids = [op.id for op in pipeline.ops()]
    sums: dict[int, np.ndarray[Any, np.dtype[np.float64]]] = {op: np.zeros(3) for op in ids}
    counts = dict.fromkeys(ids, 0)
    for k in range(n):
        for op, figures in pipeline.timed(order(k % len(pipeline))).items():
            sums[op] += figures
            counts[op] += 1
    idle = [op.name for op in pipeline.ops() if not counts[op.id]]
    if idle:
        raise InputError(f"none of {n} examples reached {idle[0]}. Profile more, or drop the filter before it.")
    seconds = {op: float(sums[op][0]) / n for op in ids}
    total = sum(seconds.values())
    if total <= 0:
        raise InputError(f"{n} examples took no measurable time. Profile more examples.")
    sizes = {op: sums[op] / counts[op] for op in ids}
    return PipelineProfile(
        in_bytes={op: float(size[1]) for op, size in sizes.items()},
        out_bytes={op: float(size[2]) for op, size in sizes.items()},
        seconds=seconds,
        examples_per_s=1 / total,
        read_s_per_byte=MEMORY_S_PER_BYTE,
    )


def plan(pipeline: Timed, profile: PipelineProfile, resources: Resources | None = None) -> PipelinePlan:
    """Return the best plan of a profiled pipeline; a cache must hold the whole dataset. Raises `InputError`."""
    resources = resources or Resources(cores=host_cores())
    if resources.cache_bytes and not resources.num_examples:
        resources = dataclasses.replace(resources, num_examples=len(pipeline))
    return optimize.plan(pipeline.ops(), profile, resources)


@dataclass(frozen=True, slots=True)
class OrderCheck:
    """Whether two orders of a pipeline gave the same examples."""

    examples: int
    equal: bool
    """Bit by bit, with types and shapes."""
    largest_difference: float
    """Of any value; infinity where shapes, types or the set of examples differ."""

    def to_json(self) -> dict[str, object]:
        """Return what `plan --check --json` prints."""
        return asdict(self)


def difference(one: Any, other: Any) -> float:
    """Return the largest difference of two results: 0 when equal bit by bit, infinity when they cannot be compared."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.shape != other.shape or one.dtype != other.dtype:
            return float("inf")
        if one.tobytes() == other.tobytes() or not one.size:
            return 0.0
        gap = np.abs(one.astype(np.float64) - other.astype(np.float64))
        return float("inf") if np.isnan(gap).any() else max(float(gap.max()), float(np.finfo(np.float64).tiny))
    return 0.0 if type(one) is type(other) and one == other else float("inf")
