"""The copy of the state into an image: what a save costs the training thread.

Tensors of the host are copied at once. Those of a CUDA device are copied on a
stream beside the computation, and only two things wait for that, both on the
device: the next work of any kind for tensors that it may change (buffers),
and the next weight update, or replay of a graph, for those that only an update
changes. A write that raises the version of one of the latter has all of them
copied again; for any other write the agent compares sums (`writers` lists who
is seen how). With mode "device" all work waits for a copy inside the device's own
memory, which is fast, and nothing has to be known of who writes. That copy has a
pool of memory of its own, which goes back to the driver after the save: the
allocator would keep it for the copying stream alone.

>>> snapshot = Snapshot()
>>> slot = torch.zeros(3)
>>> snapshot.copy([(slot, torch.ones(3))], settled=lambda tensor: True)
>>> slot.tolist(), snapshot.is_ready()
([1.0, 1.0, 1.0], True)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from headway.checkpoint.costs import choose_snapshot
from headway.checkpoint.state.writers import sums_of, word_bytes
from headway.runtime.host.device import Device
from headway.runtime.torch_state import copy_into

LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())

Pair = tuple[torch.Tensor, torch.Tensor]
"""A slot of an image, and the tensor that goes there."""

DEVICE_BYTES_PER_S = 1e12
"""What a device copies inside its own memory, assumed: reading and writing at 2 TB/s together."""

FREE_FRACTION = 0.2
"""Share of a device's memory that stays free, of all processes and the copy, where the mode is chosen here."""

SPARE_FRACTION = 0.02
"""Share that a copy inside the device leaves free in any case: beyond it the allocator would empty its caches to make
room, and wait for the device to do so."""

_CUDA: Any = torch.cuda
"""Streams and events, whose constructors torch does not type."""


class Snapshot:
    """One snapshot under way. `mode` is "host" or "device", for what lies on CUDA devices."""

    def __init__(self, mode: str = "host", streams: dict[torch.device, Any] | None = None) -> None:
        self._mode = mode
        self._streams = {} if streams is None else streams
        self._copies: list[_DeviceCopy] = []

    def copy(self, pairs: Iterable[Pair], *, settled: Callable[[torch.Tensor], bool]) -> None:
        """Begin to copy; `settled(tensor)` says whether nothing but a weight update changes a tensor.

        What lies on the host is copied on return.
        """
        on_device: dict[torch.device, list[Pair]] = {}
        for slot, source in pairs:
            if source.is_cuda:
                on_device.setdefault(source.device, []).append((slot, source))
            else:
                copy_into(slot, source)
        for device, some in on_device.items():
            if device not in self._streams:
                self._streams[device] = _CUDA.Stream(device)
            self._copies.append(_begun(self._streams[device], some, settled, self._mode))

    def fence(self) -> None:
        """Make what is launched from now on wait, on the device, until the state may change."""
        self.renew()
        for copy in self._copies:
            copy.met_s = copy.met_s or time.perf_counter()
            torch.cuda.current_stream(copy.device).wait_event(copy.may_change)
            copy.close()

    def renew(self) -> None:
        """Copy all again that may have been written meanwhile, where something was; later work waits for that.

        All, since what a copy missed of one tensor may have come before what it caught of another one.
        """
        if not any(
            each.source._version != each.version for copy in self._copies for each in copy.watched if each.is_open
        ):
            return
        for copy in list(self._copies):
            again = [(each.slot, each.source) for each in copy.watched if each.is_open]
            if again:
                copy.close(is_renewed=True)
                self._copies.append(_begun(self._streams[copy.device], again, lambda tensor: False, "host"))

    def sums(self) -> dict[int, tuple[int, int]]:
        """Return address of a slot -> (bytes of a word, sum of the words) that it must have; the image is whole."""
        found: dict[int, tuple[int, int]] = {}
        for copy in self._copies:
            if copy.watched and copy.sums is not None:
                with torch.cuda.stream(self._streams[copy.device]):  # on training's the host would wait for its work
                    values = copy.sums.tolist()
                found |= {
                    each.slot.data_ptr(): (each.word_bytes, value)
                    for each, value in zip(copy.watched, values, strict=True)
                    if not each.is_renewed
                }
        return found

    def is_ready(self) -> bool:
        """Whether the image is whole."""
        return all(copy.done.query() for copy in self._copies)

    def wait(self) -> None:
        """Wait until the image is whole."""
        for copy in self._copies:
            copy.done.synchronize()
            copy.close()

    def release(self) -> None:
        """Give back what copies inside devices took; the image is whole. The driver may wait for the device first."""
        for copy in self._copies:
            copy.clones.clear()  # before their pool: it gives back what is free then
            copy.pool = None

    def better_mode(self) -> str:
        """Return the mode that would have stalled training least, by CheckFreq's rule; the snapshot is done."""
        modes = {copy.better_mode() for copy in self._copies}
        return "device" if "device" in modes else "host"


@dataclass(slots=True)
class _WatchedTensor:
    """A tensor that is copied while nothing waits for that."""

    slot: torch.Tensor
    source: torch.Tensor
    version: int
    word_bytes: int
    is_open: bool = True
    """Whether a write may still meet the copy."""
    is_renewed: bool = False
    """Whether it was copied again, in order: then it may differ from its sum."""


@dataclass(slots=True)
class _DeviceCopy:
    """What one device copies."""

    device: torch.device
    num_bytes: int
    began: Any
    """Event: the first copy."""
    may_change: Any
    """Event: the state has been read."""
    done: Any
    """Event: the image is whole."""
    begun_s: float
    met_s: float | None = None
    """When the host came to the next weight update."""
    clones: list[torch.Tensor] = field(default_factory=list)
    """Copies in the device's memory, kept until the image is whole."""
    pool: Any = None
    """Which their memory is of."""
    watched: list[_WatchedTensor] = field(default_factory=list)
    sums: torch.Tensor | None = None
    """[watched] Sums of their words where the save began."""

    def close(self, *, is_renewed: bool = False) -> None:
        """Note that what is written from now on comes after the copy, or after the one that is made anew."""
        for each in self.watched:
            each.is_renewed |= each.is_open and is_renewed
            each.is_open = False

    def better_mode(self) -> str:
        """Return "host" or "device"."""
        host_s = self.began.elapsed_time(self.done) / 1e3
        overlap_s = max((self.met_s or self.begun_s) - self.begun_s, 0.0)
        free_bytes = room_bytes(self.device, FREE_FRACTION)
        free_bytes += sum(clone.nbytes for clone in self.clones)  # what this save took, the next one can take
        device_s = self.num_bytes / DEVICE_BYTES_PER_S
        return choose_snapshot(
            device_s=device_s, host_s=host_s, overlap_s=overlap_s, state_bytes=self.num_bytes, free_bytes=free_bytes
        ).device


def _begun(stream: Any, pairs: list[Pair], settled: Callable[[torch.Tensor], bool], mode: str) -> _DeviceCopy:
    """Queue the copies of one device: first what a forward may change, which later work waits for."""
    device = pairs[0][1].device
    now = torch.cuda.current_stream(device)
    began, may_change, done = (_CUDA.Event(enable_timing=True) for _ in range(3))
    num_bytes = sum(source.numel() * source.element_size() for _, source in pairs)
    copy = _DeviceCopy(device, max(num_bytes, 1), began, may_change, done, time.perf_counter())
    stream.wait_stream(now)
    with torch.cuda.stream(stream):
        began.record(stream)
        if mode == "device":
            copy.clones, copy.pool = _clones([source for _, source in pairs], device)
    if copy.clones:
        may_change.record(stream)
        now.wait_event(may_change)
        with torch.cuda.stream(stream):
            _queue([(slot, clone) for (slot, _), clone in zip(pairs, copy.clones, strict=True)])
    else:
        later = [pair for pair in pairs if settled(pair[1])]
        kept = {id(slot) for slot, _ in later}
        with torch.cuda.stream(stream):
            _queue([pair for pair in pairs if id(pair[0]) not in kept])
        now.wait_stream(stream)
        if later:  # summed before anything else may write them: on the stream that every later write comes after
            copy.watched = [_WatchedTensor(slot, source, source._version, word_bytes(source)) for slot, source in later]
            copy.sums = sums_of(source for _, source in later)
            stream.wait_stream(now)
        with torch.cuda.stream(stream):
            _queue(later)
        may_change.record(stream)
    done.record(stream)
    for _, source in pairs:
        source.record_stream(stream)  # the allocator must not hand its memory on before it was read
    return copy


def _queue(pairs: list[Pair]) -> None:
    """Queue copies to the host on the current stream."""
    for slot, source in pairs:
        # Of a copy that nobody waits for, torch takes a lazy sign back on the host before the elements are there
        # (github.com/pytorch/pytorch/issues/146286): the device does it first.
        slot.copy_(source.resolve_conj().resolve_neg(), non_blocking=True)


def room_bytes(device: torch.device, spare_fraction: float) -> int:
    """Return the memory that a device has left when `spare_fraction` of all it has stays free.

    What torch has reserved and not allocated counts as taken: between two steps that is where the next forward's
    activations will lie.
    """
    found = Device(device.type, device.index or 0).free_memory()
    return 0 if found is None else found[0] - int(spare_fraction * found[1])


def mode_for(device: torch.device, num_bytes: int) -> str:
    """Return "device" where it has room for a copy of so much, else "host"."""
    return "device" if 0 < num_bytes < room_bytes(device, FREE_FRACTION) else "host"


def _clones(sources: list[torch.Tensor], device: torch.device) -> tuple[list[torch.Tensor], Any]:
    """Return copies in the device's own memory, and their pool; none where it has no room for all of them."""
    try:
        if room_bytes(device, SPARE_FRACTION) >= sum(source.nbytes for source in sources):
            with Device(device.type, device.index or 0).private_pool() as pool:
                return [source.clone() for source in sources], pool
    except torch.OutOfMemoryError:
        pass
    LOG.warning("the device has no memory left for a snapshot: this one goes straight to the host")
    return [], None
