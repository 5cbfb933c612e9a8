"""A recorded job as a training step: played jobs whose truth is known, and what cannot be told is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from benchmarks._hops import Network
from benchmarks._step_model import BACKWARD, FORWARD, UPDATE, StepProfile, TrainingStep
from benchmarks._step_optimiser import optimise as searched
from headway.core.errors import BarMissedError, InputError
from headway.core.files.planfile import PlanFile
from headway.core.units import MIB
from headway.cost.specs import LinkSpec
from headway.plan.optimiser import CHANGES, optimise, uniform
from headway.sim.ddp.ddp_replay import DdpReplay
from headway.sim.ddp.ddp_step import RecordedStep, recorded_step
from headway.trace.rings.rank_tables import DdpModel
from tests.ddp_made import MS, Job, changed, play


def made(seed: int) -> Job:
    """Five layers of different sizes on a link of a round rate."""
    rng = np.random.default_rng(seed)
    forward = tuple(int(ms) * MS for ms in rng.integers(2, 9, 5))
    size = tuple(int(count) * 100_000 for count in rng.integers(2, 50, 5))
    return Job(forward_ns=forward, size=size, bytes_per_s=float(rng.choice([5e7, 1e8, 2e8])))


SEEDS = range(8)


def replay_of(job: Job) -> DdpReplay:
    return DdpReplay.from_windows([play(job).window], models=[DdpModel(**job.model())], cores=8)


def step_of(job: Job) -> RecordedStep | None:
    """Return the step; None where two sums at once share the job's link, and the step says that it cannot tell."""
    try:
        return recorded_step(replay_of(job))
    except BarMissedError:
        return None


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_and_its_other_bucket_sizes_take_as_long_as_the_job(seed: int) -> None:
    job = made(seed)
    step = step_of(job)
    if step is None:
        return

    assert step.gradient_bytes.sum() == sum(job.size)
    assert step.step_ns() / 1e9 == pytest.approx(play(job).step_s, rel=0.06)
    for cap in (100_000, 2_000_000, 10**8):
        truth = play(changed(job, limit=(cap, cap))).step_s
        assert step.in_buckets(cap).step_ns() / 1e9 == pytest.approx(truth, rel=0.1)


def test_most_jobs_can_be_told() -> None:
    assert sum(step_of(made(seed)) is not None for seed in SEEDS) >= 0.75 * len(SEEDS)


JOB = Job(forward_ns=(6 * MS,) * 5, size=(900_000,) * 5, bytes_per_s=1e8)


def test_a_plan_for_a_played_job_is_as_fast_as_it_says() -> None:
    step = recorded_step(replay_of(JOB))
    found = optimise(step)
    size = found.bucket_parameters()["bucket_mb"] * 2**20

    truth = play(changed(JOB, limit=(int(size), int(size)))).step_s

    assert found.speedup >= 1
    assert found.uniform.step_ns() / 1e9 == pytest.approx(truth, rel=0.08)


def test_gradients_of_two_types_are_refused() -> None:
    made = replay_of(JOB)
    types = ["torch.float32"] * 4 + ["torch.float16"]
    model = structs.replace(made.models[0], parameter_types=types)

    with pytest.raises(InputError, match=r"gradients are of 2 types.*Use headway plan"):
        recorded_step(replace(made, models=(model,)))


def test_busy_cores_are_refused() -> None:
    with pytest.raises(InputError, match=r"not predictable here: the cores are busy"):
        recorded_step(replace(replay_of(JOB), busy="the cores are busy"))


def test_windows_without_a_whole_step_are_refused() -> None:
    made = replay_of(JOB)
    threads = [replace(thread, backward=np.minimum(thread.backward, 0)) for thread in made.steps[0].threads]

    with pytest.raises((InputError, BarMissedError), match=r"no window holds a whole step|misses them"):
        recorded_step(replace(made, steps=(replace(made.steps[0], threads=tuple(threads)),)))


# The best buckets, against dPRO's search over the same step.


@st.composite
def steps(draw: st.DrawFn) -> RecordedStep:
    """Up to a dozen gradients whose sizes and times span three decades."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    count = draw(st.integers(1, 12))
    joined = rng.random(count) < 0.5
    joined[-1] = False
    return RecordedStep(
        segment_ns=np.rint(10 ** rng.uniform(4, 7, count)).astype(np.int64),
        gradient_bytes=np.rint(10 ** rng.uniform(3, 7, count)).astype(np.int64),
        rest_ns=int(rng.integers(0, 3_000_000)),
        update_ns=int(rng.integers(0, 3_000_000)),
        copy_ns_per_byte=draw(st.sampled_from([0.0, 0.05])),
        num_ranks=draw(st.sampled_from([2, 3, 8])),
        link=LinkSpec("made up", 10 ** rng.uniform(7.5, 9.5), draw(st.sampled_from([1e-6, 2e-5, 3e-4])), "made up"),
        joined=joined,
    )


def as_training_step(step: RecordedStep) -> TrainingStep:
    """Return the same step as dPRO's model takes it."""
    count = step.joined.size
    duration = np.array([step.segment_ns[0], 0, *step.segment_ns[1:], step.rest_ns, step.update_ns])
    nothing = np.zeros(duration.size, np.int64)
    profile = StepProfile(
        kind=np.array([FORWARD, *[BACKWARD] * (count + 1), UPDATE]), duration_ns=duration, fixed_ns=nothing,
        half_ns=duration, block=np.array([0, *range(count - 1, -1, -1), 0, -1]),
        tensor=np.array([-1, *range(count), -1, -1]), tensor_bytes=step.gradient_bytes,
        activation_bytes=nothing[:count], input_bytes=nothing[:count], block_kind=np.arange(count),
        copy_ns_per_byte=step.copy_ns_per_byte,
    )  # fmt: skip
    return replace(TrainingStep.of(profile, Network("ring", step.num_ranks, step.link)), joined=step.joined)


@settings(max_examples=15)
@given(steps())
def test_no_search_over_all_moves_finds_a_shorter_recorded_step(step: RecordedStep) -> None:
    best, found = optimise(step), searched(as_training_step(step))

    assert (best.before.step_ns(), best.after.step_ns()) == (found.base_ns, found.step_ns)
    assert best.uniform.step_ns() >= best.after.step_ns()
    assert [row.step_ns for row in best.moves][-1:] in ([], [best.after.step_ns()])


@settings(max_examples=15)
@given(steps())
def test_ddp_told_the_sizes_of_the_plan_makes_exactly_its_buckets(step: RecordedStep) -> None:
    best = optimise(step)
    told = best.bucket_parameters()
    buckets, held = [], 0
    for gradient in step.gradient_bytes.tolist():  # DDP's rule: a bucket closes once it holds its limit
        held += gradient
        if held >= int(told["bucket_mb_list"][min(len(buckets), len(told["bucket_mb_list"]) - 1)] * MIB):
            buckets.append(held)
            held = 0

    assert buckets == best.after.bucket_bytes().tolist()
    assert (
        best.after.in_buckets(told["bucket_mb"] * MIB).bucket_bytes().tolist() == best.uniform.bucket_bytes().tolist()
    )
    assert 1 in {one.bucket_ends().size for one in uniform(step)}


@settings(max_examples=15)
@given(steps())
def test_the_plan_file_holds_every_change_that_was_chosen(step: RecordedStep) -> None:
    best = optimise(step)
    plan = best.plan_file("runs/base")

    assert {remedy.name for remedy in plan.remedies} == {CHANGES[row.name].remedy for row in best.moves}
    assert PlanFile.from_json(plan.to_json()) == plan
    assert plan.predicted_speedup in (None, best.speedup)
    assert best.to_json()["predicted_speedup"] == best.speedup >= 1
