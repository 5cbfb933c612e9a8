"""Files of the pipeline planner: profiles (YAML, cedar's layout) and operators (TOML).

A profile holds, per operator id, nanoseconds and bytes per example of one
in-process run (`baseline`), and under `offloads` the throughput with only
that operator run elsewhere. An operator file has one `[[op]]` row per
operator, in the order of the pipeline: `id`, `name`, and where needed
`depends_on` (ids), `fixed`, `random`, `source`, `fusable`.

>>> ops = parse_ops('[[op]]\\nid = 1\\nname = "read"\\nsource = true\\n[[op]]\\nid = 0\\nname = "to_tensor"')
>>> [(op.id, op.name, op.source, op.fusable) for op in ops]
[(1, 'read', True, True), (0, 'to_tensor', False, False)]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from headway.core.errors import FormatError, InputError
from headway.core.files.regular_file import read_regular
from headway.core.files.settings_files import parse_toml, parse_yaml
from headway.core.tables import pick
from headway.core.units import NS_PER_S
from headway.data.planning.optimize import Op, PipelineProfile

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
        row = [f"id = {op.id}", f"name = {_quoted(op.name)}", f"fusable = {str(op.fusable).lower()}"]
        row += [f"depends_on = {list(op.depends_on)}"] if op.depends_on else []
        row += [f"{key} = true" for key in ("fixed", "random", "source") if getattr(op, key)]
        rows.append("\n".join(["[[op]]", *row]))
    return "\n\n".join(rows) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


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
