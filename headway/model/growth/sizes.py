"""Which element of the small model each element of the large one is a copy of.

A stream of width s that grows to t = q s + r is repeated q times, and r elements are left over: their mean (layer norm)
or zero (RMS norm). Its variance is then eta^2 = q s / t times what it was. Hidden units and heads are repeated
circularly. Source: LEMON (Wang et al., ICLR 2024, arXiv 2310.07999).

>>> repeated(2, 5).tolist(), round(eta(2, 5), 3)
([0, 1, 0, 1, -1], 0.894)
>>> circular(2, 5).tolist()
[0, 1, 0, 1, 0]
>>> [(each.source, each.is_new) for each in blocks(2, 3)]
[(0, False), (1, False), (1, True)]

The learning rate of a grown model: the peak of training from scratch, reached as soon, decayed over fewer steps.

A smaller peak starts with a lower loss and ends with a higher one (LEMON, section 5: accelerated decay).

>>> schedule = growth_schedule(1200, 0.433)
>>> schedule.num_steps, schedule(schedule.warmup_steps), round(schedule(schedule.num_steps), 3)
(519, 1.0, 0.1)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one model's attention."""

    query: int
    """Number of query heads."""

    kv: int
    """Number of key and value heads; fewer than query heads under grouped-query attention."""

    size: int
    """Elements of one head."""


@dataclass(frozen=True, slots=True)
class GrownLayer:
    """One layer of the large model."""

    source: int
    """The small model's layer that it is a copy of."""

    is_new: bool
    """Whether it adds nothing to the stream at first, behind the copy that does."""


def repeated(small: int, large: int) -> NDArray[np.int64]:
    """[large] Return the source of each element of the stream; -1 for the r elements that are left over."""
    index = np.arange(large) % small
    index[large - large % small :] = -1
    return index


def eta(small: int, large: int) -> float:
    """Return the square root of the share of the stream that holds copies: sqrt(q s / t)."""
    return math.sqrt(large // small * small / large)


def circular(small: int, large: int) -> NDArray[np.int64]:
    """[large] Return the source of each hidden unit."""
    return np.arange(large) % small


def query_rows(small: Heads, large: Heads) -> NDArray[np.int64]:
    """[query heads x size] Return the source row of each row of the queries.

    A large group of query heads holds those of one small group, so that each still meets its own key head.
    """
    before, after = small.query // small.kv, large.query // large.kv
    head = np.arange(large.query)
    source = head // after % small.kv * before + head % after % before
    return (source[:, None] * small.size + np.arange(small.size)).reshape(-1)


def kv_rows(small: Heads, large: Heads) -> NDArray[np.int64]:
    """[kv heads x size] Return the source row of each row of the keys and of the values."""
    source = circular(small.kv, large.kv)
    return (source[:, None] * small.size + np.arange(small.size)).reshape(-1)


def check_heads(small: Heads, large: Heads, path: str) -> None:
    """Raise `InputError`, naming the attention's path, where its heads cannot grow so."""
    if small.size != large.size:
        raise InputError(
            f"{path}: the head size changes from {small.size} to {large.size}, and attention scores with it. Keep the "
            f"head size: {small.size} x a larger number of heads."
        )
    if small.query % small.kv or large.query % large.kv:
        raise InputError(f"{path}: {small} -> {large}; query heads must be a multiple of the key heads.")
    if large.query < small.query or large.kv < small.kv:
        raise InputError(
            f"{path}: the large model has {large.query} query and {large.kv} key heads, the small one {small.query} "
            f"and {small.kv}. Give the large one at least as many."
        )
    if large.query // large.kv < small.query // small.kv:
        raise InputError(
            f"{path}: {small.query // small.kv} query heads share a key head in the small model, and only "
            f"{large.query // large.kv} in the large one. Keep the ratio: {large.query} query heads want at most "
            f"{large.query * small.kv // small.query} key heads."
        )


def blocks(small: int, large: int) -> list[GrownLayer]:
    """Return the layers of the large model in order; new ones lie right behind their sources, the last layers first.

    Raises `InputError` where the large model has fewer layers.
    """
    if large < small:
        raise InputError(
            f"the large model has {large} layers, the small one {small}. Give the large one at least {small}."
        )
    each, more = divmod(large - small, small)
    counts = [1 + each + (layer >= small - more) for layer in range(small)]
    return [GrownLayer(layer, copy > 0) for layer, count in enumerate(counts) for copy in range(count)]


# The learning rate of a grown model: the peak of training from scratch, reached as soon, decayed over fewer steps.


@dataclass(frozen=True, slots=True)
class GrowthSchedule:
    """A linear warm-up and a cosine decay; call it with a step, as `torch.optim.lr_scheduler.LambdaLR` does."""

    num_steps: int
    """Steps to train the grown model for."""

    warmup_steps: int
    """Steps until the peak: as many as from scratch."""

    floor: float
    """Fraction of the peak that remains at the end."""

    def __call__(self, step: int) -> float:
        """Return the fraction of the peak at a step, from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        share = min(1.0, (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * share))


def growth_schedule(steps: int, share: float, *, warmup: int | None = None, floor: float = 0.1) -> GrowthSchedule:
    """Return the schedule of a grown model.

    `steps` are those of training from scratch, `share` the fraction of them to take, in (0, 1]; `warmup` steps default
    to 2 % of `steps`; `floor` is the last rate as a fraction of the peak. Raises `InputError` on others.
    """
    if steps < 1 or not 0 < share <= 1:
        raise InputError(f"steps is {steps} and share is {share}; pass at least 1 step and a share in (0, 1].")
    num_steps = max(1, int(steps * share))
    warmup = steps // 50 if warmup is None else warmup
    if not 0 <= warmup < num_steps or not 0 <= floor <= 1:
        raise InputError(
            f"warmup is {warmup} and floor is {floor}; pass 0 <= warmup < {num_steps} (steps x share), 0 <= floor <= 1."
        )
    return GrowthSchedule(num_steps, warmup, floor)
