"""Named streams of random numbers from one seed.

A stream depends on the seed and its name only: not on which other streams
exist, on the order in which they are made, or on the process. So adding a
random choice to a simulation leaves all the others as they were.

>>> bool(stream(7, "failures", 3).random() == stream(7, "failures", 3).random())
True
>>> bool(stream(7, "failures", 3).random() == stream(7, "failures", 4).random())
False

The binomial distribution, term by term: how often out of many something happens that happens with probability p.

In logarithms, since (1 - p)^n is 0 in floating point for large n:

    log P(0) = n log(1 - p)        log P(k + 1) = log P(k) + log((n - k) / (k + 1)) + log(p / (1 - p))

>>> [round(chance, 3) for chance in binomial(3, 0.5)]
[0.125, 0.375, 0.375, 0.125]
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np

from headway.core.errors import InputError


def derived_seed(seed: int, *name: str | int) -> int:
    """Return a 128-bit seed for the stream called `name` (strings and integers); raises `InputError` on others."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise InputError(f"the seed is {seed!r}; pass a whole number >= 0.")
    for part in name:
        if not isinstance(part, (str, int, np.integer)):
            raise InputError(
                f"{part!r} in the name of a random stream is {type(part).__name__}; use strings and integers."
            )
    # Each part carries its kind and length: ("a", "b") and ("ab",), 1 and "1" are different names.
    parts = [f"{'s' if isinstance(part, str) else 'i'}{len(str(part))}:{part}" for part in name]
    digest = hashlib.blake2b("/".join([str(int(seed)), *parts]).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


def stream(seed: int, *name: str | int) -> np.random.Generator:
    """Return the generator of the stream called `name`; equal arguments give equal numbers, always."""
    return np.random.Generator(np.random.PCG64(derived_seed(seed, *name)))


def binomial(times: int, probability: float) -> Iterator[float]:
    """Yield P(X = k) for k = 0..times, X ~ Binomial(times, probability); 0 < probability < 1."""
    log_odds = math.log(probability) - math.log1p(-probability)
    log_term = times * math.log1p(-probability)
    for count in range(times + 1):
        yield math.exp(log_term)
        if count < times:
            log_term += math.log((times - count) / (count + 1)) + log_odds
