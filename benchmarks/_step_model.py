"""One data-parallel training step, and the choices about it that moves can change.

Use a `StepProfile` for what was measured or modelled (it never changes) and a
`TrainingStep` for what is chosen: which operations run as one, which gradients
travel as one bucket and in how many parts, what is computed in 16 bits, what
is computed again, how many micro-batches are accumulated. Every choice is a
flag on the profile, so taking one back restores the step exactly. All workers
are equal, each has one compute lane. Durations are int64 ns, sizes bytes.

A choice is a flag of `TrainingStep`, and a move is `dataclasses.replace`. `headway.sim.ddp.ddp_step` is the step of a
recorded run, of which only buckets and gradient views can be chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks._hops import Network
from headway.core.units import MIB
from headway.sim.ddp.ddp_link import assign, limits

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

FORWARD, OUTPUT, BACKWARD, UPDATE = range(4)
"""Kinds of compute operation, in the order in which a device prefers them; communication comes last."""


@dataclass(frozen=True, slots=True, eq=False)
class StepProfile:
    """What one worker computes in a step: n operations in program order, T gradients in the order they are ready."""

    kind: Ints
    """[n] FORWARD, OUTPUT, BACKWARD or UPDATE."""

    duration_ns: Ints
    """[n] As profiled, for the whole batch of a worker."""

    fixed_ns: Ints
    """[n] Part of it that neither shrinks with the batch nor is paid again by an operation fused to the one before."""

    half_ns: Ints
    """[n] Duration in 16 bits; equal to `duration_ns` where that changes nothing."""

    block: Ints
    """[n] Block of each operation, 0..blocks-1 in forward order; -1 = none (updates)."""

    tensor: Ints
    """[n] Gradient that the operation completes; -1 = none. An update with -1 waits for all gradients."""

    tensor_bytes: Ints
    """[T] Size of each gradient, in the order in which backward completes them."""

    activation_bytes: Ints
    """[blocks] What each block's forward pass keeps for its backward pass."""

    input_bytes: Ints
    """[blocks] What is kept instead when the block is computed again."""

    block_kind: Ints
    """[blocks] Equal blocks have equal kinds."""

    state_bytes: int = 0
    """Weights, one copy of the gradients, optimizer state: what memory holds besides activations."""

    copy_ns_per_byte: float = 0.0
    """Cost of copying a gradient into its bucket, and the same again for copying it out."""

    most_microbatches: int = 1
    """Up to so many micro-batches a worker's batch can be cut into: its number of examples."""

    @property
    def producer(self) -> Ints:
        """[T] Operation that completes each gradient."""
        return np.flatnonzero((self.kind == BACKWARD) & (self.tensor >= 0))

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.block_kind.size


@dataclass(frozen=True, slots=True, eq=False)
class TrainingStep:
    """A profile, the network, and every choice. Build it with `of`."""

    profile: StepProfile
    """What never changes."""

    network: Network
    """How gradients are summed."""

    fused: Flags
    """[n] Operation i runs as one with operation i + 1."""

    joined: Flags
    """[T] Gradient t travels in one bucket with gradient t + 1; never the last."""

    parts: Ints
    """[T] Parts of the bucket that ends with gradient t."""

    half: Flags
    """[blocks] Computed, and its gradients sent, in 16 bits."""

    recomputed: Flags
    """[blocks] Forward pass run once more before the backward pass, activations dropped in between."""

    microbatches: int = 1
    """Micro-batches that a worker accumulates before gradients are summed."""

    gradient_view: bool = False
    """Gradients live inside the buckets: no copies, and one copy of the gradients less in memory."""

    @classmethod
    def of(cls, profile: StepProfile, network: Network) -> TrainingStep:
        """Return the step with nothing fused, joined, cut or computed again."""
        none, tensors, blocks = profile.kind.size, profile.tensor_bytes.size, profile.num_blocks
        return cls(
            profile,
            network,
            fused=np.zeros(none, np.bool_),
            joined=np.zeros(tensors, np.bool_),
            parts=np.ones(tensors, np.int64),
            half=np.zeros(blocks, np.bool_),
            recomputed=np.zeros(blocks, np.bool_),
        )

    def equals(self, other: TrainingStep) -> bool:
        """Say whether both are the same choices on the same profile and network."""
        return (self.profile, self.network) == (other.profile, other.network) and all(
            np.array_equal(getattr(self, part.name), getattr(other, part.name)) for part in fields(self)[2:]
        )

    def gradient_bytes(self) -> Ints:
        """Return [T] bytes of each gradient as it is sent."""
        size = self.profile.tensor_bytes
        return np.where(self.half[self.profile.block[self.profile.producer]], (size + 1) // 2, size)

    def bucket_ends(self) -> Ints:
        """Return [b] the last gradient of each bucket, in the order of readiness."""
        return np.flatnonzero(~self.joined)

    def bucket_bytes(self) -> Ints:
        """Return [b] the size of each bucket."""
        total = np.cumsum(self.gradient_bytes())[self.bucket_ends()]
        return np.diff(total, prepend=0)

    def op_ns(self) -> tuple[int, Ints]:
        """Return (time of the micro-batches before the last, [n] durations in the last one).

        A fused group has all its time in its first operation, so that nothing
        it makes is ready before its end. Copies of gradients are part of the
        operation that completes them, and of the first update.
        """
        profile, m = self.profile, self.microbatches
        base = np.where(self.half[profile.block] & (profile.block >= 0), profile.half_ns, profile.duration_ns)
        fixed = np.minimum(profile.fixed_ns, base)
        # A micro-batch pays the fixed part of an operation in full, and 1 / m of what grows with the batch.
        takes = np.where(profile.kind == UPDATE, base, fixed + np.rint((base - fixed) / m).astype(np.int64))
        # fused[i] joins operation i + 1 to i: its fixed part is saved, and `bincount` moves its time to the head of the
        # group.
        takes = takes - np.concatenate([[0], np.where(self.fused[:-1], np.minimum(fixed, takes)[1:], 0)])
        begins = np.concatenate([[True], ~self.fused[:-1]])
        head = np.maximum.accumulate(np.where(begins, np.arange(begins.size), 0))
        takes = np.bincount(head, takes, takes.size).astype(np.int64)
        again = self.recomputed[profile.block] & (profile.block >= 0) & (profile.kind == FORWARD)
        for block in np.flatnonzero(self.recomputed):
            backward = np.flatnonzero((profile.block == block) & (profile.kind == BACKWARD))
            takes[backward[:1]] += takes[again & (profile.block == block)].sum()
        before = (m - 1) * int(takes[profile.kind != UPDATE].sum())
        if not self.gradient_view and profile.copy_ns_per_byte:
            copies = np.rint(self.gradient_bytes() * profile.copy_ns_per_byte).astype(np.int64)
            np.add.at(takes, head[profile.producer], copies)
            takes[np.argmax(profile.kind == UPDATE)] += copies.sum()
        return before, takes

    def ready_ns(self) -> Ints:
        """Return [T] when each gradient is complete, from the start of the step."""
        before, takes = self.op_ns()
        return before + np.cumsum(takes)[self.profile.producer]

    def peak_bytes(self) -> int:
        """Return the most memory that a worker holds: states, a copy of the gradients in buckets, activations.

        Blocks that are computed again keep their input until their own backward pass needs everything.
        """
        profile = self.profile
        scale = np.where(self.half, 0.5, 1.0) / self.microbatches
        whole = profile.activation_bytes * scale
        kept = np.where(self.recomputed, profile.input_bytes * scale, whole)
        full = np.where(self.recomputed, kept + whole, whole)
        earlier = np.concatenate([[0.0], np.cumsum(kept)[:-1]])
        copies = 0 if self.gradient_view else int(self.gradient_bytes().sum())
        return profile.state_bytes + copies + int(np.ceil((earlier + full).max(initial=0.0)))


# Moves that need a rule: buckets by size and by each framework's default, operations that may be fused.

HOROVOD_CAP_BYTES = 64 * MIB
"""Horovod's fusion threshold."""


def with_buckets(step: TrainingStep, joined: Flags) -> TrainingStep:
    """Return the step with other buckets; `joined` [T] as in `TrainingStep`."""
    return replace(step, joined=np.asarray(joined, np.bool_).copy())


def bucket_by_size(step: TrainingStep, cap_bytes: float) -> TrainingStep:
    """Bucket as DDP does: in order of readiness, a bucket closes once it holds `cap_bytes`."""
    return with_buckets(step, _by_ddp(step.gradient_bytes(), (int(cap_bytes), int(cap_bytes))))


def default_buckets(step: TrainingStep, framework: str = "ddp") -> TrainingStep:
    """Return the step as a framework of `DEFAULTS` buckets it."""
    return with_buckets(step, DEFAULTS[framework](step.gradient_bytes()))


def _by_ddp(sizes: Ints, limit: tuple[int, int] | None = None) -> Flags:
    """Return [T] joined flags by DDP's rule (`headway.sim.ddp.ddp_link`), for gradients of one type."""
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


def fuse_ops(step: TrainingStep, ops: Iterable[int], *, on: bool = True) -> TrainingStep:
    """Run each of `ops` as one with the operation after it, or no longer: one launch less, a gradient ready later."""
    fused = step.fused.copy()
    fused[list(ops)] = on
    return replace(step, fused=fused)


def fusible(step: TrainingStep) -> Flags:
    """Return [n] whether an operation may run as one with the next: same block, both forward or both backward."""
    profile = step.profile
    same = (profile.kind[1:] == profile.kind[:-1]) & (profile.block[1:] == profile.block[:-1])
    inside = (profile.kind[1:] == FORWARD) | (profile.kind[1:] == BACKWARD)
    return np.concatenate([same & inside, [False]])
