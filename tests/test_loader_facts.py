"""Typed facts of loaders: older and damaged rows are read, and what they rule out is ruled out."""

from typing import Any

import pytest
from msgspec import structs

from headway.trace.events.loader_facts import (
    LoaderFacts,
    Rehearsal,
    unkept,
    unmovable,
    unmovable_by_hand,
    unshared,
    unthreadable,
)
from headway.trace.recording.run_facts import RunFacts
from headway.why.fixes import withdrawn

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


def test_users_may_give_workers_to_a_loader_whose_sampler_counts_epochs_and_headway_does_not() -> None:
    row = {"sampler": "SeedableRandomSampler", "steered": "it counts", "rehearsal": {"processes": "it counts"}}
    facts = LoaderFacts.of({**row, "worker_init_fn": "transformers:seed_worker", "num_workers": 0})

    assert unmovable(facts)
    assert unmovable_by_hand(facts) == ""
    assert "own" in unmovable_by_hand(LoaderFacts.of({**row, "draws": ["own"]}))
    assert unmovable_by_hand(LoaderFacts.of({**row, "sampler": "Curriculum"})) == "it counts"


@pytest.mark.parametrize("row", [None, 7, [], {"changes": 3}, {"rehearsal": "yes"}, {"draws": "torch", "line": 4}])
def test_nothing_is_proposed_for_a_loader_whose_facts_are_damaged(row: object) -> None:
    facts = LoaderFacts.of(row)

    assert facts.damaged
    assert all("damaged" in rule(facts) for rule in RULES.values())


def test_a_row_of_an_older_run_has_defaults_and_a_newer_one_may_say_more() -> None:
    (facts,) = RunFacts.of({"loaders": {"0": {"dataset": "D", "from_the_future": [1]}}}).effective_loaders.values()

    assert facts == LoaderFacts(dataset="D")
    assert facts.rehearsal == Rehearsal()
    assert RunFacts.of({}).effective_loaders == RunFacts.of({"loaders": None}).effective_loaders == {}


def found(about: str | None, *, later: bool = False) -> list[dict[str, Any]]:
    """Return `applied` of a run in which data.workers left dataset D alone: at once, or `later`."""
    reason = {"dataset": "D", **({} if about is None else {"about": about})}
    left = {"withdrawn": [{**reason, "reason": "why"}]} if later else {}
    left["loaders"] = [{"dataset": "D", "num_workers": 2} if later else {**reason, "reason_not_applied": "why"}]
    return [{"name": "data.workers", "facts": left, "reason_not_applied": None if later else "why"}]


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("about", "expected"), [(None, set()), ("reading", {*RULES} - {"cache"}), ("dataset", {*RULES})]
)
def test_what_a_remedy_found_of_a_dataset_holds_for_the_others(about, expected, later):
    loaders = {group: {"dataset": name, "sampler": "RandomSampler"} for group, name in (("0", "D"), ("1", "E"))}
    facts = RunFacts.of({"loaders": loaders, "applied": found(about, later=later)})
    ours, other = facts.effective_loaders.values()

    assert {name for name, rule in RULES.items() if rule(ours)} == expected
    assert all(
        rule(ours) == "why (data.workers found it in this run)" for name, rule in RULES.items() if name in expected
    )
    assert not any(rule(other) for rule in RULES.values())


@pytest.mark.parametrize(("line", "of_both"), [("train.py:3", False), (None, True)])
def test_what_was_found_with_one_loader_is_not_said_of_another_over_a_dataset_of_its_class(line, of_both) -> None:
    loaders = {group: {"dataset": "D", "constructed": f"train.py:{group}"} for group in ("3", "7")}
    rows = found("reading")
    rows[0]["facts"]["loaders"][0]["line"] = line
    ours, other = RunFacts.of({"loaders": loaders, "applied": rows}).effective_loaders.values()

    assert any(rule(ours) for rule in RULES.values())
    assert any(rule(other) for rule in RULES.values()) == of_both


def test_a_remedy_that_the_last_loader_left_is_not_in_force() -> None:
    had, left = {"dataset": "D", "num_workers": 2}, {"dataset": "D", "reason_not_applied": "it forks"}
    gone = {**left, "had_it": True, "line": "train.py:9"}
    rows = {"had": [had], "left": [had, gone], "came back": [gone, had], "elsewhere": [had, {**gone, "dataset": "E"}]}
    rows |= {"evaluates": [had, left], "evaluates first": [left, had]}  # another loader over a dataset of that class
    facts = RunFacts.of({"applied": [{"name": name, "facts": {"loaders": row}} for name, row in rows.items()]})

    assert {*facts.in_force} == rows.keys() - {"left"}
    lost = withdrawn(structs.replace(row, applied=True) for row in facts.applied)
    assert lost == {"left": "train.py:9, D: it forks"}
    assert {name: row.reason for name, row in facts.given_up.items()} == {"left": "it forks"}
