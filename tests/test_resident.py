"""A resident loader: its first batch again and again, unspoilt, where the script wants it."""

from collections import namedtuple
from contextlib import contextmanager, nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from headway.data.stalls.torch_resident import ResidentBatch, ResidentLoaders, in_batch
from headway.runtime.calls.patches import replace_attribute

Pair = namedtuple("Pair", "x y")
leaves = st.one_of(st.integers(), st.text(), st.lists(st.integers(-9, 9), min_size=1, max_size=3).map(torch.tensor))
batches = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=6,
)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(6.0))


def plain(batch):
    """Return the batch with tensors as lists, so that == compares it."""
    return in_batch(batch, torch.Tensor.tolist)


@contextmanager
def resident(epoch_batches=None):
    handed = []
    loaders = ResidentLoaders(epoch_batches or {}, nullcontext, handed.append)
    undos = [
        replace_attribute("torch.utils.data.dataloader:DataLoader.__iter__", loaders.around_iter),
        replace_attribute("torch._tensor:Tensor.to", loaders.around_move),
    ]
    try:
        yield handed
    finally:
        for undo in reversed(undos):
            undo()


@given(batches)
def test_a_batch_comes_back_equal_and_of_the_same_types_whatever_was_done_to_the_last_one(batch):
    first = plain(batch)
    kept = ResidentBatch(batch)
    for _ in range(3):
        handed = kept.hand_out()

        assert plain(handed) == first
        assert type(handed) is type(batch)
        in_batch(handed, lambda tensor: tensor.zero_())
        if isinstance(handed, (dict, list)):
            handed.clear()


def test_every_pass_has_its_length_and_every_batch_is_the_first():
    with resident() as handed:
        loader = DataLoader(torch.arange(10.0), 4)
        passes = [[batch.tolist() for batch in loader] for _ in range(2)]

    assert passes == [[[0.0, 1.0, 2.0, 3.0]] * 3] * 2
    assert len(handed) == 6
    assert len(list(loader)) == 3


def test_a_batch_that_the_script_moved_is_handed_out_where_it_is():
    with resident():
        loader = DataLoader([{"x": torch.ones(2), "y": i} for i in range(8)], 2)
        places = []
        for batch in loader:
            places.append((batch["x"].device.type, batch["y"].device.type))
            batch["x"] = batch["x"].to("meta")
            batch["y"].to(torch.float64)

    assert places == [("cpu", "cpu")] + 3 * [("meta", "cpu")]


def test_a_stream_ends_where_it_ended_when_it_was_read():
    with resident({-1: 3}):
        iterator = iter(DataLoader(Stream(), 2))

        assert len(list(iterator)) == 3


def test_a_stream_whose_end_nobody_saw_goes_on():
    with resident():
        iterator = iter(DataLoader(Stream(), 2))

        assert [next(iterator).tolist() for _ in range(5)] == [[0.0, 1.0]] * 5
        with pytest.raises(TypeError, match="no length"):
            len(iterator)


def test_a_loader_without_data_stays_empty():
    with resident():
        assert list(DataLoader(torch.arange(3.0), 4, drop_last=True)) == []
