"""Whole numbers in no more room than they need.

Use it for columns that are kept for long or written: the values stay, the type
becomes the narrowest signed one that holds them all.

>>> narrowed([0, 300]).dtype, narrowed([-1, 2**40]).dtype, narrowed([5], np.int32).dtype
(dtype('int16'), dtype('int64'), dtype('int32'))
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

WIDTHS: tuple[type[np.signedinteger[Any]], ...] = (np.int8, np.int16, np.int32, np.int64)


def narrowed(values: ArrayLike, at_least: type[np.signedinteger[Any]] = np.int8) -> NDArray[Any]:
    """Return whole numbers [...] in the narrowest type that holds them all, `at_least` this wide."""
    numbers = np.asarray(values)
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
    wide = [width for width in WIDTHS if np.iinfo(width).bits >= np.iinfo(at_least).bits]
    return numbers.astype(next(w for w in wide if np.iinfo(w).min <= low and high <= np.iinfo(w).max))
