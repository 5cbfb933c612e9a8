"""The binomial distribution, term by term: how often out of many something happens that happens with probability p.

In logarithms, since (1 - p)^n is 0 in floating point for large n:

    log P(0) = n log(1 - p)        log P(k + 1) = log P(k) + log((n - k) / (k + 1)) + log(p / (1 - p))

>>> [round(chance, 3) for chance in binomial(3, 0.5)]
[0.125, 0.375, 0.375, 0.125]
"""

from __future__ import annotations

import math
from collections.abc import Iterator


def binomial(times: int, probability: float) -> Iterator[float]:
    """Yield P(X = k) for k = 0..times, X ~ Binomial(times, probability); 0 < probability < 1."""
    log_odds = math.log(probability) - math.log1p(-probability)
    log_term = times * math.log1p(-probability)
    for count in range(times + 1):
        yield math.exp(log_term)
        if count < times:
            log_term += math.log((times - count) / (count + 1)) + log_odds
