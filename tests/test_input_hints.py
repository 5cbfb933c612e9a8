"""The table of hints: every row is reached, says something whole, and the last row of a cause always holds."""

import itertools
import re

import pytest

from headway.ledger.answers.input_causes import HINTS, ONCE, LoaderState, hint_of
from headway.sim.whatif import parse_edit

STATES = [
    LoaderState(
        workers=workers, cores=cores, refusal=refusal, is_served=served, on_host=on_host, is_persistent=persistent,
        pins=pins, waits_for_cores=waits, is_small=small, is_stream=stream, threads=4 * full,
        is_renewed=renewed, is_once=small, computes=not small, load_s=0.001 * (stream and small),
        hand_over_s=0.009 * full, is_heavy=waits, is_abandoned=waits,
    )
    for workers, cores, refusal, served, on_host, persistent, pins, waits, small, stream, full, renewed
    in itertools.product((None, 0, 2, 10), (0, 4), ("", "it reads from a socket"), *[(False, True)] * 9)
]  # fmt: skip


@pytest.mark.parametrize("row", HINTS, ids=lambda row: f"{row.cause}: {row.when}")
def test_each_row_is_the_answer_for_some_loader_and_says_a_whole_sentence(row):
    states = [state for state in STATES if hint_of(row.cause, state) is row]

    assert states
    for state in states:
        fix, edit = row.fix(state), row.edit(state)
        assert not re.search(r"[{}]|None|\b0 (core|worker)", fix + edit)
        statement = r"(torch\.set_num_threads\(\d\); )?DataLoader\(\.\.\., [a-z_=\w, ]+\)(; batch\.to\(.*\))?"
        assert not edit or edit == ONCE or re.fullmatch(statement, edit)
        for tried in re.findall(r"--set (\S+?)(?:,|$)", fix):
            parse_edit(tried)  # what-if takes what the advice says


@pytest.mark.parametrize("cause", sorted({row.cause for row in HINTS}))
def test_a_loader_of_any_kind_has_a_hint(cause):
    assert {hint_of(cause, state).cause for state in STATES} == {cause}


def test_nobody_is_told_to_give_workers_to_a_loader_whose_workers_are_refused_or_to_a_full_host():
    for state in STATES:
        for cause in ("input.fetch", "input.prep"):
            edit = hint_of(cause, state).edit(state)
            refused = state.refusal and not state.is_stream  # one worker reads a stream as the loop does
            assert not (edit and (refused or state.is_served))
        if state.workers and state.cores and state.workers >= state.cores:
            assert not hint_of("input.prep", state).edit(state)


def test_nobody_is_told_to_keep_workers_of_a_loader_whose_data_change_between_epochs():
    for state in STATES:
        for row in (hint_of(cause, state) for cause in {row.cause for row in HINTS}):
            assert not state.is_renewed or "persistent_workers" not in row.edit(state)
