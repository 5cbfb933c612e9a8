"""Root causes of straggling, against made-up jobs whose losses are known."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks._synthetic import FAULTS, Generated, SyntheticFault, SyntheticJob, calibrated, generate, scenario
from headway.ledger.operations.root_cause import CAUSES
from headway.ledger.operations.straggler import analyse, root_causes

JOB = SyntheticJob(dp=4, pp=4, num_microbatches=8, num_steps=6)


def found(made: Generated) -> dict[str, float]:
    return {cause.cause: cause.lost_device_s for cause in root_causes(analyse(made.trace))}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_drawn_jobs_are_diagnosed_and_their_losses_known_to_a_tenth(seed):
    job, faults = scenario(seed)
    made = generate(job, seed=seed, faults=faults)
    causes = found(made)

    assert set(causes) == set(made.lost_device_s)
    for cause, lost in made.lost_device_s.items():
        assert causes[cause] == pytest.approx(lost, rel=0.1)


@pytest.mark.parametrize("job", [
    JOB,
    SyntheticJob(dp=2, pp=2, num_microbatches=8, num_steps=6, noise=0.05),
    SyntheticJob(dp=4, pp=2, vpp=2, num_microbatches=8, num_steps=6, overlap_dp=True),
    SyntheticJob(dp=8, pp=1, num_microbatches=8, num_steps=6, noise=0.02),
    SyntheticJob(dp=1, pp=4, num_microbatches=8, num_steps=6),
], ids=["dp4-pp4", "dp2-pp2", "interleaved", "dp8", "pp4"])  # fmt: skip
@pytest.mark.parametrize("kind", sorted(FAULTS))
def test_each_fault_is_named_with_its_loss_on_every_shape(job, kind):
    if job.pp == 1 and kind in ("last_stage", "link"):
        pytest.skip("one pipeline rank has no other stage")
    fault = calibrated(job, 1, SyntheticFault(kind, 1.0, dp=job.dp - 1, stage=max(job.pp - 2, 0)), (), 1.15)
    made = generate(job, seed=1, faults=[fault])
    cause = FAULTS[kind][0]
    causes = found(made)

    assert next(iter(causes)) == cause
    assert set(causes) == {cause}
    assert causes[cause] == pytest.approx(made.lost_device_s[cause], rel=0.1)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_healthy_job_has_no_cause(noise, overlap):
    assert not found(generate(replace(JOB, noise=noise, overlap_dp=overlap), seed=2))


def test_a_slow_worker_is_located():
    made = generate(JOB, seed=1, faults=[SyntheticFault("worker", 1.8, dp=2, stage=1)])
    report = analyse(made.trace)
    cause = root_causes(report)[0]

    assert cause.where.startswith("dp 2 / pp 1 ")
    assert np.unravel_index(report.heat.argmax(), report.heat.shape) == (2, 1)
    assert report.M_W > 0.5
    assert cause.predicted_speedup == pytest.approx(made.slowdown, rel=0.02)
    assert cause.interval[0] <= cause.predicted_speedup <= cause.interval[1]


def test_a_slow_pipeline_rank_is_located_when_it_is_not_the_last():
    """All DP ranks of one inner stage are slow: no DP rank differs from another, stages do."""
    faults = [SyntheticFault("worker", 1.6, dp=d, stage=1) for d in range(4)]
    cause = root_causes(analyse(generate(JOB, seed=1, faults=faults).trace))[0]

    assert cause.cause == "straggler.worker"
    assert cause.where == "pp 1 on all DP ranks"


def test_a_slow_replica_is_located():
    """All pipeline ranks of one DP rank are slow: every one of its micro-batches is, and that is no sequence length."""
    faults = [SyntheticFault("worker", 1.6, dp=3, stage=p) for p in range(4)]
    made = generate(JOB, seed=1, faults=faults)
    causes = root_causes(analyse(made.trace))
    healthy = generate(JOB, seed=1)

    assert [cause.cause for cause in causes] == ["straggler.worker"]
    assert causes[0].where.count("dp 3 / pp") == 3
    lost = (made.step_ns - healthy.step_ns).sum() / 1e9 * JOB.devices
    assert causes[0].lost_device_s == pytest.approx(lost, rel=0.02)


def test_a_sequence_verdict_explains_the_last_stage_away():
    """Both are there and the last stage costs more; it still stands below the sequence verdict."""
    faults = [SyntheticFault("sequence", 0.25), SyntheticFault("last_stage", 2.0)]
    made = generate(SyntheticJob(dp=8, pp=2, num_microbatches=8, num_steps=6), seed=1, faults=faults)
    causes = root_causes(analyse(made.trace))
    names = [cause.cause for cause in causes]

    assert made.lost_device_s["straggler.last_stage"] > made.lost_device_s["straggler.sequence"]
    assert names == ["straggler.sequence", "straggler.last_stage"]
    assert "sequence-length imbalance comes first" in causes[1].evidence


def test_a_slow_worker_alone_is_no_sequence_imbalance():
    report = analyse(generate(JOB, seed=1, faults=[SyntheticFault("worker", 2.5)]).trace)

    assert not report.sequence.imbalanced


def test_recorded_collections_are_collections_too():
    made = generate(JOB, seed=1)
    pauses = made.trace.named("gc")
    shift = np.zeros(len(made.trace), dtype=np.int64)
    late = made.trace.named(
        "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "grads-reduce-scatter",
        "optimizer-clip-main-grad", "optimizer",
    )  # fmt: skip
    shift[late] = 10**9
    events = {
        **made.trace.events,
        "duration_ns": made.trace.events["duration_ns"] + np.where(pauses, 10**9, 0),
        "start_ns": made.trace.events["start_ns"] + shift + made.trace.events["step"].astype(np.int64) * 10**9,
    }
    causes = root_causes(analyse(replace(made.trace, events=events)))

    assert [cause.cause for cause in causes] == ["host.gc"]
    assert causes[0].lost_device_s == pytest.approx(JOB.num_steps * JOB.devices, rel=1e-6)


def test_launch_delays_are_the_hosts_doing():
    job = replace(JOB, launch_s=0.02)
    made = generate(job, seed=1)
    healthy = generate(JOB, seed=1)
    causes = root_causes(analyse(made.trace))

    assert [cause.cause for cause in causes] == ["host.launch"]
    lost = (made.step_ns - healthy.step_ns).sum() / 1e9 * job.devices
    assert causes[0].lost_device_s == pytest.approx(lost, rel=1e-6)


@pytest.mark.parametrize("name", sorted({*CAUSES, "host.launch"}))
def test_every_cause_says_where_why_and_what_to_do(name):
    kinds = {cause: kind for kind, (cause, _) in FAULTS.items()}
    job = JOB if name in kinds else replace(JOB, launch_s=0.02)
    faults = [calibrated(job, 1, SyntheticFault(kinds[name], 1.0), (), 1.2)] if name in kinds else []
    cause = root_causes(analyse(generate(job, seed=1, faults=faults).trace))[0]

    assert cause.cause == name
    assert cause.where
    assert any(letter.isdigit() for letter in cause.evidence)
    assert len(cause.fix.split()) > 5
    assert cause.lost_device_s > 0
    assert cause.predicted_speedup is not None
    assert cause.predicted_speedup >= 1
