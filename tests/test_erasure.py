"""Erasure codes: any k of k + m members give everything back, byte for byte."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.storage.redundancy.erasure import COMPILE_FROM_BYTES, RS
from headway.storage.redundancy.xor_program import field
from tests.codes import shapes, survivors
from tests.refusals import refused


def some_data(k, length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (k, length), dtype=np.uint8)


def members(code, data):
    return dict(enumerate([*data, *code.encode(data)]))


@pytest.mark.parametrize("n", range(2, 15))
def test_every_erasure_is_undone(n):
    """Some patterns of every code of n members; `headway bench erasure_speed` takes a tenth, with --full all."""
    rng = np.random.default_rng(n)
    for k, m in shapes(n):
        code = RS(k, m)
        data = some_data(k, 23, seed=n)
        whole = members(code, data)
        patterns = list(survivors(k, m))
        for index in rng.choice(len(patterns), max(1, min(12, len(patterns) // 10)), replace=False):
            kept = {number: whole[number] for number in patterns[index]}
            lost = [number for number in range(n) if number not in kept]

            assert (code.decode(kept) == data).all()
            assert (code.rebuild(kept, lost) == [whole[number] for number in lost]).all()


codes = st.tuples(st.integers(1, 9), st.integers(1, 5))


@given(codes, st.integers(0, 300), st.integers(0, 99))
def test_a_change_of_one_datum_changes_parity_as_encoding_anew_does(shape, length, seed):
    code = RS(*shape)
    data = some_data(code.k, length, seed)
    parity = code.encode(data)
    changed, at = data.copy(), seed % code.k
    changed[at] = some_data(1, length, seed + 1)[0]

    code.update(parity, at, data[at], changed[at])

    assert (parity == code.encode(changed)).all()


@given(codes, st.integers(0, 300), st.integers(0, 99))
def test_parity_is_linear(shape, length, seed):
    code = RS(*shape)
    one, two = some_data(code.k, length, seed), some_data(code.k, length, seed + 1)

    assert (code.encode(one ^ two) == code.encode(one) ^ code.encode(two)).all()


@given(st.integers(0, 40), st.integers(1, 8), st.integers(0, 99))
def test_any_length_and_any_width_come_back(length, w, seed):
    code = RS(1 if w == 1 else 2, 2, w)
    data = some_data(code.k, length, seed)
    whole = members(code, data)

    assert all((code.decode({n: whole[n] for n in kept}) == data).all() for kept in survivors(code.k, 2))


def test_parity_is_what_the_field_says_byte_by_byte():
    """The oracle: with one-byte packets of w = 8, bit b of each element is bit 0 of packet b."""
    code = RS(5, 3, 8, cell_bytes=8)
    data = some_data(5, 8) & 1
    elements = np.packbits(data, axis=1, bitorder="little")
    want = np.zeros((3, 1), np.uint8)
    for row in range(3):
        for column in range(5):
            want[row] ^= field(8).multiply[code.matrix[row, column], elements[column]]

    assert (np.packbits(code.encode(data), axis=1, bitorder="little") == want).all()


def test_damage_stays_inside_its_cell():
    code = RS(4, 2)
    data = some_data(4, 4 * code.cell_bytes)
    parity = code.encode(data)
    data[2, code.cell_bytes : 2 * code.cell_bytes] ^= 1

    differs = (code.encode(data) != parity).reshape(2, 4, -1).any(axis=2)

    assert differs.tolist() == [[False, True, False, False]] * 2


def test_machine_code_and_interpreter_make_the_same_parity():
    length = COMPILE_FROM_BYTES // 4 + 777
    data = some_data(4, length)
    cold, warm = RS(4, 2), RS(4, 2)
    first = 3 * cold.cell_bytes
    pieces = np.hstack([RS(4, 2).encode(data[:, at : at + first].copy()) for at in range(0, length, first)])

    assert (warm.encode(data) == pieces).all()
    assert (warm.encode(data) == warm.encode(data, np.zeros((2, length), np.uint8))).all()


def test_torch_makes_the_bytes_that_numpy_makes():
    data = some_data(6, 9001)
    ours, theirs = RS(6, 3), RS(6, 3, xp="torch")
    whole = members(ours, data)
    tensors = {number: torch.from_numpy(whole[number].copy()) for number in (1, 2, 4, 6, 7, 8)}
    parity = theirs.encode(torch.from_numpy(data))
    theirs.update(parity, 2, tensors[2], torch.zeros_like(tensors[2]))
    data[2] = 0

    assert (parity.numpy() == ours.encode(data)).all()
    assert (theirs.decode(tensors).numpy()[[0, 3]] == data[[0, 3]]).all()


def test_a_code_is_made_again_from_its_stored_matrix():
    code = RS(4, 2)
    data = some_data(4, 100)

    assert (RS(4, 2, 4, matrix=code.matrix.tolist()).encode(data) == code.encode(data)).all()


def test_pyeclib_undoes_the_same_erasures():
    """The oracle of the field: both give the same data back from the same erasures (their parities differ)."""
    drivers = pytest.importorskip("pyeclib.ec_iface")
    data = some_data(4, 4096)
    ours, theirs = RS(4, 2), drivers.ECDriver(k=4, m=2, ec_type="isa_l_rs_cauchy")
    whole, fragments = members(ours, data), theirs.encode(data.tobytes())
    for kept in combinations(range(6), 4):
        assert ours.decode({n: whole[n] for n in kept}).tobytes() == theirs.decode([fragments[n] for n in kept])


test_bad_input_is_told = refused(
    (lambda: RS(0, 2), r"0\+2 is not a valid code; choose k >= 1"),
    (lambda: RS(200, 100), "at most 256"),
    (lambda: RS(14, 4, 4), r"w is 4; a 14\+4 code needs"),
    (lambda: RS(4, 2, xp="nunpy"), "unknown array module 'nunpy'. Did you mean 'numpy'"),
    (lambda: RS(4, 2, cell_bytes=6), "multiple of 4"),
    (lambda: RS(4, 2, matrix=[[1, 1]]), r"shape \(1, 2\)"),
    (lambda: RS(4, 2).encode(some_data(3, 8)), "has 3 members; this 4"),
    (lambda: RS(2, 1).encode([np.zeros(8, np.uint8), np.zeros(9, np.uint8)]), "member 1 of data.*Pad shorter"),
    (lambda: RS(2, 1).encode(np.zeros((2, 8), np.float32)), "float32"),
    (lambda: RS(2, 1).encode(np.zeros((8, 2), np.uint8).T), "contiguous"),
    (lambda: RS(2, 1).encode(np.zeros((2, 8), np.uint8), np.zeros((1, 9), np.uint8)), "member 1 of out"),
    (lambda: RS(4, 2).decode({0: np.zeros(8, np.uint8)}), "1 of 6 members are given; a 4.2 code needs 4"),
    (lambda: RS(2, 1).decode({0: np.zeros(8, np.uint8), 7: np.zeros(8, np.uint8)}), "member 7"),
    (lambda: RS(2, 1).update(*_parity_and_datum(2)), "data 0 to 1"),
)


def _parity_and_datum(i):
    return np.zeros((1, 8), np.uint8), i, np.zeros(8, np.uint8), np.zeros(8, np.uint8)
