"""dPRO's optimiser: rules that are what they stand for, never worse, as good as trying everything, within memory."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks._hops import Network
from benchmarks._step_blocks import Block, profile_of
from benchmarks._step_model import TrainingStep, default_buckets, with_buckets
from benchmarks._step_optimiser import MOVES, SAFE, optimise
from benchmarks._step_search import (
    MOST_PARTS,
    NEIGHBOURHOODS,
    Scorer,
    best_buckets,
    best_parts,
    gradient_fusion_pays,
    op_fusion_pays,
)
from benchmarks._step_view import StepView, Variants
from headway.core.errors import InputError
from headway.cost.specs import LinkSpec
from tests.steps_made import few, steps

# The rules of fusion against what they stand for: the step times that they compare.


times = st.integers(0, 10**6)


@given(sync=times, before=times, now=times, saved=times)
def test_operations_are_fused_when_compute_saved_exceeds_the_sync_delayed(sync, before, now, saved):
    assume(saved <= now)
    # Two producers of two gradients, the second of which syncs in no time: end of both, apart and fused.
    apart = max(before + sync, before + now)
    fused = before + now - saved + sync

    pays = op_fusion_pays(sync_ns=sync, before_ns=before, now_ns=now, fused_ns=before + now - saved)

    if pays:
        assert fused <= apart


@given(ready=times, gap=times, sizes=st.tuples(times, times), latency=st.integers(0, 10**5))
def test_gradients_are_fused_exactly_when_both_are_through_sooner(ready, gap, sizes, latency):
    def sync(size: int) -> int:
        return latency + size

    now = ready + gap
    apart = max(ready + sync(sizes[0]), now) + sync(sizes[1])
    fused = now + sync(sum(sizes))

    pays = gradient_fusion_pays(
        sync_end_ns=ready + sync(sizes[0]), compute_end_ns=now, fused_sync_ns=sync(sum(sizes)), sync_ns=sync(sizes[1])
    )

    if ready + sync(sizes[0]) >= now:
        assert pays == (fused < apart)
    else:
        assert not pays or fused < apart


def linear_parts(num_bytes: float, *, fast_s_per_byte: float, slow_latency_s: float) -> int:
    """Return dPRO's k* of two hops of t = a s + b each: sqrt(s * a(faster) / b(slower)), rounded, at least 1."""
    return min(MOST_PARTS, max(1, round(math.sqrt(num_bytes * fast_s_per_byte / slow_latency_s))))


@given(
    num_bytes=st.integers(10**4, 10**8), push=st.floats(1e8, 1e10), pull=st.floats(1e8, 1e10),
    latency=st.floats(1e-6, 1e-4),
)  # fmt: skip
def test_the_closed_form_of_k_is_the_best_number_of_parts_of_two_hops(num_bytes, push, pull, latency):
    links = [LinkSpec("hop", rate, latency, "made up") for rate in (push, pull)]
    network = Network("parameter_server", 1, links[0], num_servers=1, pull_link=links[1])

    closed = linear_parts(num_bytes, fast_s_per_byte=1 / max(push, pull), slow_latency_s=latency)

    best = best_parts(network, num_bytes)
    assert network.sync_ns(num_bytes, closed) <= 1.03 * network.sync_ns(num_bytes, best) + 100
    assert network.sync_ns(num_bytes, best) == min(network.sync_ns(num_bytes, np.arange(1, MOST_PARTS + 1)))


@given(num_bytes=st.integers(0, 10**9), ranks=st.integers(2, 64))
def test_a_ring_is_never_cut_because_it_fills_its_links_already(num_bytes: int, ranks: int) -> None:
    assert best_parts(Network("ring", ranks, LinkSpec("wire", 1e9, 1e-6, "made up")), num_bytes) == 1


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=8),
    backward=st.lists(st.integers(0, 10**6), min_size=8, max_size=8),
    ranks=st.integers(1, 5),
)
def test_the_buckets_that_are_through_soonest_are_the_best_of_all_on_a_ring(sizes, backward, ranks):
    network = Network("ring", ranks, LinkSpec("wire", 1e9, 2e-5, "made up"))
    blocks = [Block((1,), (t,), (size,)) for size, t in zip(sizes, backward, strict=False)]
    step = TrainingStep.of(profile_of(blocks), network)
    every = np.array([[*mask, False] for mask in itertools.product([False, True], repeat=len(sizes) - 1)]).T
    view = StepView.of(step)

    joined = best_buckets(network, step.ready_ns(), step.gradient_bytes())

    took = view.score_variants(Variants.of_buckets(step, np.column_stack([joined, every])))
    assert took[0] == took.min()


# The search.


SLOW = LinkSpec("slow", bytes_per_s=25e9 / 8, latency_s=10e-6, source="made up")


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


def test_a_single_gradient_and_a_single_rank_leave_nothing_to_do() -> None:
    step = TrainingStep.of(profile_of([Block((5,), (9,), (400,))]), Network("ring", 1, SLOW))

    assert optimise(step).speedup == 1
    assert optimise(with_buckets(step, np.array([False]))).speedup == 1
