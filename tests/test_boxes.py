"""Boxes: flat intervals, meetings, and whether boxes make up a tensor."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.storage.boxes import Box, BoxIndex, cover_fault, flat_to_boxes, intersection, whole

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def intervals(draw):
    shape = draw(shapes)
    start, stop = sorted(draw(st.lists(st.integers(0, math.prod(shape)), min_size=2, max_size=2)))
    return shape, start, stop


@st.composite
def tilings(draw):
    """A shape, and boxes that partition it: cut again and again."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 8))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.lengths[dim]))
        for first, length in ((0, at), (at, box.lengths[dim] - at)):
            offsets, lengths = list(box.offsets), list(box.lengths)
            offsets[dim], lengths[dim] = offsets[dim] + first, length
            boxes.append(Box(tuple(offsets), tuple(lengths)))
    return shape, draw(st.permutations(boxes))


@st.composite
def boxes_in(draw, shape):
    ends = [sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2))) for size in shape]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


def counts(shape, boxes):
    """How many boxes hold each element."""
    held = np.zeros(shape, int)
    for box in boxes:
        held[box.within(whole(shape))] += 1
    return held


@given(intervals())
def test_a_flat_interval_is_its_boxes_in_order_and_at_most_two_per_dimension_but_one(interval):
    shape, start, stop = interval
    boxes, elements = flat_to_boxes(shape, start, stop), np.arange(math.prod(shape)).reshape(shape)

    found = [int(e) for box in boxes for e in elements[box.within(whole(shape))].ravel()]

    assert found == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_head_body_and_tail_come_in_this_order():
    boxes = [str(box) for box in flat_to_boxes((3, 2, 4), 3, 21)]

    assert boxes == ["[0:1, 0:1, 3:4]", "[0:1, 1:2, 0:4]", "[1:2, 0:2, 0:4]", "[2:3, 0:1, 0:4]", "[2:3, 1:2, 0:1]"]


def test_a_scalar_is_one_box_and_no_elements_are_none():
    assert flat_to_boxes((), 0, 1) == [Box((), ())]
    assert flat_to_boxes((3, 4), 5, 5) == flat_to_boxes((0, 4), 0, 0) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13)])
def test_an_interval_outside_the_tensor_is_refused(start, stop):
    with pytest.raises(InputError, match=r"shape \(4, 3\) \(12 elements\).*Give 0 <= start"):
        flat_to_boxes((4, 3), start, stop)


@given(st.data())
def test_an_index_finds_what_trying_all_boxes_finds(data):
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    boxes = data.draw(st.lists(boxes_in(shape), max_size=8))
    query = data.draw(boxes_in(shape))

    found = BoxIndex(boxes).overlapping(query)

    everything = [(i, part) for i, box in enumerate(boxes) if (part := intersection(query, box)) is not None]
    assert found == everything


def test_an_index_over_columns_looks_at_those_near_the_query_only(monkeypatch):
    index = BoxIndex([Box((0, column), (1000, 1)) for column in range(1000)])
    tried = []
    monkeypatch.setattr("headway.storage.boxes.intersection", lambda a, b: tried.append(b) or intersection(a, b))

    found = index.overlapping(Box((0, 500), (1000, 2)))

    assert [number for number, _ in found] == [500, 501]
    assert len(tried) == 2


@given(tilings())
def test_cuts_of_a_tensor_cover_it(tiling):
    shape, boxes = tiling

    assert cover_fault(shape, boxes) is None


@given(st.data())
def test_a_fault_is_found_exactly_when_an_element_is_not_held_once_and_is_such_a_place(data):
    shape = data.draw(st.lists(st.integers(1, 4), max_size=3).map(tuple))
    boxes = data.draw(st.lists(boxes_in(shape), max_size=5))
    held = counts(shape, boxes)

    fault = cover_fault(shape, boxes)

    assert (fault is None) == bool((held == 1).all())
    if fault is not None:
        inside = held[fault.box.within(whole(shape))]
        assert inside.size
        assert (inside == len(fault.indices)).all() if fault.kind == "overlap" else (inside == 0).all()


def test_the_first_gap_and_the_boxes_that_overlap_are_named():
    rows = [Box((0, 0), (2, 4)), Box((3, 0), (1, 4))]

    assert str(cover_fault((4, 4), rows)) == "elements [2:3, 0:4] are in no box"
    assert str(cover_fault((2, 4), [rows[0], Box((1, 1), (1, 2))])) == "elements [1:2, 1:3] are in boxes 0, 1"
    assert str(cover_fault((1, 4), rows[:1])) == "box 0, [0:2, 0:4], reaches outside the tensor"
    assert str(cover_fault((4,), rows[:1])) == "box 0, [0:2, 0:4], reaches outside the tensor"


def test_scalars_are_covered_once_and_tensors_without_elements_by_anything():
    assert cover_fault((), [Box((), ())]) is None
    assert str(cover_fault((), [])) == "elements [] are in no box"
    assert cover_fault((), [Box((), ())] * 2).indices == (0, 1)
    assert cover_fault((0, 3), []) is cover_fault((0, 3), [whole((0, 3))] * 2) is None
