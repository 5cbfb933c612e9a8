"""What the training process and its checkpoint agent say to each other, and what a new attempt asks an old agent.

    trainer -> agent     Hello first; ImageArena (with memory) and Layout when they change; Persist per save; Leave
    agent -> trainer     Persisted when the rank's image is durable, Committed or Failed when the save is over
    anybody -> agent     ImageRequest; Finish: say when nothing is under way; Leave, once orphaned

Offsets and sizes are bytes of the image; times are int ns of `CLOCK_MONOTONIC`
(`time.perf_counter_ns`), the same clock in every process of a host.

>>> msgspec.msgpack.decode(msgspec.msgpack.encode(ImageRequest(step=7)), type=FROM_CALLER)
ImageRequest(step=7)
"""

from __future__ import annotations

import msgspec

PROTOCOL = 1
"""Grows when a message changes its meaning: an agent of another release is left alone."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Who the agent writes for; the first message."""

    root: str
    """Folder of the checkpoints."""
    attempt: str
    """The attempt of the job, agreed on by all its ranks."""
    rank: int
    world_size: int
    redundancy: str = "none"
    """What parity is asked for: "none", "xor", "+m", "k+m"."""
    keep_last: int = 2
    keep_every: int | None = None
    host: str = ""
    """Failure domain of the rank."""
    started_unix_s: float = 0.0
    """When the attempt began: a checkpoint of one of its steps that is older may be replaced."""
    protocol: int = PROTOCOL


class ImageArena(msgspec.Struct, tag="Arena", frozen=True):
    """Memory for images, whose descriptor comes beside; it replaces what was known under its number."""

    number: int
    num_bytes: int


class Slot(msgspec.Struct, array_like=True, frozen=True):
    """Where one piece of one tensor lies in the image."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    """[d] Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """[d] Where the piece begins in it."""
    lengths: tuple[int, ...]
    """[d] How long it is."""
    record_offset: int
    record_bytes: int
    payload_offset: int
    payload_bytes: int
    crc_offsets: tuple[int, ...]
    """Where the payload's CRC-32 belongs: the data descriptor behind it, and the central directory. Empty: the record
    came with its CRC in place."""


class Layout(msgspec.Struct, tag=True, frozen=True):
    """How images are laid out from now on."""

    slots: tuple[Slot, ...]
    """In the order of their offsets."""
    tied: tuple[Slot, ...] = ()
    """Further names of records: tensors that share their memory with one of the slots."""
    paths: dict[str, tuple[str | int, ...]] = {}
    """Name of a tensor or object -> the keys that lead to it in the nested state."""


class SavedObject(msgspec.Struct, array_like=True, frozen=True):
    """One object of a save, pickled into the tail of the image."""

    fqn: str
    record_offset: int
    record_bytes: int
    any_world: bool = False
    """Whether, where ranks differ, another world size may take some rank's value."""


class Persist(msgspec.Struct, tag=True, frozen=True):
    """Make the image in arena `number` durable as step `step`."""

    step: int
    attempt: str
    """The attempt; numbered where its training had gone back, and saves a step again."""
    number: int
    num_bytes: int
    """Length of the image."""
    begun_ns: int
    """When the save began."""
    values: tuple[SavedObject, ...] = ()
    replicas: dict[str, str] = {}
    """Name of a tensor that is taken to be equal on all ranks -> digest of all of it (first save of a layout)."""
    sums: tuple[tuple[int, int], ...] = ()
    """[slots of the layout] Bytes of a word, and the sum of the words; see `headway.checkpoint.agent.saving`."""


class Phase(msgspec.Struct, array_like=True, frozen=True):
    """One stretch of background work."""

    name: str
    """An event: "checkpoint.persist", "checkpoint.commit", "checkpoint.parity"."""
    start_ns: int
    end_ns: int
    num_bytes: int = 0


class Persisted(msgspec.Struct, tag=True, frozen=True):
    """The rank's image, digests and manifest are durable; its arena may be filled again."""

    step: int
    phases: tuple[Phase, ...]


class Committed(msgspec.Struct, tag=True, frozen=True):
    """The checkpoint of all ranks is visible and durable."""

    step: int
    path: str
    root: str
    """Merkle root over its files."""
    num_bytes: int
    """Of all its files."""
    ended_ns: int
    phases: tuple[Phase, ...] = ()


class Redundant(msgspec.Struct, tag=True, frozen=True):
    """This rank's parity of a committed checkpoint is durable."""

    step: int
    phases: tuple[Phase, ...]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """A save, or what follows it, went wrong; older checkpoints stand."""

    step: int
    kind: str
    """Name of the exception."""
    text: str
    what: str = "save"
    """"save": the checkpoint does not exist. "parity", "retention": it does."""


class Leave(msgspec.Struct, tag=True, frozen=True):
    """The trainer is done, or a new one has its own agent: finish what is under way, then end."""


class ImageRequest(msgspec.Struct, tag="Ask", frozen=True):
    """Show the image that you hold of committed step `step`."""

    step: int


class Finish(msgspec.Struct, tag=True, frozen=True):
    """A new attempt begins: finish what is under way, then answer `Done`."""


class Done(msgspec.Struct, tag=True, frozen=True):
    """Nothing is under way."""

    is_orphan: bool
    """Whether the trainer is dead, or has left."""


class HeldImage(msgspec.Struct, tag="Held", frozen=True):
    """The image that is held, its descriptor beside; step -1: none."""

    step: int = -1
    name: str = ""
    """Its path inside the checkpoint."""
    num_bytes: int = 0
    root: str = ""
    """Merkle root of the checkpoint that it is part of."""


FROM_CALLER = Hello | ImageArena | Layout | Persist | Leave | ImageRequest | Finish
"""What an agent accepts."""

FROM_AGENT = Persisted | Committed | Redundant | Failed | HeldImage | Done
"""What the training process accepts."""
