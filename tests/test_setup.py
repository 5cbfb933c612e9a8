"""What a plan has to respect."""

from headway.plan.setup import LEAST_WORKERS, MEMORY_FRACTION, PlanLimits, Setup
from tests.refusals import refused


def test_a_setup_comes_from_what_the_run_says() -> None:
    facts = {"world_size": 8, "nproc": 4, "cores": 32, "device_type": "NVIDIA H100", "memory_available_bytes": 1000}
    setup = Setup.from_facts(facts)

    assert (setup.world_size, setup.ranks_per_host, setup.accelerated) == (8, 4, True)
    assert setup.limits.max_workers == 64
    assert setup.limits.memory_per_rank_bytes(setup) == int(1000 * MEMORY_FRACTION) // 4


def test_a_host_of_few_cores_may_still_try_workers_that_sleep() -> None:
    assert Setup.from_facts({"cores": 1}).limits.max_workers == LEAST_WORKERS


def test_memory_that_the_run_did_not_record_is_asked_of_this_host() -> None:
    assert Setup.from_facts({}).limits.memory_bytes > 0


def test_hosts_of_a_merged_run_share_neither_memory_nor_cores() -> None:
    facts = {"world_size": 8, "nproc": 8, "cores": 4, "memory_available_bytes": 1000, "hosts": ["a", "b"]}
    setup = Setup.from_facts(facts)

    assert setup.ranks_per_host == 4
    assert setup.limits.memory_per_rank_bytes(setup) == int(1000 * MEMORY_FRACTION) // 4


def test_arguments_win_over_the_run() -> None:
    setup = Setup.from_facts({"memory_available_bytes": 5}, memory_bytes=7, max_workers=3, allow=("result-equivalent",))

    assert setup.limits == PlanLimits(7, 3, ("result-equivalent",))


test_bad_counts_are_refused = refused(
    (lambda: Setup(1, 1, 0, "cpu", PlanLimits(0, 0)), r"cores is 0; it must be at least 1"),
    (lambda: PlanLimits(-1, 0), r"limits are -1 bytes.*pass numbers from 0"),
)
