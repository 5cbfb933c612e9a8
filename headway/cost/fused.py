"""What an optimizer's fused form takes of its loop over tensors, on a CPU.

The loop makes several passes over each tensor, one operator each (about ten of Adam's); the fused form makes one:

    loop     mul . lerp . mul . addcmul . sqrt . div . add . addcdiv      each reads and writes the whole tensor
    fused    one kernel                                                   each number is read and written once

So it saves the calls where tensors are small, and the passes through memory where they are large. Shares of the loop's
time measured with one thread (`headway bench fused_optimizer`): the range is that over sizes of tensors from 64 numbers
to a million.

>>> fused_share("AdamW"), fused_share("SGD", has_momentum=True, mean_elements=1 << 20)
(Share(low=0.14, mid=0.24, high=0.4), None)
"""

from __future__ import annotations

from typing import NamedTuple

SMALL_ELEMENTS = 4096
"""Tensors with as many numbers, or fewer, cost what their calls cost."""


class Share(NamedTuple):
    """Time of the fused form / time of the loop."""

    low: float
    mid: float
    high: float


ADAPTIVE = {"Adam": Share(0.14, 0.24, 0.4), "AdamW": Share(0.14, 0.24, 0.4), "Adagrad": Share(0.2, 0.3, 0.45)}
"""Optimizers that win at every size: their loops make many passes."""

OF_CALLS = {True: Share(0.2, 0.33, 0.5), False: Share(0.4, 0.57, 0.85)}
"""Of SGD on small tensors, with momentum and without: large ones pass through memory as often in either form."""


def fused_share(name: str, *, has_momentum: bool = False, mean_elements: float = 0.0) -> Share | None:
    """Return what the fused form takes of the loop's time; None where there is none, or none was measured to be faster.

    `name` is the class of torch.optim, `mean_elements` the mean numbers in a tensor that it updates.
    """
    if name == "SGD":
        return OF_CALLS[has_momentum] if mean_elements <= SMALL_ELEMENTS else None
    return ADAPTIVE.get(name)
