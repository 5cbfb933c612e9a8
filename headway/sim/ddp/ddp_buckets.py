"""DDP's published rule: which gradients go into which bucket.

Use it to lay out the buckets of a size that was never run. Gradients are taken
in the order in which they become ready; those of one type fill a bucket until
it holds at least its limit, the tensor that crosses the limit included. The
first bucket of each type has a limit of its own (1 MiB by default), so that
the first all-reduce starts early. Sizes in bytes, `bucket_mb` in MiB as in
torch's `bucket_cap_mb`.

>>> assign([3, 3, 3, 3], ["f"] * 4, limits(6 / 2**20))
[[0, 1], [2, 3]]
>>> assign([3, 3, 3, 3], ["f"] * 4, (1, 100))
[[0], [1, 2, 3]]
>>> limits("default")
(1048576, 26214400)
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.errors import InputError
from headway.core.units import MIB

DEFAULT_FIRST_BYTES, DEFAULT_CAP_BYTES = MIB, 25 * MIB
"""Limits of the first and of every further bucket when the script names none (torch.nn.parallel.distributed)."""


def limits(bucket_mb: float | str) -> tuple[int, int]:
    """Return (first, further) limit in bytes for a size in MiB, or for 'default'."""
    if bucket_mb == "default":
        return DEFAULT_FIRST_BYTES, DEFAULT_CAP_BYTES
    size = int(float(bucket_mb) * MIB)
    return size, size


def assign(sizes: Sequence[int], types: Sequence[str], limit: tuple[int, int]) -> list[list[int]]:
    """Return the buckets, each a list of indices into `sizes`, in the order in which DDP reduces them.

    `sizes` [g] bytes and `types` [g] of the gradients in order of readiness; `limit` as `limits` gives it. Full
    buckets come in the order in which they filled, what is left over follows by type. Raises `InputError` when the two
    lists differ in length.
    """
    if len(sizes) != len(types):
        raise InputError(f"{len(sizes)} sizes and {len(types)} types; give each gradient one of both.")
    full: list[list[int]] = []
    held: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    bound: dict[str, int] = {}
    for index, (size, kind) in enumerate(zip(sizes, types, strict=True)):
        held.setdefault(kind, []).append(index)
        filled[kind] = filled.get(kind, 0) + size
        if filled[kind] >= bound.get(kind, limit[0]):
            full.append(held.pop(kind))
            filled[kind], bound[kind] = 0, limit[1]
    return [*full, *held.values()]
