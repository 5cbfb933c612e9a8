"""Checkpoints written rank by rank without an engine: the pieces of a state into an image, then the commit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headway.checkpoint.agent.messages import Hello, Layout, Persist, SavedObject
from headway.checkpoint.agent.saving import persist_rank
from headway.checkpoint.saves.image import Image, Part, pickled, plan
from headway.checkpoint.state.shards import Holders, pieces
from headway.core.wire.pace import RateLimiter
from headway.storage.commit import commit
from headway.storage.draft import Draft


def write_part(
    state: Mapping[str, Any],
    root: str | Path,
    step: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    holders: Holders = None,
    any_world: bool = False,
) -> Draft:
    """Write one rank's part of a save into its draft."""
    mine = pieces(state, rank=rank, world_size=world_size, holders=holders)
    own = [shard for shard in mine.shards if shard.same_as is None]
    laid = plan([Part(s.fqn, s.tensor.dtype, s.shape, s.box.offsets, s.box.lengths) for s in own])
    slots = {(slot.fqn, slot.offsets): slot for slot in laid.slots}
    tied = [s for s in mine.shards if s.same_as is not None]
    more = tuple(msgspec.structs.replace(slots[s.same_as, s.box.offsets], fqn=s.fqn) for s in tied)
    values = {name: pickled(value) for name, value in mine.objects.items()}
    image = Image(laid, tail_bytes=sum(len(value) + 4096 for value in values.values()))
    for slot, shard in zip(image.slots, own, strict=True):
        slot.copy_(shard.tensor)
    offsets = image.place(list(values.values())) or []
    placed = [
        SavedObject(name, at, len(value), any_world) for (name, value), at in zip(values.items(), offsets, strict=True)
    ]
    hello = Hello(str(root), "a", rank, world_size)
    save = Persist(step, "a", 0, image.num_bytes, 0, tuple(placed))
    draft, _ = persist_rank(hello, Layout(laid.slots, more, mine.paths), save, image.memory, RateLimiter())
    image.close()
    return draft


def write(state: Mapping[str, Any], root: str | Path, step: int = 1) -> Path:
    """Write and commit a save of one rank; returns the checkpoint's folder."""
    draft = write_part(state, root, step)
    commit(draft, world_size=1)
    return draft.target
