"""What is packed comes back equal, of the same types and shapes, as views; what cannot be is named with its place."""

import enum
import math
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headway.core.errors import DamageError, InputError
from headway.data.bytes.packing import ALIGN, Marked, Stacked, pack, unpack
from tests.refusals import refused

Point = namedtuple("Point", ["x", "y"])

arrays = hnp.arrays(
    st.one_of(
        hnp.boolean_dtypes(), hnp.integer_dtypes(endianness="="), hnp.floating_dtypes(endianness="="),
        hnp.complex_number_dtypes(endianness="="), hnp.byte_string_dtypes(), hnp.unicode_string_dtypes(endianness="="),
        hnp.datetime64_dtypes(endianness="="),
    ),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)  # fmt: skip
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**80), 2**80), st.floats(), st.text(), st.binary(), arrays
)  # fmt: skip
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.binary(), st.tuples(st.integers(), st.text()))
values = st.recursive(
    scalars,
    lambda inside: st.one_of(
        st.lists(inside, max_size=4), st.lists(inside, max_size=4).map(tuple),
        st.dictionaries(keys, inside, max_size=4),
        st.builds(Point, inside, inside),
    ),
    max_leaves=12,
)  # fmt: skip


def packed(value):
    """A value as bytes that may be written to."""
    room = bytearray((parcel := pack(value)).num_bytes)
    parcel.write(room)
    return room


def same(one, other):
    """The slow, obvious comparison: types, order of keys, bits."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and (one.dtype, one.shape) == (other.dtype, other.shape) and (
            one.tobytes() == other.tobytes()
        )  # fmt: skip
    if isinstance(one, Point):
        return type(other).__name__ == "Point" and other._fields == one._fields and same(tuple(one), tuple(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


@given(values)
def test_what_is_packed_comes_back(value):
    assert same(value, unpack(packed(value)))
    assert pack(value).to_bytes() == packed(value)


@given(values)
def test_the_size_is_known_before_and_nothing_outside_is_touched(value):
    parcel = pack(value)
    room = bytearray(b"\xaa" * (parcel.num_bytes + 40))
    parcel.write(memoryview(room)[: parcel.num_bytes])

    assert room[parcel.num_bytes :] == b"\xaa" * 40
    assert same(value, unpack(memoryview(room)[: parcel.num_bytes]))


@given(st.lists(arrays, max_size=5))
def test_arrays_are_aligned_views_of_the_buffer(parts):
    room = packed(parts)
    begin = np.frombuffer(room, np.uint8).__array_interface__["data"][0]

    for array in unpack(room):
        where = array.__array_interface__["data"][0] - begin
        assert array.size == 0 or (where % ALIGN == 0 and 0 < where < len(room))


@given(hnp.arrays(np.int32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=4)), st.data())
def test_memory_in_another_order_keeps_it(array, data):
    axes = data.draw(st.permutations(range(array.ndim)))
    turned = array.transpose(axes)

    back = unpack(packed(turned))
    assert back.tolist() == turned.tolist()
    assert back.transpose(np.argsort(axes)).flags.c_contiguous


def test_slices_and_repeated_rows_are_copied_whole():
    base = np.arange(40).reshape(4, 10)
    for array in (base[::2, 1::3], base[::-1], np.broadcast_to(base[0], (3, 10))):
        assert unpack(packed(array)).tolist() == array.tolist()


def test_a_writable_buffer_gives_writable_views_and_a_read_only_one_does_not():
    room = packed(np.zeros(3))
    unpack(room)[1] = 7

    assert unpack(room).tolist() == [0, 7, 0]
    assert not unpack(bytes(room)).flags.writeable


@given(st.integers(1, 5), hnp.array_shapes(min_dims=0, max_dims=2, max_side=3))
def test_rows_are_stacked_where_they_stay(count, shape):
    rows = [np.full(shape, k, np.int16) for k in range(count)]

    found = unpack(packed({"x": Stacked(rows)}))["x"]
    assert found.dtype == np.int16
    assert found.tolist() == np.stack(rows).tolist()


def test_marked_arrays_become_what_the_reader_makes_of_them():
    room = packed([Marked(np.arange(3), "tensor"), np.arange(2), Marked(Stacked([np.zeros(2)]), "tensor")])

    first, plain, last = unpack(room, marked=lambda array, mark: (mark, array.tolist()))
    assert (first, last) == (("tensor", [0, 1, 2]), ("tensor", [[0.0, 0.0]]))
    assert isinstance(plain, np.ndarray)
    assert isinstance(unpack(room)[0], Marked)


def test_numpy_scalars_stay_numpy_scalars_and_mappings_become_dicts():
    back = unpack(packed([np.float32(1.5), np.bool_(True), OrderedDict(a=1)]))

    assert [type(part) for part in back] == [np.float32, np.bool_, dict]


class Colour(enum.IntEnum):
    RED = 1


test_what_is_no_plain_memory_is_named_with_its_place = refused(
    ({"meta": [object()]}, r"\['meta'\]\[0\] is of type object"),
    ({"x": ({1, 2},)}, r"\['x'\]\[0\] is of type set"),
    ([np.arange(3).astype(">i4")], r"\[0\] is an array of >i4.*astype"),
    (np.array([object()]), "it is an array of object"),
    (np.ma.array([1]), "it is of type MaskedArray"),
    ({frozenset(): 1}, "key .* is of type frozenset"),
    (Colour.RED, "it is of type Colour"),
    ("\ud800", "half a character"),
    by=pack,
)


def test_a_list_that_holds_itself_is_an_error_and_no_crash():
    circle: list[object] = []
    circle.append(circle)

    with pytest.raises(InputError, match="more than 50 containers"):
        pack(circle)


test_rows_that_differ_are_named = refused(
    (lambda: Stacked([np.zeros(2), np.zeros(3)]), r"row 1 is float64\[3\], row 0 is float64\[2\]"),
    (lambda: Stacked([]), "no rows"),
)


def test_too_small_a_buffer_is_refused_before_anything_is_written():
    parcel = pack(np.arange(100))
    room = bytearray(parcel.num_bytes - 1)

    with pytest.raises(InputError, match="do not fit"):
        parcel.write(room)
    assert not any(room)


@given(st.binary(max_size=80), st.integers(0, 200))
def test_damaged_bytes_are_damage_and_never_a_crash(noise, cut):
    good = packed({"x": np.arange(6), "y": [1, (2, None)]})
    for bad in (noise, good[:cut], good[:cut] + noise + good[cut + len(noise) :]):
        try:
            unpack(bad)
        except DamageError:
            continue
