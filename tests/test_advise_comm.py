"""What the communication room proposes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from headway.comm.advise import SEARCH, propose
from headway.ledger.cause import Cause
from headway.plan.proposal import Proposal, Refusal
from headway.plan.setup import Setup
from headway.runtime.recorder.ddp_facts import facts_of
from headway.sim.ddp.ddp_link import limits
from headway.sim.ddp.ddp_replay import DdpReplay
from headway.sim.ddp.ddp_window import StepWindow
from headway.sim.recorded.program import Program
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace, concat
from headway.trace.events.vocabulary import COLLECTIVES, KIND
from headway.trace.rings.rank_tables import DdpModel
from headway.why.fixes import with_reasons
from tests.ddp_made import GRADIENT, Job, changed, play, play_on_devices
from tests.runs_made import MS, Rows, RunMaker
from tests.spawn import on_ranks


def advice(**changes: Any) -> dict[str, Proposal | Refusal]:
    made = RunMaker(**{"ranks": 2, "steps": 60, "cores": 8, **changes}).make()
    program = Program.from_trace(made.trace, made.meta)
    return {row.name: row for row in propose(None, program, Setup.from_facts(made.meta))}


def test_faster_links_are_predicted_but_not_applied() -> None:
    row = advice(comm_ns=5 * MS)["comm.links"]

    assert not row.applies
    assert 1.2 < row.predicted_speedup < row.interval[1]


def test_the_bucket_size_is_offered_for_a_live_try_without_a_promise() -> None:
    row = advice(comm_ns=5 * MS)["comm.bucket"]

    assert (row.predicted_speedup, row.clear, row.applies) == (1.0, False, True)
    assert row.interval[0] < 1 < row.interval[1]
    assert "Try it live" in row.reason


@pytest.mark.parametrize("ranks", [2, 3])
def test_buckets_of_more_than_two_ranks_need_a_grant(ranks: int) -> None:
    row = advice(comm_ns=5 * MS, ranks=ranks)["comm.bucket"]

    assert row.allow == (None if ranks == 2 else "result-equivalent")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("comm.bucket", {"comm_ns": MS // 100}, "no bucket size can win more"),
        ("comm.bucket", {"ranks": 1}, "no collective"),
        ("comm.gradient_view", {"comm_ns": 5 * MS}, "a bare trace has no deep windows"),
    ],
)
def test_what_wins_nothing_or_is_not_known_is_refused_with_the_reason(name: str, changes: Any, reason: str) -> None:
    row = advice(**changes)[name]

    assert isinstance(row, Refusal)
    assert reason in row.reason


# What DDP does around the sums


def with_windows(job: Job, window: StepWindow | None = None, **facts: Any) -> dict[str, Proposal | Refusal]:
    """Return what is proposed for a made run whose deep windows are those of `job`, and whose DDP noted `facts`."""
    made = RunMaker(ranks=2, steps=60, cores=8, comm_ns=5 * MS).make()
    deep = DdpReplay.from_windows([window or play(job).window], models=[DdpModel(**{**job.model(), **facts})], cores=8)
    program = replace(Program.from_trace(made.trace, made.meta), deep=[deep])
    return {row.name: row for row in propose(None, program, Setup.from_facts(made.meta))}


@pytest.mark.parametrize("bytes_per_s", [1.5e8, 4e8])
def test_gradients_inside_buckets_win_what_the_copies_cost(bytes_per_s: float) -> None:
    job = Job(forward_ns=(2 * MS,) * 6, size=(9_000_000,) * 6, bytes_per_s=bytes_per_s)
    row = with_windows(job)["comm.gradient_view"]
    truth = play(job).step_s / play(changed(job, views=True)).step_s

    assert (row.applies, row.allow, row.parameters) == (True, "result-equivalent", {})
    assert row.predicted_speedup == pytest.approx(truth, rel=0.03)
    assert row.interval[0] <= truth <= row.interval[1]


SEARCHED = {"find_unused_parameters": True, "static_graph": False, "can_set_static_graph": True}


@pytest.mark.parametrize(
    ("name", "job", "facts", "reason"),
    [
        ("gradient_view", Job(), {"gradient_as_bucket_view": True}, "live inside the buckets already"),
        ("gradient_view", Job(views=True), {}, "no deep window shows a copy out of a bucket"),
        ("gradient_view", Job(size=(90_000,) * 4), {}, "copies out of buckets cost little"),
        ("static_graph", Job(), {"find_unused_parameters": False}, "no deep window noted a DDP that searches"),
        ("static_graph", Job(), {**SEARCHED, "static_graph": True}, "has a static graph already"),
        ("static_graph", Job(), {**SEARCHED, "can_set_static_graph": False}, "steps that use other parameters"),
    ],
)
def test_what_ddp_has_already_or_never_needs_is_refused(name: str, job: Job, facts: Any, reason: str) -> None:
    row = with_windows(job, **facts)[f"comm.{name}"]

    assert isinstance(row, Refusal)
    assert reason in row.reason


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({**SEARCHED, "unused_bytes": 0}, "find_unused_parameters=False"),
        ({**SEARCHED, "unused_bytes": 288}, ""),
        (SEARCHED, ""),  # recordings that did not note it
        ({**SEARCHED, "unused_bytes": 0, "can_set_static_graph": False}, ""),
        ({"default": False, "bucket_bytes": 10_000}, "bucket_cap_mb=25"),
        ({"default": False, "bucket_bytes": 50 << 20}, ""),
    ],
)
def test_arguments_of_ddp_that_cost_and_win_nothing_are_named_without_a_promise(facts: Any, line: str) -> None:
    made = RunMaker(ranks=2, steps=60, cores=8, comm_ns=5 * MS).make()
    deep = DdpReplay.from_windows([play(Job()).window], models=[DdpModel(**{**Job().model(), **facts})], cores=8)
    program = replace(Program.from_trace(made.trace, made.meta), deep=[deep])
    cause = Cause("comm.exposed", "2 ranks", 1.0, "seen", "faster links", 1.2, (1.1, 1.3))
    found = with_reasons(cause, program)

    assert (line in found.script) if line else found == cause
    assert not line or found.predicted_speedup is None


# Devices


def on_devices(job: Job | None) -> dict[str, Proposal | Refusal]:
    """Return what is proposed for a run on devices that are at work throughout, which windows of `job` show or none."""
    made = RunMaker(ranks=2, steps=60, cores=8, comm_ns=0).make()
    step = made.trace.where(made.trace.named("step"))
    work = Trace.from_columns(
        {
            "rank": step.events["rank"], "start_ns": step.events["start_ns"] + MS,
            "duration_ns": step.events["duration_ns"], "seq": [MS] * len(step), "name": [0] * len(step),
        },
        names=["device.work"], ranks=made.trace.ranks,
    )  # fmt: skip
    program = Program.from_trace(concat([made.trace, work]), {**made.meta, "device_type": "NVIDIA H100"})
    if job is not None:
        deep = DdpReplay.from_windows([play_on_devices(job).window], models=[DdpModel(**job.model())], cores=8)
        program = replace(program, deep=[deep])
    return {row.name: row for row in propose(None, program, Setup.from_facts(made.meta))}


def test_devices_that_communicate_get_the_buckets_that_windows_predict() -> None:
    job = Job(size=(4_000_000,) * 4, limit=(25 << 20, 25 << 20))
    found = on_devices(job)
    row = found["comm.bucket"]
    truths = {mb: play_on_devices(job).step_s / play_on_devices(changed(job, limit=limits(mb))).step_s for mb in (1, 5)}

    assert row.edits
    assert row.predicted_speedup >= 0.97 * max(truths.values())
    assert isinstance(found["comm.links"], Proposal)


def test_without_windows_of_devices_buckets_are_refused_with_the_reason() -> None:
    row = on_devices(None)["comm.bucket"]

    assert isinstance(row, Refusal)
    assert "no window shows devices that only communicate" in row.reason


def searching(job: Job) -> StepWindow:
    """Return the job's window with its last layer named as the search for unused parameters."""
    window = play(job).window
    names = tuple(SEARCH if name == "layer.3" else name for name in window.trace.names)
    return replace(window, trace=replace(window.trace, names=names))


def test_a_static_graph_wins_what_the_search_costs_and_needs_the_users_word() -> None:
    job = Job(bytes_per_s=1e9)
    row = with_windows(job, searching(job), **SEARCHED)["comm.static_graph"]
    truth = play(job).step_s / play(changed(job, slow={3: 0.001})).step_s

    assert (row.applies, row.allow) == (True, "result-equivalent")
    assert row.predicted_speedup == pytest.approx(truth, rel=0.05)


def test_a_search_that_no_window_shows_is_left_to_a_live_try() -> None:
    row = with_windows(Job(), **SEARCHED)["comm.static_graph"]

    assert (row.predicted_speedup, row.edits, row.clear) == (1.0, (), False)
    assert "try it live: no deep window shows the search" in row.reason


def graph_facts(changing: bool) -> list[bool]:
    """Train with a search for unused parameters; return whether DDP calls the graph static, while and after."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])
            self.step = 0

        def forward(self, x: Any) -> Any:
            self.step += 1
            return self.parts[self.step % 2 if changing else 0](x)

    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    found = []
    for _ in range(12):
        model(torch.ones(1, 4)).sum().backward()
        facts = facts_of(model)
        found.append(facts["find_unused_parameters"] and facts["can_set_static_graph"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("changing", [False, True])
def test_ddp_itself_says_whether_its_graph_is_static(changing: bool) -> None:
    found = on_ranks(graph_facts, 2, changing)[0]

    assert found[-1] is not changing


def with_sum_of_used(job: Job) -> StepWindow:
    """Return the job's window with one collective more per rank: the last gradient queues the used parameters."""
    window = play(job).window
    parts = [window.trace]
    for rank in range(job.ranks):
        trace = window.trace.where(window.trace.events["rank"] == rank)
        start, duration = trace.events["start_ns"], trace.events["duration_ns"]
        ready = int((start + duration)[trace.named(GRADIENT)].max())
        ran = trace.named("gloo:all_reduce")
        columns = {
            "rank": [rank] * 2, "name": [0, 1], "lane": [0, 1],
            "start_ns": [ready - 10, int((start + duration)[ran].max())], "duration_ns": [9, 1000],
            "group": [-1, 0], "seq": [-1, int(trace.events["seq"].max()) + 1], "bytes": [-1, 16],
            "kind": [KIND["HOST"], KIND["COLL"]],
        }  # fmt: skip
        names = ("c10d::allreduce_", "gloo:all_reduce")
        parts.append(Trace.from_columns(columns, names=names, lanes=("main", "thread 1"), ranks={rank: {}}))
    return replace(window, trace=concat(parts))


def test_the_sum_over_used_parameters_is_no_bucket_with_copies() -> None:
    job = Job(forward_ns=(2 * MS,) * 6, size=(9_000_000,) * 6, bytes_per_s=4e8)
    plain, row = (with_windows(job, window)["comm.gradient_view"] for window in (None, with_sum_of_used(job)))

    assert row.predicted_speedup == pytest.approx(plain.predicted_speedup, rel=0.01)


# The order of all-gathers


def sharded(gather_ns: int, gathers: int = 3) -> dict[str, Proposal | Refusal]:
    """Return what is proposed for a run whose steps also gather and scatter, `gather_ns` each time."""
    made = RunMaker(ranks=2, steps=60, cores=8, comm_ns=5 * MS).make()
    program = Program.from_trace(made.trace, made.meta)
    parts = [made.trace]
    for lane in program.recording.lanes:
        rows = Rows(lane.rank)
        for start in lane.step_end_ns[:-1].tolist():
            for name, count in (("all_gather_into_tensor", gathers), ("reduce_scatter_tensor", 1)):
                for _ in range(count):
                    rows.add("comm.collective", start, gather_ns, corr=COLLECTIVES.index(name))
        parts.append(rows.trace(ranks={lane.rank: {}}))
    program = replace(
        program, run=SimpleNamespace(path=Path("made"), parts=Parts.of(concat(parts)), windows=list, facts=made.facts)
    )
    return {row.name: row for row in propose(None, program, Setup.from_facts(made.meta))}


def test_waits_for_all_gathers_offer_another_order_without_a_promise() -> None:
    rows = sharded(MS // 2)
    row = rows["comm.order"]

    assert (row.predicted_speedup, row.clear, row.applies, row.parameters) == (1.0, False, True, {"ahead": 1})
    assert "waits 1.5 ms of a step" in row.reason
    assert isinstance(rows["comm.bucket"], Refusal)
    assert "it has no buckets" in rows["comm.bucket"].reason


def test_short_waits_for_all_gathers_leave_nothing_to_win() -> None:
    assert "no order can win more" in sharded(MS // 1000)["comm.order"].reason


def test_a_job_that_gathers_once_a_step_is_not_sharded_by_modules() -> None:
    assert "comm.order" not in sharded(MS, gathers=1)
