"""A modelled training step: durations, readiness, memory and buckets under every choice; its view scores it exactly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._hops import Network
from benchmarks._step_blocks import Block, profile_of
from benchmarks._step_dag import expand_step
from benchmarks._step_model import (
    BACKWARD,
    FORWARD,
    UPDATE,
    TrainingStep,
    bucket_by_size,
    default_buckets,
    fuse_ops,
    fusible,
    with_buckets,
)
from benchmarks._step_view import StepView, Variants, bucket_sizes
from headway.core.units import MIB
from headway.sim.graph.dag import replay
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


# Buckets of DDP and Horovod by their published rules.


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


# The symmetric, coarsened, partial view scores a step exactly as all ranks replayed hop by hop do.


@few
@given(steps())
def test_one_worker_and_one_lane_per_stage_take_as_long_as_all_ranks_hop_by_hop(step: TrainingStep) -> None:
    whole = expand_step(step)

    assert StepView.of(step).score([step]).tolist() == [replay(whole.dag, whole.duration_ns).makespan_ns]


@few
@given(step=steps(), data=st.data())
def test_replaying_only_what_comes_after_a_bucket_gives_the_same_time(step: TrainingStep, data: st.DataObject) -> None:
    begins = [0, *(step.bucket_ends() + 1).tolist()]
    first = data.draw(st.sampled_from(begins))

    assert StepView.of(step, first=first).score([step]).tolist() == StepView.of(step).score([step]).tolist()


@few
@given(step=steps(), data=st.data())
def test_a_batch_of_bucketings_equals_each_of_them_alone(step: TrainingStep, data: st.DataObject) -> None:
    tensors, k = step.joined.size, 5
    joined = np.array(data.draw(st.lists(st.lists(st.booleans(), min_size=k, max_size=k), min_size=tensors,
                                         max_size=tensors)), bool).reshape(tensors, k)  # fmt: skip
    joined[-1:] = False
    variants = [with_buckets(step, joined[:, at]) for at in range(k)]
    view = StepView.of(step)

    batch = view.score_variants(Variants.of_buckets(step, joined)).tolist()

    assert batch == view.score(variants).tolist() == [int(StepView.of(one).score([one])[0]) for one in variants]


@few
@given(steps())
def test_a_step_is_no_shorter_than_its_compute_or_its_busiest_stage(step: TrainingStep) -> None:
    before, takes = step.op_ns()
    size, parts = step.bucket_bytes(), step.parts[step.bucket_ends()]
    loads = [
        int((stage.job_ns * parts * stage.jobs).sum()) for stage in step.network.stages((size + parts - 1) // parts)
    ]

    took = int(StepView.of(step).score([step])[0])

    assert took >= before + takes.sum()
    assert took >= max(loads, default=0)


def test_bucket_sizes_stand_where_buckets_end() -> None:
    joined = np.array([[True, False], [False, True], [False, False]])

    assert bucket_sizes(np.array([[1], [2], [4]]), joined).tolist() == [[0, 1], [3, 0], [4, 6]]
