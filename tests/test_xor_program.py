"""Programs of XORs: what is shared computes the same, with fewer operations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.storage.redundancy.xor_program import SLAB_BYTES, cauchy, compiled, in_bits, interpret, plain, shared


def matrices():
    """Bit matrices without empty rows."""
    shape = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32 - 1))
    return shape.map(lambda drawn: _filled(np.random.default_rng(drawn[2]).random(drawn[:2]) < 0.5))


def _filled(bits):
    bits[~bits.any(axis=1), 0] = True
    return bits


def rows(bits, inputs):
    """The oracle: each row on its own."""
    return [np.bitwise_xor.reduce([inputs[index] for index in np.flatnonzero(row)]) for row in bits]


def run(program, inputs):
    made = [np.empty_like(inputs[0]) for _ in program.outputs]
    interpret(program, inputs, made, np)
    return made


@given(matrices())
def test_every_program_makes_the_rows_of_its_matrix(bits):
    inputs = list(np.random.default_rng(1).integers(0, 256, (bits.shape[1], 3, 5), dtype=np.uint8))

    want = rows(bits, inputs)

    for program in (plain(bits), shared(bits)):
        assert all((made == row).all() for made, row in zip(run(program, inputs), want, strict=True))


@given(matrices())
def test_sharing_never_costs_an_xor(bits):
    assert len(shared(bits).xors) <= len(plain(bits).xors)


@settings(max_examples=20)
@given(matrices())
def test_machine_code_makes_the_same_bytes(bits):
    cells, packet = 3, 64 + 7
    inputs = list(np.random.default_rng(2).integers(0, 256, (bits.shape[1], cells * packet), dtype=np.uint8))
    made = [np.zeros(cells * packet, np.uint8) for _ in bits]

    places = np.array([row.ctypes.data for row in (*inputs, *made)], np.uintp)
    compiled(shared(bits)).run(places, len(inputs), cells=cells, cell_bytes=packet, packet_bytes=packet)

    assert all((out == row).all() for out, row in zip(made, rows(bits, inputs), strict=True))


@pytest.mark.parametrize(("k", "m"), [(6, 3), (8, 4), (10, 4)])
def test_sharing_takes_a_quarter_of_the_xors_away(k, m):
    bits = in_bits(cauchy(k, m, 4), 4)

    assert len(shared(bits).xors) <= 0.75 * len(plain(bits).xors)


def test_what_exceeds_a_slab_is_made_slab_by_slab():
    bits = in_bits(cauchy(2, 2, 2), 2)
    inputs = list(np.random.default_rng(4).integers(0, 256, (4, 2 * SLAB_BYTES // 100, 128), dtype=np.uint8))

    made = run(shared(bits), inputs)

    assert all((out == row).all() for out, row in zip(made, rows(bits, inputs), strict=True))
