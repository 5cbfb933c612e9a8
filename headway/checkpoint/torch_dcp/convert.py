"""A checkpoint in another form: other ranks, safetensors, torch.save, and back; one tensor in memory at a time.

`rewrite` makes a checkpoint of headway's with as many rank files as asked
for, from any source, and commits it as a save does: for a layout that stock
DCP or a byte-copying tool shall read, or to begin a run from published
weights. (To *load* on another world size nothing needs to be rewritten.)
`export` writes safetensors, in several files under an index where the state
is large, or one torch.save file. Every element is stored bit for bit, unless
another type is asked for. No process group.

>>> import tempfile
>>> from headway.checkpoint.torch_dcp.calls import save
>>> import warnings; warnings.simplefilter("ignore")
>>> root = Path(tempfile.mkdtemp())
>>> _ = save({"model": {"w": torch.ones(4, 2)}, "lr": 0.1}, checkpoint_id=root / "step-3")
>>> done = export(root / "step-3", root / "w.safetensors", prefix="model.")
>>> done.files, done.tensors, done.left_out
(('w.safetensors',), 1, ('lr',))
>>> rewrite(root / "step-3", root / "two", world_size=2).world_size
2
"""

from __future__ import annotations

import difflib
import json
import math
import os
import uuid
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headway.checkpoint.layout.reads import ReplicatedTensor, shares
from headway.checkpoint.saves.image import Part
from headway.checkpoint.saves.image_file import SerializedObject, write_image
from headway.checkpoint.torch_dcp.plugins import draft_at
from headway.checkpoint.torch_dcp.sources import INDEX, TORCH_SUFFIXES, SavedState, open_source
from headway.core.errors import InputError
from headway.core.files.safe_files import whole_file
from headway.core.tables import pick
from headway.storage.boxes import Box
from headway.storage.commit import commit
from headway.storage.draft import Draft, abandon, finish_rank, open_draft
from headway.storage.formats.values import FROM_SAFETENSORS, ITEM_BYTES
from headway.storage.manifest import CommitRecord, RankManifest
from headway.storage.redundancy.erasure import scheme_of
from headway.storage.redundancy.parity import encode_rank

FILE_BYTES = 5 * 10**9
"""Largest safetensors file by default, as published models have it."""

FLOATS = {
    "fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "float64": "float64",
    "float32": "float32", "float16": "float16", "bfloat16": "bfloat16",
}  # fmt: skip
"""Types that floating-point tensors may be cast to."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote."""

    files: tuple[str, ...]
    """Names, in the folder of the output; the index is the last."""
    tensors: int
    num_bytes: int
    """Of the elements."""
    left_out: tuple[str, ...]
    """Names that were not asked for, or that the format cannot hold."""


def rewrite(
    path: Path | SavedState,
    target: Path,
    *,
    world_size: int = 1,
    redundancy: str = "none",
    prefix: str = "",
    without: Sequence[str] = (),
) -> CommitRecord:
    """Write saved state as a checkpoint of `world_size` ranks at `target`, which must not exist; return its record.

    `prefix` goes before every name ("model."); names that begin with one of `without` are left out. What is
    verifiable is verified before it is written. Raises `InputError`, `FormatError`, `DamageError`; `target` is then
    not there.
    """
    if world_size < 1:
        raise InputError(f"the world size is {world_size}; a checkpoint has at least one rank. Pass 1 or more.")
    scheme_of(redundancy, world_size)
    _refuse_existing(target)
    with open_source(path) as source:
        names = [name for name in source.tensors if not _is_below(name, without)]
        held = [ReplicatedTensor(name, source.tensors[name][0], ITEM_BYTES[source.tensors[name][1]]) for name in names]
        values = _values(source, [name for name in source.objects if not _is_below(name, without)], world_size, prefix)
        draft = draft_at(Path(os.path.abspath(target)), f"rewrite-{uuid.uuid4().hex[:12]}")
        try:
            for rank, share in enumerate(shares(held, world_size)):
                boxes = [(name, box) for name, found in share.items() for box in found]
                _write_rank(draft, rank, world_size, source, boxes, values[rank], prefix)
            record = commit(draft, world_size=world_size, redundancy=redundancy, deadline_s=0)
        except BaseException:
            abandon(draft)
            raise
    for rank in range(world_size) if redundancy != "none" else ():
        encode_rank(draft.target, rank)
    return record


def _write_rank(
    draft: Draft,
    rank: int,
    world_size: int,
    source: SavedState,
    boxes: list[tuple[str, Box]],
    values: list[SerializedObject],
    prefix: str,
) -> None:
    """Write one rank's part of a draft."""
    open_draft(draft.root, draft.step, draft.attempt, rank=rank)
    parts = [_part(source, name, box, prefix) for name, box in boxes]
    written = write_image(draft, rank, parts, lambda index: source.tensor(*boxes[index]), values)
    names = {part.fqn for part in parts} | {value.fqn for value in values}
    keys = {name: _path(source, name.removeprefix(prefix), prefix) for name in names}
    manifest = RankManifest(
        draft.step, draft.attempt, rank, world_size, written.entry if written else None,
        written.pieces if written else (), written.objects if written else (), paths=keys, host=f"rank-{rank}",
    )  # fmt: skip
    finish_rank(draft, manifest, written.digested if written else None)


def export(
    path: Path | SavedState, out: Path, *, prefix: str = "", dtype: str | None = None, file_bytes: int = FILE_BYTES
) -> Exported:
    """Write saved state as safetensors, or as a torch.save file, by the suffix of `out`; return what was written.

    Only names that begin with `prefix` go in, without it. `dtype` casts what is floating-point. Safetensors holds no
    objects; beyond `file_bytes` it becomes several files, each whole in memory once, under an index. A torch.save
    file is built in memory. Raises `InputError`, `FormatError`, `DamageError`; what exists is not written over.
    """
    kind = pick(FLOATS, dtype, "dtype") if dtype is not None else None
    is_safe = out.name.endswith(".safetensors")
    if not is_safe and out.suffix not in TORCH_SUFFIXES:
        raise InputError(
            f"{out.name} has a suffix that says no format. Name a file that ends in .safetensors, "
            f"{', '.join(TORCH_SUFFIXES)}."
        )
    _refuse_existing(out)
    with open_source(path) as source:
        names = [name for name in source.tensors if name.startswith(prefix) and name != prefix]
        if not names:
            raise InputError(_no_prefix(prefix, source))
        if is_safe:
            return _export_safetensors(source, names, out, prefix, kind, file_bytes)
        return _export_torch(source, names, out, prefix, kind)


def _export_safetensors(
    source: SavedState, names: list[str], out: Path, prefix: str, kind: str | None, file_bytes: int
) -> Exported:
    """Write one file, or several and their index, which appears last."""
    sizes = {name: math.prod(source.tensors[name][0]) * ITEM_BYTES[_kind(source, name, kind)] for name in names}
    known = set(FROM_SAFETENSORS.values())
    lacking = [name for name in names if _kind(source, name, kind) not in known]
    if lacking:
        raise InputError(
            f"'{lacking[0]}' is {source.tensors[lacking[0]][1]}, which safetensors cannot hold. Export to a .pt file, "
            "or choose other names with --prefix."
        )
    groups = _groups(sizes, file_bytes)
    stem = out.name.removesuffix(".safetensors")
    files = [out.name] if len(groups) == 1 else [
        f"{stem}-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups))
    ]  # fmt: skip
    index = out.with_name(stem + INDEX)
    for name in files if len(files) == 1 else (*files, index.name):
        _refuse_existing(out.with_name(name))
    for file, group in zip(files, groups, strict=True):
        with whole_file(out.with_name(file)) as draft:
            tensors = {name[len(prefix) :]: _cast(source.tensor(name), kind).contiguous() for name in group}
            save_file(tensors, draft, metadata={"format": "pt"})
    if len(files) > 1:
        weights = {name[len(prefix) :]: file for file, group in zip(files, groups, strict=True) for name in group}
        with whole_file(index) as draft:
            told = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weights}
            draft.write_text(json.dumps(told, indent=2) + "\n")
        files.append(index.name)
    left_out = [name for name in (*source.tensors, *source.objects) if name not in sizes]
    return Exported(tuple(files), len(names), sum(sizes.values()), tuple(left_out))


def _export_torch(source: SavedState, names: list[str], out: Path, prefix: str, kind: str | None) -> Exported:
    """Write one torch.save file: nested as it was saved, or flat below a prefix."""
    objects = [name for name in source.objects if name.startswith(prefix)]
    state: dict[str, Any] = {}
    num_bytes = 0
    for name in (*names, *objects):
        value = source.value(name) if name in objects else _cast(source.tensor(name), kind)
        num_bytes += value.nbytes if isinstance(value, torch.Tensor) else 0
        _put(state, (name[len(prefix) :],) if prefix else source.paths.get(name, (name,)), value)
    with whole_file(out) as draft:
        torch.save(_with_lists(state), draft)
    left_out = [name for name in (*source.tensors, *source.objects) if not name.startswith(prefix)]
    return Exported((out.name,), len(names), num_bytes, tuple(left_out))


def _values(source: SavedState, names: Iterable[str], world_size: int, prefix: str) -> list[list[SerializedObject]]:
    """Return the objects that each rank writes: its own, and its share of everybody's."""
    found: list[list[SerializedObject]] = [[] for _ in range(world_size)]
    for name in names:
        for whose, (data, any_world) in source.records(name, world_size).items():
            rank = zlib.crc32(name.encode()) % world_size if whose is None else whose
            found[rank].append(SerializedObject(prefix + name, data, whose, any_world))
    return found


def _part(source: SavedState, name: str, box: Box, prefix: str) -> Part:
    shape, dtype = source.tensors[name]
    return Part(prefix + name, getattr(torch, dtype), shape, box.offsets, box.lengths)


def _path(source: SavedState, name: str, prefix: str) -> tuple[str | int, ...]:
    """Return the keys of a name: a prefix that ends in a dot is a key of its own."""
    keys = source.paths.get(name, (name,))
    if prefix.endswith("."):
        return (*prefix[:-1].split("."), *keys)
    return (prefix + str(keys[0]), *keys[1:])


def _is_below(name: str, roots: Sequence[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise InputError(f"{path} exists already; nothing is written over. Remove it, or name another place.")
    if not path.absolute().parent.is_dir():
        raise InputError(f"the folder {path.parent} does not exist. Create it first.")


def _no_prefix(prefix: str, source: SavedState) -> str:
    """Say that no name begins so, and what names begin with."""
    if not source.tensors:
        return f"{source.place} holds no tensors. Name another checkpoint."
    roots = sorted({f"{name.partition('.')[0]}." for name in source.tensors if "." in name} or set(source.tensors))
    near = difflib.get_close_matches(prefix, roots, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"no tensor's name begins with {prefix!r}.{hint} Choose one of: {', '.join(roots[:8])}"


def _kind(source: SavedState, name: str, kind: str | None) -> str:
    """Return the type that a tensor gets: the one asked for, where it is floating-point."""
    told = source.tensors[name][1]
    return kind if kind is not None and getattr(torch, told).is_floating_point else told


def _cast(tensor: torch.Tensor, kind: str | None) -> torch.Tensor:
    return tensor.to(getattr(torch, kind)) if kind is not None and tensor.is_floating_point() else tensor


def _groups(sizes: dict[str, int], most_bytes: int) -> list[list[str]]:
    """Cut names, in their order, into runs of at most `most_bytes`; a larger tensor is a run of its own."""
    groups: list[list[str]] = []
    room = -1
    for name, num_bytes in sizes.items():
        if not groups or num_bytes > room:
            groups.append([])
            room = most_bytes
        groups[-1].append(name)
        room -= num_bytes
    return groups


def _put(state: dict[Any, Any], path: tuple[str | int, ...], value: Any) -> None:
    """Put a value under its keys."""
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value


def _with_lists(value: Any) -> Any:
    """Return nested mappings with those whose keys are numbers, which were lists, as lists."""
    if type(value) is not dict:
        return value
    inner = {key: _with_lists(each) for key, each in value.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner
