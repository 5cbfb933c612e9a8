"""Replicas of unlike tensor-parallel degrees train as one device does; what contradicts a split says so."""

import pytest
import torch

from headway.core.errors import InputError
from headway.parallel.availability import ShardMap, split_together
from headway.parallel.torch_reshard import take_units
from tests.made.pool import RankFailedError
from tests.made.tensor_block import BlockShape, join_units, train
from tests.spawn import on_ranks

SHAPE = BlockShape(heads=6, kv_heads=3, head_size=4, ffn=11, vocabulary=7)


def as_arrays(degrees: tuple[int, ...], shape: BlockShape) -> dict[str, object]:
    """Run in a rank: train, return arrays, which travel between processes."""
    return {name: tensor.numpy() for name, tensor in train(degrees, shape, examples=7, steps=5).items()}


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2, 1), (3, 1)])
def test_unlike_replicas_have_the_weights_of_one_device_after_five_steps_of_adam(degrees):
    [alone] = on_ranks(as_arrays, 1, (1,), SHAPE)

    for weights in on_ranks(as_arrays, sum(degrees), degrees, SHAPE):
        assert weights.keys() == alone.keys()
        for name, array in weights.items():
            torch.testing.assert_close(torch.tensor(array), torch.tensor(alone[name]), rtol=0, atol=1e-10)


def test_the_units_of_all_ranks_joined_are_the_tensor():
    shards = ShardMap.build(7, 4, 3)
    split = split_together(shards, {"down": (1, 14)})["down"]
    tensor = torch.arange(42).view(3, 14)

    for layout in (shards.comp, shards.sync):
        assert torch.equal(join_units([take_units(tensor, split, units) for units in layout], split, layout), tensor)


def test_heads_that_share_no_units_say_which_numbers_they_share():
    with pytest.raises(InputError, match=r"key has 12 elements.*8 units do not divide.*number of units of: 1, 2, 4\."):
        split_together(ShardMap.build(8, 4, 3), {"query": (0, 32), "key": (0, 12)})
    with pytest.raises(InputError, match=r"dimension of output is -1; give it from the front"):
        split_together(ShardMap.build(8, 4, 3), {"output": (-1, 32)})


def test_degrees_that_are_not_the_job_say_so():
    with pytest.raises(RankFailedError, match=r"replicas of \[2, 2\] ranks are 4 ranks, and the job has 3"):
        on_ranks(as_arrays, 3, (2, 2), SHAPE)
