"""Time of a data-parallel step as a function of hosts, replicas and micro-batch: Pollux' model of seven parameters.

    compute  = alpha_c + beta_c b                        b examples per micro-batch and replica
    sync     = 0                           K = 1         K replicas
             = alpha_r + beta_r max(K - 2, 0)            on one host
             = alpha_n + beta_n max(K - 2, 0)            over several hosts
    step     = a compute + (compute^gamma + sync^gamma)^(1 / gamma)      a micro-batches accumulated before the last

gamma says how far compute and communication overlap: 1 = not at all, 10 =
nearly max(compute, sync). A configuration that was never seen looks as cheap
as the data allow, which is what makes jobs try it. Source: Qiao et al.,
Pollux, OSDI 2021, section 3.2, and the code released with it.

>>> speed = Speed(0.1, 0.01, 0.2, 0.0, 0.05, 0.0, 1.0)
>>> round(float(speed.step_s(1, 2, 10)), 3)
0.25

Useful examples per second of a batch size: throughput times statistical efficiency (Pollux' goodput).

With gradients of mean square `sqr` and, at the initial batch size, variance
`var`, one step of a batch S times as large makes the progress of

    gain(S) = (var + sqr) / (var / S + sqr)        1 <= gain(S) <= S

initial steps (AdaScale), so that its efficiency is gain(S) / S, equal to
(phi + B0) / (phi + B) with the noise scale phi = B0 var / sqr. A batch B over K
replicas is K b (a + 1): micro-batches of b, a of them before the last one.
Source: Qiao et al., OSDI 2021, sections 2.2 and 3.1; Johnson et al., AdaScale, 2020.

>>> float(gain(4.0, sqr=1.0, var=3.0)), float(gain(1.0, sqr=0.0, var=0.0))
(2.2857142857142856, 1.0)

Gradient noise scale: how large a batch may become before its gradients say the same thing twice.

From c gradients of b examples each, with the mean of them being the step's gradient:

    local = mean ||g_i||^2  = |G|^2 + Sigma / b          total = ||mean g_i||^2 = |G|^2 + Sigma / (c b)
    sqr   = (c total - local) / (c - 1)    -> |G|^2
    var   = (local - total) S / (c - 1)    -> Sigma / B0          S = c b / B0
    noise scale = B0 var / sqr             -> Sigma / |G|^2, in examples

Both are averaged over steps with the weight 0.999^S, corrected for the start
at zero. A single gradient per step shows no variance: two consecutive ones
then count as two samples, which is biased by how far the weights moved
between them; such averages are dropped once there are real ones. Source:
Qiao et al., Pollux, OSDI 2021; McCandlish et al., 2018; Johnson et al., AdaScale, 2020.

>>> noise = NoiseScale(8)
>>> noise.add(local=3.0, total=2.0, count=2, batch_size=16)
True
>>> noise.sqr, noise.var, noise.noise_scale
(1.0, 2.0, 16.0)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError

Values = NDArray[np.float64]

SMALLEST = 1e-8
"""Least value of a parameter, and the time of a synchronisation that does not happen."""

SMOOTH = 0.01
"""Relative errors of times below this one hardly count."""

NEEDS_SCIPY = "fitting and interpolating speeds needs the extra `cluster`. Install it: pip install 'headway[cluster]'."


@dataclass(frozen=True, slots=True)
class Speed:
    """The seven parameters, in seconds; all but gamma are also >= 1e-8."""

    alpha_c: float
    """Constant part of a forward and backward pass."""

    beta_c: float
    """Time of an example."""

    alpha_n: float
    """Synchronisation of two replicas on different hosts."""

    beta_n: float
    """Each further replica, over several hosts."""

    alpha_r: float
    """Synchronisation of two replicas on one host."""

    beta_r: float
    """Each further replica, on one host."""

    gamma: float
    """Overlap of compute and communication, 1 (none) to 10."""

    def compute_s(self, microbatch_size: ArrayLike) -> Values:
        """Seconds of one forward and backward pass."""
        return np.asarray(self.alpha_c + self.beta_c * np.asarray(microbatch_size, np.float64))

    def step_s(
        self, num_hosts: ArrayLike, num_replicas: ArrayLike, microbatch_size: ArrayLike, accumulation: ArrayLike = 0
    ) -> Values:
        """Seconds of a step; arguments are broadcast, `accumulation` counts the passes before the last one."""
        compute, sync = self.compute_s(microbatch_size), _sync_s(self, np.asarray(num_hosts), np.asarray(num_replicas))
        last = (compute**self.gamma + sync**self.gamma) ** (1 / self.gamma)
        return np.asarray(np.asarray(accumulation) * compute + last)


def _sync_s(speed: Speed, num_hosts: NDArray[Any], num_replicas: NDArray[Any]) -> Values:
    """Seconds of a synchronisation."""
    further = np.maximum(num_replicas - 2, SMALLEST)
    alone = np.where(num_replicas > 1, speed.alpha_r + speed.beta_r * further, SMALLEST)
    return np.where(num_hosts > 1, speed.alpha_n + speed.beta_n * further, alone)


def fit_speed(
    num_hosts: ArrayLike, num_replicas: ArrayLike, microbatch_size: ArrayLike, compute_s: ArrayLike, step_s: ArrayLike
) -> Speed:
    """Fit the parameters to measured times [n]: a pass without synchronisation, and a step with it.

    Least sum of the root mean squared errors of both logarithms, plus
    1e-3 (gamma - 1)^2 and 1e-2 (beta / alpha)^2 of either synchronisation, by
    L-BFGS-B. Parameters of which nothing was seen keep their lower bound;
    with one micro-batch size half of a pass counts as constant. Raises
    `InputError` on times that are not above 0 and without scipy.
    """
    try:
        from scipy.optimize import Bounds, minimize
    except ImportError as error:
        raise InputError(NEEDS_SCIPY) from error
    hosts, replicas, size = (np.asarray(column, np.float64) for column in (num_hosts, num_replicas, microbatch_size))
    passes, steps = np.asarray(compute_s, np.float64), np.asarray(step_s, np.float64)
    if not hosts.size or {column.shape for column in (replicas, size, passes, steps)} != {hosts.shape}:
        raise InputError("the columns of a fit differ in length or are empty; pass one number per measurement in each.")
    for name, column in (("compute_s", passes), ("step_s", steps)):
        wrong = ~(column > 0) | np.isinf(column)
        if wrong.any():
            at = int(wrong.argmax())
            raise InputError(
                f"{name} is {column[at]:g} with {hosts[at]:g} hosts, {replicas[at]:g} replicas and micro-batches of "
                f"{size[at]:g}; a time must be above 0. Drop this measurement."
            )
    start = np.array([1e-1, 1e-2] * 3 + [1.0 + 1e-3])
    low, high = np.array([SMALLEST] * 6 + [1.0]), np.array([math.inf] * 6 + [10.0])
    many = hosts > 1
    unseen = [] if many.any() else [2, 3]
    unseen += [] if (~many & (replicas > 1)).any() else [4, 5]
    unseen += [] if (replicas > 2).any() else [3, 5]
    start[unseen] = high[unseen] = low[unseen]
    if np.unique(size).size == 1:
        start[0] = low[0] = high[0] = max(passes.mean() / 2, SMALLEST)
    further = np.maximum(replicas - 2, SMALLEST)
    one = ~many & (replicas > 1)
    log_passes, log_steps = np.log(passes), np.log(steps)

    def loss(p: Values) -> tuple[float, Values]:
        """Return the loss and its gradient."""
        gamma = p[6]
        compute = p[0] + p[1] * size
        sync = np.where(many, p[2] + p[3] * further, np.where(one, p[4] + p[5] * further, SMALLEST))
        log_compute, log_sync = np.log(compute), np.log(sync)
        # log(compute^gamma + sync^gamma) / gamma, and the share of each in it.
        total = np.logaddexp(gamma * log_compute, gamma * log_sync)
        share = np.exp(gamma * log_compute - total)
        off = (log_compute - log_passes, total / gamma - log_steps)
        # Without the small constant the loss has a kink where one of both errors is 0, and the search ends there.
        errors = [math.sqrt(float((each**2).mean()) + SMOOTH**2) for each in off]
        by_pass, by_step = (each / (len(each) * error) for each, error in zip(off, errors, strict=True))
        by_compute = (by_pass + by_step * share) / compute
        by_sync = by_step * (1 - share) / sync
        by_gamma = by_step * (share * log_compute + (1 - share) * log_sync - total / gamma) / gamma
        ratio_n, ratio_r = p[3] / p[2], p[5] / p[4]
        value = errors[0] + errors[1] + 1e-3 * (gamma - 1) ** 2 + 1e-2 * (ratio_n**2 + ratio_r**2)
        gradient = np.array([
            by_compute.sum(), by_compute @ size,
            by_sync @ many - 2e-2 * ratio_n**2 / p[2], by_sync @ (many * further) + 2e-2 * ratio_n / p[2],
            by_sync @ one - 2e-2 * ratio_r**2 / p[4], by_sync @ (one * further) + 2e-2 * ratio_r / p[4],
            by_gamma.sum() + 2e-3 * (gamma - 1),
        ])  # fmt: skip
        return value, gradient

    # Two starts: the published one, and one read from the times.
    tries = [
        minimize(loss, np.clip(first, low, high), jac=True, method="L-BFGS-B", bounds=Bounds(low, high))
        for first in (start, _start_of(start, size, passes, steps, ((2, many), (4, one))))
    ]
    found = min(tries, key=lambda each: float(each.fun)).x
    if not many.any():  # a network is taken to be somewhat slower than a host
        found[2:4] = np.maximum(found[2:4], 1.1 * found[4:6])
    return Speed(*(float(value) for value in found))


def _start_of(
    start: Values, size: Values, passes: Values, steps: Values, waits: tuple[tuple[int, NDArray[np.bool_]], ...]
) -> Values:
    """Read a start from the times: passes as a line in the size, steps as sums of a pass and a constant wait."""
    found = start.copy()
    line = np.linalg.lstsq(np.stack([np.ones_like(size), size], axis=1), passes, rcond=None)[0]
    found[:2] = np.maximum(line, passes.min() / 100 / np.array([1, size.max()]))
    for at, here in waits:
        if here.any():
            found[at] = max(float(np.median((steps - passes)[here])), steps.min() / 100)
            found[at + 1] = found[at] / 100
    found[6] = 2.0
    return found


# Useful examples per second of a batch size: throughput times statistical efficiency (Pollux' goodput).

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


MEMORY = 0.999
"""Weight of the past, per initial step."""


class NoiseScale:
    """The running estimate of one job."""

    def __init__(self, initial_batch: int) -> None:
        """Start without an estimate; `initial_batch` is B0 in examples. Raises `InputError` below 1."""
        if initial_batch < 1:
            raise InputError(f"the initial batch is {initial_batch}; it needs at least 1 example.")
        self.initial_batch = initial_batch
        self.skipped = 0
        """Steps with gradients that were not finite."""
        self.num_steps = 0
        """Steps in the averages."""
        self.biased = False
        """Whether the averages come from consecutive gradients."""
        self._sums, self._weight = [0.0, 0.0], 0.0

    def add(self, *, local: float, total: float, count: int, batch_size: int, biased: bool = False) -> bool:
        """Take a step in: squared norms, gradients behind them, examples of all of them together.

        Returns whether it counts: a step that is not finite is skipped and counted, a biased one is left out
        beside real ones. Raises `InputError` on fewer than two gradients.
        """
        if count < 2:
            raise InputError(f"{count} gradient shows no variance. Pass two: micro-batches, replicas, or two steps.")
        if not (math.isfinite(local) and math.isfinite(total)):
            self.skipped += 1
            return False
        if biased and self.num_steps and not self.biased:
            return False
        if self.biased and not biased:
            self._sums, self._weight, self.num_steps = [0.0, 0.0], 0.0, 0
        self.biased = biased
        scale = batch_size / self.initial_batch
        found = (count * total - local) / (count - 1), (local - total) * scale / (count - 1)
        keep = MEMORY**scale
        self._sums = [keep * old + (1 - keep) * new for old, new in zip(self._sums, found, strict=True)]
        self._weight = keep * self._weight + (1 - keep)
        self.num_steps += 1
        return True

    @property
    def sqr(self) -> float:
        """Squared norm of the true gradient; NaN without a step."""
        return self._sums[0] / self._weight if self.num_steps else math.nan

    @property
    def var(self) -> float:
        """Variance of the gradient of the initial batch; NaN without a step."""
        return self._sums[1] / self._weight if self.num_steps else math.nan

    @property
    def noise_scale(self) -> float | None:
        """Noise scale in examples; None where there is no estimate, or the gradient cannot be told from 0."""
        if not self.num_steps or not self.sqr > 0:
            return None
        return self.initial_batch * max(self.var, 0.0) / self.sqr

    def gain(self, batch_size: float) -> float:
        """Initial steps that one step of a batch is worth; as many as it is larger where all is noise."""
        if not self.num_steps:
            return 1.0
        return float(gain(batch_size / self.initial_batch, sqr=max(self.sqr, 0.0), var=max(self.var, 0.0)))
