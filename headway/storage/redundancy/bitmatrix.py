"""Arithmetic of erasure codes: small finite fields, Cauchy matrices, and what they are in bits.

An element of GF(2^w) is `w` bits, and multiplying by a constant is a `w` x `w`
matrix of bits. So a code over the field becomes XORs of packets: nothing but
XOR touches the data (Bloemer et al. 1995; Plank and Xu 2006 for the choice of
points). Matrices of field elements are uint8.

>>> field(4).multiply[7, 9]
np.uint8(10)
>>> cauchy(4, 2, 4).tolist()
[[1, 1, 1, 1], [2, 1, 9, 4]]
>>> in_bits(np.array([[2]], np.uint8), 2).astype(int).tolist()
[[0, 1], [1, 1]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Elements = NDArray[np.uint8]
"""Elements of GF(2^w), one per entry."""

POLYNOMIALS = {1: 0b11, 2: 0b111, 3: 0b1011, 4: 0b10011, 5: 0b100101, 6: 0b1000011, 7: 0b10001001, 8: 0b100011101}
"""w -> primitive polynomial of GF(2^w), by Lidl and Niederreiter's tables: x generates the field."""


@dataclass(frozen=True, slots=True)
class Field:
    """GF(2^w) as tables."""

    w: int
    """Bits per element."""

    multiply: Elements
    """[2^w, 2^w] Products."""

    inverse: Elements
    """[2^w] Multiplicative inverses; entry 0 is 0 and means nothing."""

    ones: NDArray[np.int64]
    """[2^w] Ones in the bit matrix of each element: what multiplying by it costs."""


@lru_cache
def field(w: int) -> Field:
    """Return the tables of GF(2^w), 1 <= w <= 8."""
    size = 1 << w
    powers = [1]
    while len(powers) < size - 1:
        shifted = powers[-1] << 1
        powers.append(shifted ^ POLYNOMIALS[w] if shifted & size else shifted)
    log = np.zeros(size, np.int64)
    log[powers] = np.arange(size - 1)
    multiply = np.array(powers, np.uint8)[(log[:, None] + log[None, :]) % (size - 1)]
    multiply[0, :] = multiply[:, 0] = 0
    inverse = np.argmax(multiply == 1, axis=1).astype(np.uint8)
    basis = multiply[:, [1 << bit for bit in range(w)]]
    ones = np.unpackbits(basis, axis=1).sum(axis=1, dtype=np.int64)
    return Field(w, multiply, inverse, ones)


def product(left: Elements, right: Elements, w: int) -> Elements:
    """Return the matrix product over GF(2^w) of [a, b] and [b, c]."""
    terms = field(w).multiply[left[:, :, None], right[None, :, :]]
    summed: Elements = np.bitwise_xor.reduce(terms, axis=1)
    return summed


@lru_cache
def cauchy(k: int, m: int, w: int) -> Elements:
    """Return the [m, k] coefficients of parity over data: every square part of it is invertible.

    Entry (i, j) is 1 / (x_i + y_j), columns and rows scaled so that row 0 is
    all ones (parity 0 is plain XOR) and the others cost few XORs. The caller
    sees to k + m <= 2^w; with one parity or one datum ones alone will do.
    """
    if m == 1 or k == 1:
        return np.ones((m, k), np.uint8)
    table = field(w)
    spare = np.arange(m, 1 << w)
    matrix = table.inverse[np.arange(m)[:, None] ^ spare[None, :]]
    matrix = table.multiply[matrix, table.inverse[matrix[0]]]
    # Choose rows' scales for all spare points, keep the k cheapest points, and scale for these again.
    cheapest = np.argsort(_costs(_scaled(matrix, table), table).sum(axis=0), kind="stable")[:k]
    return _scaled(matrix[:, np.sort(cheapest)], table)


def _costs(matrix: Elements, table: Field) -> NDArray[np.int64]:
    return table.ones[matrix]


def _scaled(matrix: Elements, table: Field) -> Elements:
    """Multiply each row but the first by the element that leaves the fewest ones in it."""
    scaled = matrix.copy()
    for row in scaled[1:]:
        choices = table.multiply[1:, row]
        row[:] = choices[np.argmin(_costs(choices, table).sum(axis=1))]
    return scaled


def in_terms_of(parity: Elements, present: Sequence[int], w: int) -> Elements:
    """Return the [k, k] matrix that gives the data from the k members `present` (0..k-1 data, k.. parity).

    Only the lost data need solving: their columns in the parities at hand form a square part of `parity`.
    """
    k = parity.shape[1]
    kept = [member for member in present if member < k]
    lost = [member for member in range(k) if member not in kept]
    used = [member - k for member in present if member >= k]
    # parity = K kept + L lost, so lost = L^-1 (parity + K kept); in characteristic 2, + is -.
    solved = inverted(parity[np.ix_(used, lost)], w)
    answer = np.zeros((k, k), np.uint8)
    place = {member: column for column, member in enumerate(present)}
    for member in kept:
        answer[member, place[member]] = 1
    if lost:
        columns = [place[member] for member in kept]
        answer[np.ix_(lost, columns)] = product(solved, parity[np.ix_(used, kept)], w)
        answer[np.ix_(lost, [place[k + row] for row in used])] = solved
    return answer


def inverted(matrix: Elements, w: int) -> Elements:
    """Return the inverse of a square matrix over GF(2^w) (Gauss and Jordan). An uninvertible one is our bug."""
    table, size = field(w), len(matrix)
    work = np.hstack([matrix, np.eye(size, dtype=np.uint8)])
    for column in range(size):
        rows = np.flatnonzero(work[column:, column])
        assert len(rows), "a square part of the code's matrix is singular"
        pivot = column + int(rows[0])
        work[[column, pivot]] = work[[pivot, column]]
        work[column] = table.multiply[table.inverse[work[column, column]], work[column]]
        others = work[:, column].copy()
        others[column] = 0
        work ^= table.multiply[others[:, None], work[column][None, :]]
    return work[:, size:]


def in_bits(matrix: Elements, w: int) -> NDArray[np.bool_]:
    """Return the [rows * w, columns * w] bits of a matrix: packet b of a product is the XOR of the packets marked."""
    table = field(w)
    rows, columns = matrix.shape
    powers = np.array([1 << bit for bit in range(w)], np.uint8)
    images = table.multiply[matrix[:, :, None], powers]  # [rows, columns, bit in]
    bits = (images[:, :, :, None] >> np.arange(w, dtype=np.uint8)) & 1  # [rows, columns, bit in, bit out]
    return bits.transpose(0, 3, 1, 2).reshape(rows * w, columns * w).astype(np.bool_)
