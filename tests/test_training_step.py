"""A training step: durations, readiness and memory under every choice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.sim.graph.hops import Network
from headway.sim.training_moves import fuse_ops, fusible
from headway.sim.training_step import BACKWARD, FORWARD, UPDATE, TrainingStep
from tests.made.step_blocks import Block, profile_of
from tests.steps_made import WIRE, few, steps

RING = Network("ring", 2, WIRE)


def total_ns(step: TrainingStep) -> int:
    before, takes = step.op_ns()
    return before + int(takes.sum())


def recomputed(step: TrainingStep, *, on: bool) -> TrainingStep:
    return replace(step, recomputed=np.full(step.profile.num_blocks, on))


def plain(step: TrainingStep) -> TrainingStep:
    return TrainingStep.of(step.profile, step.network)


@few
@given(steps())
def test_without_choices_operations_take_what_was_profiled_plus_the_copies(step: TrainingStep) -> None:
    profile = step.profile
    copies = np.rint(profile.tensor_bytes * profile.copy_ns_per_byte).astype(int)

    assert total_ns(plain(step)) == profile.duration_ns.sum() + 2 * copies.sum()
    assert total_ns(replace(plain(step), gradient_view=True)) == profile.duration_ns.sum()


@few
@given(steps())
def test_gradients_are_ready_in_order_and_before_the_update(step: TrainingStep) -> None:
    ready = step.ready_ns()

    assert (np.diff(ready) >= 0).all()
    assert ready.size == 0 or ready[-1] <= total_ns(step) - step.op_ns()[1][step.profile.kind == UPDATE].sum()


@few
@given(step=steps(), data=st.data())
def test_fusing_two_operations_saves_one_launch_and_makes_no_gradient_earlier_than_its_group(step, data):
    base = plain(step)
    able = np.flatnonzero(fusible(base)).tolist()
    if not able:
        return
    op = data.draw(st.sampled_from(able))
    fused = fuse_ops(base, [op])
    saved = min(base.profile.fixed_ns[op + 1], base.profile.duration_ns[op + 1])

    assert total_ns(base) - total_ns(fused) == saved
    tensor = int(base.profile.tensor[op])
    if base.profile.kind[op] == BACKWARD and tensor >= 0:
        group_end = base.op_ns()[1][: op + 2].sum() - saved
        assert fused.ready_ns()[tensor] == group_end
    assert fuse_ops(fused, [op], on=False).equals(base)


@few
@given(steps())
def test_computing_again_trades_time_for_memory_and_is_restored(step: TrainingStep) -> None:
    base = plain(step)
    again = recomputed(base, on=True)

    forward = base.profile.duration_ns[base.profile.kind == FORWARD].sum()
    assert total_ns(again) == total_ns(base) + forward
    assert recomputed(again, on=False).equals(base)


def test_computing_again_keeps_only_inputs_and_one_whole_block() -> None:
    block = Block((5,), (9,), (400,), activation_bytes=1000, input_bytes=10)
    step = replace(TrainingStep.of(profile_of([block] * 4, state_bytes=7), RING), gradient_view=True)

    assert step.peak_bytes() == 7 + 4 * 1000
    assert recomputed(step, on=True).peak_bytes() == 7 + 4 * 10 + 1000
    assert replace(step, gradient_view=False).peak_bytes() == 7 + 4 * 1000 + 4 * 400


@few
@given(step=steps(), count=st.integers(1, 4))
def test_micro_batches_pay_launches_again_and_divide_activations(step: TrainingStep, count: int) -> None:
    base = replace(plain(step), gradient_view=True)
    cut = replace(base, microbatches=count)
    profile = base.profile
    compute = profile.kind != UPDATE
    fixed = np.minimum(profile.fixed_ns, profile.duration_ns)[compute].sum()

    rounding = count * compute.sum() / 2 + 1
    assert abs(total_ns(cut) - total_ns(base) - (count - 1) * fixed) <= rounding
    assert cut.peak_bytes() - profile.state_bytes <= (base.peak_bytes() - profile.state_bytes) / count + 1


def test_sixteen_bits_halve_gradients_and_take_their_own_time() -> None:
    profile = profile_of([Block((100,), (200,), (400,), half_fraction=0.4), Block((100,), (200,), (401,))])
    step = replace(TrainingStep.of(profile, RING), half=np.array([True, False]))

    assert step.gradient_bytes().tolist() == [401, 200]
    assert step.op_ns()[1].tolist() == [40, 100, 200, 80, 0]


@few
@given(steps())
def test_buckets_partition_the_gradients(step: TrainingStep) -> None:
    assert step.bucket_bytes().sum() == step.gradient_bytes().sum()
    assert step.bucket_ends().size == (~step.joined).sum()


BLOCK = Block((5,), (9,), (400,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor": np.array([-1, 1, -1])}, r"number gradients 0, 1, 2"),
        ({"duration_ns": np.array([5, -9, 1])}, r"a duration is negative.*Correct the clock"),
        ({"tensor_bytes": np.array([-4])}, r"tensor 0 has a negative size"),
        ({"fixed_ns": np.zeros(2, int)}, r"fixed_ns has 2 entries; pass one per operation"),
        ({"kind": np.array([2, 2, 3])}, r"backward completes gradients|sort them"),
        ({"kind": np.array([3, 2, 0])}, r"end with an update; sort them|sort them"),
    ],
)
def test_profiles_that_contradict_themselves_are_refused(change: dict, message: str) -> None:
    profile = profile_of([BLOCK])
    if "kind" in change and change["kind"][0] == 2:
        change = {**change, "tensor": np.array([0, 0, -1])}

    with pytest.raises(InputError, match=message):
        replace(profile, **change)


def test_blocks_that_make_no_step_are_refused() -> None:
    with pytest.raises(InputError, match=r"at least one block"):
        profile_of([])
    with pytest.raises(InputError, match=r"block 0 has more gradients than backward operations"):
        profile_of([Block((1,), (1,), (4, 4))])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fused": np.array([False, True, False, False, False])}, r"different blocks or kinds are fused"),
        ({"joined": np.array([False, True])}, r"last gradient is joined to one that does not exist"),
        ({"parts": np.array([0, 1])}, r"give at least 1 part"),
        ({"microbatches": 2}, r"2 micro-batches.*1\.\.1 micro-batches"),
        ({"order": "forwards"}, r"unknown order of communication 'forwards'. Did you mean 'forward'"),
    ],
)
def test_choices_that_cannot_be_are_refused(change: dict, message: str) -> None:
    step = TrainingStep.of(profile_of([BLOCK, BLOCK]), RING)

    with pytest.raises(InputError, match=message):
        replace(step, **change)
