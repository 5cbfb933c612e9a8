"""The ledger of operation traces: exact, and in the right buckets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._synthetic import SyntheticFault, SyntheticJob, generate
from headway.ledger.answers.ledger import Ledger
from headway.ledger.buckets import BUCKETS, SUBS
from headway.ledger.operations.root_cause import operation_account
from headway.trace.readers import straggler
from tests.paths import shared

jobs = st.builds(
    lambda dp, pp, vpp, overlap, launch: SyntheticJob(
        dp=dp, pp=pp, vpp=vpp if pp > 1 else 1, num_microbatches=2 * pp, num_steps=2, overlap_dp=overlap, noise=0.2,
        launch_s=launch,
    ),
    dp=st.integers(1, 3), pp=st.integers(1, 3), vpp=st.integers(1, 2), overlap=st.booleans(),
    launch=st.sampled_from([0.0, 0.02]),
)  # fmt: skip


@given(job=jobs, seed=st.integers(0, 99))
@settings(max_examples=20)
def test_the_buckets_are_a_partition_to_the_nanosecond(job, seed):
    made = generate(job, seed=seed)
    ledger = Ledger.of(made.trace)

    assert sum(ledger.ledger_ns.values()) == ledger.devices * ledger.wall_ns
    assert sum(ledger.sub_ns.values()) == ledger.devices * ledger.wall_ns
    assert ledger.wall_ns == made.step_ns.sum()
    assert ledger.devices == job.devices
    assert all(isinstance(amount, int) and amount >= 0 for amount in ledger.ledger_ns.values())


@given(job=jobs, seed=st.integers(0, 99))
@settings(max_examples=20)
def test_computes_are_useful_and_steps_add_up(job, seed):
    trace = generate(job, seed=seed).trace
    account = operation_account(trace)
    computes = trace.named("forward-compute", "backward-compute")

    assert account.step_ns[BUCKETS.index("useful")].sum() >= trace.events["duration_ns"][computes].sum()
    assert account.step_ns.sum() == account.wall_ns * job.devices
    assert np.array_equal(account.step_ns.sum(axis=0), account.step_wall_ns * job.devices)


def test_permuting_rows_changes_nothing():
    trace = generate(SyntheticJob(), seed=1).trace
    order = np.random.default_rng(0).permutation(len(trace))

    assert Ledger.of(trace.where(order)).to_json() == Ledger.of(trace).to_json()


def test_victims_of_a_slow_worker_wait_for_it():
    """The slow worker computes, the others wait."""
    job = SyntheticJob(dp=4, pp=2, num_microbatches=8, num_steps=4)
    healthy = Ledger.of(generate(job, seed=1).trace).ledger_ns
    trace = generate(job, seed=1, faults=[SyntheticFault("worker", 2.0, dp=0, stage=0)]).trace
    slow, account = Ledger.of(trace).ledger_ns, operation_account(trace)
    waits = np.array([sub.startswith("straggler.") for sub in SUBS])
    waited = {rank: int(amounts[waits].sum()) for rank, amounts in account.sub_ns.items()}

    assert slow["straggler"] > 10 * healthy["straggler"]
    assert slow["host"] == slow["unknown"] == 0
    assert waited[0] == min(waited.values())


def test_without_noise_the_bubble_is_the_closed_form():
    """Of m + p - 1 slots, p - 1 are bubble on every stage."""
    job = SyntheticJob(dp=2, pp=4, num_microbatches=8, num_steps=2, noise=0.0, transfer_s=0.0, collective_s=0.0)
    ledger = Ledger.of(generate(job, seed=0).trace)
    slots = 2 * (8 + 3) * 300_000_000

    assert ledger.ledger_ns["bubble"] == slots * 3 // 11 * job.devices
    assert ledger.ledger_ns["useful"] == (slots * 8 // 11 + 2 * 10_000_000) * job.devices


def test_launch_delays_are_the_hosts_time():
    job = SyntheticJob(dp=2, pp=1, num_microbatches=4, num_steps=2, noise=0.0, launch_s=0.02)
    ledger = Ledger.of(generate(job, seed=0).trace)

    assert ledger.sub_ns["host.launch"] > 0


@pytest.mark.parametrize("name", ["AR", "SE"])
def test_published_traces_are_explained(name):
    ledger = Ledger.of(straggler.read(shared(f"straggler/trace-{name}.parquet")))
    total = ledger.devices * ledger.wall_ns

    assert sum(ledger.ledger_ns.values()) == total
    assert ledger.ledger_ns["unknown"] == 0
    assert ledger.ledger_ns["host"] < 0.01 * total
    assert 0.4 < ledger.ledger_ns["useful"] / total < 0.6
