"""The rules of fusion against what they stand for: the step times that they compare."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks._hops import Network
from benchmarks._step_model import TrainingStep
from benchmarks._step_search import MOST_PARTS, best_buckets, best_parts, gradient_fusion_pays, op_fusion_pays
from benchmarks._step_view import StepView, Variants
from headway.cost.specs import LinkSpec
from tests.made.step_blocks import Block, profile_of

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
