"""Kill -9 of trainers and agents at random points: a tenth of benchmarks/checkpoint_kills.py."""

import pytest

from benchmarks import checkpoint_kills as kills


@pytest.fixture(scope="module")
def expected():
    return kills.undisturbed(2)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "worlds"), [(2, (2,)), (3, (2, 1))], ids=["same ranks", "other ranks"])
def test_what_is_restored_after_a_kill_is_what_was_saved_and_the_job_ends_as_if_undisturbed(
    monkeypatch, expected, seed, worlds
):
    monkeypatch.setenv("HEADWAY_CKPT_RATE_MB_S", kills.RATE_MB_S)
    monkeypatch.setenv("HEADWAY_CKPT_LINGER_S", "5")

    outcome = kills.play(seed, 1, worlds, expected)

    assert outcome.wrong == []
    assert sum(outcome.kills.values()) == 1
