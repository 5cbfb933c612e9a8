"""Step profiles laid out from blocks: what a modelled network computes.

>>> profile_of([Block((5,), (9,), (400,))], update_ns=1).duration_ns.tolist()
[5, 9, 1]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks._step_model import BACKWARD, FORWARD, OUTPUT, UPDATE, StepProfile
from headway.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Block:
    """A layer, or a group of layers that is computed again as a whole: what `profile_of` takes."""

    forward_ns: tuple[int, ...]
    """Durations of its forward operations."""

    backward_ns: tuple[int, ...]
    """Durations of its backward operations."""

    gradient_bytes: tuple[int, ...] = ()
    """For each backward operation: the gradient that it completes; 0 = none."""

    fixed_ns: int = 0
    """Part of each operation that does not shrink with the batch and that fusing saves: launch, reading its input."""

    half_fraction: float = 1.0
    """Duration in 16 bits / as profiled; 1 = it gains nothing."""

    activation_bytes: int = 0
    """What its forward pass keeps for its backward pass."""

    input_bytes: int = 0
    """What is kept instead when the block is computed again."""

    kind: int = -1
    """Equal blocks have equal kinds; -1 = like no other."""


def profile_of(
    blocks: Sequence[Block],
    *,
    update_ns: int = 0,
    output_ns: int = 0,
    state_bytes: int = 0,
    copy_ns_per_byte: float = 0.0,
    most_microbatches: int = 1,
) -> StepProfile:
    """Lay blocks out: forward in order, backward in reverse, one update.

    Raises `InputError` when there are no blocks or a block names more gradients than backward operations.
    """
    if not blocks:
        raise InputError("a step needs at least one block; pass one per layer.")
    rows: list[tuple[int, int, int, int, int, int]] = []
    sizes: list[int] = []
    for index, block in enumerate(blocks):
        rows += [(FORWARD, t, block.fixed_ns, round(t * block.half_fraction), index, -1) for t in block.forward_ns]
    if output_ns:
        rows.append((OUTPUT, output_ns, 0, output_ns, len(blocks) - 1, -1))
    for index in reversed(range(len(blocks))):
        block = blocks[index]
        if len(block.gradient_bytes) > len(block.backward_ns):
            raise InputError(f"block {index} has more gradients than backward operations; give each an operation.")
        for at, t in enumerate(block.backward_ns):
            size = block.gradient_bytes[at] if at < len(block.gradient_bytes) else 0
            rows.append(
                (BACKWARD, t, block.fixed_ns, round(t * block.half_fraction), index, len(sizes) if size else -1)
            )
            sizes += [size] if size else []
    rows.append((UPDATE, update_ns, 0, update_ns, -1, -1))
    kind, duration, fixed, half, block_of, tensor_of = np.ascontiguousarray(np.array(rows, np.int64).T)
    kinds = [block.kind if block.kind >= 0 else -1 - index for index, block in enumerate(blocks)]
    return StepProfile(
        kind=kind, duration_ns=duration, fixed_ns=fixed, half_ns=half, block=block_of, tensor=tensor_of,
        tensor_bytes=np.array(sizes, np.int64),
        activation_bytes=np.array([block.activation_bytes for block in blocks], np.int64),
        input_bytes=np.array([block.input_bytes for block in blocks], np.int64),
        block_kind=np.unique(kinds, return_inverse=True)[1].astype(np.int64), state_bytes=state_bytes,
        copy_ns_per_byte=copy_ns_per_byte, most_microbatches=most_microbatches,
    )  # fmt: skip
