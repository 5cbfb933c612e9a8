"""What an operator loses in fewer bits: the variance of what is rounded, as far as the loss sees it.

An adjustable operator multiplies an input v by a weight w; its backward takes
the gradient g of its output. A number rounded at random to one of its two
neighbours at distance q errs with the variance f (1 - f) q^2 at the fraction
f, q^2 / 6 on average:

    int8   q = max|x| / 127, one scale for the tensor        bf16   q = 2^e eps, eps = 2^-7, e = floor(log2 rms(x))

With D numbers in a tensor, and the backward in bf16,

    s_f = (||w||^2 q_v^2 D_v + ||v||^2 q_w^2 D_w) / 6
    s_b = (||g||^2 q_v^2 D_v + ||v||^2 q_g^2 D_g) / 6        q_g always of bf16
    omega = 4 (L - d) s_f + d s_b                             d depth of the operator, L of the model

float32 loses 0. Numbers compare operators and precisions; they are no
variance of the output (D_v and D_w make them a score).

Source: *QSync* (IPDPS 2024), section 4, with the exponent of a tensor's rms
and squared norms, where its code takes the exponent linearly, capped at 5.

>>> x = TensorStatistics(numel=4, square_norm=16.0, largest=3.0)
>>> rounding_step(x, "int8") == 3 / 127, rounding_step(x, "bf16") == 2 * 2**-7
(True, True)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.model.remedies import PRECISIONS

FORWARD_WEIGHT = 4.0
"""gamma: what an error of the forward counts beside one of the backward."""

BF16_EPS = 2.0**-7
"""Distance of neighbours in [1, 2)."""


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """What is known of a tensor, over the batches looked at."""

    numel: int
    """Numbers in it."""

    square_norm: float
    """Sum of squares; over batches, the mean."""

    largest: float
    """Largest absolute value; over batches, the mean."""

    def __post_init__(self) -> None:
        """Raise `InputError` on what no tensor of finite numbers has."""
        finite = math.isfinite(self.square_norm) and math.isfinite(self.largest)
        if self.numel < 1 or not finite or min(self.square_norm, self.largest) < 0:
            raise InputError(f"{self} is of no tensor with finite numbers. Measure batches whose loss is finite.")

    @classmethod
    def mean(cls, batches: Sequence[TensorStatistics]) -> TensorStatistics:
        """Return the mean over batches; raises `InputError` for none."""
        if not batches:
            raise InputError("no batch was looked at. Give statistics of at least one.")
        n = len(batches)
        return cls(
            round(sum(one_batch.numel for one_batch in batches) / n),
            sum(one_batch.square_norm for one_batch in batches) / n,
            sum(one_batch.largest for one_batch in batches) / n,
        )


@dataclass(frozen=True, slots=True)
class OperatorStatistics:
    """What is known of one operator."""

    input: TensorStatistics
    """v: what it multiplies."""

    weight: TensorStatistics
    """w: by what; of a product of two activations, the second one."""

    gradient: TensorStatistics
    """g: of its output."""

    depth: int
    """d: operators in front of it, itself included."""


def rounding_step(tensor: TensorStatistics, precision: str) -> float:
    """Return q, the distance of neighbours (module docstring); 0 for float32. Raises `UnknownNameError`."""
    rms = math.sqrt(tensor.square_norm / tensor.numel)
    steps = {
        "int8": tensor.largest / 127,
        "bf16": 2.0 ** math.floor(math.log2(rms)) * BF16_EPS if rms else 0.0,
        "float32": 0.0,
    }
    return pick(steps, precision, "precision")


def rounding_variance(tensor: TensorStatistics, precision: str) -> float:
    """Return the mean variance of one number, rounded at random: q^2 / 6."""
    return rounding_step(tensor, precision) ** 2 / 6


def omega_of(operator: OperatorStatistics, precision: str, model_depth: int) -> float:
    """Return the indicator of one operator in one precision (module docstring); 0 for float32."""
    if not 1 <= operator.depth <= model_depth:
        raise InputError(f"depth {operator.depth} is outside 1 to {model_depth}; number the operators from 1.")
    if pick(dict.fromkeys(PRECISIONS, precision), precision, "precision") == "float32":
        return 0.0
    v, w, g = operator.input, operator.weight, operator.gradient
    of_v = rounding_variance(v, precision) * v.numel
    forward = w.square_norm * of_v + v.square_norm * rounding_variance(w, precision) * w.numel
    backward = g.square_norm * of_v + v.square_norm * rounding_variance(g, "bf16") * g.numel
    return FORWARD_WEIGHT * (model_depth - operator.depth) * forward + operator.depth * backward


def omega_table(operators: Sequence[OperatorStatistics], precisions: Sequence[str] = PRECISIONS) -> list[list[float]]:
    """Return [operators][precisions] the indicator, depths counted up to the deepest operator."""
    depth = max((operator.depth for operator in operators), default=1)
    return [[omega_of(operator, precision, depth) for precision in precisions] for operator in operators]
