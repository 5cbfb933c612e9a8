"""Typed facts of loaders: older and damaged rows are read, and what they rule out is ruled out."""

from __future__ import annotations

from typing import Any

import pytest

from headway.trace.loader_facts import LoaderFacts, Rehearsal, loaders_in, unkept, unmovable, unshared, unthreadable

RULES = {"processes": unmovable, "threads": unthreadable, "cache": unkept, "server": unshared}


def refused(**facts: Any) -> set[str]:
    """Return which remedies a loader with these facts may not have."""
    return {name for name, rule in RULES.items() if rule(LoaderFacts.of({"sampler": "RandomSampler", **facts}))}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, set()),
        ({"changes": "others"}, {*RULES}),
        ({"draws": ["torch"]}, {"threads", "cache"}),
        ({"draws": ["own"]}, {*RULES}),
        ({"worker_init_fn": "m:f", "num_workers": 0}, {"processes", "server"}),
        ({"worker_init_fn": "m:f", "num_workers": 0, "rehearsal": {"processes": ""}}, {"server"}),
        ({"worker_init_fn": "m:f", "num_workers": 2}, {"threads", "server"}),
        ({"rehearsal": {"processes": "an open file", "threads": "", "cache": ""}}, {"processes", "server"}),
        ({"rehearsal": {"threads": "another batch"}}, {"threads"}),
        ({"rehearsal": {"cache": "draws"}}, {"cache"}),
        ({"steered": "its sampler looks at losses"}, {"processes", "threads", "server"}),
    ],
)
def test_each_fact_rules_out_the_remedies_that_apply_would_refuse(facts: dict[str, Any], expected: set[str]) -> None:
    assert refused(**facts) == expected


@pytest.mark.parametrize("row", [None, 7, [], {"changes": 3}, {"rehearsal": "yes"}, {"draws": "torch", "line": 4}])
def test_nothing_is_proposed_for_a_loader_whose_facts_are_damaged(row: object) -> None:
    facts = LoaderFacts.of(row)

    assert facts.damaged
    assert all("damaged" in rule(facts) for rule in RULES.values())


def test_a_row_of_an_older_run_has_defaults_and_a_newer_one_may_say_more() -> None:
    (facts,) = loaders_in({"loaders": {"0": {"dataset": "D", "from_the_future": [1]}}}).values()

    assert facts == LoaderFacts(dataset="D")
    assert facts.rehearsal == Rehearsal()
    assert loaders_in({}) == loaders_in({"loaders": None}) == {}
