"""Moves: what an optimiser may change about a training step, each a pure function from a step to a step.

Use them directly or as data (`Move`, `apply`). A move sets flags of
`TrainingStep` and keeps the profile, so the opposite move restores the step
exactly. Bad targets raise `InputError`. Sizes are bytes.

>>> from headway.cost.specs import LinkSpec
>>> from headway.sim.graph.hops import Network
>>> from headway.sim.training.training_step import Block, StepProfile
>>> profile = StepProfile.of([Block((5,), (9,), (400,)), Block((5,), (9,), (300,)), Block((5,), (9,), (200,))])
>>> step = TrainingStep.of(profile, Network("ring", 2, LinkSpec("wire", 1e9, 0.0, "doctest")))
>>> joined = join_buckets(step, 0)
>>> joined.bucket_bytes().tolist(), split_bucket(joined, 0).equals(step)
([500, 400], True)
>>> bucket_by_size(step, 450).bucket_bytes().tolist()
[500, 400]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.core.units import MIB
from headway.sim.ddp.ddp_buckets import assign, limits
from headway.sim.training.training_step import BACKWARD, FORWARD, Flags, Ints, TrainingStep

HOROVOD_CAP_BYTES = 64 * MIB
"""Horovod's fusion threshold."""


@dataclass(frozen=True, slots=True)
class Move:
    """A move as data."""

    name: str
    """One of `MOVES`."""

    targets: tuple[int, ...] = ()
    """Gradients, operations or blocks that it acts on."""

    value: int = 1
    """What it sets: on or off, parts, micro-batches."""


class MoveFn(Protocol):
    """A move. Write a function of this shape and list it in `MOVES`."""

    def __call__(self, step: TrainingStep, targets: tuple[int, ...], value: int) -> TrainingStep:
        """Return the step with the move made."""
        ...


def apply(step: TrainingStep, moves: Iterable[Move]) -> TrainingStep:
    """Make moves one after the other; raises `UnknownNameError` on a name, `InputError` on a target."""
    for move in moves:
        step = pick(MOVES, move.name, "move")(step, move.targets, move.value)
    return step


def join_buckets(step: TrainingStep, tensor: int) -> TrainingStep:
    """Join the bucket that ends with gradient `tensor` to the one after it."""
    _check(tensor, step.joined.size - 1, "gradient")
    if step.joined[tensor]:
        raise InputError(f"gradient {tensor} ends no bucket; choose one of {step.bucket_ends()[:-1].tolist()[:9]}.")
    return replace(step, joined=_with(step.joined, (tensor,), on=True))


def split_bucket(step: TrainingStep, tensor: int) -> TrainingStep:
    """Split a bucket after gradient `tensor`."""
    _check(tensor, step.joined.size - 1, "gradient")
    if not step.joined[tensor]:
        raise InputError(f"gradient {tensor} ends a bucket already; choose one inside a bucket.")
    return replace(step, joined=_with(step.joined, (tensor,), on=False))


def cut_bucket(step: TrainingStep, tensor: int, parts: int) -> TrainingStep:
    """Send the bucket that ends with gradient `tensor` in `parts` equal parts."""
    _check(tensor, step.parts.size, "gradient")
    cut = step.parts.copy()
    cut[tensor] = parts
    return replace(step, parts=cut)


def with_buckets(step: TrainingStep, joined: Flags) -> TrainingStep:
    """Return the step with other buckets; `joined` [T] as in `TrainingStep`."""
    return replace(step, joined=np.asarray(joined, np.bool_).copy())


def bucket_by_size(step: TrainingStep, cap_bytes: float, *, first_bytes: float | None = None) -> TrainingStep:
    """Bucket as DDP does: in order of readiness, a bucket closes once it holds `cap_bytes`, the first `first_bytes`."""
    if not cap_bytes >= 1 or (first_bytes is not None and not first_bytes >= 1):
        raise InputError(f"a bucket of {cap_bytes} bytes holds nothing; give a size of at least 1.")
    return with_buckets(step, _by_ddp(step.gradient_bytes(), (int(first_bytes or cap_bytes), int(cap_bytes))))


def default_buckets(step: TrainingStep, framework: str = "ddp") -> TrainingStep:
    """Return the step as a framework of `DEFAULTS` buckets it."""
    return with_buckets(step, pick(DEFAULTS, framework, "framework")(step.gradient_bytes()))


def _by_ddp(sizes: Ints, limit: tuple[int, int] | None = None) -> Flags:
    """Return [T] joined flags by DDP's rule (`headway.sim.ddp.ddp_buckets`), for gradients of one type."""
    joined = np.ones(sizes.size, np.bool_)
    kept = assign(sizes.tolist(), ["gradient"] * sizes.size, limit or limits("default"))
    joined[[bucket[-1] for bucket in kept]] = False
    return joined


def _by_horovod(sizes: Ints) -> Flags:
    """Return [T] joined flags of buckets that never exceed the threshold, unless one gradient does."""
    joined, held = np.ones(sizes.size, np.bool_), 0
    for tensor, size in enumerate(sizes.tolist()):
        if held and held + size > HOROVOD_CAP_BYTES:
            joined[tensor - 1], held = False, 0
        held += size
    joined[-1:] = False
    return joined


DEFAULTS: dict[str, Callable[[Ints], Flags]] = {"ddp": _by_ddp, "horovod": _by_horovod}
"""Framework -> its buckets: DDP's close once they hold 25 MiB (the first 1 MiB), Horovod's before they exceed 64 MiB.

Horovod fuses what is ready within a cycle; the threshold is the most that it fuses, taken here as always reached.
"""


def fuse_ops(step: TrainingStep, ops: Iterable[int]) -> TrainingStep:
    """Run each of `ops` as one with the operation after it: one launch less, but its gradient is ready later."""
    return replace(step, fused=_with(step.fused, tuple(ops), on=True))


def unfuse_ops(step: TrainingStep, ops: Iterable[int]) -> TrainingStep:
    """Take `fuse_ops` back."""
    return replace(step, fused=_with(step.fused, tuple(ops), on=False))


def fusible(step: TrainingStep) -> Flags:
    """Return [n] whether an operation may run as one with the next: same block, both forward or both backward."""
    profile = step.profile
    same = (profile.kind[1:] == profile.kind[:-1]) & (profile.block[1:] == profile.block[:-1])
    inside = (profile.kind[1:] == FORWARD) | (profile.kind[1:] == BACKWARD)
    return np.concatenate([same & inside, [False]])


def compute_in_half(step: TrainingStep, blocks: Iterable[int], *, on: bool = True) -> TrainingStep:
    """Compute `blocks`, and send their gradients, in 16 bits (results change)."""
    return replace(step, half=_with(step.half, tuple(blocks), on=on))


def recompute(step: TrainingStep, blocks: Iterable[int], *, on: bool = True) -> TrainingStep:
    """Keep only the inputs of `blocks`, and run their forward pass again before their backward pass."""
    return replace(step, recomputed=_with(step.recomputed, tuple(blocks), on=on))


def accumulate(step: TrainingStep, microbatches: int) -> TrainingStep:
    """Cut the batch into micro-batches; gradients are summed over ranks after the last one."""
    return replace(step, microbatches=microbatches)


def send_first(step: TrainingStep, order: str) -> TrainingStep:
    """Change the order of communication; `order` is one of `headway.sim.training.training_step.ORDERS`."""
    return replace(step, order=order)


def view_gradients(step: TrainingStep, *, on: bool = True) -> TrainingStep:
    """Let gradients live inside their buckets: no copies."""
    return replace(step, gradient_view=on)


MOVES: dict[str, MoveFn] = {
    "join_buckets": lambda step, targets, value: _each(join_buckets if value else split_bucket, step, targets),
    "cut_bucket": lambda step, targets, value: _each(lambda s, t: cut_bucket(s, t, value), step, targets),
    "fuse_ops": lambda step, targets, value: (fuse_ops if value else unfuse_ops)(step, targets),
    "compute_in_half": lambda step, targets, value: compute_in_half(step, targets, on=bool(value)),
    "recompute": lambda step, targets, value: recompute(step, targets, on=bool(value)),
    "accumulate": lambda step, targets, value: accumulate(step, value),
    "forward_first": lambda step, targets, value: send_first(step, "forward" if value else "ready"),
    "view_gradients": lambda step, targets, value: view_gradients(step, on=bool(value)),
}
"""Name of a move -> the function that makes it; value 0 takes it back (1 part, 1 micro-batch)."""


def _each(
    move: Callable[[TrainingStep, int], TrainingStep], step: TrainingStep, targets: tuple[int, ...]
) -> TrainingStep:
    """Make a move on one target after the other."""
    for target in targets:
        step = move(step, target)
    return step


def _with(flags: Flags, targets: tuple[int, ...], *, on: bool) -> NDArray[np.bool_]:
    """Return a copy with some flags set."""
    for target in targets:
        _check(target, flags.size, "target")
    changed = flags.copy()
    changed[list(targets)] = on
    return changed


def _check(target: int, size: int, what: str) -> None:
    """Refuse a target that does not exist."""
    if not 0 <= target < size:
        raise InputError(f"{what} {target} does not exist; choose from 0..{size - 1}.")
