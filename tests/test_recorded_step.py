"""A recorded job as a training step: played jobs whose truth is known, and what cannot be told is refused."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from headway.core.errors import BarMissedError, InputError
from headway.plan.optimiser import optimise
from headway.sim.ddp.ddp_replay import DdpReplay
from headway.sim.step_view import StepView
from headway.sim.training_moves import bucket_by_size, recorded_step
from headway.sim.training_step import TrainingStep
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


def score_s(step: TrainingStep) -> float:
    return int(StepView.of(step).score([step])[0]) / 1e9


def step_of(job: Job) -> TrainingStep | None:
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

    assert step.gradient_bytes().sum() == sum(job.size)
    assert score_s(step) == pytest.approx(play(job).step_s, rel=0.06)
    for cap in (100_000, 2_000_000, 10**8):
        truth = play(changed(job, limit=(cap, cap))).step_s
        assert score_s(bucket_by_size(step, cap)) == pytest.approx(truth, rel=0.1)


def test_most_jobs_can_be_told() -> None:
    assert sum(step_of(made(seed)) is not None for seed in SEEDS) >= 0.75 * len(SEEDS)


JOB = Job(forward_ns=(6 * MS,) * 5, size=(900_000,) * 5, bytes_per_s=1e8)


def test_a_plan_for_a_played_job_is_as_fast_as_it_says() -> None:
    step = recorded_step(replay_of(JOB))
    found = optimise(step)
    size = found.bucket_parameters()["bucket_mb"] * 2**20

    truth = play(changed(JOB, limit=(int(size), int(size)))).step_s

    assert found.speedup >= 1
    assert found.uniform_ns / 1e9 == pytest.approx(truth, rel=0.08)


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
