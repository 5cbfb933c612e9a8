"""What the data room proposes, and why it sometimes does not."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headway.core.errors import InputError
from headway.core.machine.host_load import HostLoad
from headway.data.advise import neighbours, propose
from headway.data.worker_search import worker_counts
from headway.plan.planner import Plan
from headway.plan.proposal import Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.recorded.pool_waits import PoolWaits
from headway.sim.recorded.program import Program
from headway.trace.events.loader_facts import LoaderFacts
from headway.trace.events.vocabulary import READING_FAILED, UNREAD
from headway.trace.recording.run_facts import RunFacts
from headway.why.fixes import fixes_of
from tests.runs_made import MS, Made, RunMaker

FEWER = "compute_threads=1"
QUIET = HostLoad(cores=2, cores_available=2, readings=9)


def made_of(**changes: Any) -> Made:
    usual: dict[str, Any] = {"ranks": 1, "steps": 120, "epoch_steps": 30, "cores": 2, "compute_ns": 5 * MS}
    return RunMaker(**{**usual, **changes}).make()


def advice(made: Made, memory_bytes: int = 10**9, **loader: Any) -> dict[str, Proposal | Refusal]:
    meta = {**made.meta, "loaders": {"0": {**made.meta["loaders"]["0"], **loader}}, "compute_cpu_fraction": 0.0}
    program = Program.from_trace(made.trace, meta)
    return {row.name: row for row in propose(None, program, Setup.from_facts(meta, memory_bytes=memory_bytes))}


def test_loads_that_sleep_get_more_workers_than_there_are_cores() -> None:
    row = advice(made_of(fetch_ns=30 * MS))["data.workers"]

    assert row.parameters["num_workers"] in (6, 8)
    assert row.parameters["persistent_workers"]
    assert row.predicted_speedup > 3


def test_where_a_trial_counts_workers_by_hand_are_predicted_with_their_start_and_without_looks() -> None:
    row, longer = (advice(made_of(fetch_ns=30 * MS, steps=steps))["data.workers"] for steps in (30, 3000))

    assert row.by_hand is not None
    assert row.by_hand.clear
    assert longer.by_hand is None, "nothing but the looks is saved"
    assert row.by_hand.interval[0] < row.by_hand.predicted_speedup < row.by_hand.interval[1]
    assert row.by_hand.predicted_speedup < longer.predicted_speedup


def test_workers_that_computing_threads_leave_no_core_are_predicted_with_fewer_of_those() -> None:
    """20 ms of loads and 5 ms of compute on two threads, on 2 cores: workers alone make every operator wait."""
    made = made_of(prep_ns=20 * MS)
    meta = {**made.meta, "compute_cpu_fraction": 1.0}
    program = Program.from_trace(made.trace, meta)
    recording = replace(program.recording, beside=np.array([0.95]))
    program = replace(program, recording=recording, pool=PoolWaits.of(recording, 2, QUIET), busy=np.ones(1))
    alone, fewer = (program.predict((*edits, "watched=false")) for edits in (["workers=2"], ["workers=2", FEWER]))
    setup = Setup.from_facts(meta, memory_bytes=10**9)
    row = next(row for row in propose(None, program, setup) if row.name == "data.workers")

    fix = fixes_of(Plan(1.0, 1.0, (1.0, 1.0), (row,)))["input.prep"]

    assert alone.speedup < 1.1 < 1.3 < fewer.speedup
    assert program.predict([FEWER]).speedup == pytest.approx(25 / (20 + 5 * 1.95 ** (1 / 3)), rel=0.05)
    assert fix.script == "torch.set_num_threads(1); DataLoader(..., num_workers=2, persistent_workers=True)"
    assert fix.interval[0] < fewer.speedup < fix.interval[1]

    other = Program.from_trace(made.trace, meta)  # a program keeps what it has replayed
    recording = replace(recording, waiting=np.array([0.9]))
    pool = PoolWaits.of(recording, 2, None)
    starved = replace(other, recording=recording, pool=pool, busy=np.ones(1), orders={})
    with pytest.raises(InputError, match="threads that compute waited for cores for 19 % of the steps"):
        starved.predict([FEWER])
    assert not next(row for row in propose(None, starved, setup) if row.name == "data.workers").by_hand_script


@pytest.mark.parametrize(("prep_ns", "fetch_ns", "workers"), [(30 * MS, 0, 2), (30 * MS, 2 * MS, 2), (0, 3 * MS, 1)])
def test_loads_that_compute_get_no_more_workers_than_cores_and_of_settings_as_good_the_smallest_is_proposed(
    prep_ns: int, fetch_ns: int, workers: int
) -> None:
    """More would take turns on the two cores, though they sleep for a sixteenth of a load."""
    row = advice(made_of(prep_ns=prep_ns, fetch_ns=fetch_ns))["data.workers"]

    assert row.parameters["num_workers"] == workers


def test_persistence_is_proposed_only_where_iterators_are_made_again() -> None:
    row = advice(made_of(fetch_ns=10 * MS, epoch_steps=120))["data.workers"]

    assert row.edits == (f"workers={row.parameters['num_workers']}",)


@pytest.mark.parametrize(("later_ms", "edits"), [(12, ("persistent=true",)), (40, ("workers=8", "persistent=true"))])
def test_workers_that_only_start_too_often_are_kept_and_others_are_added_where_they_are_worth_it(later_ms, edits):
    """Two workers open for 300 ms in each pass; then they nearly keep up with the steps, or sleep for eight of them."""
    made = made_of(num_workers=2, fetch_ns=lambda _, step: (300 if step % 30 < 2 else later_ms) * MS, iter_ns=3 * MS)

    assert advice(made)["data.workers"].edits == edits


def test_a_loader_that_is_made_anew_for_each_epoch_keeps_no_workers() -> None:
    row = advice(made_of(fetch_ns=10 * MS), loaders=4)["data.workers"]

    assert "persistent=true" not in row.edits
    assert row.parameters["persistent_workers"] is False


@pytest.mark.parametrize("loader", [{"changes_between": "others"}, {"changes_unchecked": UNREAD}])
def test_nothing_outlives_a_pass_where_nobody_saw_that_later_ones_give_the_same(loader: dict[str, str]) -> None:
    rows = advice(made_of(fetch_ns=10 * MS), **loader)

    assert isinstance(rows["data.workers"], Proposal)
    assert rows["data.workers"].parameters["persistent_workers"] is False
    assert isinstance(rows["data.cache"], Refusal)
    assert "between passes" in rows["data.cache"].reason


def test_the_cache_is_as_large_as_the_data_or_the_memory() -> None:
    made = made_of(fetch_ns=60 * MS)
    whole, half = advice(made)["data.cache"], advice(made, memory_bytes=4 * 10**6)["data.cache"]

    assert whole.edits[:2] == ("cache_fraction=1", "cache_cold=1")
    assert half.parameters["bytes"] == int(0.8 * 4 * 10**6)
    assert 1 < half.predicted_speedup < whole.predicted_speedup


def test_examples_that_ranks_are_dealt_anew_come_back_less_often() -> None:
    made = made_of(fetch_ns=20 * MS, ranks=2)
    own, dealt = advice(made)["data.cache"], advice(made, sampler="DistributedSampler")["data.cache"]

    assert "cache_shards=2" in dealt.edits
    assert dealt.predicted_speedup < own.predicted_speedup


@pytest.mark.parametrize(
    ("name", "changes", "loader", "reason"),
    [
        ("data.workers", {}, {"reason_untunable": "an IterableDataset: it would repeat its data"}, "IterableDataset"),
        ("data.workers", {}, {"sampler": "MySampler"}, "MySampler: a sampler of the script's own"),
        ("data.workers", {}, {"draws": ["own"]}, "each worker would draw the same numbers"),
        ("data.cache", {"epoch_steps": 120}, {}, "from the second pass on"),
        ("data.cache", {"batch_bytes": 0}, {}, "not known"),
        ("data.cache", {}, {"memory_bytes": 0}, "no memory is free"),
        ("data.cache", {}, {"datasets": 2}, "made anew 1 time"),
        ("data.cache", {}, {"rehearsal": {"look_s": 0.9}}, "looking, before each batch, at what its dataset"),
        ("data.workers", {}, {"rehearsal": {"look_s": 0.9}}, "takes 900 ms"),
        ("data.workers", {}, {"changes_unchecked": READING_FAILED}, "its trial would refuse it: a child that read"),
        ("data.cache", {}, {"changes_unchecked": READING_FAILED}, "wanted to write or to send"),
        ("data.threads", {"fetch_ns": 0, "prep_ns": 12 * MS, "compute_ns": MS, "epoch_steps": 10}, {}, "for 100 % of"),
    ],
)
def test_what_would_win_nothing_or_change_the_data_is_refused_with_the_reason(name, changes, loader, reason) -> None:
    row = advice(made_of(**{"fetch_ns": 20 * MS, **changes}), **loader)[name]

    assert isinstance(row, Refusal)
    assert reason in row.reason


@pytest.mark.parametrize("key", ["draws", "collate_draws"])
def test_workers_for_examples_that_are_drawn_need_the_users_leave(key: str) -> None:
    made = made_of(fetch_ns=30 * MS)
    row = advice(made, dataset="Pictures", **{key: ["random", "torch"]})["data.workers"]

    assert row.allow == "result-equivalent"
    assert row.risk.startswith("loader 0 (Pictures) draws random numbers (random, torch), and workers would draw other")
    pure = advice(made, draws=[], collate_draws=[])["data.workers"]
    assert pure.allow is None


def test_without_leave_the_plan_says_what_to_grant_and_with_it_the_plan_file_carries_it() -> None:
    made = made_of(fetch_ns=30 * MS)
    meta = {**made.meta, "compute_cpu_fraction": 0.0}
    meta["loaders"] = {"0": {**made.meta["loaders"]["0"], "draws": ["torch"]}}
    plans = [
        Plan.of(
            None,
            Program.from_trace(made.trace, meta),
            Setup.from_facts(meta, memory_bytes=10**9, allow=allow),
            {"data": propose},
        )
        for allow in ((), ("result-equivalent",))
    ]
    refusals = {row.name: row.reason for row in plans[0].refused}

    assert plans[0].chosen == ()
    assert "with --allow result-equivalent" in refusals["data.workers"]
    assert "draws random numbers (torch)" in refusals["data.cache"]
    assert plans[1].chosen == ("data.workers",)
    assert plans[1].plan_file().remedies[0].allow == "result-equivalent"


def test_collating_at_random_is_no_hindrance_to_a_cache() -> None:
    made = made_of(fetch_ns=20 * MS)

    assert isinstance(advice(made, collate_draws=["torch"])["data.cache"], Proposal)
    assert isinstance(advice(made, draws=["torch"])["data.cache"], Refusal)


def test_examples_without_an_index_are_not_cached_but_a_sampler_of_ones_own_is_no_hindrance() -> None:
    made = made_of(fetch_ns=20 * MS)

    assert isinstance(advice(made, reason_untunable="an IterableDataset")["data.cache"], Refusal)
    assert isinstance(advice(made, datasets=1)["data.cache"], Proposal)
    assert isinstance(advice(made, sampler="MySampler")["data.cache"], Proposal)


def test_a_loader_that_must_not_be_read_ahead_keeps_its_workers_in_a_what_if_too() -> None:
    made = made_of(fetch_ns=20 * MS)
    fact = {**made.meta["loaders"]["0"], "sampler": "MySampler"}
    program = Program.from_trace(made.trace, {**made.meta, "loaders": {"0": fact}})

    prediction = program.predict(["workers=4"])
    assert prediction.speedup == 1.0
    assert "Loader 0 must not be read ahead" in prediction.note


def test_a_run_without_a_loader_gets_no_advice() -> None:
    made = made_of()
    bare = replace(made, trace=made.trace.where(~made.trace.named("input.next", "input.iter", "input.load")))

    assert "no DataLoader" in advice(bare)["data.workers"].reason


def test_batches_that_come_from_no_loader_of_torchs_are_given_nothing() -> None:
    """A library whose own loader makes torch's iterators: no remedy would ever meet it."""
    made = made_of(fetch_ns=20 * MS)
    events = dict(made.trace.events)
    loads = made.trace.named("input.next", "input.load")
    events["group"] = np.where(loads, -1, events["group"])
    seen = replace(made.trace, events=events).where(~made.trace.named("input.iter"))
    meta = {**made.meta, "loaders": {}}

    rows = propose(None, Program.from_trace(seen, meta), Setup.from_facts(meta, memory_bytes=10**9))

    for row in rows:
        assert isinstance(row, Refusal)
        assert "not of a DataLoader's making" in row.reason


def test_counts_of_workers_are_dense_where_one_more_matters() -> None:
    assert worker_counts(0) == []
    assert worker_counts(5) == [1, 2, 3, 4]


def test_with_two_loaders_the_proposal_names_those_it_is_about() -> None:
    made = made_of(fetch_ns=30 * MS)
    first = {**made.meta["loaders"]["0"], "dataset": "Pictures"}
    events = {name: column.copy() for name, column in made.trace.events.items()}
    odd = made.trace.named("input.iter", "input.next", "input.load", "input.fetch") & (events["step"] // 30 % 2 == 1)
    events["group"][odd] = 1  # every other pass goes through the second loader
    two = replace(made, trace=replace(made.trace, events=events))

    def both(**second: Any) -> dict[str, Proposal | Refusal]:
        meta = {**two.meta, "loaders": {"0": first, "1": {**first, "dataset": "Labels", **second}}}
        program = Program.from_trace(two.trace, {**meta, "compute_cpu_fraction": 0.0})
        return {row.name: row for row in propose(None, program, Setup.from_facts(meta, memory_bytes=10**9))}

    alike, own, drawn = both(), both(sampler="MySampler"), both(draws=["torch"])

    assert "for loader 0 (Pictures), loader 1 (Labels)" in alike["data.workers"].reason
    assert "for loader 0 (Pictures)." in own["data.workers"].reason
    assert "Left alone: loader 1 (Labels): MySampler" in own["data.workers"].reason
    assert "For loader 0 (Pictures)." in drawn["data.cache"].reason
    assert "Left alone: loader 1 (Labels): reading an example draws" in drawn["data.cache"].reason
    assert drawn["data.workers"].allow == "result-equivalent"
    assert drawn["data.workers"].risk.startswith("loader 1 (Labels) draws")


def test_threads_are_proposed_where_the_hand_off_between_processes_is_what_is_left() -> None:
    """Loads of 6 ms beside steps of 0.25 ms: workers hide them, and then pay 1.6 ms for each hand-off."""
    made = made_of(fetch_ns=6 * MS, compute_ns=MS // 4, epoch_steps=30)
    found = advice(made)
    row, processes = found["data.threads"], found["data.workers"]

    assert row.edits == (f"workers={row.parameters['num_workers']}", "threads=true")
    assert row.predicted_speedup >= 1.2 * processes.predicted_speedup
    assert set(row.conflicts) == {"data.workers", "data.cache"}
    assert row.applies


def test_threads_are_refused_where_processes_do_as_well_or_examples_are_drawn() -> None:
    made = made_of(fetch_ns=30 * MS, compute_ns=20 * MS, epoch_steps=120)
    same, drawn = advice(made)["data.threads"], advice(made, draws=["random"])["data.threads"]

    assert isinstance(same, Refusal)
    assert "by worker processes" in same.reason
    assert isinstance(drawn, Refusal)
    assert "it draws random numbers (random), and threads would share the generators" in drawn.reason


def test_headways_own_loader_is_left_to_its_user() -> None:
    found = advice(made_of(fetch_ns=30 * MS), own=True)

    assert all(isinstance(row, Refusal) for row in found.values())
    assert [row.reason.partition("pass ")[2].partition(" ")[0] for row in found.values()] == [
        "num_workers", 'workers="threads"', "cache_bytes", 'server="auto"',
    ]  # fmt: skip


def test_a_server_is_proposed_where_other_jobs_read_the_same_data_meanwhile(tmp_path) -> None:
    made = made_of(fetch_ns=30 * MS)
    loader = {**made.meta["loaders"]["0"], "dataset": "Pictures", "dataset_size": 240}
    begun = {"host": "here", "start_ns": 0, "end_ns": 100, "loaders": {"0": loader}}
    runs = {
        "ours": {**begun, "run_id": "a", "realtime_ns": 1000},
        "beside": {**begun, "run_id": "b", "realtime_ns": 1050},
        "going on": {**begun, "run_id": "c", "realtime_ns": 900, "end_ns": None},
        "later": {**begun, "run_id": "d", "realtime_ns": 1200},
        "elsewhere": {**begun, "run_id": "e", "realtime_ns": 1000, "host": "there"},
        "other data": {**begun, "run_id": "f", "realtime_ns": 1000, "loaders": {"0": {**loader, "dataset_size": 9}}},
        "broken": {"run_id": "g"},
    }
    for name, facts in runs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(facts))
    run = SimpleNamespace(path=tmp_path / "ours", facts=RunFacts.of(runs["ours"]))
    meta = {**made.meta, "loaders": {"0": loader}, "compute_cpu_fraction": 0.0}
    program = replace(Program.from_trace(made.trace, meta), run=run)
    rows = {row.name: row for row in propose(None, program, Setup.from_facts(meta, memory_bytes=10**9))}
    row = rows["data.server"]

    assert neighbours(run, {0: LoaderFacts.of(loader)}) == 2
    assert row.edits == ("input.fetch=0.333x", "input.prep=0.333x")
    assert row.predicted_speedup > 1.5
    assert row.allow == "result-equivalent"
    assert isinstance(advice(made)["data.server"], Refusal)
