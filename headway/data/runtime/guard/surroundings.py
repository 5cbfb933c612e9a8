"""What a dataset goes by when it reads: its own attributes, and the plain values that its code names elsewhere.

An epoch or a ratio that the training loop sets may be an attribute, a global
variable, an attribute of a class, or a variable of a closure. A picture of all
of them, taken twice, shows that something was set in between.

>>> from types import SimpleNamespace
>>> dataset = SimpleNamespace(epoch=1)
>>> before = surroundings(dataset)
>>> dataset.epoch = 2
>>> surroundings(dataset) == before
False
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from types import BuiltinMethodType, MethodType, MethodWrapperType
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch

from headway.data.runtime.guard.purity import picture
from headway.runtime.script.object_graph import LEAVES, reached

PLAIN = (*LEAVES, list, tuple, dict, set, np.ndarray, torch.Tensor)
"""What may be set from outside, and is looked at. Of all else that code names (functions, classes, objects) it counts
which one it is, and of what class: another may be bound to the name."""

MADE = (MethodType, BuiltinMethodType, MethodWrapperType, ReferenceType)
"""Objects that Python may make anew at each look-up: what they lead to counts, and is in the walk as well."""


def surroundings(dataset: Any, found: Sequence[tuple[Any, bool]] | None = None) -> object:
    """Return a picture of `dataset` and of the values that its code names; 0.1 to 0.9 ms.

    `found` is what `reached` yields for it, where the caller has that already.
    """
    walk = tuple(reached(dataset)) if found is None else found
    outside = [value for value, by_code in walk if by_code]
    plain = [value for value in outside if isinstance(value, PLAIN)]
    plain += [value.get(None) for value, _ in walk if isinstance(value, ContextVar)]
    others = [(id(value), id(type(value))) for value in outside if not isinstance(value, (*PLAIN, *MADE))]
    return picture(dataset), tuple(picture(value) for value in plain), others
