"""A cut that is kept is the cut that would be made anew, whatever happened to the state in between."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from headway.checkpoint.state.sharding_cache import ShardingCache
from headway.checkpoint.state.shards import pieces
from tests.reshard_cases import LAYOUTS, held, whole_state
from tests.spawn import on_ranks


def made():
    base = torch.randn(3000, 700)
    return {
        "model": {
            "base": base, "tied": base, "rows": base[:5], "turned": torch.randn(4, 3).t(), "none": torch.empty(0, 4),
            "scalar": torch.tensor(1.5), "half": torch.ones(7, dtype=torch.bfloat16), "step": 3,
            "list": [torch.ones(2), {"x": 1}],
        },
        "loader": {"epoch": 0},
    }  # fmt: skip


def _new_memory(state):
    state["model"]["turned"] = torch.randn(4, 3).t()


def _other_strides(state):
    state["model"]["turned"] = torch.randn(3, 4)


def _new_name(state):
    state["model"]["more"] = torch.randn(len(state["model"]))


def _gone(state):
    state["model"].pop("more", None)


def _untied(state):
    state["model"]["tied"] = state["model"]["base"].clone()


def _tied(state):
    state["model"]["tied"] = state["model"]["base"]


def _other_type(state):
    half = state["model"]["half"]
    state["model"]["half"] = half.to(torch.float16 if half.dtype == torch.bfloat16 else torch.bfloat16)


def _same_bytes_other_type(state):
    half = state["model"]["half"]
    state["model"]["half"] = half.view(torch.int16 if half.is_floating_point() else torch.bfloat16)


def _trained(state):
    state["model"]["base"].add_(1)
    state["model"]["step"] += 1


def _tensor_to_object(state):
    state["model"]["scalar"] = 2.5 if torch.is_tensor(state["model"]["scalar"]) else torch.tensor(2.5)


def _renamed(state):
    state["model"] = dict(reversed(state["model"].items()))


CHANGES = (
    _new_memory, _other_strides, _new_name, _gone, _untied, _tied, _other_type, _same_bytes_other_type, _trained,
    _tensor_to_object, _renamed,
)  # fmt: skip


def facts(state):
    """All of a cut: what its parts are called, and where they lie."""
    parts = [
        (s.fqn, s.shape, s.box, s.holders, s.same_as, s.tensor.dtype, s.tensor.shape, s.tensor.stride(),
         s.tensor.data_ptr(), s.tensor.requires_grad)
        for s in state.shards
    ]  # fmt: skip
    replicas = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in state.replicas.items()}
    return parts, state.objects, state.paths, state.tensors, replicas


@pytest.mark.slow
@given(changes=st.lists(st.sampled_from(range(len(CHANGES))), max_size=12))
def test_it_is_the_cut_that_would_be_made_anew(changes):
    state = made()
    kept = {(rank, world): ShardingCache() for world in (1, 3) for rank in range(world)}
    for number in (None, *changes):
        if number is not None:
            CHANGES[number](state)
        for (rank, world), cut in kept.items():
            found = facts(cut.pieces(state, rank=rank, world_size=world))
            assert found == facts(pieces(state, rank=rank, world_size=world))


def test_a_step_of_training_keeps_the_cut_and_holders_are_part_of_it():
    state, cut = made(), ShardingCache()
    cut.pieces(state, rank=0, world_size=2)
    _trained(state)
    cut.pieces(state, rank=0, world_size=2)
    once = cut.num_made
    cut.pieces(state, rank=0, world_size=2, holders={"model.base": (0,)})

    assert (once, cut.num_made) == (1, 2)


def test_no_memory_of_a_state_is_held():
    state, cut = made(), ShardingCache()
    cut.pieces(state)
    lives = weakref.ref(state["model"]["half"].untyped_storage())
    del state["model"]["half"]
    gc.collect()

    assert lives() is None


def _kept_on_this_rank():
    rank, world = dist.get_rank(), dist.get_world_size()
    answers = []
    for layout in LAYOUTS:
        state = held(layout, whole_state(1), fresh=False)
        cut = ShardingCache()
        again = [facts(cut.pieces(state, rank=rank, world_size=world)) for _ in range(2)]
        answers.append(again[0] == again[1] == facts(pieces(state, rank=rank, world_size=world)))
    return answers


def test_it_holds_in_every_layout():
    assert all(all(answers) for answers in on_ranks(_kept_on_this_rank, 2))
