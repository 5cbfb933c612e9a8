"""The symmetric, coarsened, partial view scores a step exactly as all ranks replayed hop by hop do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._hops import Network
from benchmarks._step_dag import expand_step
from benchmarks._step_model import TrainingStep, with_buckets
from benchmarks._step_view import StepView, Variants, bucket_sizes
from headway.core.errors import InputError
from headway.sim.graph.dag import replay
from tests.made.step_blocks import Block, profile_of
from tests.steps_made import WIRE, few, steps


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


PROFILE = profile_of([Block((5,), (9,), (400,)), Block((5,), (9,), (300,))], update_ns=3)
STEP = TrainingStep.of(PROFILE, Network("ring", 2, WIRE))


def test_a_suffix_that_cuts_a_bucket_is_refused() -> None:
    with pytest.raises(InputError, match=r"gradient 1 does not begin a bucket"):
        StepView.of(with_buckets(STEP, np.array([True, False])), first=1)
    with pytest.raises(InputError, match=r"gradient 3 does not begin a bucket; choose one that does"):
        StepView.of(STEP, first=3)
