"""Named streams of random numbers from one seed.

A stream depends on the seed and its name only: not on which other streams
exist, on the order in which they are made, or on the process. So adding a
random choice to a simulation leaves all the others as they were.

>>> bool(stream(7, "failures", 3).random() == stream(7, "failures", 3).random())
True
>>> bool(stream(7, "failures", 3).random() == stream(7, "failures", 4).random())
False
"""

from __future__ import annotations

import hashlib

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
