"""Which size to grow a recorded run's model to, and what share of the schedule from scratch it then needs.

The losses of the run give its curve, L(s) = floor + scale s^-exponent. More parameters lower the floor, by the law of
Kaplan et al. (arXiv 2001.08361, eq. 1.1), and leave the rest:

    floor of a larger model      F' = floor (N / N')^0.076, N without embeddings
    scratch ends at              T = F' + scale S^-exponent, after S steps
    a grown model begins as if   it had trained for s_0 steps from scratch: F' + scale s_0^-exponent = L(S)
    share of the schedule        1 - s_0 / S
    FLOPs, with the small run's  f / f' + share, as a fraction of scratch's f' S

>>> steps = np.arange(1, 2001)
>>> curve = fits(steps, 2.0 + 6.0 * steps**-0.5)[0]
>>> round(curve.floor, 2), round(curve.exponent, 2)
(2.0, 0.5)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from headway.core.errors import InputError
from headway.cost.transformer import Transformer, flops_per_token

FLOOR_EXPONENT = 0.076
"""Exponent of a language model's loss in its parameters, the embeddings left out (Kaplan et al.)."""

FEWEST = 20
"""Points of a curve that its three numbers are fitted to, at least."""

WARM_UP = 0.02
"""Share of the run that is left out: its learning rate rises, and no power of the steps describes that."""

LEAST_LEFT = 0.9
"""Share of the losses' variance that a curve leaves where they do not fall."""

ROUNDING = 1e-6
"""Relative spread of losses that are all the same."""

LEAST_SHARE = 0.01
"""A smaller share of the schedule, on any curve that fits, says that the losses do not tell a floor."""

MULTIPLES = (1.0, 1.5, 2.0)
"""Of layers and of width. Twice both, eight times the weights, is the most that LEMON (arXiv 2310.07999) shows."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Losses of a run: floor + scale s^-exponent at step s."""

    floor: float
    """Where the loss would end without an end of the run, in the loss's unit."""

    scale: float
    """What there is above it at step 1."""

    exponent: float
    """How fast that falls."""

    steps: int
    """Last step."""

    def at(self, step: float) -> float:
        """Return the loss at a step."""
        return float(self.floor + self.scale * step**-self.exponent)

    def lower(self, times: float) -> Curve:
        """Return the curve from scratch of a model with so many times the weights."""
        return replace(self, floor=self.floor * times**-FLOOR_EXPONENT)

    def step_of(self, loss: float) -> float:
        """Return the step at which the curve comes to a loss above its floor."""
        return float((self.scale / (loss - self.floor)) ** (1 / self.exponent))


def fits(steps: ArrayLike, losses: ArrayLike) -> list[Curve]:
    """Return the best curve, and after it those that the noise of the losses does not tell from it (about 95 %).

    `steps` [n] increase, `losses` [n] are finite. Raises `InputError` where there are few points, or where losses do
    not fall.
    """
    s, y = np.asarray(steps, float), np.asarray(losses, float)
    behind = s > WARM_UP * s.max(initial=0.0)
    s, y = s[behind], y[behind]
    if len(s) < FEWEST:
        raise InputError(
            f"{len(s)} losses behind the warm-up are too few for a curve of three numbers. Record a longer run: "
            f"{FEWEST} are needed, and one in eight steps is read."
        )
    found = []
    for exponent in np.geomspace(0.02, 2.0, 401):  # for each exponent the other two numbers are linear
        falling = s**-exponent
        scale, floor = np.polyfit(falling, y, 1)
        if floor < 0:  # then the best floor in range is 0
            scale, floor = float(falling @ y / (falling @ falling)), 0.0
        squares = float(((floor + scale * falling - y) ** 2).sum())
        if scale > 0:
            found.append((squares, Curve(float(floor), float(scale), float(exponent), int(s[-1]))))
    found.sort(key=lambda each: each[0])
    flat = float(((y - y.mean()) ** 2).sum())
    if not found or found[0][0] > LEAST_LEFT * flat or flat <= len(y) * (ROUNDING * y.mean()) ** 2:
        raise InputError(
            f"the losses of the run do not fall behind its first {WARM_UP:.0%} of steps, so they say nothing of more "
            "steps. Pass another run."
        )
    most = found[0][0] * (1 + 4 / max(1, len(s) - 3))
    return [curve for squares, curve in found if squares <= most]


@dataclass(frozen=True, slots=True)
class Growth:
    """One larger size, and what growing to it takes."""

    model: Transformer
    """Its shape."""

    share: float
    """Of the steps from scratch that the grown model needs for scratch's loss, in (0, 1)."""

    share_range: tuple[float, float]
    """The least and the largest share over all curves that fit."""

    loss: float
    """Where scratch, and the grown model, are predicted to end."""

    flops: float
    """Of the grown model's steps."""

    compute: float
    """FLOPs of the grown model and of the recorded run, as a fraction of scratch's."""


def growths(
    model: Transformer, curves: Sequence[Curve], budget: float = math.inf, sequences: float = 1.0
) -> list[Growth]:
    """Return what it takes to grow `model` to each larger size with the same size of heads; what saves most is first.

    `curves` are those of `fits`, `sequences` those of one step, `budget` the most FLOPs for the grown model's steps.
    Empty where a curve without a floor fits too: with a floor of 0 more parameters would lower nothing. Raises
    `InputError` where the budget is no number above 0, or too small for all sizes.
    """
    if not budget > 0:  # nan too
        raise InputError(f"the budget is {budget:g} FLOPs; it is a number above 0. Pass one such as 1e18.")
    small = flops_per_token(model)
    found = []
    for more_layers in MULTIPLES:
        for wider in MULTIPLES:
            sizes = [size * wider for size in (model.heads, model.kv_heads, model.ffn)]
            layers = model.layers * more_layers
            if more_layers == wider == 1 or any(size % 1 for size in (*sizes, layers)):
                continue
            heads, kv_heads, ffn = map(int, sizes)
            large = replace(
                model, layers=int(layers), hidden=model.hidden // model.heads * heads, heads=heads, kv_heads=kv_heads,
                ffn=ffn,
            )  # fmt: skip
            times = large.layers * large.matrix_parameters / (model.layers * model.matrix_parameters)
            shares = [1 - curve.lower(times).step_of(curve.at(curve.steps)) / curve.steps for curve in curves]
            if min(shares) < LEAST_SHARE or max(shares) >= 1:
                continue
            steps, each = curves[0].steps, flops_per_token(large) * large.sequence * sequences
            found.append(
                Growth(
                    large, shares[0], (min(shares), max(shares)), curves[0].lower(times).at(steps),
                    shares[0] * steps * each, small / flops_per_token(large) + shares[0],
                )
            )  # fmt: skip
    within = [growth for growth in found if growth.flops <= budget]
    if found and not within:
        least = 1.005 * min(growth.flops for growth in found)  # so that three digits of it are enough
        raise InputError(
            f"the budget of {budget:.3g} FLOPs is too small for each larger size; pass at least {least:.3g}."
        )
    return sorted(within, key=lambda growth: growth.compute)
