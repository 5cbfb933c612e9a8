"""dPRO's optimiser: never worse, as good as trying everything, within memory; the best buckets of recorded steps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._hops import Network
from benchmarks._step_model import TrainingStep, default_buckets, with_buckets
from benchmarks._step_optimiser import MOVES, SAFE, optimise
from benchmarks._step_search import NEIGHBOURHOODS, Scorer
from headway.core.errors import InputError
from headway.cost.specs import LinkSpec, shipped
from tests.made.step_blocks import Block, profile_of
from tests.steps_made import few, steps

SLOW = LinkSpec("slow", bytes_per_s=25e9 / 8, latency_s=10e-6, source="made up")
DEVICE = shipped().device("V100-SXM2-16GB")


def random_step(seed: int, layers: int, network: Network) -> TrainingStep:
    """Layers of very different sizes and times, bucketed as DDP does."""
    rng = np.random.default_rng(seed)
    rows = zip(10 ** rng.uniform(4, 7.2, layers), 10 ** rng.uniform(5, 6.7, layers), strict=True)
    blocks = [Block((int(t),), (2 * int(t),), (int(size),)) for size, t in rows]
    return default_buckets(TrainingStep.of(profile_of(blocks, update_ns=1000), network))


@pytest.mark.parametrize("name", NEIGHBOURHOODS)
@few
@given(steps())
def test_no_neighbourhood_makes_a_step_slower(name: str, step: TrainingStep) -> None:
    scorer = Scorer(frozenset(MOVES))

    assert scorer.steps([NEIGHBOURHOODS[name](step, scorer)])[0] <= scorer.steps([step])[0]


@settings(max_examples=10)
@given(step=steps(), allow=st.sets(st.sampled_from(sorted(MOVES))))
def test_a_plan_is_never_slower_and_changes_only_what_is_allowed(step: TrainingStep, allow: set[str]) -> None:
    found = optimise(step, allow=allow)

    assert found.step_ns <= found.base_ns
    untouched = {"join_buckets": "joined", "cut_bucket": "parts", "compute_in_half": "half", "recompute": "recomputed"}
    for name, part in untouched.items():
        assert name in allow or np.array_equal(getattr(found.after, part), getattr(step, part))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "network",
    [Network("ring", 32, SLOW), Network("parameter_server", 8, SLOW, num_servers=4), Network("tree", 15, SLOW)],
    ids=lambda network: network.algorithm,
)
def test_a_plan_is_within_three_percent_of_all_bucketings_of_nine_gradients(network: Network, seed: int) -> None:
    step = random_step(seed, 9, network)
    masks = np.array([[*mask, False] for mask in itertools.product([False, True], repeat=8)]).T
    best = int(Scorer(frozenset()).buckets(step, masks).min())

    assert optimise(step, allow=["join_buckets"]).step_ns <= 1.03 * best


def test_parts_shorten_what_a_pipeline_of_push_and_pull_takes() -> None:
    step = random_step(0, 6, Network("parameter_server", 8, LinkSpec("slower", 3e8, 1e-5, "made up"), num_servers=8))

    whole = optimise(step, allow=["join_buckets"])
    cut = optimise(step, allow=["join_buckets", "cut_bucket"])

    assert cut.step_ns < 0.9 * whole.step_ns


def memory_bound(budget_blocks: float, **more: int) -> tuple[TrainingStep, int]:
    """Eight equal blocks of 1 MB activations; return the step and a budget of so many blocks."""
    block = Block((10**6,), (2 * 10**6,), (4000,), fixed_ns=10**5, activation_bytes=10**6, input_bytes=10**4, kind=0)
    profile = profile_of([block] * 8, state_bytes=10**5, **more)
    step = TrainingStep.of(profile, Network("ring", 2, SLOW))
    return step, int(10**5 + 8 * 4000 + budget_blocks * 10**6)


def test_memory_comes_first_with_as_few_blocks_computed_again_as_fit() -> None:
    step, budget = memory_bound(5)

    found = optimise(step, memory_bytes=budget)

    assert found.after.peak_bytes() <= budget < step.peak_bytes()
    again = int(found.after.recomputed.sum())
    fewer = replace(found.after, recomputed=np.arange(8) < again - 1, gradient_view=True)
    assert fewer.peak_bytes() > budget


def test_the_cheaper_of_computing_again_and_accumulating_is_taken() -> None:
    step, budget = memory_bound(4.1, most_microbatches=8)

    # Half the batch pays 16 launches of 0.1 ms again; computing four blocks again takes 4 ms.
    assert optimise(step, memory_bytes=budget).after.microbatches == 2
    assert optimise(step, memory_bytes=budget, allow=["recompute"]).after.recomputed.sum() >= 4


def test_a_budget_that_no_move_reaches_is_refused_with_both_sizes() -> None:
    step, _ = memory_bound(1)

    with pytest.raises(InputError, match=r"needs 8\.1 MB, 1\.2 MB with every move.*budget is 50\.0 KB.*shard states"):
        optimise(step, memory_bytes=50_000)


def test_sixteen_bits_are_taken_only_where_they_are_allowed_and_gain() -> None:
    blocks = [
        Block((10**6,), (10**6,), (10**6,), half_fraction=fraction, kind=k) for k, fraction in enumerate((0.5, 1.5))
    ]
    step = TrainingStep.of(profile_of(blocks), Network("ring", 2, LinkSpec("fast", 1e15, 0.0, "made up")))

    assert "compute_in_half" not in SAFE
    assert not optimise(step).after.half.any()
    assert optimise(step, allow=MOVES).after.half.tolist() == [True, False]


def test_an_unknown_move_is_named() -> None:
    with pytest.raises(InputError, match=r"unknown move 'fuse'. Did you mean 'fuse_ops'"):
        optimise(random_step(0, 3, Network("ring", 4, SLOW)), allow=["fuse"])


def test_a_single_gradient_and_a_single_rank_leave_nothing_to_do() -> None:
    step = TrainingStep.of(profile_of([Block((5,), (9,), (400,))]), Network("ring", 1, SLOW))

    assert optimise(step).speedup == 1
    assert optimise(with_buckets(step, np.array([False]))).speedup == 1
