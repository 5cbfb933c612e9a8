"""Clocks of the ranks of an operation trace: offsets are found up to a constant, whatever the ranks are called."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._synthetic import SyntheticJob, generate
from headway.ledger.operations.compute_factors import NOISE_NS, aligned
from headway.trace.events.trace import Trace

JOB = SyntheticJob(dp=2, pp=3, num_microbatches=6, num_steps=3)
NUM_RANKS = JOB.dp * JOB.pp
SECOND_NS = 10**9

shifts = st.lists(st.integers(-20, 20), min_size=NUM_RANKS, max_size=NUM_RANKS).map(
    lambda values: np.array(values) * SECOND_NS
)


def moved(trace: Trace, shift_ns: np.ndarray) -> Trace:
    """Return the trace as clocks that stand `shift_ns` [ranks] ahead would have recorded it."""
    start_ns = trace.events["start_ns"] + shift_ns[trace.events["rank"]]
    return replace(trace, events={**trace.events, "start_ns": start_ns})


def offsets(trace: Trace) -> np.ndarray:
    """Return [ranks] what was found."""
    found = aligned(trace)
    return np.array([found.ranks[rank].get("offset_ns", 0) for rank in sorted(found.ranks)])


@given(shift_ns=shifts, seed=st.integers(0, 9))
@settings(max_examples=10)
def test_offsets_are_recovered_up_to_a_constant(shift_ns, seed):
    found = offsets(moved(generate(JOB, seed=seed).trace, shift_ns))

    rest_ns = found + shift_ns
    assert rest_ns.max() - rest_ns.min() <= 3 * NOISE_NS


@given(shift_ns=shifts, seed=st.integers(0, 9))
@settings(max_examples=10)
def test_the_names_of_the_ranks_and_the_order_of_their_rows_do_not_matter(shift_ns, seed):
    trace = moved(generate(JOB, seed=seed).trace, shift_ns)
    names = np.random.default_rng(seed).permutation(NUM_RANKS)
    other = replace(
        trace,
        events={**trace.events, "rank": names[trace.events["rank"]].astype(np.int32)},
        ranks={int(names[rank]): place for rank, place in trace.ranks.items()},
    ).where(np.random.default_rng(seed).permutation(len(trace)))

    assert offsets(other)[names].tolist() == offsets(trace).tolist()


def test_a_known_offset_is_added_to_not_replaced():
    trace = moved(generate(JOB, seed=1).trace, np.array([0, 0, 0, 0, 0, 7 * SECOND_NS]))
    told = replace(trace, ranks={**trace.ranks, 5: {**trace.ranks[5], "offset_ns": -3 * SECOND_NS}})

    assert aligned(told).ranks[5]["offset_ns"] == pytest.approx(-7 * SECOND_NS, abs=3 * NOISE_NS)
    assert told.ranks[5]["offset_ns"] == -3 * SECOND_NS
