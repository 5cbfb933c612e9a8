"""Gradient noise scale: how large a batch may become before its gradients say the same thing twice.

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

from headway.cluster.adaptive.speed import gain
from headway.core.errors import InputError

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
