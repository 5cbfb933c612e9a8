"""Lines of the script that the training thread was sampled in between the steps, in the words of causes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.ledger.answers.causes import find_causes
from headway.ledger.answers.ledger import Ledger
from tests.runs_made import MS
from tests.test_causes import FAULTS


def sampled(*rows: object) -> Ledger:
    """Return the ledger of a run whose training thread was sampled between the steps."""
    made = FAULTS["host.script"].make()
    ranks = {rank: {**facts, "script": list(rows)} for rank, facts in made.trace.ranks.items()} or {
        0: {"script": list(rows)}
    }
    return Ledger.of(replace(made, trace=replace(made.trace, ranks=ranks)))


def test_sampled_lines_name_what_the_script_did_and_what_makes_a_batch_belongs_in_a_loader():
    cause = find_causes(
        sampled(
            {"line": "train.py:9", "function": "log", "ns": 20 * MS, "count": 2},
            {"line": "train.py:7", "function": "get_batch", "ns": 180 * MS, "count": 18, "feeds_forward": True},
        )
    )[0]

    assert cause.where == "get_batch at train.py:7"
    assert "get_batch at train.py:7 90 %, log at train.py:9 10 % of" in cause.evidence
    assert cause.fix.startswith("get_batch makes the batch: give it to a DataLoader with workers")


def test_a_line_that_loops_is_told_to_do_all_passes_at_once():
    row = {"line": "train.py:9", "function": "cut", "ns": 200 * MS, "count": 20, "loop": "train.py:3"}
    cause = find_causes(sampled(row))[0]

    assert "Python loop at train.py:3" in cause.evidence
    assert cause.fix.startswith("let one call do all passes of the loop at train.py:3")


@pytest.mark.parametrize("few", [{"ns": 900 * MS, "count": 3}, {"ns": 9 * MS, "count": 30}])
def test_too_few_samples_and_samples_of_little_of_the_time_name_no_line(few):
    assert find_causes(sampled({"line": "train.py:9", "function": "log", **few}))[0].where == "training loop"


@pytest.mark.parametrize("damaged", [{"line": 3}, {"a": 1}, "x"])
def test_damaged_samples_cost_their_words_only(damaged):
    assert find_causes(sampled(damaged))[0].where == "training loop"
