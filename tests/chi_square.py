"""Pearson's test against expected counts, without a table."""

import math

import numpy as np


def p_value(observed, expected):
    """Return the probability of a fit as bad as this one, by Wilson and Hilferty's cube root (1931)."""
    observed, expected = np.asarray(observed, float), np.asarray(expected, float)
    degrees = observed.size - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    spread = 2 / (9 * degrees)
    z = ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2)) / 2
