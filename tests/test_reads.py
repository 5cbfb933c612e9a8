"""Read plans: whatever the layouts, every wanted element from its place, few bytes more, each once per group."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.checkpoint.layout.reads import READ_BYTES, Shard, plan_reads
from headway.core.errors import InputError
from headway.core.units import MIB
from headway.storage.boxes import Box, flat_to_boxes, whole
from headway.storage.manifest import Piece
from tests.test_boxes import boxes_in, tilings

ITEM = 4


def stored(shape, boxes, *, file="rank-0/a", start=640, header=1000):
    """Pieces of a tensor whose elements are their own flat indices, record after record, and the file's bytes."""
    values = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    pieces, content = [], bytearray(start)
    for box in boxes:
        data = np.ascontiguousarray(values[box.within(whole(shape))]).tobytes()
        if not data:
            continue
        place = (len(content), len(data))
        pieces.append(Piece("w", "int32", tuple(shape), box.offsets, box.lengths, file, *place, *place, 0))
        content += data + bytes(header)
    return pieces, bytes(content)


def carried_out(plan, content, shape):
    """Do a plan the obvious way: one element after the other; -1 where nothing came."""
    results = [np.full(shard.box.lengths, -1, np.int32) for shard in plan.want]
    for read in plan.reads:
        for transfer in read.transfers:
            assert read.start <= transfer.start <= transfer.stop <= read.stop
            for index in np.ndindex(*transfer.box.lengths):
                at = transfer.start + sum(i * stride for i, stride in zip(index, transfer.strides, strict=True))
                place = tuple(
                    i + o - w
                    for i, o, w in zip(index, transfer.box.offsets, plan.want[transfer.want].box.offsets, strict=True)
                )
                assert results[transfer.want][place] == -1, "an element came twice"
                results[transfer.want][place] = int.from_bytes(content[at : at + ITEM], "little")
    return results


@given(tilings(), st.data(), st.integers(1, 4), st.sampled_from([0, 8, 10_000]))
def test_every_wanted_element_comes_once_from_its_place(tiling, data, group, gap_bytes):
    shape, boxes = tiling
    pieces, content = stored(shape, boxes)
    want = [Shard("w", shape, "int32", data.draw(boxes_in(shape))) for _ in range(2)]

    plan = plan_reads(want, {"w": pieces}, group=group, gap_bytes=gap_bytes)

    values = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    for shard, found in zip(want, carried_out(plan, content, shape), strict=True):
        assert (found == values[shard.box.within(whole(shape))]).all()
    assert plan.wanted_bytes == sum(shard.box.num_elements * ITEM for shard in want)


@given(tilings(), st.integers(1, 5))
def test_a_group_reads_even_shares_and_nothing_twice(tiling, group):
    shape, boxes = tiling
    pieces, _ = stored(shape, boxes, header=0)

    plan = plan_reads([Shard("w", shape, "int32", whole(shape))], {"w": pieces}, group=group, gap_bytes=0)

    loads = [sum(read.stop - read.start for read in plan.of(reader)) for reader in range(group)]
    assert sum(loads) == plan.read_bytes == plan.wanted_bytes
    assert max(loads) <= plan.wanted_bytes / group + ITEM


def test_a_replicated_load_by_eight_reads_at_most_a_twentieth_more_than_its_bytes():
    shape = (512, 1024)
    pieces, _ = stored(shape, [box for r in range(4) for box in flat_to_boxes(shape, r * 131072, (r + 1) * 131072)])

    plan = plan_reads([Shard("w", shape, "int32", whole(shape))], {"w": pieces}, group=8)

    assert plan.read_bytes <= 1.05 * 512 * 1024 * ITEM


def test_rows_of_a_stored_matrix_are_one_run_of_bytes_and_columns_are_read_through_their_gaps():
    pieces, _ = stored((8, 4), [whole((8, 4))], start=0)
    rows = plan_reads([Shard("w", (8, 4), "int32", Box((2, 0), (3, 4)))], {"w": pieces})
    columns = plan_reads([Shard("w", (8, 4), "int32", Box((0, 1), (8, 2)))], {"w": pieces})
    exact = plan_reads([Shard("w", (8, 4), "int32", Box((0, 1), (8, 2)))], {"w": pieces}, gap_bytes=0)

    assert [(read.start, read.stop) for read in rows.reads] == [(32, 80)]
    assert [(read.start, read.stop) for read in columns.reads] == [(4, 124)]
    assert [(read.start, read.stop) for read in exact.reads] == [(16 * row + 4, 16 * row + 12) for row in range(8)]
    assert exact.read_bytes == exact.wanted_bytes == 64


def test_long_runs_are_cut_and_short_neighbours_joined():
    big = Piece("big", "int32", (8, MIB), (0, 0), (8, MIB), "f", 0, 32 * MIB, 0, 32 * MIB, 0)
    small = [Piece(f"s{n}", "int32", (16,), (0,), (16,), "g", n * 4096, 64, n * 4096, 64, 0) for n in range(5)]
    want = [Shard(p.fqn, p.shape, "int32", whole(p.shape)) for p in [big, *small]]

    plan = plan_reads(want, {p.fqn: [p] for p in [big, *small]})

    assert [read.stop - read.start for read in plan.of(0) if read.file == "f"] == [READ_BYTES] * 8
    assert [(read.start, read.stop) for read in plan.reads if read.file == "g"] == [(0, 4 * 4096 + 64)]


def test_what_is_not_stored_or_stored_otherwise_is_refused_with_both_sides_named():
    pieces, _ = stored((4, 3), [Box((0, 0), (2, 3))])

    with pytest.raises(InputError, match="'v' is not in the checkpoint"):
        plan_reads([Shard("v", (4, 3), "int32", whole((4, 3)))], {"w": pieces})
    with pytest.raises(InputError, match=r"stored as int32 \[4, 3\], but wanted as float32 \[4, 3\]"):
        plan_reads([Shard("w", (4, 3), "float32", whole((4, 3)))], {"w": pieces})
    with pytest.raises(InputError, match=r"stored as int32 \[4, 3\], but wanted as int32 \[3, 4\]"):
        plan_reads([Shard("w", (3, 4), "int32", whole((3, 4)))], {"w": pieces})
    with pytest.raises(InputError, match=r"wanted at \[1:3, 0:3\], but its 1 stored pieces hold only part of that"):
        plan_reads([Shard("w", (4, 3), "int32", Box((1, 0), (2, 3)))], {"w": pieces})
    with pytest.raises(InputError, match="group is 0; at least one has to read"):
        plan_reads([], {}, group=0)
