"""Dumps and watch reports become the waits of ranks, and real hung jobs name the right rank."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.nccl_hangs import named_by
from benchmarks.nccl_hangs import verdict_of as verdict_of_job
from headway.core.errors import FormatError, InputError
from headway.core.mesh import Mesh
from headway.ledger.hang import HangVerdict, Wait, localise
from headway.ledger.hang_reports import WatchReport, of_dumps, of_watch
from headway.report.page.ranks import hang_part, render_hang
from headway.trace.events.trace import Trace, concat
from headway.trace.readers import flight
from headway.trace.recording.run_facts import RunExit
from headway.verbs.jobs.fault import verdict_of
from headway.verbs.runs.why import hang_of
from tests.hung_nccl import FAULTS, hung_devices
from tests.refusals import refused
from tests.spawn import on_ranks

PATIENCE_S = 50.0
WORLD = [0, 1, 2, 3]


def entry(name: str, seq: int, state: str = "completed", *, group: str = "0", **more: Any) -> dict[str, Any]:
    """Return one entry of a dump as NCCL writes it."""
    done = state == "completed"
    row = {"process_group": [group, more.pop("desc", "")], "profiling_name": f"nccl:{name}", "state": state}
    return {**row, "collective_seq_id": seq, "p2p_seq_id": 0, "is_p2p": False, "retired": done, **more}


def dumps(of_rank: dict[int, list[dict[str, Any]]], groups: dict[str, list[int]] | None = None) -> Trace:
    """Return the dumps of several ranks as one trace."""
    config = {name: {"name": name, "desc": "", "ranks": str(ranks)} for name, ranks in (groups or {"0": WORLD}).items()}
    return concat([
        flight.parse(json.dumps({"version": "2.10", "pg_config": config, "entries": rows}).encode(), f"rank_{rank}")
        for rank, rows in of_rank.items()
    ])  # fmt: skip


def verdict(trace: Trace, mesh: Mesh | None = None) -> HangVerdict:
    found = of_dumps(trace, mesh)
    return localise(found.reports, found.mesh, groups=found.groups)


def test_the_rank_whose_dump_lacks_the_collective_is_the_origin():
    behind = [entry("all_reduce", 1)]
    inside = [*behind, entry("all_reduce", 2, "started")]

    found = verdict(dumps({0: inside, 1: inside, 2: behind, 3: inside}))

    assert [(o.ranks, o.reason, o.num_waiting) for o in found.origins] == [((2,), "absent", 3)]
    assert found.origins[0].awaited == "all_reduce 2 of group 0"


def test_a_mark_of_completion_that_lags_behind_its_rank_is_no_wait():
    late = [entry("all_reduce", 1, "started"), entry("all_reduce", 2, "started")]

    found = verdict(dumps({0: late, 1: [entry("all_reduce", 1)]}, {"0": [0, 1]}))

    assert [(o.ranks, o.reason, o.awaited) for o in found.origins] == [((1,), "absent", "all_reduce 2 of group 0")]


def test_work_queued_behind_another_collective_has_not_begun():
    """Rank 1 has queued all_reduce 2 of group 0, but its device still waits in group 1 for rank 3."""
    held = [entry("all_gather", 7, "started", group="1"), entry("all_reduce", 2, "scheduled")]
    waits = [entry("all_reduce", 2, "started")]
    groups = {"0": WORLD, "1": [1, 3]}

    found = verdict(dumps({0: waits, 1: held, 2: waits}, groups))

    assert found.ranks == (3,)
    assert found.chain(0)[-1] == 3
    assert of_dumps(dumps({0: waits, 1: held, 2: waits}, groups)).reports[1].waits == (Wait("all_gather", 1, 7),)


def test_pipeline_messages_lead_over_stages_to_the_silent_one():
    def receives(rank: int) -> list[dict[str, Any]]:
        return [entry(f"recv {rank}<-{rank - 1}", 0, "started", is_p2p=True, p2p_seq_id=4)]

    found = verdict(dumps({1: receives(1), 2: receives(2), 3: receives(3)}), Mesh({"pp": 4}))

    assert (found.ranks, found.chain(3)) == ((0,), [3, 2, 1, 0])


def test_an_unnamed_group_stands_along_the_axis_that_its_description_names():
    """gloo's dumps tell no group's ranks; rank 3 is silent, so only the mesh knows that it belongs to the group."""
    rows = [entry("all_reduce", 3, "scheduled", group="2", desc="mesh_tp")]

    found = verdict(dumps({0: [], 1: [], 2: rows}, {"": []}), Mesh({"tp": 2, "dp": 2}))

    assert found.chain(2) == [2, 3]
    assert found.origins[0].ranks == (3,)


test_a_dump_needs_its_rank_and_a_mesh_as_large_as_the_world = refused(
    (lambda: of_dumps(Trace.from_columns({"rank": [-1]})), r"does not say whose it is. Name each file after its rank"),
    (lambda: of_dumps(dumps({0: []}), Mesh({"tp": 2})), r"tp\(2\) = 2 is not the world size 4"),
    (lambda: of_dumps(Trace.from_columns({"rank": [0]}, lanes=["main", "stream 7"])), r"no Flight Recorder dump"),
)


WATCH = {
    "schema": "headway.hang-watch/1",
    "groups": {"0": {"name": "0", "ranks": [0, 1, 2, 3]}, "4": [0, 1]},
    "ranks": [
        {"rank": 0, "silent": False, "phase": "step", "op": "comm.collective", "group": 0, "seq": 11, "since_ns": 5},
        {"rank": 1, "silent": False, "phase": "step", "op": "input.next", "group": 2, "seq": 11, "since_ns": 5},
        {"rank": 2, "silent": True},
        {"rank": 3, "silent": False, "phase": "step", "op": "comm.collective", "group": 0, "seq": 11, "state": "T"},
    ],
}  # fmt: skip


def test_the_watch_of_a_run_tells_waits_from_work_and_stopped_ranks_from_waiting_ones():
    found = of_watch(WatchReport.of(WATCH))

    assert [(r.rank, r.waits, r.doing) for r in found.reports] == [
        (0, (Wait("collective", 0, 11),), ""),
        (1, (), "step input.next"),
    ]
    assert localise(found.reports, found.mesh, groups=found.groups).ranks == (1, 2, 3)


def test_a_rank_that_runs_and_has_entered_nothing_tells_where_it_is():
    rows = [
        {"rank": 0, "silent": False, "phase": "backward", "op": "comm.wait", "group": 0, "seq": 3, "state": "S"},
        {"rank": 1, "silent": True, "phase": "forward", "op": None, "group": -1, "state": "S", "step": 7},
    ]

    found = of_watch(WatchReport.of({"world_size": 2, "groups": {"0": {"name": "0", "ranks": [0, 1]}}, "ranks": rows}))

    (origin,) = localise(found.reports, found.mesh, groups=found.groups).origins
    assert (origin.ranks, origin.reason, origin.doing) == ((1,), "absent", "forward of step 7")


def test_a_blocking_rank_shows_the_line_it_stands_at_and_a_waiting_one_does_not():
    stack = (
        'Thread 0x1 (most recent call first):\n  File "/lib/threading.py", line 5 in wait\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/my job/train.py", line 22 in <lambda>\n'
        '  File "train.py", line 30 in main'
    )
    rows = [
        {"rank": 0, "silent": False, "op": "comm.wait", "group": 0, "seq": 3, "state": "S", "stack": stack},
        {"rank": 1, "silent": True, "phase": "forward", "op": None, "state": "S", "step": 7, "stack": stack},
        {"rank": 2, "silent": True, "phase": "forward", "op": None, "state": "S", "step": 7, "stack": "not asked"},
    ]
    found = of_watch(WatchReport.of({"world_size": 3, "groups": {"0": [0, 1, 2]}, "ranks": rows}))
    hung = localise(found.reports, found.mesh, groups=found.groups).to_json()

    assert hung["stacks"] == {"1": ["/my job/train.py:22 in <lambda>", "train.py:30 in main"]}
    assert "Rank 1 stands at\n    /my job/train.py:22 in <lambda>\n" in render_hang(hung, width=80, unicode=False)
    assert "/my job/train.py:22 in &lt;lambda&gt;" in hang_part(hung)


def test_a_rank_that_creates_the_first_group_waits_for_all():
    rows = [{"rank": 0, "op": "comm.init", "group": -1, "seq": -1}, {"rank": 1, "phase": "startup", "op": None}]

    found = of_watch(WatchReport.of({"ranks": rows}))

    assert localise(found.reports, found.mesh, groups=found.groups).chain(0) == [0, 1]


def test_other_json_is_no_watch():
    with pytest.raises(FormatError, match=r"no report of the hang watch.*Give RUN/hang"):
        WatchReport.of({"entries": []})
    with pytest.raises(FormatError, match=r"hang/3.json is no report .*`int`, got `str` - at `\$.ranks\[0\].rank`"):
        WatchReport.of({"ranks": [{"rank": "zero"}]}, "hang/3.json")


@pytest.mark.parametrize(("end_ns", "said"), [(None, "so far no rank has stood still"), (9, "no rank had stood still")])
def test_a_run_without_a_report_says_whether_one_may_come(tmp_path, end_ns, said):
    (tmp_path / "run.json").write_text(json.dumps({"end_ns": end_ns}))
    with pytest.raises(InputError, match=said):
        verdict_of([tmp_path])


def test_a_run_folder_gives_its_newest_report(tmp_path):
    (tmp_path / "rings").mkdir()
    with pytest.raises(InputError, match=r"holds no report of the hang watch"):
        verdict_of([tmp_path])
    (tmp_path / "hang").mkdir()
    for number, silent in ((2, 1), (10, 0)):
        rows = [{"rank": 1 - silent, "op": "barrier", "group": 0, "seq": 1}, {"rank": silent, "silent": True}]
        written = {"groups": {"0": [0, 1]}, "ranks": rows}
        (tmp_path / "hang" / f"{number}.json").write_text(json.dumps(written))

    assert verdict_of([tmp_path]).ranks == (0,)


@pytest.mark.parametrize(
    ("cls", "steps", "ended"),
    [("preempted", 30, True), ("preempted", 31, False), ("hang", 31, True), ("user", 30, False)],
)
def test_a_run_that_was_stopped_hung_where_no_step_came_behind_the_report(tmp_path, cls, steps, ended):
    for name in ("rings", "hang"):
        (tmp_path / name).mkdir()
    rows = [{"rank": rank, "step": 30 - rank, "silent": not rank} for rank in range(2)]
    (tmp_path / "hang" / "0.json").write_text(json.dumps({"ranks": rows}))
    run = SimpleNamespace(path=tmp_path, facts=SimpleNamespace(exit=RunExit(code=143, cls=cls)))

    found = hang_of(SimpleNamespace(run=run, ledger=SimpleNamespace(steps=steps)))

    assert found["ended_the_run"] is ended


def wait_for(told: Any, what: str) -> Any:
    """Return the first true answer of `told()`."""
    deadline = time.monotonic() + PATIENCE_S
    while not (answer := told()):
        assert time.monotonic() < deadline, f"nobody came: {what}"
        time.sleep(0.005)
    return answer


def hung_job(folder: str, faulty: int, stops: bool) -> None:
    """Run on each rank: all but `faulty` enter an all-reduce and dump from a thread; then `faulty` comes too.

    With `stops` the faulty rank stops itself (SIGSTOP) and rank 0 lets it go on once the others have dumped.
    """
    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    rank, world, place = dist.get_rank(), dist.get_world_size(), Path(folder)
    dist.all_reduce(torch.ones(8))
    others = [other for other in range(world) if other != faulty]

    def write() -> None:
        draft = place / f"draft_{rank}"
        draft.write_bytes(c10d._dump_fr_trace_json())
        draft.rename(place / f"dump_rank_{rank}")

    def entered() -> bool:
        rows = json.loads(c10d._dump_fr_trace_json())["entries"]
        return any(row["collective_seq_id"] == 2 and not row["retired"] for row in rows)

    def all_dumped() -> bool:
        return all((place / f"dump_rank_{other}").exists() for other in others)

    def watch() -> None:
        wait_for(entered, "this rank never entered the all-reduce")
        write()
        if stops and rank == others[0]:
            wait_for(all_dumped, "a dump is missing")
            process = int(wait_for((place / "pid").exists, "pid") and (place / "pid").read_text())
            wait_for(lambda: _state(process) == "T", "the faulty rank never stopped")
            os.kill(process, signal.SIGCONT)

    if rank != faulty:
        thread = threading.Thread(target=watch)
        thread.start()
    elif stops:
        (place / "draft_pid").write_text(str(os.getpid()))
        (place / "draft_pid").rename(place / "pid")
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        wait_for(all_dumped, "a dump is missing")
        write()
    dist.all_reduce(torch.ones(8))
    if rank != faulty:
        thread.join()


def _state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "faulty", "stops"), [(2, 1, False), (3, 0, False), (4, 2, True)])
def test_the_dumps_of_a_real_hung_job_name_the_rank_that_stayed_away(tmp_path, world, faulty, stops):
    pytest.importorskip("torch")
    from torch._C import _distributed_c10d as c10d

    if not hasattr(c10d, "_dump_fr_trace_json"):
        pytest.skip("this torch has no Flight Recorder outside NCCL")

    on_ranks(hung_job, world, str(tmp_path), faulty, stops, env={"TORCH_FR_BUFFER_SIZE": "100"})

    files = sorted(tmp_path.glob("dump_rank_*"))
    found = verdict_of(files, Mesh({"dp": world}))
    assert len(files) == world - stops
    assert [(o.ranks, o.reason, o.num_waiting) for o in found.origins] == [
        ((faulty,), "silent" if stops else "absent", world - 1)
    ]
    assert found.origins[0].awaited == "all_reduce 2 of group 0"


@pytest.mark.parametrize("fault", FAULTS)
def test_of_hosts_that_run_ahead_of_devices_the_culprit_is_named_and_no_innocent_rank(fault):
    """By what their Flight Recorders hold: where the hosts stand, the rank that launched least is often innocent."""
    outcomes = []
    for seed in range(12):
        job = hung_devices(seed, fault)
        named = named_by(verdict_of_job(job))
        truth = {job.culprit} - {-1}
        assert named <= truth, f"seed {seed}: {named} are named, {truth} is at fault"
        outcomes.append(named == truth or job.mesh.world_size == 2)

    assert sum(outcomes) >= 11


def test_a_rank_that_left_out_a_collective_is_told_by_its_group_or_by_groups_of_its_role():
    """In a group of two nothing tells who is wrong but what the other groups of its role ran."""
    tensor = {"tp 0": [0, 1], "tp 2": [2, 3]}
    usual = [entry("all_reduce", 1, group="tp 2", desc="tp")]
    rows = {rank: [entry("all_reduce", 1, "started", group="tp 0", desc="tp")] for rank in (0, 1)}
    rows[1] = [entry("all_gather", 1, "started", group="tp 0", desc="tp")]

    alone = verdict(dumps(rows, {"0": WORLD, **tensor}), Mesh({"tp": 2, "dp": 2}))
    among = verdict(dumps({**rows, 2: usual, 3: usual}, {"0": WORLD, **tensor}), Mesh({"tp": 2, "dp": 2}))

    assert (1,) not in [o.ranks for o in alone.origins]
    assert alone.deadlocks == ((0, 1),)
    assert [(o.ranks, o.reason) for o in among.origins if o.num_waiting] == [((1,), "differs")]
