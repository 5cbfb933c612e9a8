"""The hang watch: who is late is named, who gets on never is, and nothing is asked of ranks before."""

import json
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.ledger.hang import localise
from headway.ledger.hang_reports import WatchReport, of_watch
from headway.runtime.launching.hang_watch import FLOORS_S, PAUSE_NS, HangWatch, limit_s, summary
from headway.runtime.launching.options import LaunchOptions, check
from headway.trace.events.vocabulary import SPANS
from headway.trace.rings.records import RECORD_DTYPE, Page
from headway.verbs.jobs.fault import verdict_of
from tests.launching import run, script, wait_for

SECOND = 1_000_000_000
BEGIN = 1000 * SECOND
FLOORS = {"setup": 60.0, "step": 2.0, "checkpoint": 10.0}


@pytest.fixture(scope="module")
def sleepers():
    """Yield processes that stand for two ranks: their states are real."""
    found = [subprocess.Popen(["sleep", "300"]) for _ in range(2)]
    yield found
    for process in found:
        process.kill()
        process.wait()


class Job:
    """Ranks that a test moves by hand, as their rings and pages show them."""

    def __init__(self, run: Path, processes, **options) -> None:
        self.lines: list[str] = []
        options = {"floors_s": FLOORS, "world_size": len(processes), **options}
        self.watch = HangWatch(run, say=self.lines.append, **options)
        self.readers = [
            SimpleNamespace(
                header=SimpleNamespace(
                    pid=process.pid, rank=rank, role="main", attempt=0, process_start_ns=BEGIN, clock_ns=BEGIN, end_ns=0
                ),
                page=Page(0, 0, 0, -1, -1, -1, 0, float("nan"), 0),
                path=run / f"a0-r{rank}-p{process.pid}.ring",
            )
            for rank, process in enumerate(processes)
        ]

    def record(self, rank: int, name: str, end_ns: int, duration_ns: int = 1000, lane: int = 0) -> None:
        """Let the drain hand over one record of a rank."""
        record = np.zeros(1, RECORD_DTYPE)
        record["code"], record["lane"] = SPANS[name].code, lane
        record["start_ns"], record["duration_ns"] = end_ns - duration_ns, duration_ns
        self.watch.add(self.readers[rank].header, record)

    def update(self, rank: int, step: int, end_ns: int) -> None:
        """Let a rank end its update number `step`."""
        self.record(rank, "optimizer.step", end_ns)
        self.readers[rank].page = Page(step, end_ns, 0, -1, -1, -1, 0, float("nan"), 0)

    def open(self, rank: int, name: str, since_ns: int, group: int = -1, seq: int = -1) -> None:
        """Let a rank enter an operation."""
        page = self.readers[rank].page
        self.readers[rank].page = Page(
            page.step, page.progress_ns, SPANS[name].code, group, -1, seq, since_ns, page.loss, 0
        )

    def look(self, now_ns: int) -> None:
        """Let the watch look, and wait for what it writes."""
        self.watch.look_at(self.readers, now_ns)
        self.watch.finish()

    def wait_until(self, now_ns: int, begin_ns: int) -> None:
        """Let nothing happen but looks, once a second."""
        for moment in range(begin_ns, now_ns + 1, SECOND):
            self.look(moment)

    def reports(self) -> list[dict]:
        """Return what was written."""
        files = sorted((self.watch.run / "hang").glob("*.json"))
        return [json.loads(file.read_text()) for file in files]


def trained(tmp_path: Path, sleepers, steps: int = 20, **options) -> tuple[Job, int]:
    """Return a job whose ranks have made steps of 0.1 s, and the moment of the last."""
    job = Job(tmp_path, sleepers, **options)
    now = BEGIN
    for step in range(1, steps + 1):
        now += SECOND // 10
        for rank in range(len(sleepers)):
            job.update(rank, step, now)
        job.look(now)
    return job, now


@given(durations=st.lists(st.floats(1e-6, 1e4), max_size=50), section=st.sampled_from(sorted(FLOORS_S)))
def test_a_limit_is_never_below_its_floor_nor_five_usual_durations(durations, section):
    limit = limit_s(section, durations)

    assert limit >= FLOORS_S[section]
    assert not durations or limit >= 5 * np.percentile(durations, 99) * (1 - 1e-12)


@pytest.mark.slow
def test_in_ten_minutes_of_uneven_steps_and_pauses_for_checkpoints_nobody_is_suspected(tmp_path, sleepers):
    rng = np.random.default_rng(0)
    job, now = Job(tmp_path, sleepers), BEGIN
    looked, step = now, 0
    while now < BEGIN + 600 * SECOND:
        step += 1
        pause_s = 3.0 if step % 100 == 0 else 0.2 * float(rng.lognormal(sigma=0.5))
        if pause_s == 3.0:
            for rank in (0, 1):
                job.open(rank, "checkpoint.save", now)
        now += int(pause_s * 1e9)
        while looked + SECOND // 5 < now:
            looked += SECOND // 5
            job.look(looked)
        for rank in (0, 1):
            job.update(rank, step, now)

    assert step > 2000
    assert job.lines == []


def test_the_rank_that_did_not_come_is_silent_and_the_other_says_what_it_waits_in(tmp_path, sleepers):
    job, now = trained(tmp_path, sleepers)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "r0.json").write_text('{"groups": {"0": {"name": "0", "ranks": [0, 1]}}}')
    job.record(1, "input.next", now + 1000)
    job.open(0, "comm.wait", now + SECOND // 20, group=0, seq=20)
    job.wait_until(now + 5 * SECOND, now)
    (report,) = job.reports()
    rows = report["ranks"]

    assert [row["silent"] for row in rows] == [False, True]
    assert (rows[0]["op"], rows[0]["group"], rows[0]["seq"]) == ("comm.wait", 0, 20)
    assert rows[0]["since_ns"] == now + SECOND // 20
    assert (rows[1]["op"], rows[1]["phase"], rows[1]["state"]) == (None, "forward", "S")
    assert {"rank", "silent", "phase", "op", "group", "seq", "since_ns", "state"} <= set(rows[1])
    assert localise(**of_watch(WatchReport.of(report))._asdict()).ranks == (1,)
    assert job.lines == [
        f"no progress for 3 s: rank 1 is silent (forward of step 20); rank 0 is in comm.wait. "
        f"See: headway hang {tmp_path}"
    ]
    assert job.watch.blamed == 1


def test_a_standstill_is_told_once_and_so_is_its_end(tmp_path, sleepers):
    job, now = trained(tmp_path, sleepers)
    job.wait_until(now + 30 * SECOND, now)

    assert len(job.lines) == 1
    for rank in (0, 1):
        job.update(rank, 21, now + 31 * SECOND)
    job.look(now + 31 * SECOND)
    assert job.lines[1:] == ["all 2 ranks make progress again"]
    job.wait_until(now + 300 * SECOND, now + 32 * SECOND)
    assert len(job.reports()) == 2


def test_a_slow_checkpoint_is_no_hang_until_its_own_limit(tmp_path, sleepers):
    job, now = trained(tmp_path, sleepers)
    job.open(0, "checkpoint.save", now)
    job.open(1, "comm.collective", now, group=0, seq=3)
    job.wait_until(now + 9 * SECOND, now)

    assert job.lines == []
    job.wait_until(now + 12 * SECOND, now + 10 * SECOND)
    assert len(job.lines) == 1
    assert "0 is in checkpoint.save" in job.lines[0]


def test_a_rank_that_waited_for_a_checkpoint_of_another_is_late_only_a_limit_after_it(tmp_path, sleepers):
    job, now = trained(tmp_path, sleepers)
    job.open(0, "checkpoint.save", now)
    job.open(1, "comm.wait", now)
    job.wait_until(now + 8 * SECOND, now)
    job.open(0, "comm.wait", now + 8 * SECOND)  # with its own part made, the collective ends in a moment
    job.wait_until(now + 9 * SECOND, now + 8 * SECOND)

    assert not job.lines

    job.wait_until(now + 12 * SECOND, now + 9 * SECOND)
    assert "ranks 0, 1 are in comm.wait" in job.lines[0]


def usually_saves_for_long(job, now):
    job.record(0, "checkpoint.save", now, duration_ns=8 * SECOND)
    job.open(0, "checkpoint.save", now)


def ends(job, now):
    for reader in job.readers:
        reader.header.end_ns = now


@pytest.mark.parametrize(("act", "for_s"), [(usually_saves_for_long, 39), (ends, 50)])
def test_checkpoints_that_usually_take_long_and_ranks_that_take_their_time_to_end_may(tmp_path, sleepers, act, for_s):
    job, now = trained(tmp_path, sleepers)
    act(job, now)
    job.wait_until(now + for_s * SECOND, now)

    assert job.lines == []


def test_while_a_rank_is_still_in_set_up_nobody_is_suspected(tmp_path, sleepers):
    job = Job(tmp_path, sleepers)
    job.update(0, 3, BEGIN + SECOND)
    job.wait_until(BEGIN + 50 * SECOND, BEGIN + SECOND)

    assert job.lines == []
    job.wait_until(BEGIN + 62 * SECOND, BEGIN + 51 * SECOND)
    assert "rank 1 is silent (set-up)" in job.lines[0]


def test_a_script_alone_that_never_trains_is_nobodys_hang(tmp_path, sleepers):
    job = Job(tmp_path, sleepers[:1])
    job.wait_until(BEGIN + 100 * SECOND, BEGIN)

    assert job.lines == []


def test_a_suspended_launcher_or_ranks_suspended_alike_raise_no_alarm(tmp_path, sleepers):
    job, now = trained(tmp_path, sleepers)
    job.look(now + 100 * SECOND)  # it slept itself: PAUSE_NS
    assert 100 * SECOND > PAUSE_NS
    job.look(now + 101 * SECOND)

    assert job.lines == []
    for process in sleepers:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: all("T" in Path(f"/proc/{p.pid}/stat").read_text().split()[2] for p in sleepers))
        job.wait_until(now + 110 * SECOND, now + 102 * SECOND)
        assert job.lines == []
        os.kill(sleepers[0].pid, signal.SIGCONT)
        wait_for(lambda: "S" in Path(f"/proc/{sleepers[0].pid}/stat").read_text().split()[2])
        job.wait_until(now + 112 * SECOND, now + 111 * SECOND)
        assert "rank 1 is silent (input of step 20, stopped)" in job.lines[0].replace("forward", "input")
    finally:
        for process in sleepers:
            os.kill(process.pid, signal.SIGCONT)


def test_headways_own_work_does_not_say_what_a_rank_is_doing(tmp_path, sleepers):
    job, now = trained(tmp_path, sleepers)
    for rank, name in ((0, "input.next"), (1, "input.next"), (0, "optimizer.step"), (1, "optimizer.step")):
        job.record(rank, name, now)
    job.record(0, "host.recording", now)
    job.wait_until(now + 3 * SECOND, now)

    assert "ranks 0, 1 are in input" in job.lines[0]


def test_a_record_of_another_thread_is_no_progress(tmp_path, sleepers):
    job, now = trained(tmp_path, sleepers)
    for second in range(1, 5):
        job.record(1, "host.logging", now + second * SECOND, lane=2)
    job.wait_until(now + 4 * SECOND, now)

    assert len(job.lines) == 1


def test_ranks_that_all_stand_alike_are_not_called_silent(tmp_path, sleepers):
    job, now = trained(tmp_path, sleepers)
    job.wait_until(now + 3 * SECOND, now)

    assert [row["silent"] for row in job.reports()[0]["ranks"]] == [False, False]
    assert job.watch.blamed is None
    assert "ranks 0, 1 are in forward" in job.lines[0]


def test_the_time_out_ends_the_run_after_what_was_found_is_written(tmp_path, sleepers):
    job, now = trained(tmp_path, sleepers, timeout_s=1.0)
    job.open(0, "checkpoint.save", now)
    job.wait_until(now + 9 * SECOND, now)

    assert not job.watch.expired  # a checkpoint keeps its own limit
    for rank in (0, 1):
        job.update(rank, 21, now + 9 * SECOND)
    job.look(now + 10 * SECOND)
    job.look(now + 11 * SECOND)
    assert len(job.reports()) == 1
    job.look(now + 11 * SECOND + 1)
    assert job.watch.expired
    job.readers = job.readers[:1]  # the ranks are being ended, one is gone already
    job.watch._ranks = {pid: rank for pid, rank in job.watch._ranks.items() if rank.header.rank == 0}
    job.look(now + 12 * SECOND)
    assert len(job.reports()) == 1
    job.watch.begin()
    assert not job.watch.expired


def test_a_fault_of_the_watch_ends_the_watch_and_not_the_drain(tmp_path, sleepers):
    job = Job(tmp_path, sleepers)
    job.watch.look([SimpleNamespace()])
    job.watch.look(job.readers)

    assert len(job.lines) == 1
    assert job.lines[0].startswith("hangs are not watched for any more: AttributeError")


def test_many_silent_ranks_are_counted_and_not_all_listed():
    rows = [{"rank": r, "silent": True, "op": None, "step": 3, "phase": "setup", "state": "S"} for r in range(9)]

    assert summary(rows, 3.0).endswith("rank 3 is silent (set-up); and 5 more")


def test_a_time_out_that_is_no_time_is_refused():
    with pytest.raises(InputError, match=r"--hang-timeout is 0.*above 0.*Leave it out"):
        check(LaunchOptions(hang_timeout_s=0.0), ["-c"])


JOB = """
import os, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    optimizer.zero_grad()
    if sys.argv[1] == "sleep" and step == 8 and dist.get_rank() == 1:
        time.sleep(600)
    if sys.argv[1] == "save" and step == 8 and dist.get_rank() == 1:
        torch.save(Slow(), sys.argv[2])
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
dist.barrier()
print("done", dist.get_rank(), flush=True)
os._exit(0)
"""
SLOW = """
class Slow:
    def __reduce__(self):
        time.sleep(5)
        return (list, ())
"""


@pytest.mark.slow
def test_a_rank_that_sleeps_before_the_all_reduce_is_named_and_its_line_shown(tmp_path):
    job = script(tmp_path, JOB)
    options = {"nproc_per_node": 2, "quiet": False, "hang_timeout_s": 3.0, "grace_s": 2.0, "windows": 0.0}
    ended = run(tmp_path / "run", [job, "sleep"], env={"HEADWAY": ""}, **options)
    code, cls, first_rank, *_ = json.loads((tmp_path / "run" / "report.json").read_text())
    found = json.loads((tmp_path / "run" / "hang" / "0.json").read_text())

    assert (code, cls, first_rank) == (128 + signal.SIGTERM, "hang", 1), ended.stderr
    assert [(row["rank"], row["silent"], row["op"], row["step"]) for row in found["ranks"]] == [
        (0, False, "comm.wait", 8),
        (1, True, None, 8),
    ]
    assert 'job.py", line 10' in found["ranks"][1]["stack"]
    assert "backward" in found["ranks"][0]["stack"]
    assert localise(**of_watch(WatchReport.of(found))._asdict()).ranks == (1,)
    assert "no progress for 3" in ended.stderr
    assert "rank 1 is silent" in ended.stderr
    assert not list((tmp_path / "run" / "rings").iterdir())


PRETENDED = """
import headway.runtime.recorder.probes
headway.runtime.recorder.probes.device_type = lambda: "a device"
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))"""


@pytest.mark.slow
def test_where_hosts_run_ahead_the_flight_recorders_tell_who_is_missing(tmp_path):
    """The place of the hosts says nothing there: rank 0, blocked first, has come no further than rank 1."""
    job = script(tmp_path, JOB.replace('\ndist.init_process_group("gloo")', PRETENDED))
    options = {"nproc_per_node": 2, "quiet": False, "hang_timeout_s": 3.0, "grace_s": 2.0, "windows": 0.0}
    ended = run(tmp_path / "run", [job, "sleep"], env={"HEADWAY": ""}, **options)
    _, cls, first_rank, *_ = json.loads((tmp_path / "run" / "report.json").read_text())
    found = json.loads((tmp_path / "run" / "hang" / "0.json").read_text())
    verdict = verdict_of([tmp_path / "run"])

    assert (cls, first_rank) == ("hang", 1), ended.stderr
    assert found["ahead"]
    assert [row["silent"] for row in found["ranks"]] == [False, True]
    assert sorted(path.name for path in (tmp_path / "run" / "hang" / "0").iterdir()) == [
        "r0.flight.json",
        "r1.flight.json",
    ]
    assert [(origin.ranks, origin.reason) for origin in verdict.origins] == [((1,), "absent")]
    assert f"1 wait for rank 1 in {verdict.origins[0].awaited}" in ended.stderr
    assert not list((tmp_path / "run" / "rings").iterdir())


def test_ranks_ahead_of_their_devices_that_cannot_be_asked_are_blamed_for_nothing(tmp_path, sleepers):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "r0.json").write_text(json.dumps({"device_type": "a device"}))
    job, now = trained(tmp_path, sleepers)
    job.update(1, 21, now + SECOND // 10)
    job.look(now + 3 * SECOND)
    (found,) = job.reports()

    assert [row["silent"] for row in found["ranks"]] == [False, False]
    assert job.watch.blamed is None
    assert "is silent" not in job.lines[0]


@pytest.mark.slow
def test_a_slow_checkpoint_of_a_real_job_gives_no_alarm_though_it_takes_longer_than_the_time_out(tmp_path):
    job = script(tmp_path, JOB.replace("dist.init", f"{SLOW}dist.init", 1))
    options = {"nproc_per_node": 2, "quiet": False, "hang_timeout_s": 3.0, "windows": 0.0}
    ended = run(tmp_path / "run", [job, "save", str(tmp_path / "state")], env={"HEADWAY": ""}, **options)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done") == 2
    assert "no progress" not in ended.stderr
    assert not (tmp_path / "run" / "hang").exists()
