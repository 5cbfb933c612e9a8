"""Where a loader stands: one walk per pass over the dataset, and the state that another one goes on from.

A walk hands out the keys of batches ahead of time, and counts the batches that
the training loop took: only those are in its state. `OrderWalk` owns the
order; `SamplerWalk` follows the user's sampler; `StreamWalk` leaves an
iterable dataset's position to that dataset.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.data.order import Permutation, Sequence, occurrences
from headway.data.runtime.keyed import WORD, DrawsApart, Keys

State = dict[str, Any]


@dataclass(slots=True)
class OrderWalk:
    """A pass in an order of our own: the state is one number, good for any rank of any world."""

    epoch: int
    seed: int
    sequence: Sequence
    order: Permutation
    rank: int
    taken: int = 0
    """Batches that the training loop has got."""
    finished: bool = False

    def keys(self) -> Iterator[Keys]:
        """Yield the keys of this rank's batches."""
        done, num_items = self.sequence.start // self.sequence.global_batch, self.sequence.num_items
        for batch in range(self.sequence.num_batches(self.rank)):
            positions = self.sequence.positions(batch, self.rank)
            items = self.order(positions % num_items).tolist()
            # In a padded tail an item comes again: its random numbers must differ from those of its first time.
            again = (positions // num_items).tolist()
            yield Keys(items, again, seed=self.seed, epoch=self.epoch, batch=done + batch)

    def state(self) -> State:
        """Return epoch and position; the end of an epoch is the start of the next."""
        position = self.sequence.position_after(self.taken)
        if self.finished or position >= self.sequence.num_items:
            return {"epoch": self.epoch + 1, "position": 0}
        return {"epoch": self.epoch, "position": position}


@dataclass(slots=True)
class SamplerWalk:
    """A pass in the order of the user's sampler, which is read again up to the state's batch, without loading."""

    epoch: int
    sampler: Any
    """What yields indices, or lists of them."""
    batched: bool
    seed: int
    skip: int = 0
    taken: int = 0
    finished: bool = False
    before: State = field(default_factory=dict)
    """The sampler's own state at the start of the pass."""

    def __post_init__(self) -> None:
        """Note, or put back, what decides the sampler's order."""
        inner = getattr(self.sampler, "sampler", self.sampler)
        generator = getattr(inner, "generator", None)
        if self.before:
            if "generator" in self.before and generator is not None:
                generator.set_state(self.before["generator"])
            if "sampler_epoch" in self.before and hasattr(inner, "set_epoch"):
                inner.set_epoch(self.before["sampler_epoch"])
            return
        if isinstance(generator, torch.Generator):
            self.before["generator"] = generator.get_state()
        if isinstance(getattr(inner, "epoch", None), int):
            self.before["sampler_epoch"] = inner.epoch

    def keys(self) -> Iterator[Keys]:
        """Yield the keys of the batches after the skipped ones. Raises `InputError` when the sampler is shorter."""
        seen: dict[Any, int] = {}
        seed = derived_seed(self.seed, "sampler", self.epoch) & WORD
        batch = 0
        for batch, indices in enumerate(DrawsApart(lambda: iter(self.sampler), seed), start=1):
            items = list(indices) if self.batched else [indices]
            again = occurrences(items, seen)
            if batch > self.skip:
                yield Keys(items, again, seed=self.seed, epoch=self.epoch, batch=batch - 1)
        if batch < self.skip:
            raise InputError(
                f"the state was taken after batch {self.skip} of the sampler, which now yields {batch}. "
                "Give the loader the sampler that it had."
            )

    def state(self) -> State:
        """Return epoch, batches, and what the sampler's order depends on."""
        if self.finished:
            return {"epoch": self.epoch + 1, "batches": 0}
        return {"epoch": self.epoch, "batches": self.skip + self.taken, "sampler": self.before}


@dataclass(slots=True)
class StreamWalk:
    """A pass over an iterable dataset that can say where it is (`state_dict`)."""

    epoch: int
    num_workers: int
    before: State = field(default_factory=dict)
    """Where the pass began: {"batches", "workers"}."""
    taken: int = 0
    finished: bool = False
    states: dict[int, Any] = field(default_factory=dict)
    """Worker (0 without workers) -> the dataset's state after the last batch taken from it."""
    next_worker: int = 0
    """Whose turn it is."""

    def __post_init__(self) -> None:
        """Take over the states that the pass goes on from."""
        self.states.update(self.before.get("workers", {}))
        self.next_worker = self.before.get("next_worker", 0)

    def state(self) -> State:
        """Return epoch, batches and the dataset's state in every worker that has delivered."""
        if self.finished:
            return {"epoch": self.epoch + 1, "batches": 0}
        return {
            "epoch": self.epoch,
            "batches": self.before.get("batches", 0) + self.taken,
            "workers": dict(self.states),
            "next_worker": self.next_worker,
        }

    def got(self, worker: int, state: Any) -> None:
        """Note that a batch of `worker` was taken, and where the dataset stood after it."""
        self.taken += 1
        self.states[worker] = state
        self.next_worker = (worker + 1) % max(self.num_workers, 1)
