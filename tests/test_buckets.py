"""The table that maps recorded names to buckets."""

from collections import Counter

import pytest

from headway.ledger.buckets import (
    BLAME,
    BUCKET_CODE_OF_SUB,
    BUCKET_OF,
    BUCKETS,
    REMAINDER_SUB,
    STARTUP_OF,
    SUB_CODE,
    SUB_LINES,
    SUBS,
    bucket_of_sub,
)
from headway.trace.events.vocabulary import SPANS

ORDER = ("host.gc", "checkpoint.save", "host.logging", "input.next", "comm.wait", "host.compile")
"""DESIGN's order on overlap, one name of each."""


def test_the_buckets_are_those_of_the_contract():
    assert set(BUCKETS) == {
        "useful", "eval", "input", "comm", "bubble", "straggler", "checkpoint", "startup", "restart", "rework", "host",
        "idle", "unknown",
    }  # fmt: skip


@pytest.mark.parametrize("sub", SUBS)
def test_every_sub_line_belongs_to_a_bucket_and_says_what_it_means(sub):
    assert bucket_of_sub(sub) in BUCKETS
    assert BUCKETS[BUCKET_CODE_OF_SUB[SUB_CODE[sub]]] == bucket_of_sub(sub)
    assert len(SUB_LINES[sub]) > 10


@pytest.mark.parametrize("name", {**BUCKET_OF, **STARTUP_OF})
def test_every_booked_name_is_one_the_recorder_writes(name):
    assert name in SPANS
    assert (BUCKET_OF.get(name) or STARTUP_OF[name]).sub in SUB_LINES


@pytest.mark.parametrize("table", [BUCKET_OF, STARTUP_OF], ids=["steps", "startup"])
def test_only_names_that_nest_in_every_way_have_equal_precedence(table):
    levels = Counter(booking.precedence for booking in table.values())

    equal = {name for name, booking in table.items() if levels[booking.precedence] > 1}
    assert equal <= {"forward", "segment.backward", "segment.grad", "optimizer.step", "optimizer.closure"}


def test_on_overlap_gc_beats_checkpoint_beats_logging_beats_input_beats_comm_beats_startup():
    levels = [BUCKET_OF[name].precedence for name in ORDER]

    assert levels == sorted(levels, reverse=True)


def test_a_restart_has_every_line_that_a_start_up_has():
    starts = {sub.split(".")[1] for sub in SUBS if bucket_of_sub(sub) == "startup"}

    assert starts <= {sub.split(".")[1] for sub in SUBS if bucket_of_sub(sub) == "restart"}


def test_blame_and_remainder_are_sub_lines():
    assert set(BLAME) <= set(BUCKETS)
    assert {*BLAME.values(), REMAINDER_SUB} <= set(SUB_LINES)
