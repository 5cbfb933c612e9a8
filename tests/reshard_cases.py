"""The matrix of saving and loading layouts: one state, dealt out in every way to worlds of 1, 2 and 4 ranks.

Everything here runs on the ranks of the test pool. A layout turns whole tensors into what one rank of it holds; what
is loaded is held against the whole tensors, byte by byte.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from headway.checkpoint.restores.restore import restore_into
from headway.checkpoint.state.shards import FlatShard, local_shards
from headway.storage.boxes import whole
from headway.storage.commit import commit
from tests.layouts_made import write_part

Whole = dict[str, torch.Tensor]


@cache
def whole_state(seed: int) -> Whole:
    """Return whole tensors of many shapes and types; seed 0 holds other bits than any other seed."""
    rng = torch.Generator().manual_seed(seed)

    def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        flat = torch.randint(0, 256, (torch.Size(shape).numel() * dtype.itemsize,), generator=rng, dtype=torch.uint8)
        if dtype == torch.bool:
            flat &= 1
        return flat.view(dtype).view(shape)

    state = {
        "rows.weight": bits(torch.float32, 300, 257), "odd": bits(torch.float32, 7, 5),
        "deep": bits(torch.bfloat16, 16, 3, 4), "vector": bits(torch.float64, 11), "one": bits(torch.float32, 1),
        "scalar": bits(torch.int64), "few": bits(torch.int32, 2, 3), "none": bits(torch.float32, 0, 4),
        "hollow": bits(torch.int16, 3, 0), "small": bits(torch.float8_e4m3fn, 6, 6),
        "small5": bits(torch.float8_e5m2, 5, 9), "mask": bits(torch.bool, 9, 2), "counts": bits(torch.int64, 5, 2),
        "wave": bits(torch.complex64, 4, 3), "wave128": bits(torch.complex128, 5, 3), "byte": bits(torch.uint8, 13),
        "half": bits(torch.float16, 8, 8), "turned": bits(torch.float32, 9, 6).t(),
    }  # fmt: skip
    return state | {"tied": state["odd"]}


def _plain(value: torch.Tensor, rank: int, world: int) -> Any:
    return value


@cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """Return the mesh of a shape: one per process, because every mesh makes groups with threads of their own."""
    return init_device_mesh("cpu", shape)


def _dealt(*placements: Any, mesh: Callable[[int], tuple[int, ...]]) -> Callable[[torch.Tensor, int, int], Any]:
    def deal(value: torch.Tensor, rank: int, world: int) -> Any:
        fitting = [p if value.ndim > getattr(p, "dim", -1) else Shard(0) for p in placements]
        fitting = fitting if value.ndim else [Replicate()] * len(placements)
        return distribute_tensor(value, _mesh(mesh(world)), fitting, src_data_rank=None)

    return deal


def _flat(value: torch.Tensor, rank: int, world: int) -> Any:
    """Uneven intervals: rank r has so many parts of the elements as its number counts, plus one."""
    parts, size = world * (world + 1) // 2, value.numel()
    start, stop = (size * (r * (r + 1) // 2) // parts for r in (rank, rank + 1))
    return FlatShard(value.reshape(-1)[start:stop].clone(), tuple(value.shape), start, stop)


def _line(world: int) -> tuple[int, ...]:
    return (world,)


def _square(world: int) -> tuple[int, ...]:
    return (2, 2) if world == 4 else (1, world)


LAYOUTS: dict[str, Callable[[torch.Tensor, int, int], Any]] = {
    "plain": _plain,
    "rows": _dealt(Shard(0), mesh=_line),
    "columns": _dealt(Shard(1), mesh=_line),
    "copies": _dealt(Replicate(), mesh=_line),
    "square": _dealt(Shard(0), Shard(1), mesh=_square),
    "hybrid": _dealt(Replicate(), Shard(0), mesh=_square),
    "nested": _dealt(Shard(0), Shard(0), mesh=_square),
    "strided": _dealt(_StridedShard(0, split_factor=2), Shard(0), mesh=_square),
    "flat": _flat,
}
"""Name -> a whole tensor, rank, world size -> what that rank holds."""

OWN_ONLY = ("strided", "flat")
"""Layouts that stock DCP has no words for."""


def held(layout: str, whole_tensors: Whole, *, fresh: bool) -> dict[str, Any]:
    """Return what this rank holds; `fresh` in memory of its own."""
    rank, world, deal = dist.get_rank(), dist.get_world_size(), LAYOUTS[layout]
    memory: dict[int, torch.Tensor] = {}
    state = {}
    for name, value in whole_tensors.items():
        own = memory.setdefault(id(value), value.clone() if fresh else value)
        state[name] = deal(own, rank, world)
    if not layout.startswith("strided") and isinstance(state["odd"], torch.Tensor):
        state["tied"] = state["odd"]
    return {"model": state, "step": 7, "notes": {"list": [1, 2], "tuple": (3, "x")}}


def save_all(folder: str, cases: list[tuple[str, str]]) -> None:
    """Save in every (writer, layout) of `cases`, each into a folder of its own."""
    warnings.simplefilter("ignore")
    for writer, layout in cases:
        state, place = held(layout, whole_state(1), fresh=True), place_of(folder, dist.get_world_size(), writer, layout)
        if writer == "stock":
            dcp.save(state, checkpoint_id=place)
            continue
        draft = write_part(state, place.parent, 1, rank=dist.get_rank(), world_size=dist.get_world_size())
        dist.barrier()
        if dist.get_rank() == 0:
            commit(draft, world_size=dist.get_world_size())
        dist.barrier()


def load_all(folder: str, cases: list[tuple[int, str, str, str, str]]) -> list[str]:
    """Load every (world that saved, writer, layout, reader, layout here); return what came back wrong."""
    warnings.simplefilter("ignore")
    wrong = []
    for world, writer, layout, reader, here in cases:
        place = place_of(folder, world, writer, layout)
        state = held(here, whole_state(0), fresh=True)
        state |= {"step": 0, "notes": {"list": [], "tuple": ()}}
        try:
            if reader == "stock":
                dcp.load(state, checkpoint_id=place)
            else:
                together = dist.group.WORLD if reader == "exchange" else None
                restore_into(place, state, group=together)
            differing = differences(state, whole_state(1))
        except BaseException as error:  # stock's CheckpointException is no Exception
            differing = [f"{type(error).__name__}: {error}"[-400:]]
        wrong += [f"{world} {writer} {layout} -> {dist.get_world_size()} {reader} {here}: {text}" for text in differing]
    return wrong


def place_of(folder: str, world: int, writer: str, layout: str) -> Path:
    """Return the folder of a checkpoint."""
    return Path(folder) / f"{writer}-{layout}-{world}" / "step-1"


def differences(state: Mapping[str, Any], expected: Whole) -> list[str]:
    """Return the names of which this rank holds other bytes than the whole tensors say."""
    found = local_shards(state, rank=dist.get_rank(), world_size=dist.get_world_size())
    wrong = []
    for shard in found.shards:
        want = expected[shard.fqn.removeprefix("model.")][shard.box.within(whole(shard.shape))]
        wrong += [shard.fqn] if _bytes(shard.tensor) != _bytes(want) else []
    return wrong + [
        f"{name} = {value}"
        for name, value in found.objects.items()
        if value != {"step": 7, "notes.list": [1, 2], "notes.tuple": (3, "x")}[name]
    ]


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def run_matrix(
    on_ranks: Callable[..., Any], folder: str, worlds: tuple[int, ...], keep: Callable[[str], bool]
) -> tuple[int, list[str]]:
    """Save and load all combinations whose name `keep` takes; return how many, and what came back wrong."""
    saved: list[tuple[int, str, str]] = []
    for world in worlds:
        cases = [(w, layout) for w in ("ours", "stock") for layout in LAYOUTS if w == "ours" or layout not in OWN_ONLY]
        wanted = [case for case in cases if any(keep(name) for name in _names(world, *case, worlds))]
        on_ranks(save_all, world, folder, wanted)
        saved += [(world, *case) for case in wanted]
    count, wrong = 0, []
    for world in worlds:
        cases = [
            (*source, reader, here)
            for source in saved
            for reader, here in _loads(source[1])
            if keep(f"{source} {world} {reader} {here}")
        ]
        count += len(cases)
        wrong += [text for told in on_ranks(load_all, world, folder, cases) for text in told]
    return count, sorted(set(wrong))


def _names(world: int, writer: str, layout: str, worlds: tuple[int, ...]) -> list[str]:
    source = (world, writer, layout)
    return [f"{source} {other} {reader} {here}" for other in worlds for reader, here in _loads(writer)]


def _loads(writer: str) -> list[tuple[str, str]]:
    """Return (reader, layout) of the loads that say something about us: stock of stock's does not."""
    readers = ("ours", "exchange") if writer == "stock" else ("ours", "exchange", "stock")
    return [(reader, here) for reader in readers for here in LAYOUTS if reader != "stock" or here not in OWN_ONLY]
