"""The copy that `dcp.async_save` makes before training goes on, into memory that is taken once.

    dcp.async_save(state, async_stager=stager, ...)      stager = HeadwayStager(), kept for all saves

Tensors are copied into an image in shared memory, prefaulted and, for CUDA,
pinned: no save meets a page fault. An image is used again once nobody refers
to the copy that lies in it, so a save may go on while the next one begins;
a further one waits. The staged state has the structure of the state.

Of a state on a device `stage` returns a future, as torch's protocol allows:
the host goes on at once, and `dcp.async_save` returns an `AsyncSaveResponse`.
The state may be changed at once too, without a wait for `staging_completion`:
later work on the device waits there, for the copy inside the device where it
has room for one, else for the copy to the host. On the CPU there is nothing to
go on with: `stage` returns the copy.

>>> stager, state = HeadwayStager(), {"w": torch.ones(2), "step": 7}
>>> staged = stager.stage(state)
>>> _ = state["w"].zero_()
>>> staged["w"].tolist(), staged["step"]
([1.0, 1.0], 7)
>>> del staged; stager.close()
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor
from torch.multiprocessing import reductions

from headway.checkpoint.saves.image import Image, Part, cuda_device_of, pickled, plan
from headway.checkpoint.saves.snapshot import Snapshot, mode_for
from headway.checkpoint.state.shards import FlatShard
from headway.core.errors import BackgroundError, InputError

_REDUCTIONS: Any = reductions
"""Torch does not type it."""

_DTENSOR: Any = DTensor
"""Nor its constructor."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Values that can always be stored."""

IMAGES = 3
"""At most so many copies exist: one that is written, one that a planner still holds, one that is made."""

PATIENCE_S = 600.0
"""How long `stage` waits for one of them."""


class Save(Future[Any]):
    """A save under way. It knows whether somebody has been told of its end."""

    is_told = False
    unsaved: list[Any] = []  # noqa: RUF012  # replaced, never changed
    """The copy that was to be saved, or its future, where that failed."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait; return the metadata. Raises what the save raised."""
        try:
            return super().result(timeout)
        finally:
            self.is_told = self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait; return what the save raised, or None."""
        error = super().exception(timeout)
        self.is_told = True
        return error


class HeadwayStager(AsyncStager):
    """Copies states into images of its own; one per rank, used by its training thread."""

    _synchronize_after_execute = False

    def __init__(self) -> None:
        """Take no memory yet: the first `stage` does."""
        self._images: list[tuple[tuple[Part, ...], Image, Any]] = []
        self._streams: dict[torch.device, Any] = {}
        self._watched: Save | None = None
        self._is_whole = threading.Event()
        self._is_whole.set()
        self.num_bytes = 0
        """Of the tensors that were staged last."""

    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, object] | Future[dict[str, object]]:
        """Return the state with every tensor copied: its future where some lie on a device, and may be changed too.

        Raises `BackgroundError` when the save that was `watch`ed has failed, or no image becomes free;
        `InputError` for a tensor that cannot be copied so.
        """
        self._raise_failure()
        found = _tensors(state_dict)
        parts = tuple(
            Part(str(number), tensor.dtype, tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape))
            for number, tensor in enumerate(found.values())
        )
        self.num_bytes = sum(tensor.nbytes for tensor in found.values())
        device = cuda_device_of(found.values())
        image, memory = self._image(parts, device)
        slots = [_view(memory, slot, tensor) for slot, tensor in zip(image.plan.slots, found.values(), strict=True)]
        snapshot = Snapshot("host" if device is None else mode_for(device, self.num_bytes), self._streams)
        snapshot.copy(zip(slots, found.values(), strict=True), settled=lambda tensor: False)
        copies = dict(zip(found, slots, strict=True))
        staged: dict[str, Any] = _staged(state_dict, copies)
        if device is None:
            return staged
        future, self._is_whole = Future[dict[str, Any]](), threading.Event()
        threading.Thread(
            target=_arrive, args=(snapshot, [staged], future, self._is_whole), name="headway-staging"
        ).start()
        return future

    def watch(self, save: Save) -> None:
        """Raise at the next `stage` what goes wrong with this save, unless its future has told it."""
        self._watched = save

    def synchronize_staging(self) -> None:
        """Wait until what was staged last is whole."""
        self._is_whole.wait()

    def close(self) -> None:
        """Give back the memory that nobody uses any more; raises as `stage` does."""
        kept = []
        for parts, image, user in self._images:
            if user.expired():
                image.close()
            else:
                kept.append((parts, image, user))
        self._images = kept
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._watched is not None and self._watched.is_told:
            self._watched = None
        if self._watched is not None and self._watched.done():
            error, self._watched = self._watched.exception(), None
            if error is not None:
                raise BackgroundError(
                    f"the save before was not written: {error}. Remove the cause; older checkpoints stand."
                ) from error

    def _image(self, parts: tuple[Part, ...], device: torch.device | None) -> tuple[Image, torch.Tensor]:
        """Return a free image for `parts`, and its memory as a tensor that tells when nobody uses it any more."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            free = [entry for entry in self._images if entry[2].expired()]
            fits = [entry for entry in free if entry[0] == parts]
            if fits or free or len(self._images) < IMAGES:
                break
            if time.monotonic() > until_s:
                raise BackgroundError(
                    f"{IMAGES} staged states are still in use after {PATIENCE_S:g} s. Wait for the saves before, and "
                    "let go of what stage() returned."
                )
            time.sleep(0.01)
        for entry in fits[:1] or free[:1]:
            self._images.remove(entry)
            if not fits:
                entry[1].close()
        image = fits[0][1] if fits else Image(plan(parts), tail_bytes=0, pin=device)
        image.pin()
        memory = torch.frombuffer(image.mapped, dtype=torch.uint8)
        self._images.append((parts, image, _REDUCTIONS.StorageWeakRef(memory.untyped_storage())))
        return image, memory


def _arrive(
    snapshot: Snapshot, staged: list[dict[str, Any]], future: Future[dict[str, Any]], is_whole: threading.Event
) -> None:
    """Wait for the copies from devices, then give the state out of the list to the future and refer to it no more."""
    try:
        snapshot.wait()
        snapshot.release()
    except BaseException as error:  # whatever it is, it is the caller's
        future.set_exception(error)
    else:
        future.set_result(staged.pop())
    finally:
        is_whole.set()


def _view(memory: torch.Tensor, slot: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of one copy."""
    if not slot.payload_bytes:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    flat = memory[slot.payload_offset : slot.payload_offset + slot.payload_bytes]
    return flat.view(tensor.dtype).view(tensor.shape)


Place = tuple[Any, ...]
"""What two tensors share that are one: device, address, type, shape and strides."""


def _place(tensor: torch.Tensor) -> Place:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _local(value: Any) -> torch.Tensor | None:
    """Return the local memory of a dense tensor; None for what is copied as a Python object is."""
    if isinstance(value, FlatShard):
        return value.tensor.detach()
    if isinstance(value, ShardedTensor):
        raise InputError("a ShardedTensor cannot be staged. Keep parameters as DTensor, or call dcp.save.")
    if not isinstance(value, torch.Tensor):
        return None
    local = value.to_local() if isinstance(value, DTensor) else value
    wait = getattr(local, "wait", None)
    local = wait() if callable(wait) else local
    plain = type(local) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and not local.is_quantized
    return local.detach() if plain and local.layout == torch.strided else None


def _tensors(value: Any) -> dict[Place, torch.Tensor]:
    """Return the tensors in a state, each memory once."""
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    else:
        local = _local(value)
        return {} if local is None else {_place(local): local}
    return {place: tensor for each in inner for place, tensor in _tensors(each).items()}


def unstorable(value: Any) -> str | None:
    """Say what of a state cannot be stored, None when all can: the call that saves it is to fail, and not a thread.

    >>> unstorable({"step": 7, "rate": [0.1]}), unstorable({"rate": [lambda step: 0.1]}) is None
    (None, False)
    """
    if isinstance(value, (Mapping, list, tuple)):
        inner = value.values() if isinstance(value, Mapping) else value
        return next((reason for reason in map(unstorable, inner) if reason is not None), None)
    try:
        if not isinstance(value, _PLAIN) and _local(value) is None:
            pickled(copy.deepcopy(value))
    except Exception as cause:  # whatever its own methods raise
        return f"{type(value).__name__} cannot be stored: {cause}"
    return None


def _staged(value: Any, copies: dict[Place, torch.Tensor]) -> Any:
    """Return a state of the same structure with copied tensors."""
    if isinstance(value, Mapping):
        return {key: _staged(inner, copies) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        inner = [_staged(each, copies) for each in value]
        return inner if isinstance(value, list) else type(value)(*inner) if hasattr(value, "_fields") else tuple(inner)
    local = _local(value)
    if local is None:
        return copy.deepcopy(value)
    copied = copies[_place(local)]
    if isinstance(value, FlatShard):
        return replace(value, tensor=copied)
    if not isinstance(value, DTensor):
        return copied
    # Its constructor, since from_local() would bring the copy back to the mesh's device.
    return _DTENSOR(copied, value._spec, requires_grad=False)
