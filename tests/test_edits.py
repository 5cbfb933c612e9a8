"""Edits: what people write, and what the replay is told to change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.sim.whatif import EDITS, Edit, ResolvedEdits, WorkerEdit, parse_edit, scenario_of
from tests.refusals import refused

EXAMPLES = {
    "straggler": "none", "input": "instant", "input.fetch": "0.5x", "input.prep": "2x", "input.transfer": "none",
    "comm": "0.5x", "checkpoint": "none", "host": "instant", "host.gc": "0.1x", "host.logging": "none",
    "op:GLOB": "0.5x", "workers": "4", "prefetch": "3", "persistent": "true", "threads": "true",
    "cache_fraction": "0.25", "other": "0.5",
    "cache_cold": "1", "cache_shards": "2", "bucket_mb": "25", "bandwidth": "2x", "cores": "1.5", "storage": "2x",
    "compress": "topk:0.01", "watched": "false", "compute_threads": "1",
    "accelerator": "3x", "logging": "buffered", "gc": "frozen:100",
    "script": "none", "schedule": "1f1b", "bubble": "none", "stage:NUMBER": "0.5x",
}  # fmt: skip


def text_of(target: str) -> str:
    return f"{target.replace('GLOB', 'checkpoint.*').replace('NUMBER', '2')}={EXAMPLES[target]}"


@pytest.mark.parametrize("target", EDITS)
def test_every_edit_changes_the_scenario_and_reads_back_as_it_was_written(target: str) -> None:
    text = text_of(target)

    assert str(parse_edit(text)) == text
    assert scenario_of([text]) != ResolvedEdits()


@given(st.permutations(sorted(set(EDITS))))
def test_the_order_of_edits_does_not_matter(order: list[str]) -> None:
    scenario = scenario_of([text_of(target) for target in order])
    names = ["checkpoint.save", "comm.wait", "host.gc", "host.logging", "compute"]

    expected = scenario_of([text_of(target) for target in sorted(order)])
    assert [scenario.factor(name) for name in names] == pytest.approx([expected.factor(name) for name in names])
    assert (scenario.workers, scenario.fetch, scenario.storage) == (WorkerEdit(4), 0.0, 2.0)


def test_factors_of_patterns_that_overlap_multiply() -> None:
    scenario = scenario_of(["checkpoint=0.5x", "op:checkpoint.save=0.5x"])

    assert (scenario.factor("checkpoint.save"), scenario.factor("checkpoint.sync")) == (0.25, 0.5)


def test_an_edit_can_be_built_with_numbers() -> None:
    assert scenario_of([Edit("workers", 4), Edit("cache_fraction", 0.5)]) == scenario_of(
        ["workers=4", "cache_fraction=0.5"]
    )


test_a_bad_edit_says_what_would_be_right = refused(
    ("workers", r"not an edit. Write target=value"),
    ("=4", r"not an edit"),
    ("schedule=1f1", r"Did you mean '1f1b'"),
    ("bubble=0.5x", r"Write bubble=none"),
    ("stage:x=2x", r"Write stage:NUMBER"),
    ("worker=4", r"Did you mean 'workers'"),
    ("workers=-1", r"'-1' is not a count. Write a whole number, at least 0"),
    ("prefetch=0", r"at least 1"),
    ("cache_fraction=1.5", r"number from 0 to 1"),
    ("cache_fraction=nan", r"number from 0 to 1"),
    ("comm=2", r"'2' is not a factor. Write none, instant or 0.5x"),
    ("bandwidth=none", r"Write 2x \(twice as fast\)"),
    ("bandwidth=0x", r"Write 2x"),
    ("persistent=yes", r"Write true or false"),
    ("bucket_mb=-3", r"positive number"),
    ("gc=none", r"Write gc=frozen:N"),
    ("gc=frozen:0", r"Write gc=frozen:N"),
    ("logging=none", r"host.logging=none"),
    ("op:=2x", r"Write op:GLOB"),
    ("storage=fast", r"shared or parallel"),
    ("accelerator=1e400x", r"not a factor"),
    by=parse_edit,
)


def test_a_target_that_is_given_twice_is_refused() -> None:
    with pytest.raises(InputError, match=r"'workers' is edited twice. Give each target one value"):
        scenario_of(["workers=2", "workers=4"])
