"""Moves: pure, undone by their opposite, named in one table; buckets of DDP and Horovod by their published rules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.units import MIB
from headway.sim.graph.hops import Network
from headway.sim.training.moves import (
    MOVES,
    Move,
    apply,
    bucket_by_size,
    cut_bucket,
    default_buckets,
    fusible,
    join_buckets,
    split_bucket,
)
from headway.sim.training.training_step import Block, StepProfile, TrainingStep
from tests.steps_made import WIRE, few, steps


def targets(name: str, step: TrainingStep) -> tuple[int, ...] | None:
    """Return what the move can act on in this step; None if nothing."""
    if name == "join_buckets":
        return tuple(step.bucket_ends()[:-1][:1].tolist()) or None
    if name == "cut_bucket":
        return tuple(np.flatnonzero(step.parts == 1)[:1].tolist()) or None
    if name == "fuse_ops":
        return tuple(np.flatnonzero(fusible(step) & ~step.fused)[:2].tolist()) or None
    if name == "compute_in_half":
        return tuple(np.flatnonzero(~step.half)[:2].tolist()) or None
    if name == "recompute":
        return tuple(np.flatnonzero(~step.recomputed)[:2].tolist()) or None
    return (
        () if {"accumulate": step.microbatches == 1, "view_gradients": not step.gradient_view}.get(name, True) else None
    )


UNDO = {"cut_bucket": 1, "accumulate": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVES)
@few
@given(step=steps())
def test_every_move_is_pure_and_undone_by_its_opposite(name: str, step: TrainingStep) -> None:
    on = targets(name, step)
    if on is None:
        return
    kept = apply(step, [])

    moved = apply(step, [Move(name, on, 3 if name in UNDO else 1)])

    assert not moved.equals(step)
    assert step.equals(kept)
    assert apply(moved, [Move(name, on, UNDO.get(name, 0))]).equals(step)


@few
@given(step=steps(), data=st.data())
def test_joining_and_then_splitting_buckets_restores_the_graph(step: TrainingStep, data: st.DataObject) -> None:
    ends = step.bucket_ends()[:-1].tolist()
    if not ends:
        return
    tensor = data.draw(st.sampled_from(ends))

    joined = join_buckets(step, tensor)

    assert joined.bucket_bytes().sum() == step.bucket_bytes().sum()
    assert joined.bucket_ends().size == step.bucket_ends().size - 1
    assert split_bucket(joined, tensor).equals(step)


def chain(*sizes: float) -> TrainingStep:
    """Gradients of these sizes in MiB, in the order in which they are ready."""
    blocks = [Block((1,), (1,), (round(size * MIB),)) for size in reversed(sizes)]
    return TrainingStep.of(StepProfile.of(blocks), Network("ring", 2, WIRE))


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30), cap=st.integers(1, 60))
def test_every_bucket_but_the_last_has_reached_its_size_and_none_before_its_last_gradient(
    sizes: list[int], cap: int
) -> None:
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


def test_targets_that_do_not_exist_are_named() -> None:
    with pytest.raises(InputError, match=r"gradient 2 does not exist; choose from 0..1"):
        join_buckets(STEP, 2)
    with pytest.raises(InputError, match=r"gradient 0 ends no bucket; choose one of \[1\]"):
        join_buckets(join_buckets(STEP, 0), 0)
    with pytest.raises(InputError, match=r"gradient 0 ends a bucket already"):
        split_bucket(STEP, 0)
    with pytest.raises(InputError, match=r"gradient 9 does not exist"):
        cut_bucket(STEP, 9, 2)
    with pytest.raises(InputError, match=r"target 3 does not exist"):
        apply(STEP, [Move("recompute", (3,))])


def test_sizes_and_names_that_mean_nothing_are_refused() -> None:
    with pytest.raises(InputError, match=r"a bucket of 0 bytes holds nothing"):
        bucket_by_size(STEP, 0)
    with pytest.raises(InputError, match=r"unknown framework 'dpp'. Did you mean 'ddp'"):
        default_buckets(STEP, "dpp")
    with pytest.raises(InputError, match=r"unknown move 'join_bucket'. Did you mean 'join_buckets'"):
        apply(STEP, [Move("join_bucket", (0,))])
