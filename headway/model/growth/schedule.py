"""The learning rate of a grown model: the peak of training from scratch, reached as soon, decayed over fewer steps.

A smaller peak starts with a lower loss and ends with a higher one (LEMON, section 5: accelerated decay).

>>> schedule = growth_schedule(1200, 0.433)
>>> schedule.num_steps, schedule(schedule.warmup_steps), round(schedule(schedule.num_steps), 3)
(519, 1.0, 0.1)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.core.errors import InputError


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
