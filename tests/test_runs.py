"""Run folders: opened whole, cut short, or merged from several hosts; clocks apart by a constant change nothing."""

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from headway.core.errors import FormatError, InputError
from headway.runtime.run_folder.finalise import finalise
from headway.runtime.run_folder.recording import Exit, LaunchedRank, RunRecording
from headway.trace.recording.run_facts import RankMemory
from headway.trace.recording.runs import Run, is_run, merge
from headway.trace.rings.ring import Recorder
from headway.verbs.shared.run_options import RunOptions
from headway.why.explanation import explain_run
from tests.rings_made import Process


def recorded(path: Path, ranks: list[int], *, steps: int = 3, group_rank: int = 0, attempts: int = 1) -> Path:
    """Return a finalised run folder of `ranks` on one host."""
    path.mkdir(parents=True, exist_ok=True)
    processes = [Process(path, rank=rank, attempt=a) for a in range(attempts) for rank in ranks]
    start_ns = min(process.now_ns for process in processes) - 1_000_000
    recording = RunRecording(path, ["train.py"], start_ns, group_rank=group_rank, nproc=len(ranks))
    recording.open()
    for process in processes:
        process.train(steps)
    recording.attempt = attempts - 1
    recording.rows = [LaunchedRank(rank, i, 100 + rank, start_ns, start_ns + 10**9, 0) for i, rank in enumerate(ranks)]
    finalise(path)
    recording.end(Exit(0, "ok"))
    return path


def shift(path: Path, clock_ns: int) -> None:
    """Move every time of a run on its host's own clock, as if that host had booted at another moment."""
    file = next(p for p in (path / "run.json", path / "run-host1.json") if p.exists())
    meta = json.loads(file.read_text())
    for key in ("start_ns", "end_ns"):
        meta[key] += clock_ns
    file.write_text(json.dumps(meta))


def test_a_run_opens_with_its_facts_its_ranks_and_its_attempts(tmp_path):
    run = Run.open(recorded(tmp_path / "run", [0, 1], attempts=2))

    assert is_run(tmp_path / "run")
    assert sorted(run.trace.ranks) == [0, 1]
    assert run.meta["exit"]["class"] == "ok"
    assert run.trace.meta["attempt"] == 1
    assert [trace.meta["attempt"] for trace in run.attempts()] == [0, 1]
    assert run.trace.meta["num_steps"] == 3


def test_a_folder_whose_launcher_was_killed_opens_from_its_rings(tmp_path):
    for rank in (0, 1):
        Process(tmp_path, rank=rank).train(4)
    (tmp_path / "applied").mkdir()
    row = {"name": "host.gc", "applied": True, "facts": {"every_steps": 9}, "reason_not_applied": None}
    (tmp_path / "applied" / "r0.json").write_text(json.dumps({"rank": 0, "remedies": [row]}))
    run = Run.open(tmp_path)
    assert run.facts.in_force == {"host.gc": {"every_steps": 9}}

    assert int(run.trace.named("optimizer.step").sum()) == 8
    assert run.meta["end_ns"] > run.meta["start_ns"]
    assert [row.rank for row in run.facts.ranks] == [0, 1]
    assert len(list((tmp_path / "rings").iterdir())) == 2  # looking changes nothing
    assert any("has no run.json" in note for note in explain_run(run, str(tmp_path)).to_json()["notes"])


def test_a_rank_that_was_finalised_and_one_that_was_not_open_together(tmp_path):
    Process(tmp_path, rank=0).train(2)
    finalise(tmp_path)
    Process(tmp_path, rank=1).train(2)

    assert sorted(Run.open(tmp_path).trace.ranks) == [0, 1]


def test_windows_are_listed_by_rank_and_number(tmp_path):
    recorded(tmp_path, [0])
    (tmp_path / "windows").mkdir()
    for name in ("r10-w0.json", "r2-w10.json", "r2-w9.json", "r2-w9.flight.json", "schedule-a0-vm"):
        (tmp_path / "windows" / name).write_text("{}")

    assert [p.name for p in Run.open(tmp_path).windows()] == ["r2-w9.json", "r2-w10.json", "r10-w0.json"]


@settings(max_examples=10)
@given(clock_ns=st.integers(0, 10**15))
def test_a_hosts_clock_offset_is_found_and_wall_time_is_what_it_was(clock_ns, tmp_path_factory):
    base = tmp_path_factory.mktemp("hosts")
    a, b = recorded(base / "a", [0], steps=1), recorded(base / "b", [1], steps=1, group_rank=1)
    before = merge([Run.open(a), Run.open(b)])
    shift(b, clock_ns)
    after = merge([Run.open(a), Run.open(b)])

    assert after.clock_offset_ns[1] == before.clock_offset_ns[1] - clock_ns
    assert (after.meta["start_ns"], after.meta["end_ns"]) == (before.meta["start_ns"], before.meta["end_ns"])
    assert after.clock_offset_ns[0] == 0


def test_merging_joins_ranks_and_the_order_of_hosts_does_not_matter(tmp_path):
    a, b = Run.open(recorded(tmp_path / "a", [0, 1])), Run.open(recorded(tmp_path / "b", [2, 3], group_rank=1))
    one, two = merge([a, b]), merge([b, a])

    assert sorted(one.trace.ranks) == sorted(two.trace.ranks) == [0, 1, 2, 3]
    assert one.facts.nproc == two.facts.nproc == 4
    assert one.facts.end_ns - one.facts.start_ns == two.facts.end_ns - two.facts.start_ns
    assert merge([a]) is a


def test_a_merged_run_has_the_attempts_and_windows_of_all_its_parts(tmp_path):
    parts = [recorded(tmp_path / name, [k], group_rank=k, attempts=2) for k, name in enumerate("ab")]
    for k, part in enumerate(parts):
        (part / "windows").mkdir()
        (part / "windows" / f"r{k}-w0.json").write_text("{}")
    run = merge([Run.open(part) for part in parts])

    assert [sorted(trace.ranks) for trace in run.attempts()] == [[0, 1], [0, 1]]
    assert [path.name for path in run.windows()] == ["r0-w0.json", "r1-w0.json"]


def test_a_host_that_joined_late_adds_each_of_its_attempts_once(tmp_path):
    parts = [recorded(tmp_path / "a", [0], attempts=2), recorded(tmp_path / "b", [1], group_rank=1, attempts=1)]
    run = merge([Run.open(part) for part in parts])

    assert [sorted(trace.ranks) for trace in run.attempts()] == [[0], [0, 1]]


def test_a_folder_shared_by_two_hosts_opens_as_one_run(tmp_path):
    recorded(tmp_path, [0, 1])
    recorded(tmp_path, [2, 3], group_rank=1)
    run = Run.open(tmp_path)

    assert sorted(run.trace.ranks) == [0, 1, 2, 3]
    assert len(run.facts.hosts) == 2


def test_the_exit_of_a_merged_run_is_the_one_with_a_fault_of_its_own(tmp_path):
    parts = []
    for host, cls in enumerate(("infra", "user")):
        path = recorded(tmp_path / cls, [host], group_rank=host)
        file = next(path.glob("run*.json"))
        meta = json.loads(file.read_text())
        meta["exit"] = {"code": 1, "class": cls, "first_rank": host, "traceback": None}
        file.write_text(json.dumps(meta))
        parts.append(Run.open(path))

    merged = merge(parts)
    assert merged.meta["exit"]["class"] == merged.facts.exit.cls == "user"


def test_the_memory_of_a_merged_run_is_that_of_its_fullest_host(tmp_path):
    parts = []
    for host, (free, peak) in enumerate([(900, 100), (800, 300)]):
        run = Run.open(recorded(tmp_path / str(host), [host], group_rank=host))
        facts = {"memory_available_bytes": free, "memory": {str(host): RankMemory(peak_rss_bytes=peak)}}
        parts.append(replace(run, facts=structs.replace(run.facts, **facts)))

    for order in (parts, parts[::-1]):
        facts = merge(order).facts
        assert facts.memory_available_bytes == 800
        assert facts.memory == {"1": RankMemory(peak_rss_bytes=300)}


def test_ranks_under_another_launcher_add_their_own_rows(tmp_path):
    recorded(tmp_path, [0])
    Process(tmp_path, rank=1).train(1)
    finalise(tmp_path)
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "r1.json").write_text(json.dumps({"rank": 1, "group_rank": 0, "exit_code": 0}))

    assert [row.rank for row in Run.open(tmp_path).facts.ranks] == [0, 1]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "is not a run folder"),
        ({"run.json": "{"}, "is not JSON"),
        ({"run.json": "[]"}, "has schema 'list'"),
        ({"run.json": '{"schema": "headway.run-folder/9"}'}, "must be 'headway.run-folder/1'"),
        ({"run.json": '{"schema": "headway.run-folder/1"}'}, "holds no events: the script never imported torch"),
        ({"run.json": '{"schema": "headway.run-folder/1", "start_ns": 5, "end_ns": null}'}, "run was killed, or still"),
        ({"run.json": '{"schema": "headway.run-folder/1", "env": {"HEADWAY": "0"}}'}, "events: HEADWAY=off switched"),
        (
            {"run.json": '{"schema": "headway.run-folder/1", "script": ["python3", "-u", "-E", "train.py", "-S"]}'},
            "events: python3 -E does not load",
        ),
        (
            {
                "run.json": '{"schema": "headway.run-folder/1"}',
                "logs/r0.err": "1\nheadway: nothing is recorded in process 7: /r: [Errno 28] No space left\n2\n",
            },
            "events: nothing is recorded in process 7: /r: .Errno 28. No space left. What",
        ),
        ({"run.json": '{"schema": "headway.run-folder/1"}', "tables/r0.json": "{}"}, "events: what was recorded is"),
        ({"rings/a0-r0-p1.ring": ""}, "no readable event"),
        ({"events/x": ""}, "neither run.json nor events"),
    ],
)
def test_a_folder_that_is_no_run_says_why(tmp_path, files, words):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(FormatError, match=words):
        Run.open(tmp_path)


def test_a_plan_of_a_folder_that_is_no_run_is_not_asked_of_it(tmp_path):
    with pytest.raises(InputError, match="neither a plan file nor a run folder"):
        _ = RunOptions(apply=tmp_path).plan_path


def test_of_a_folder_that_was_planned_again_the_newer_plan_is_meant(tmp_path):
    for name in ("plan.json", "next-plan.json"):
        (tmp_path / name).write_text("{}")
        assert RunOptions(apply=tmp_path).plan_path == tmp_path / name


def test_a_ring_that_could_not_be_made_is_why_a_run_holds_nothing(tmp_path):
    (tmp_path / "run.json").write_text('{"schema": "headway.run-folder/1"}')
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        assert not Recorder(str(tmp_path / "rings"), rank=0, attempt=0).open()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with pytest.raises(FormatError, match=r"holds no events: nothing is recorded in process .*: File too large"):
        Run.open(tmp_path)


def test_a_rank_in_two_folders_is_refused(tmp_path):
    run = Run.open(recorded(tmp_path, [0]))
    with pytest.raises(InputError, match="rank 0 is in two"):
        merge([run, run])
    with pytest.raises(InputError, match="no run to merge"):
        merge([])
