"""Moves: buckets of DDP and Horovod by their published rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.units import MIB
from headway.sim.graph.hops import Network
from headway.sim.training_moves import bucket_by_size, default_buckets
from headway.sim.training_step import TrainingStep
from tests.made.step_blocks import Block, profile_of
from tests.steps_made import WIRE


def chain(*sizes: float) -> TrainingStep:
    """Gradients of these sizes in MiB, in the order in which they are ready."""
    blocks = [Block((1,), (1,), (round(size * MIB),)) for size in reversed(sizes)]
    return TrainingStep.of(profile_of(blocks), Network("ring", 2, WIRE))


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30), cap=st.integers(1, 60))
def test_every_bucket_but_the_last_has_reached_its_size_and_none_before_its_last_gradient(sizes, cap):
    step = bucket_by_size(chain(*sizes), cap * MIB)
    held, last = step.bucket_bytes(), step.gradient_bytes()[step.bucket_ends()]

    assert (held[:-1] >= cap * MIB).all()
    assert (held - last < cap * MIB).all()


@pytest.mark.parametrize(
    ("framework", "gradients", "buckets"),
    [("ddp", (0.5, 0.6, 20, 4, 2, 30, 1), [1.1, 26.0, 30.0, 1.0]), ("horovod", (30, 30, 10, 70, 5), [60, 10, 70, 5])],
)
def test_ddp_closes_a_small_bucket_first_and_horovod_exceeds_its_threshold_only_for_one_gradient(
    framework: str, gradients: tuple[float, ...], buckets: list[float]
) -> None:
    step = default_buckets(chain(*gradients), framework)

    assert (step.bucket_bytes() / MIB).round(1).tolist() == buckets


STEP = chain(1, 2, 3)


def test_sizes_and_names_that_mean_nothing_are_refused() -> None:
    with pytest.raises(InputError, match=r"a bucket of 0 bytes holds nothing"):
        bucket_by_size(STEP, 0)
    with pytest.raises(InputError, match=r"unknown framework 'dpp'. Did you mean 'ddp'"):
        default_buckets(STEP, "dpp")
