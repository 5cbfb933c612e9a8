"""What torch's default collate function makes of examples, planned without torch: rows stay rows until written.

A server collates straight into a slot of shared memory. The result is a tree
for `headway.data.serving.memory.packing`: each tensor to be is a `Marked` stack of rows. What
torch would refuse, or nobody is sure of, is left to torch itself, which then
runs on the examples where they arrive.

>>> tree = collated([{"x": np.zeros(2, np.uint8), "label": 1}, {"x": np.ones(2, np.uint8), "label": 7}])
>>> tree["label"].array.tolist(), len(tree["x"].array.rows), tree["x"].mark
([1, 7], 2, 'tensor')
>>> collated([1, None]) is None
True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from headway.data.serving.memory.packing import Marked, Stacked

TENSOR = "tensor"
"""Mark of an array that is a torch tensor; "tensor:bfloat16" where numpy has no such type and holds its bits."""

_NUMBERS: dict[type, type] = {bool: np.bool_, int: np.int64, float: np.float64}
"""Python's numbers, and what torch makes of them."""

_TORCH_KINDS = "biufc"


class _LeaveItError(Exception):
    """Torch shall decide."""


def collated(examples: list[Any]) -> Any | None:
    """Return the tree of a batch, or None where the examples must be sent as they are."""
    try:
        return _collated(examples) if examples else None
    except (_LeaveItError, OverflowError):
        return None


def _collated(parts: Sequence[Any]) -> Any:
    first = parts[0]
    kind = type(first)
    if any(type(part) is not kind for part in parts):
        raise _LeaveItError
    if kind in _NUMBERS:
        return Marked(np.array(parts, _NUMBERS[kind]), TENSOR)
    if kind in (str, bytes):
        return parts  # a tuple inside of a sequence, else a list: as torch has it
    if kind is Marked:
        if any(part.mark != first.mark for part in parts):
            raise _LeaveItError
        return Marked(_stacked([part.array for part in parts]), first.mark)
    if kind is np.ndarray or isinstance(first, np.generic):
        return Marked(_stacked([np.asarray(part) for part in parts]), TENSOR)
    if kind is dict:
        return _mapping(parts)
    if isinstance(first, (tuple, list)):
        return _sequence(parts)
    raise _LeaveItError


def _stacked(rows: list[Any]) -> Stacked:
    first = rows[0]
    wide = first.dtype.itemsize > (16 if first.dtype.kind == "c" else 8)
    if (
        wide
        or first.dtype.kind not in _TORCH_KINDS
        or any(r.shape != first.shape or r.dtype != first.dtype for r in rows)
    ):
        raise _LeaveItError
    return Stacked(rows)


def _mapping(parts: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    first = parts[0]
    if any(key not in part for part in parts for key in first):
        raise _LeaveItError
    return {key: _collated([part[key] for part in parts]) for key in first}


def _sequence(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if any(len(part) != len(first) for part in parts):
        raise _LeaveItError
    columns = [_collated(column) for column in zip(*parts, strict=True)]
    made: Callable[..., Any] | None = type(first) if hasattr(first, "_fields") else None
    # Torch makes a list of a plain tuple, and keeps a named one.
    return made(*columns) if made is not None else columns
