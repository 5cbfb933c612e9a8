"""State dicts as named boxes of local memory: names as DCP's, every placement, ties, objects, and who writes what."""

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from headway.checkpoint import FlatShard
from headway.checkpoint.state.shards import leaves, local_shards, pieces
from headway.core.errors import InputError
from headway.storage.boxes import cover_fault, whole
from tests.reshard_cases import LAYOUTS, held, whole_state
from tests.spawn import on_ranks

scalars = st.sampled_from([1, 2.5, "x", None, (1, 2), torch.zeros(2)])
states = st.dictionaries(
    st.one_of(st.sampled_from("abc"), st.integers(0, 3)),
    st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.sampled_from("xyz"), st.integers(0, 2)), inner)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@given(states)
def test_names_and_paths_are_those_of_stock_dcp(state):
    try:
        stock, paths = flatten_state_dict(state)
    except ValueError:
        with pytest.raises(InputError, match="two values of the state are named"):
            leaves(state)
        return

    found = {leaf.fqn: leaf for leaf in leaves(state)}

    assert {name: leaf.path for name, leaf in found.items()} == paths
    assert all(leaf.value is stock[name] for name, leaf in found.items())


@given(states)
def test_a_leaf_put_back_is_found_where_it_stood(state):
    try:
        found = leaves(state)
    except InputError:
        return
    for number, leaf in enumerate(found):
        leaf.put(number)

    assert [leaf.value for leaf in found] == list(range(len(found)))


def _layouts_on_this_rank() -> list[tuple[str, list[tuple[str, object]], list[tuple[str, object]]]]:
    """Return per layout the boxes that this rank holds and those that it writes; check their memory."""
    answers = []
    rank, world = dist.get_rank(), dist.get_world_size()
    for layout in LAYOUTS:
        full = whole_state(1)
        state = held(layout, full, fresh=False)
        told = []
        for take in (local_shards, pieces):
            found = take(state, rank=rank, world_size=world)
            for shard in found.shards:
                expected = full[shard.fqn.removeprefix("model.")][shard.box.within(whole(shard.shape))].contiguous()
                mine = shard.tensor.contiguous()
                assert mine.shape == expected.shape, (layout, shard.fqn)
                assert mine.view(torch.uint8).equal(expected.view(torch.uint8)) if mine.ndim else mine.equal(expected)
            told.append([(shard.fqn, shard.box) for shard in found.shards])
        answers.append((layout, *told))
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
def test_in_every_layout_all_ranks_write_each_element_once_and_hold_what_they_write(world):
    ranks = on_ranks(_layouts_on_this_rank, world)
    shapes = {f"model.{name}": tuple(value.shape) for name, value in whole_state(1).items()}

    for number, layout in enumerate(LAYOUTS):
        for name, shape in shapes.items():
            boxes = [box for answer in ranks for fqn, box in answer[number][2] if fqn == name]
            assert boxes, (layout, name)
            assert cover_fault(shape, boxes) is None, (layout, name)


def test_replicated_tensors_are_told_apart_from_those_of_one_rank():
    state = {"a": torch.ones(2), "b": torch.ones(3)}

    mine = pieces(state, rank=1, world_size=2, holders={"b": (1,)})

    assert set(mine.replicas) == {"a"}
    assert [(shard.fqn, shard.holders) for shard in mine.shards if shard.fqn == "b"] == [("b", (1,))]


def test_tied_tensors_are_one_record_with_two_names_also_where_they_are_cut():
    weight = torch.randn(3000, 1000)
    state = {"embed": weight, "head": weight, "view": weight[:1]}

    both = [pieces(state, rank=rank, world_size=2).shards for rank in (0, 1)]

    for mine in both:
        ties = {(shard.same_as, shard.box) for shard in mine if shard.same_as}
        assert ties == {("embed", shard.box) for shard in mine if shard.fqn == "embed"}
        assert {shard.fqn for shard in mine if shard.same_as} == {"head"}


def test_parameters_come_without_gradient_and_what_torch_cannot_lay_out_row_by_row_is_an_object():
    sparse = torch.eye(3).to_sparse()
    state = {"p": torch.nn.Parameter(torch.ones(2)), "s": sparse, "n": 3, "l": [1, 2]}

    found = local_shards(state)

    assert [shard.fqn for shard in found.shards] == ["p"]
    assert not found.shards[0].tensor.requires_grad
    assert found.objects == {"s": sparse, "n": 3, "l": [1, 2]}


def _partial() -> str:
    mesh = init_device_mesh("cpu", (2,))
    try:
        local_shards({"w": DTensor.from_local(torch.ones(2), mesh, [Partial()])}, rank=dist.get_rank(), world_size=2)
    except InputError as error:
        return str(error)
    return ""


def test_a_tensor_of_unreduced_sums_is_refused():
    assert all("spread over ranks that hold sums. Call redistribute()" in told for told in on_ranks(_partial, 2))


def test_bad_flat_shards_meta_tensors_and_wrong_holders_are_refused():
    with pytest.raises(InputError, match=r"elements 0:3 came with a tensor of shape \(2,\)"):
        FlatShard(torch.ones(2), (4,), 0, 3)
    with pytest.raises(InputError, match=r"elements 2:6 are not an interval of a tensor of shape \(4,\)"):
        local_shards({"w": FlatShard(torch.ones(4), (4,), 2, 6)})
    with pytest.raises(InputError, match="'w' is on the meta device"):
        local_shards({"w": torch.ones(2, device="meta")})
    with pytest.raises(InputError, match=r"rank 0 holds 'w', but its holders are \(1,\)"):
        local_shards({"w": torch.ones(2)}, world_size=2, holders={"w": [1]})


def test_a_mapping_that_cannot_be_filled_says_so():
    class Frozen(Mapping):
        def __getitem__(self, key):
            return {"a": 1}[key]

        def __iter__(self):
            return iter("a")

        def __len__(self):
            return 1

    with pytest.raises(InputError, match=r"'x\.a' lies in a Frozen, which cannot be filled"):
        leaves({"x": Frozen()})[0].put(2)
