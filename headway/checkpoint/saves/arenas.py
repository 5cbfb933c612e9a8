"""The memory that snapshots go to: as many images as saves may be under way, and one more.

So the newest committed image stays whole while the next is filled. All images
share one plan as long as the state keeps its shapes; when they change, or the
objects outgrow their room, an image is made anew as its turn comes.

>>> arenas = Arenas(2)
>>> parts = (Part("w", torch.float32, (3,), (0,), (3,)),)
>>> number, image = arenas.take(parts, 0, busy=set(), spare=None)
>>> number, arenas.take(parts, 0, busy={0}, spare=None)[0], sorted(arenas.untold)
(0, 1, [0, 1])
>>> arenas.close()
"""

from __future__ import annotations

import logging
import math
import threading
import warnings
from collections.abc import Callable

import torch

from headway.checkpoint.agent.messages import Layout, Slot
from headway.checkpoint.saves.image import SPARE_TAIL_BYTES, Image, ImagePlan, Part, aligned, fits_torch, plan
from headway.checkpoint.saves.image_space import check_room
from headway.checkpoint.state.shards import LocalShard, LocalState

LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())


def parts_of(shards: list[LocalShard]) -> tuple[Part, ...]:
    """Return what is stored: tied tensors, which lie in the record of another, left out."""
    return tuple(
        Part(shard.fqn, shard.tensor.dtype, shard.shape, shard.box.offsets, shard.box.lengths)
        for shard in shards
        if shard.same_as is None
    )


def sources_of(shards: list[LocalShard]) -> list[torch.Tensor]:
    """Return the tensors that belong to `parts_of`, in the same order."""
    return [shard.tensor for shard in shards if shard.same_as is None]


def layout_of(laid: ImagePlan, state: LocalState) -> Layout:
    """Return what the agent is told of a plan."""
    by_place = {(slot.fqn, slot.offsets): slot for slot in laid.slots}
    tied = []
    for shard in state.shards:
        if shard.same_as is not None:
            slot = by_place[shard.same_as, shard.box.offsets]
            tied.append(
                Slot(
                    shard.fqn, slot.dtype, shard.shape, slot.offsets, slot.lengths, slot.record_offset,
                    slot.record_bytes, slot.payload_offset, slot.payload_bytes, slot.crc_offsets,
                )
            )  # fmt: skip
    return Layout(laid.slots, tuple(tied), state.paths)


class Arenas:
    """`count` images by number, locked for copies from the CUDA device `pin`."""

    def __init__(self, count: int, *, pin: torch.device | None = None) -> None:
        self._count, self._pin = count, pin
        self._images: dict[int, Image] = {}
        self.untold: set[int] = set()
        """Numbers whose memory the agent does not know."""
        self._parts: tuple[Part, ...] = ()
        self._plan = ImagePlan((), 0)
        self._thread: threading.Thread | None = None
        self._is_halted = threading.Event()

    def prepare(self, parts: tuple[Part, ...], tail_bytes: int) -> None:
        """Make all images in a thread, where they are for copies from a device: locking their pages takes long.

        What goes wrong there is raised by `take`, which tries again.
        """
        if self._pin is not None:
            self._start(lambda: self._prepared(parts, tail_bytes))

    def resume(self) -> None:
        """Lock in a thread what is not locked yet; no copy may be under way."""
        is_under_way = self._thread is not None and self._thread.is_alive()
        if not is_under_way and not all(image.is_pinned for image in self._images.values()):
            self._start(self._pin_rest)

    def halt(self) -> None:
        """Stop that thread after the piece that it is at; `resume` has the rest done."""
        self._is_halted.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take(self, parts: tuple[Part, ...], tail_bytes: int, *, busy: set[int], spare: int | None) -> tuple[int, Image]:
        """Return a free image for `parts`, with room for `tail_bytes` of objects, and its number.

        Not one of the `busy`, and not `spare` (the newest that is committed) where another one is free. The first
        call makes all images: it pays for the memory, so that no later save does. Pages are not locked here, which may
        take seconds: a copy into what is not locked yet is slower, and holds the host up for as long as it takes.
        """
        self.halt()
        self._lay(parts)
        free = [number for number in range(self._count) if number not in busy]
        number = next((number for number in free if number != spare), free[0])
        image = self._images.get(number)
        if image is None or image.plan is not self._plan or image.tail_bytes < tail_bytes:
            for needed in range(self._count) if not self._images else [number]:
                self._renew(needed, tail_bytes)
            image = self._images[number]
        if not image.is_pinned:
            LOG.warning("this snapshot goes to memory that is not pinned yet: training waits until it is copied")
        return number, image

    def carry(self, number: int, parts: tuple[Part, ...], tail_bytes: int) -> Image:
        """Replace an image by one for other parts, or with more room; what both have keeps its elements."""
        self.halt()
        old = self._images.pop(number)
        held = {
            (slot.fqn, slot.offsets, slot.lengths): tensor
            for slot, tensor in zip(old.plan.slots, old.slots, strict=True)
        }
        self._lay(parts)
        image = self._renew(number, tail_bytes)
        for slot, tensor in zip(image.plan.slots, image.slots, strict=True):
            known = held.get((slot.fqn, slot.offsets, slot.lengths))
            if known is not None and known.dtype == tensor.dtype:
                tensor.copy_(known)
        held.clear()
        old.close()
        return image

    def close(self) -> None:
        """Give all memory back; no save may be under way any more."""
        self.halt()
        while self._images:
            self._images.popitem()[1].close()

    def _lay(self, parts: tuple[Part, ...]) -> None:
        """Make the plan of `parts`, unless it is the current one."""
        if parts == self._parts:
            return
        check_room(sum(math.prod(part.lengths) * part.dtype.itemsize for part in parts))
        if not fits_torch():
            warnings.warn(
                f"torch {torch.__version__} does not read back what is laid out ahead: saves render every record, "
                "which takes longer. Use another torch.",
                RuntimeWarning,
                stacklevel=4,
            )
        self._plan, self._parts = plan(parts, rendered=not fits_torch()), parts

    def _start(self, work: Callable[[], None]) -> None:
        self._is_halted.clear()
        self._thread = threading.Thread(target=work, name="headway-images")
        self._thread.start()

    def _pin_rest(self) -> None:
        for image in self._images.values():
            image.pin(is_stopped=self._is_halted.is_set)

    def _prepared(self, parts: tuple[Part, ...], tail_bytes: int) -> None:
        """Make the images until that is halted, the first one first."""
        try:
            self._lay(parts)
            for number in range(self._count):
                if not self._is_halted.is_set():
                    self._renew(number, tail_bytes).pin(is_stopped=self._is_halted.is_set)
        except Exception as cause:  # the save will meet it, on the thread that can raise it
            LOG.info("no memory was prepared for the first save: %s", cause)

    def _renew(self, number: int, tail_bytes: int) -> Image:
        """Make an image for the current plan, in place of the one that had its number."""
        old = self._images.pop(number, None)
        if old is not None:
            old.close()
        # A quarter more: objects that grow at every save seldom need an image anew.
        room = aligned(tail_bytes + tail_bytes // 4 + SPARE_TAIL_BYTES)
        self._images[number] = Image(self._plan, tail_bytes=room, pin=self._pin)
        self.untold.add(number)
        return self._images[number]


def tail_bytes_of(values: list[bytes]) -> int:
    """Return the room that objects take, each at the start of a record."""
    return sum(aligned(len(value)) for value in values)
