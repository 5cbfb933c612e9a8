"""Fields, Cauchy matrices and bit matrices of erasure codes."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.storage.redundancy.xor_program import POLYNOMIALS, cauchy, field, in_bits, in_terms_of, inverted, product


@pytest.mark.parametrize("w", POLYNOMIALS)
def test_the_tables_are_a_field(w):
    table = field(w).multiply.astype(int)
    size = 1 << w
    draw = np.random.default_rng(w).integers(0, size, (3, 2000))
    a, b, c = draw

    assert (table == table.T).all()
    assert (table[1] == np.arange(size)).all()
    assert (table[table[a, b], c] == table[a, table[b, c]]).all()
    assert (table[a, b ^ c] == table[a, b] ^ table[a, c]).all()
    assert all(sorted(table[value]) == list(range(size)) for value in range(1, size))
    assert all(table[value, field(w).inverse[value]] == 1 for value in range(1, size))


def test_the_field_of_256_multiplies_as_reed_solomon_codes_of_disks_do():
    """0x1d is the polynomial of RAID 6 (Anvin): 0x80 times 2 is 0x1d."""
    assert field(8).multiply[0x80, 2] == 0x1D


@pytest.mark.parametrize("w", [2, 4, 8])
def test_bits_of_a_product_are_the_product_of_bits(w):
    rng = np.random.default_rng(w)
    left, right = (rng.integers(0, 1 << w, (3, 3)).astype(np.uint8) for _ in range(2))

    together = in_bits(left, w).astype(int) @ in_bits(right, w).astype(int) % 2

    assert (together == in_bits(product(left, right, w), w)).all()


@given(st.sampled_from([2, 4, 8]), st.data())
def test_a_matrix_times_its_inverse_is_one(w, data):
    k = data.draw(st.integers(1, min(6, (1 << w) - 1)))
    m = data.draw(st.integers(1, min(6, (1 << w) - k)))
    size = min(k, m)
    part = cauchy(k, m, w)[:size, :size] if min(k, m) > 1 else np.ones((1, 1), np.uint8)

    assert (product(part, inverted(part, w), w) == np.eye(len(part))).all()


@pytest.mark.parametrize(("k", "m", "w"), [(2, 2, 2), (4, 2, 4), (6, 3, 4), (8, 4, 4), (10, 4, 4), (12, 4, 4)])
def test_any_k_members_give_the_data_back(k, m, w):
    """All k-subsets of the shapes that are used: each square part of the matrix is invertible."""
    parity = cauchy(k, m, w)
    generator = np.vstack([np.eye(k, dtype=np.uint8), parity])
    step = max(1, len(list(combinations(range(k + m), k))) // 300)
    for present in list(combinations(range(k + m), k))[::step]:
        back = in_terms_of(parity, present, w)

        assert (product(back, generator[list(present)], w) == np.eye(k)).all()


@pytest.mark.parametrize(("k", "m"), [(4, 2), (6, 3), (10, 4), (20, 4)])
def test_the_first_parity_is_plain_xor(k, m):
    assert (cauchy(k, m, 4 if k + m <= 16 else 8)[0] == 1).all()


def test_points_are_chosen_that_cost_few_xors():
    """Against the first points in line, unscaled: the textbook's matrix (Bloemer et al.)."""
    k, m, w = 8, 3, 4
    textbook = field(w).inverse[np.arange(m)[:, None] ^ np.arange(m, m + k)[None, :]]

    assert in_bits(cauchy(k, m, w), w).sum() <= 0.75 * in_bits(textbook, w).sum()
