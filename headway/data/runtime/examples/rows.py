"""A batch's tensors, filled row by row as examples come, so that torch's default collate function has nothing to copy.

Each tensor or array of an example is copied once, while it is warm, into its
row of the batch; what `default_collate` would have stacked is there already.
Everything else (numbers, text, structure) is left to `default_collate`, whose
results are matched to the last bit, type and stride.

>>> rows = BatchRows(2, BatchMemory())
>>> examples = [rows.placed(k, (torch.full((1024,), k), k)) for k in range(2)]
>>> data, labels = rows.collated(examples)
>>> data.shape, labels, torch.equal(data, default_collate([torch.full((1024,), k) for k in range(2)]))
(torch.Size([2, 1024]), tensor([0, 1]), True)
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map
from torch.utils.data.dataloader import default_collate as default_collate

SMALL_BYTES = 4096
"""Smaller tensors are stacked as ever: that costs less than minding them."""

SPARE = 4
"""Arrays whose memory is kept for the next ones."""


class BatchMemory:
    """Memory of batches, used again once nobody has the batch any more: fresh pages cost 3 % of an image's CPU time."""

    def __init__(self) -> None:
        self._spare: deque[np.ndarray[Any, np.dtype[np.uint8]]] = deque(maxlen=SPARE)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
        """Return an array of whatever content; its memory comes back when it, and all tensors over it, are gone."""
        size = math.prod(shape) * dtype.itemsize
        raw = self._taken(size)
        array = raw[:size].view(dtype).reshape(shape)
        weakref.finalize(array, self._spare.append, raw).atexit = False
        return array

    def _taken(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        try:
            raw = self._spare.pop()  # the latest: it may be in a cache still
        except IndexError:
            return np.empty(size, np.uint8)
        return raw if size <= raw.size <= 2 * size else np.empty(size, np.uint8)

    def __reduce__(self) -> tuple[type[BatchMemory], tuple[()]]:
        """Leave the memory behind: another process has its own."""
        return BatchMemory, ()


class BatchRows:
    """Room for the examples of one batch, safe for threads."""

    def __init__(self, num_examples: int, memory: BatchMemory) -> None:
        self._num_examples, self._memory = num_examples, memory
        self._whole: dict[tuple[Any, ...], torch.Tensor] = {}
        """Place inside an example -> [num_examples, ...] tensor of the batch."""
        self._lock = threading.Lock()

    def placed(self, row: int, value: Any, place: tuple[Any, ...] = ()) -> Any:
        """Return `value`, the example for `row` or a part of it, with its large tensors and arrays moved into rows."""
        if type(value) is np.ndarray and value.dtype.kind in "biufc" and value.ndim and value.nbytes >= SMALL_BYTES:
            value = torch.as_tensor(value)
        if type(value) is torch.Tensor:
            return self._moved(row, value, place)
        if type(value) is dict:
            return {key: self.placed(row, part, (*place, key)) for key, part in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self.placed(row, part, (*place, k)) for k, part in enumerate(value))
        return value

    def collated(self, examples: list[Any]) -> Any:
        """Return what `default_collate` returns for the placed examples."""
        return collate(examples, collate_fn_map={**default_collate_fn_map, torch.Tensor: self._stacked})

    def _moved(self, row: int, tensor: torch.Tensor, place: tuple[Any, ...]) -> torch.Tensor:
        # A tensor of another layout would be stacked in that layout; one with a gradient keeps its history.
        if tensor.requires_grad or not _is_plain(tensor) or tensor.nbytes < SMALL_BYTES:
            return tensor
        whole = self._whole.get(place)
        if whole is None:
            with self._lock:
                whole = self._whole.get(place)
                if whole is None:
                    self._whole[place] = whole = self._new((self._num_examples, *tensor.shape), tensor.dtype)
        here = whole.select(0, row)
        return here.copy_(tensor) if tensor.shape == here.shape and tensor.dtype == here.dtype else tensor

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype not in _NUMPY:  # numpy has no such numbers
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self._memory.array(shape, _NUMPY[dtype]))

    def _stacked(self, batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        """Return the tensor whose rows these are, in order; else stack them."""
        whole = batch[0]._base
        ours = [one for one in self._whole.values() if one is whole]
        if ours and len(batch) == len(ours[0]) and all(_is_row(part, ours[0], k) for k, part in enumerate(batch)):
            return ours[0]
        stacked: torch.Tensor = collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        return stacked


_NUMPY = {
    torch.from_numpy(np.empty(0, kind)).dtype: np.dtype(kind)
    for kind in ("?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16")
}


def _is_row(part: object, whole: torch.Tensor, row: int) -> bool:
    return type(part) is torch.Tensor and part._base is whole and part.storage_offset() == row * whole.stride(0)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_quantized
