"""Runs of a dimension under torch's chunking, plain and strided, against torch itself."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import _StridedShard

from headway.checkpoint.layout.reads import boxes_of, deal

sizes, ranks = st.integers(0, 40), st.integers(1, 6)


def indices(runs):
    return [index for start, stop in runs for index in range(start, stop)]


@given(sizes, ranks)
def test_a_plain_cut_is_torch_chunk(size, num_ranks):
    chunks = torch.arange(size).chunk(num_ranks)
    chunks = [*chunks, *[torch.arange(0)] * (num_ranks - len(chunks))] if size else [torch.arange(0)] * num_ranks

    assert [indices(deal([(0, size)], num_ranks, rank)) for rank in range(num_ranks)] == [c.tolist() for c in chunks]


@given(sizes, ranks, st.integers(1, 4))
def test_a_strided_cut_is_torchs(size, num_ranks, split_factor):
    parts, _ = _StridedShard(0, split_factor=split_factor)._split_tensor(
        torch.arange(size), num_ranks, with_padding=False
    )

    mine = [indices(deal([(0, size)], num_ranks, rank, split_factor=split_factor)) for rank in range(num_ranks)]

    assert mine == [part.tolist() for part in parts]


@given(sizes, ranks, ranks, st.integers(1, 3))
def test_cuts_one_after_the_other_deal_out_every_index_once(size, first, second, split_factor):
    dealt = [
        index
        for a in range(first)
        for b in range(second)
        for index in indices(deal(deal([(0, size)], first, a, split_factor=split_factor), second, b))
    ]

    assert sorted(dealt) == list(range(size))


def test_boxes_of_runs_say_where_the_local_tensor_lies_in_the_whole():
    values = np.arange(48).reshape(6, 8)
    local = values[[0, 1, 4]][:, [2, 3, 7]]

    boxes = boxes_of([[(0, 2), (4, 5)], [(2, 4), (7, 8)]])

    assert len(boxes) == 4
    for mine, place in boxes:
        here = local[tuple(slice(o, o + n) for o, n in zip(mine.offsets, mine.lengths, strict=True))]
        there = values[tuple(slice(o, o + n) for o, n in zip(place.offsets, place.lengths, strict=True))]
        assert (here == there).all()
