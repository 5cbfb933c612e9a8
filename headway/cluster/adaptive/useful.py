"""Useful examples per second of a batch size: throughput times statistical efficiency (Pollux' goodput).

With gradients of mean square `sqr` and, at the initial batch size, variance
`var`, one step of a batch S times as large makes the progress of

    gain(S) = (var + sqr) / (var / S + sqr)        1 <= gain(S) <= S

initial steps (AdaScale), so that its efficiency is gain(S) / S, equal to
(phi + B0) / (phi + B) with the noise scale phi = B0 var / sqr. A batch B over K
replicas is K b (a + 1): micro-batches of b, a of them before the last one.
Source: Qiao et al., OSDI 2021, sections 2.2 and 3.1; Johnson et al., AdaScale, 2020.

>>> float(gain(4.0, sqr=1.0, var=3.0)), float(gain(1.0, sqr=0.0, var=0.0))
(2.2857142857142856, 1.0)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.cluster.adaptive.speed import Speed
from headway.core.errors import InputError

Values = NDArray[np.float64]
Indices = NDArray[np.int64]

NUM_SIZES = 50
"""Batch sizes tried, in geometric steps."""


def gain(scale: ArrayLike, *, sqr: float, var: float) -> Values:
    """Initial steps that one step of a batch `scale` times as large is worth; 1 without an estimate."""
    below = var / np.asarray(scale, np.float64) + sqr
    return np.where(below > 0, (var + sqr) / np.where(below > 0, below, 1.0), 1.0)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Batch sizes that a job may use, in examples."""

    initial: int
    """B0, the batch size that its learning rate was chosen for: nothing smaller is tried."""

    largest: int
    """B_max, of all replicas together."""

    micro_least: int
    """Smallest micro-batch."""

    micro_most: int
    """Largest micro-batch that fits a device."""

    def __post_init__(self) -> None:
        """Raise `InputError` on limits that no batch meets."""
        if not 1 <= self.initial <= self.largest:
            raise InputError(
                f"the largest batch is {self.largest}, the initial one {self.initial}; "
                "the largest must be at least the initial one, and that at least 1."
            )
        if not 1 <= self.micro_least <= self.micro_most:
            raise InputError(
                f"micro-batches are {self.micro_least} to {self.micro_most}; the least must be at most the most."
            )


class BestBatches(NamedTuple):
    """The best batch for each number of replicas [k]."""

    useful_per_s: Values
    """Useful examples per second; 0 = no batch is possible."""

    microbatch_size: Indices
    """Examples of a micro-batch on one replica."""

    accumulation: Indices
    """Micro-batches before the last one."""


def best_batch(
    speed: Speed, limits: BatchLimits, num_hosts: Indices, num_replicas: Indices, *, sqr: float, var: float,
    two_alone: bool = True,
) -> BestBatches:  # fmt: skip
    """Choose the batch with the most useful examples per second for each (hosts, replicas) [k].

    With `two_alone`, the published rule, one replica with more than the initial batch accumulates at least once: from
    a single gradient no variance can be estimated, unless consecutive ones are compared.
    """
    tries = np.geomspace(np.maximum(limits.initial, limits.micro_least * num_replicas), limits.largest, NUM_SIZES)
    each = tries / num_replicas
    accumulation = np.ceil(each / limits.micro_most - 1e-8) - 1
    alone = two_alone & (num_replicas == 1) & (each > limits.initial + 1e-8)
    accumulation = np.where(alone, np.maximum(accumulation, 1), accumulation)
    micro = np.ceil(each / (accumulation + 1) - 1e-8)
    batch = num_replicas * micro * (accumulation + 1)
    step_s = speed.step_s(num_hosts, num_replicas, micro, accumulation)
    # throughput x efficiency = B / step_s x gain(S) / S = B0 gain(S) / step_s
    useful = limits.initial * gain(batch / limits.initial, sqr=sqr, var=var) / step_s
    useful = np.where((micro >= limits.micro_least) & (micro <= limits.micro_most), useful, 0.0)
    at = useful.argmax(axis=0), np.arange(useful.shape[1])
    return BestBatches(useful[at], micro[at].astype(np.int64), accumulation[at].astype(np.int64))
