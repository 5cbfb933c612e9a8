"""The ranked causes of recorded runs with one known fault."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from headway.core.errors import InputError
from headway.ledger.answers.causes import (
    EDIT_OF_CAUSE,
    LEAST_FRACTION,
    RULES,
    Fix,
    find_causes,
)
from headway.ledger.answers.ledger import Ledger
from headway.ledger.answers.script_causes import LARGE
from headway.ledger.booking.account import SpanFacts
from headway.ledger.buckets import BUCKETS, SUBS, bucket_of_sub
from headway.ledger.cause import Cause, SampledLine, ranked
from headway.trace.events.trace import concat
from headway.trace.events.vocabulary import FROM_CACHE, SPANS
from headway.trace.rings.rank_tables import ComputeFacts
from headway.why.verdict import verdict
from tests.runs_made import MS, Made, Rows, RunMaker

QUIET: dict[str, Any] = {"iter_ns": 0, "transfer_ns": 0, "comm_ns": 0, "steps": 40}

FAULTS: dict[str, RunMaker] = {
    "input.fetch": RunMaker(**QUIET, num_workers=0, fetch_ns=9 * MS),
    "input.prep": RunMaker(**QUIET, num_workers=1, prep_ns=20 * MS),
    "input.transfer": RunMaker(**{**QUIET, "transfer_ns": 9 * MS}),
    "input.start": RunMaker(
        **{**QUIET, "iter_ns": 60 * MS},
        num_workers=1,
        epoch_steps=8,
        fetch_ns=lambda rank, step: 200 * MS * (step % 8 == 0),
    ),
    "comm.exposed": RunMaker(**{**QUIET, "comm_ns": 12 * MS}),
    "straggler.rank": RunMaker(**QUIET, ranks=3, compute_ns=lambda rank, step: (5 + 6 * (rank == 2)) * MS),
    "host.gc": RunMaker(**QUIET, gc_ns=lambda rank, step: 40 * MS * (step % 8 == 0)),
    "host.logging": RunMaker(**QUIET, logging_ns=5 * MS),
    "checkpoint.stall": RunMaker(**QUIET, save_ns=lambda rank, step: 60 * MS * (rank == 0 and step % 10 == 9)),
    "startup.compile": RunMaker(**QUIET, compile_ns=lambda rank, step: 900 * MS * (step == 0)),
    "host.script": RunMaker(**QUIET, script_ns=9 * MS),
    "host.recording": RunMaker(**QUIET, recording_ns=lambda rank, step: 90 * MS * (step % 20 == 9)),
    "eval": RunMaker(**QUIET, evaluation_ns=lambda rank, step: 120 * MS * (step % 10 == 9)),
    "rollout": RunMaker(**QUIET, acts=True, evaluation_ns=lambda rank, step: 120 * MS * (step % 10 == 9)),
}
"""Cause -> a job that has it and nothing else worth naming."""


def test_every_rule_but_the_devices_own_has_a_fault_that_shows_it():
    elsewhere = {"host.launch", "bubble.p2p", "host.cpu_wait", "steps.grow", "compute.optimizer"}
    elsewhere |= {"compute.gradients", "compute.foreign", "comm.calls"}
    assert set(RULES) == set(FAULTS) | elsewhere
    assert set(EDIT_OF_CAUSE) <= set(RULES)


@pytest.mark.parametrize("name", FAULTS)
def test_the_planted_fault_is_the_first_cause(name):
    made = FAULTS[name].make()

    causes = find_causes(Ledger.of(made))

    first = causes[0]
    assert first.cause == name
    assert first.where
    assert first.evidence
    assert first.fix
    assert any(letter.isdigit() for letter in first.evidence)


@pytest.mark.parametrize("name", ["input.fetch", "input.prep"])
def test_a_job_whose_batches_a_data_server_makes_is_sent_to_the_server_not_to_worker_processes(name):
    made = FAULTS[name].make()
    made.meta["input"] = {"server": {"prepared_from_storage": 40}}

    assert "threads or a cache in the data server" in find_causes(Ledger.of(made))[0].fix


@pytest.mark.parametrize("name", FAULTS)
def test_the_seconds_lost_are_those_of_the_truth(name):
    """The cause's own time, and what other ranks waited because of it."""
    made = FAULTS[name].make()
    truth, sub = made.truth_ns, made.sub_truth_ns
    lost_ns = {
        "input.fetch": sub.get("input.fetch", 0),
        "input.prep": sub.get("input.prep", 0),
        "input.transfer": sub.get("input.transfer", 0),
        "input.start": sub.get("input.start", 0) + sub.get("input.fetch", 0),  # each new worker's first load
        "comm.exposed": truth.get("comm", 0),
        "straggler.rank": truth.get("straggler", 0),
        "host.gc": sub.get("host.gc", 0),
        "host.logging": sub.get("host.logging", 0),
        "checkpoint.stall": truth.get("checkpoint", 0) + truth.get("straggler", 0),
        "startup.compile": sub.get("startup.compile", 0),
        "host.script": sub.get("host.script", 0),
        "host.recording": sub.get("host.recording", 0) + truth.get("straggler", 0),
        "eval": truth.get("eval", 0) + truth.get("straggler", 0),
        "rollout": sub.get("eval.rollout", 0) + truth.get("straggler", 0),
    }[name]

    first = find_causes(Ledger.of(made))[0]

    assert first.lost_device_s == pytest.approx(lost_ns / 1e9, rel=1e-6)


@given(
    booked_ns=st.dictionaries(st.sampled_from(("host.script", *SUBS)), st.sampled_from([1, 10**9, 10**12]), min_size=1),
    counts=st.dictionaries(st.sampled_from(sorted(SPANS)), st.integers(0, 2)),
    lines_ns=st.lists(st.sampled_from([1, 10**12])),
)
def test_no_sentence_counts_0_of_anything(booked_ns, counts, lines_ns):
    """Time may be booked that no record counts: gaps, what profilers saw, forwards behind the last step."""
    whole = sum(booked_ns.values())
    ledger_ns = {bucket: sum(ns for sub, ns in booked_ns.items() if bucket_of_sub(sub) == bucket) for bucket in BUCKETS}
    spans = {name: SpanFacts(count, count * 10**6, count, count * 10**6) for name, count in counts.items()}
    lines = tuple(SampledLine(f"train.py:{k + 1}", "", ns, 10) for k, ns in enumerate(sorted(lines_ns)[::-1]))
    ledger = Ledger(
        devices=1, steps=1, wall_ns=whole, ledger_ns=ledger_ns, sub_ns=booked_ns,
        basis={}, coverage=1.0, spans=spans, script_lines=lines,
    )  # fmt: skip
    answer = {**ledger.to_json(), "causes": [cause.to_json() for cause in find_causes(ledger)]}
    said = [verdict(answer).sentence, *(cause["evidence"] for cause in answer["causes"])]

    assert [text for text in said if re.search(r"(?<![\d.,:])0 [a-zA-Z%]", text)] == []


def test_headways_own_work_within_its_budget_is_no_cause_and_beyond_it_windows_can_be_left_out():
    ledger = Ledger.of(RunMaker(**QUIET, recording_ns=lambda rank, step: 10 * MS * (step == 9)).make())
    large = Ledger.of(FAULTS["host.recording"].make())
    window = {"window": replace(large.spans["host.recording"], count=2)}
    fixes = [find_causes(replace(large, spans={**large.spans, **more}))[0].fix for more in ({}, window)]

    assert LEAST_FRACTION < ledger.fraction("host.recording") < LARGE
    assert find_causes(ledger) == []
    assert ["--windows 0" in fix for fix in fixes] == [False, True]


def test_a_run_without_losses_has_no_causes():
    assert find_causes(Ledger.of(RunMaker(**QUIET, ranks=2).make())) == []


@dataclass(frozen=True)
class Told:
    """A forecast that a test made up."""

    base_step_s: float
    step_s: float
    interval: tuple[float, float] = (1.1, 1.3)

    @property
    def speedup(self) -> float:
        return self.base_step_s / self.step_s


def test_a_predictor_replaces_booked_seconds_by_counterfactual_ones():
    asked: list[tuple[str, ...]] = []

    def predict(edits: Any) -> Told:
        asked.append(tuple(edits))
        return Told(0.015, 0.012)

    ledger = Ledger.of(FAULTS["input.fetch"].make())
    cause = find_causes(ledger, predict=predict)[0]

    assert asked == [("input.fetch=none",)]
    assert cause.lost_device_s == pytest.approx(0.003 * ledger.steps * ledger.devices)
    assert (cause.predicted_speedup, cause.interval) == (1.25, (1.1, 1.3))


def test_a_run_that_cannot_be_replayed_keeps_its_booked_seconds():
    def refuse(edits: Any) -> Told:
        raise InputError("the replay is 9 % off. Record a longer run.")

    ledger = Ledger.of(FAULTS["input.fetch"].make())

    assert find_causes(ledger, predict=refuse) == find_causes(ledger)


def test_after_a_restart_the_evidence_says_what_the_replay_of_the_last_attempt_leaves_out():
    ledger = Ledger.of(FAULTS["checkpoint.stall"].make())

    def predict(edits: Any) -> Told:
        return Told(0.015, 0.012)

    again = find_causes(replace(ledger, facts=structs.replace(ledger.facts, attempt=1)), predict=predict)[0]

    assert again.evidence.partition("; 480 ms over all attempts: ")[2] == "replayed is the steady part of the last"
    assert "all attempts" not in find_causes(ledger, predict=predict)[0].evidence


def test_a_predicted_remedy_takes_the_place_of_general_advice():
    ledger = Ledger.of(FAULTS["input.fetch"].make())
    fix = Fix("data.workers: workers=6", 2.1, (1.9, 2.2), "DataLoader(..., num_workers=6)")

    cause = replace(find_causes(ledger, fixes={"input.fetch": fix})[0], line="train.py:30")

    assert (cause.fix, cause.predicted_speedup, cause.interval) == (fix.text, 2.1, (1.9, 2.2))
    assert cause.to_json() == {
        "cause": "input.fetch",
        "where": "MadeDataset, 0 workers per rank",
        "lost_device_s": cause.lost_device_s,
        "evidence": cause.evidence,
        "fix": "data.workers: workers=6",
        "predicted_speedup": 2.1,
        "interval": [1.9, 2.2],
        "at_most": False,
        "remedy": "",
        "allow": "",
        "script": "DataLoader(..., num_workers=6)  # train.py:30",
    }


def test_without_a_predicted_remedy_the_gain_is_an_upper_bound_and_the_rules_advice_stands():
    ledger = Ledger.of(FAULTS["input.fetch"].make())

    bare = find_causes(ledger)[0]
    bound = find_causes(ledger, predict=lambda edits: Told(0.015, 0.012))[0]
    by_hand = find_causes(ledger, predict=lambda edits: Told(0.015, 0.012), fixes={"input.fetch": Fix("", 1.2)})[0]

    assert (bare.at_most, bound.at_most, by_hand.at_most) == (False, True, False)
    assert (by_hand.fix, by_hand.predicted_speedup) == (bare.fix, 1.2)
    assert ["--set" in cause.fix for cause in (bound, by_hand)] == [True, False], "the edit is not what was predicted"


def test_what_lost_less_than_the_least_share_is_left_out():
    ledger = Ledger.of(FAULTS["host.logging"].make())
    share = ledger.fraction("host.logging")

    assert find_causes(ledger, least_fraction=share * 1.01) == []
    assert find_causes(ledger, least_fraction=share * 0.99)[0].cause == "host.logging"


def test_causes_rank_by_seconds_then_name_then_place():
    rows = [
        Cause("b", "x", 1.0, "", ""),
        Cause("a", "y", 1.0, "", ""),
        Cause("a", "x", 1.0, "", ""),
        Cause("c", "", 2.0, "", ""),
    ]

    assert [(row.cause, row.where) for row in ranked(rows)] == [("c", ""), ("a", "x"), ("a", "y"), ("b", "x")]


@pytest.mark.parametrize("name", FAULTS)
def test_other_numbers_for_the_ranks_are_other_words_in_the_same_causes(name):
    made = replace(FAULTS[name], ranks=3).make()
    numbers = np.array([2, 0, 1])
    events = made.trace.events
    rank = np.where(events["rank"] >= 0, numbers[events["rank"]], events["rank"]).astype(np.int32)
    trace = replace(
        made.trace,
        events={**events, "rank": rank},
        ranks={int(numbers[rank]): facts for rank, facts in made.trace.ranks.items()},
    )
    rows = [{**row, "rank": int(numbers[row["rank"]])} for row in made.meta["ranks"]]

    ours = find_causes(Ledger.of(made))
    theirs = find_causes(Ledger.of(replace(made, trace=trace, meta={**made.meta, "ranks": rows})))

    assert [(row.cause, row.lost_device_s) for row in theirs] == [(row.cause, row.lost_device_s) for row in ours]


def test_a_warm_compile_cache_is_not_to_be_kept():
    maker, told = FAULTS["startup.compile"], []
    for compiled_from in (0, FROM_CACHE):
        cause = find_causes(Ledger.of(replace(maker, compiled_from=compiled_from).make()))[0]
        told.append(("keep the compile cache" in cause.fix, "cache held 100 %" in cause.evidence))

    assert told == [(True, False), (False, True)]


def test_a_host_is_full_when_its_own_ranks_fill_it_not_those_of_all_hosts():
    made = FAULTS["input.prep"].make()
    apart = replace(made, trace=replace(made.trace, ranks={r: {"host": f"host{r}"} for r in made.trace.ranks}))

    assert "cores are busy" in find_causes(Ledger.of(made))[0].fix
    assert "more workers than 1" in find_causes(Ledger.of(apart))[0].fix


def test_a_missing_run_json_costs_only_the_words_it_would_have_given():
    made = FAULTS["input.fetch"].make()

    bare = find_causes(Ledger.of(replace(made, meta={})))[0]

    assert bare.cause == "input.fetch"
    assert bare.where == "loader"


def two_loaders() -> Made:
    """Return a run whose second half waits half as long for another loader."""
    made = RunMaker(steps=20, fetch_ns=lambda rank, step: (20 if step < 10 else 10) * MS, epoch_steps=10).make()
    first = made.meta["loaders"]["0"]
    made.meta["loaders"] = {"0": first, "1": {**first, "line": "eval.py:7", "dataset": "Labels", "num_workers": 1}}
    events = made.trace.events
    second = made.trace.named("input.next", "input.load", "input.fetch", "input.iter") & (
        events["start_ns"] >= np.sort(events["start_ns"][made.trace.named("input.iter")])[-2]
    )
    events["group"][second] = 1
    return made


def test_the_edit_names_the_line_that_constructs_the_loader_or_the_arguments_of_the_trainer_that_does():
    made = FAULTS["input.fetch"].make()
    row = {**made.meta["loaders"]["0"], "line": "train.py:30", "constructed": "train.py:12"}
    trainer = {"library": "transformers", "sampler": "SeedableRandomSampler", "steered": "it counts epochs"}

    def cause(**more: Any) -> Any:
        facts = {**made.meta, "loaders": {"0": {**row, **more}}}
        return find_causes(Ledger.of(replace(made, meta=facts)), predict=halved)[0]

    assert cause().to_json()["script"].endswith(", persistent_workers=True)  # train.py:12")
    assert cause(constructed="").to_json()["script"].endswith("  # train.py:30")
    script = cause(**trainer).to_json()["script"]
    assert re.fullmatch(
        r"TrainingArguments\(\.\.\., dataloader_num_workers=\d, dataloader_persistent_workers=True\)", script
    )
    assert cause(**trainer).fix == "read in worker processes: TrainingArguments(dataloader_num_workers=4)"


def test_each_loader_that_training_waited_for_is_a_cause_of_its_own():
    causes = [cause for cause in find_causes(Ledger.of(two_loaders())) if cause.cause == "input.fetch"]

    assert [cause.where for cause in causes] == [
        "MadeDataset, 0 workers per rank",
        "eval.py:7, Labels, 1 worker per rank",
    ]
    assert causes[0].lost_device_s == pytest.approx(2 * causes[1].lost_device_s)


def halved(edits: Any) -> Told:
    """Predict that any edit halves the step."""
    return Told(0.02, 0.01, (1.9, 2.1))


def test_what_a_replay_without_the_cause_wins_is_shared_by_the_loaders_that_have_it():
    ledger = Ledger.of(two_loaders())
    booked = [cause for cause in find_causes(ledger) if cause.cause == "input.fetch"]
    first, second = (cause for cause in find_causes(ledger, predict=halved) if cause.cause == "input.fetch")

    assert first.lost_device_s == pytest.approx(2 * second.lost_device_s)
    assert 1 < second.predicted_speedup < first.predicted_speedup < 2
    assert sum(1 - 1 / cause.predicted_speedup for cause in (first, second)) == pytest.approx(1 / 2)
    assert len(booked) == 2


def test_a_loader_that_only_evaluation_waits_for_is_no_cause_of_waiting_for_input():
    made = RunMaker(ranks=1, steps=20, fetch_ns=9 * MS).make()
    rows = made.trace.named("step")
    low, high = made.trace.events["start_ns"][rows].min(), made.trace.events["start_ns"][rows].max()
    extra = Rows(0)
    extra.add("eval", int(low), int(high - low), corr=0, seq=0)
    made = replace(made, trace=concat([made.trace, extra.trace()]))
    causes = {cause.cause: cause for cause in find_causes(Ledger.of(made))}

    assert causes["eval"].fix == "give the loader of the evaluation workers"  # there is no other to keep them for
    assert causes["input.fetch"].evidence.startswith("1 call of next(loader)")  # the one outside of the evaluation
    assert causes["eval"].where == "MadeDataset, 0 workers per rank"

    loader = {**made.meta["loaders"]["0"], "rehearsal": {"processes": "it reads from an open file"}}
    refused = replace(made, meta={**made.meta, "loaders": {"0": loader}})
    found = {cause.cause: cause for cause in find_causes(Ledger.of(refused))}["eval"]
    assert (found.script, "workers" in found.fix) == ("", False)  # what a rehearsal refused is no edit either


def test_advice_for_a_job_on_cpus_names_no_pinned_memory():
    made = FAULTS["input.transfer"].make()
    of_cpu = find_causes(Ledger.of(made))[0]
    made.meta["device_type"] = "NVIDIA H100"

    assert "pin_memory" not in of_cpu.fix
    assert "pin_memory" in find_causes(Ledger.of(made))[0].fix


def test_a_sampler_of_a_loader_without_workers_draws_and_a_loader_with_too_many_is_told_to_have_fewer():
    made = FAULTS["input.transfer"].make()
    for facts in made.meta["loaders"].values():
        facts["num_workers"] = 0
    cause = find_causes(Ledger.of(made))[0]

    assert cause.cause == "input.transfer"
    assert cause.fix.startswith("draw fewer indices"), "workers do not draw"
    assert not cause.script
    fixes = {}
    for fetch_ms, prep_ms in ((0, 6), (6, 0)):
        made = replace(FAULTS["input.transfer"], fetch_ns=fetch_ms * MS, prep_ns=prep_ms * MS).make()
        for facts in made.meta["loaders"].values():
            facts["num_workers"] = 10
        made.meta["cores"] = 2
        [cause] = [one for one in find_causes(Ledger.of(made)) if one.cause == "input.transfer"]
        fixes[prep_ms] = cause.fix, cause.script

    assert fixes[6][0] == "fewer workers: 10 of them take turns on 1 core"
    assert "num_workers=1," in fixes[6][1]
    assert not fixes[0][0].startswith("fewer workers"), "loads that wait need no core"


def test_loads_that_all_cores_cannot_hide_are_made_cheaper_and_the_line_is_named():
    fixes = {}
    for prep_ms in (8, 80):
        made = replace(FAULTS["input.fetch"], ranks=1, fetch_ns=0, prep_ns=prep_ms * MS).make()
        made.meta["cores"] = 2
        ledger = replace(Ledger.of(made), load_lines=(SampledLine("data.py:9", "decode", 10**9, 20, loader=0),))
        fixes[prep_ms] = next(cause.fix for cause in find_causes(ledger) if cause.cause == "input.prep")

    assert fixes[80].startswith("make decode at data.py:9 cheaper")
    assert fixes[8].startswith("prepare in worker processes")


def test_passes_of_one_batch_are_told_to_keep_their_iterator():
    made = replace(FAULTS["input.start"], epoch_steps=1).make()
    cause = next(cause for cause in find_causes(Ledger.of(made)) if cause.cause == "input.start")

    assert cause.script.startswith("batches = iter(loader)")


def test_calls_of_libraries_without_torch_inside_of_steps_are_a_cause_by_their_time():
    ledger = Ledger.of(FAULTS["host.script"].make())
    line = SampledLine("train.py:9", "roc_auc_score", ledger.ledger_ns["useful"] // 2, 40, library="sklearn")
    [cause] = [one for one in find_causes(replace(ledger, loop_lines=(line,))) if one.cause == "compute.foreign"]

    assert cause.where == "roc_auc_score at train.py:9"
    assert cause.lost_device_s == pytest.approx(line.ns / 1e9)
    few = structs.replace(line, count=7)
    assert not [one for one in find_causes(replace(ledger, loop_lines=(few,))) if one.cause == "compute.foreign"]


def test_an_evaluation_with_gradients_enabled_is_told_of_no_grad():
    without = find_causes(Ledger.of(FAULTS["eval"].make()))[0]
    enabled = find_causes(Ledger.of(replace(FAULTS["eval"], grad_enabled=True).make()))[0]

    assert without.cause == enabled.cause == "eval"
    assert not without.script
    assert "with gradients enabled" in enabled.evidence
    assert enabled.script.startswith("with torch.no_grad()")


def test_what_an_evaluation_waits_for_is_no_loss_of_the_training_loader():
    ledger = Ledger.of(FAULTS["input.fetch"].make())
    forecast = SimpleNamespace(base_step_s=0.02, step_s=0.01, speedup=2.0, interval=(1.9, 2.1))
    alone = find_causes(ledger, predict=lambda edits: forecast)[0]
    ledger.sub_ns["eval.input"] = 9 * ledger.sub_ns["input.fetch"]
    beside = find_causes(ledger, predict=lambda edits: forecast)[0]

    assert alone.cause == beside.cause == "input.fetch"
    assert beside.lost_device_s < 0.2 * alone.lost_device_s


def test_a_profiler_that_is_on_all_the_time_is_named():
    ledger = Ledger.of(FAULTS["host.script"].make())
    compute = ComputeFacts(profiled=0.9)
    cause = find_causes(replace(ledger, facts=structs.replace(ledger.facts, compute=compute)))[0]

    assert "torch.profiler.schedule" in cause.fix
    assert "90 % of the looks" in cause.evidence
    assert "a profiler of torch's on" in compute.words()
