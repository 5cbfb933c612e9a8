"""Fill jobs from a file: where they are placed, what they do in the gaps of a pipeline that runs, and bad input."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.core.errors import InputError
from headway.parallel.fill.gaps import LARGE, FillChunk, FillConfiguration, FillJob, FillProcess, GapWatch, fit_fill
from headway.parallel.fill.queue import MainJob, RecordedGaps, bubbles, place_jobs
from headway.sim.pipeline.lower import lower
from headway.sim.pipeline.orders import PipelineShape
from headway.sim.pipeline.schedules import SCHEDULES
from headway.sim.recorded.program import Program
from headway.trace.events.parts import Parts
from headway.trace.recording.run_facts import RunFacts
from tests.launching import json_of, refusal
from tests.paths import ROOT
from tests.pipelines_made import costs, played
from tests.test_recorded_pipeline import command

MS = 1_000_000


def sleeper(milliseconds: float, *, run: str = "", samples: int | None = None, name: str = "sleeper") -> FillJob:
    chunks = (FillChunk(int(milliseconds * MS), 0),)
    return FillJob(name, (FillConfiguration("only", chunks, 1),), samples, run=run)


def written(folder: Path, **content: object) -> Path:
    path = folder / "jobs.json"
    path.write_text(json.dumps(content))
    return path


def lend(watch: GapWatch, gap_s: float, times: int) -> None:
    """Have gaps of a length."""
    for _ in range(times):
        watch.begin(LARGE[0])
        time.sleep(gap_s)
        watch.end()


def test_chunks_end_inside_a_gap_and_use_most_of_it() -> None:
    process = FillProcess([sleeper(10)], dict.fromkeys(LARGE, 0))
    watch = GapWatch(process)
    lend(watch, 0.12, 8)
    process.stop()

    assert os.sched_getscheduler(0) != os.SCHED_IDLE
    assert watch.large_ns >= 8 * 0.12e9
    assert 0.4 < watch.used_ns / (6 * 0.12e9) <= 1.05
    assert watch.chunks >= 6 * 5


def test_a_chunk_of_three_times_its_time_harms_one_step_then_fewer_fit(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\n\ndef chunk(name, index):\n    time.sleep(0.09)\n")
    process = FillProcess([sleeper(30, run=f"{tmp_path}/slow.py:chunk")], dict.fromkeys(LARGE, 0))
    watch = GapWatch(process)
    lend(watch, 0.05, 3)
    first_ns = watch.late_ns
    lend(watch, 0.05, 5)
    process.stop()

    assert watch.chunks == 1
    assert 0.02e9 < first_ns < 0.2e9
    assert watch.late_ns - first_ns < 0.03e9


def test_a_job_that_never_returns_is_ended_and_the_rank_goes_on(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text("import time\n\ndef chunk(name, index):\n    time.sleep(1000)\n")
    process = FillProcess([sleeper(1, run=f"{tmp_path}/stuck.py:chunk")], dict.fromkeys(LARGE, 0))
    watch = GapWatch(process)
    lend(watch, 0.02, 5)

    assert "did not return" in process.ended
    assert not watch.used_ns


def test_jobs_that_are_done_end_their_process() -> None:
    process = FillProcess([sleeper(1, samples=2), sleeper(1, samples=1, name="other")], dict.fromkeys(LARGE, 0))
    watch = GapWatch(process)
    lend(watch, 0.03, 4)

    assert (process.ended, watch.chunks) == ("all fill jobs are done", 3)


@pytest.mark.parametrize(("score", "order"), [("shortest", "cba"), ("makespan", "abc"), ("deadline", "bac")])
def test_the_score_decides_which_job_is_first(score: str, order: str) -> None:
    step_ns, gaps = MainJob(stages=2, microbatches=2).gaps()
    only = [gap for gap in gaps if gap.rank == 0]
    choice = (FillConfiguration("only", (FillChunk(MS, 0),), 1),)
    jobs = [
        FillJob(name, choice, samples, deadline_s)
        for name, samples, deadline_s in (("a", 9000, 6), ("b", 600, 5), ("c", 60, 9))
    ]
    placed = place_jobs(jobs, only, dict.fromkeys(LARGE, 0), step_ns, score=score)

    assert "".join(one.job for one in placed) == order
    assert [one.start_s for one in placed[1:]] == [one.end_s for one in placed[:-1]]


def test_work_of_8192_devices_is_their_bubble_times_the_fit() -> None:
    """p 16, and a fixed global batch that leaves 8 microbatches at 8K devices: 65 % bubble (paper: 63 % more work)."""
    main = MainJob(stages=16, microbatches=8, forward_ns=20 * MS, backward_ns=40 * MS, schedule="gpipe")
    step_ns, gaps = main.gaps()
    choice = (FillConfiguration("only", tuple(FillChunk(ms * MS, 0) for ms in (70, 45, 110)), 32),)
    jobs = [FillJob(f"job{n}", choice, 32 * 400 * (1 + n % 5)) for n in range(400)]
    placed = place_jobs(jobs, gaps, dict.fromkeys(LARGE, 0), step_ns)
    fits = [row.used_ns / row.large_ns for row in fit_fill(jobs[0], gaps, dict.fromkeys(LARGE, 0))]
    share = sum(gap.duration_ns for gap in gaps) / (16 * step_ns)
    last_s = min(max(one.end_s for one in placed if one.rank == rank) for rank in range(16))
    per_sample_s = sum(chunk.duration_ns for chunk in choice[0].chunks) / 32e9
    done = {job.name: job.samples or 0 for job in jobs}
    work_s = sum(
        done[one.job] * per_sample_s * min(1, (last_s - one.start_s) / (one.end_s - one.start_s))
        for one in placed
        if one.start_s < last_s
    )

    assert share == pytest.approx(15 / 23)
    assert work_s / (16 * last_s) == pytest.approx(share * sum(fits) / 16, rel=0.1)


def test_the_command_plans(tmp_path: Path) -> None:
    jobs = [{"name": "bert", "configurations": [{"chunks": [{"duration_ns": 9 * MS}]}]}]
    path = written(tmp_path, main={"stages": 3, "microbatches": 4}, jobs=jobs)

    answer = json_of("parallel", "fill", "--jobs", path, "--simulate", "--json")

    assert (answer["main_slowdown"], [row["rank"] for row in answer["rows"]]) == (0, [0, 1, 2])
    assert [row["large_ns"] for row in answer["rows"]] == [240 * MS] * 3
    assert 0.8 < answer["used_fraction"] <= 0.95


@pytest.mark.slow
def test_a_pipeline_that_runs_loses_little_by_a_fill_job_beside_each_rank(tmp_path: Path) -> None:
    jobs = [{"name": "bert", "configurations": [{"chunks": [{"duration_ns": 9 * MS}]}]}]
    path = written(tmp_path, main={"stages": 2, "microbatches": 2}, jobs=jobs)

    answer = json_of("parallel", "fill", "--jobs", path, "--blocks", "1", "--json")

    assert answer["used_fraction"] >= 0.6
    assert answer["main_slowdown"] < 0.2  # few steps on shared cores; four ranks: docs/systems/parallel.md


ONE = {"name": "a", "configurations": [{"chunks": [{"duration_ns": 1}]}]}
LARGE_CHUNK = {"duration_ns": 1, "memory_bytes": 9}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "jobs"),
        ({"jobs": [{"name": "a", "configurations": []}]}, "configurations"),
        ({"jobs": [ONE] * 2}, "two fill jobs"),
        ({"jobs": [ONE | {"run": "x"}]}, "FILE.py"),
        ({"main": {"free_bytes": 5}, "jobs": [ONE | {"configurations": [{"chunks": [LARGE_CHUNK]}]}]}, "needs 9 bytes"),
        ({"main": {"schedule": "two_buffer"}, "jobs": [ONE]}, "no flush"),
        ({"main": {"free_bytes": {"fill": 5}}, "jobs": [ONE]}, "fill_drain"),
    ],
)
def test_a_mistake_in_the_file_is_one_error(tmp_path: Path, content: dict[str, object], words: str) -> None:
    assert words in refusal("parallel", "fill", "--jobs", written(tmp_path, **content), "--simulate")


def test_an_unknown_score_is_named() -> None:
    with pytest.raises(InputError, match="shortest"):
        place_jobs([sleeper(1)], [], dict.fromkeys(LARGE, 0), 1, score="shortst")


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gaps_of_a_recorded_run_are_their_closed_forms(name: str) -> None:
    p, m, forward, backward = 4, 6, 3 * MS, 5 * MS
    rows, facts = played(SCHEDULES[name](PipelineShape(p, m)), costs([forward] * p, [0] * p, [backward] * p), 5)
    run = SimpleNamespace(parts=Parts.of(rows), facts=RunFacts.of(facts))
    recorded = RecordedGaps.of(run, Program.from_trace(rows, facts))  # type: ignore[arg-type]

    turn = backward if name == "1f1b" else forward + backward
    lengths = {(gap.rank, gap.kind): gap.duration_ns for gap in recorded.gaps}
    assert lengths == {(r, LARGE[0]): r * (forward + backward) for r in range(1, p)} | {
        (r, LARGE[1]): (p - 1 - r) * turn for r in range(p - 1)
    }
    assert recorded.gaps == tuple(sorted(recorded.gaps, key=lambda gap: (gap.rank, gap.start_ns)))
    assert fit_fill(sleeper(2), recorded.gaps, dict.fromkeys(LARGE, 0))[0].used_ns > 0
    with pytest.raises(InputError, match=r"Give those of simulate"):
        bubbles(lower(SCHEDULES[name](PipelineShape(p, m))))


@pytest.mark.slow
def test_a_recorded_runner_is_told_what_its_gaps_lend_and_books_what_another_job_used(tmp_path: Path) -> None:
    chunks = [{"duration_ns": 7 * MS}]
    jobs = written(tmp_path, jobs=[{"name": "bert", "configurations": [{"chunks": chunks}]}])
    job = ["--", ROOT / "benchmarks" / "jobs" / "pipeline_runner.py", "--schedule", "gpipe", "--microbatches", 2]
    first, second = tmp_path / "first", tmp_path / "second"
    command("run", "--nproc-per-node", 2, "--out", first, *job, "--steps", 6)
    proposals = command("plan", first, "-o", tmp_path / "plan.json")["proposals"]
    planned = command("parallel", "fill", "--jobs", jobs, "--run", first)
    command("run", "--nproc-per-node", 2, "--out", second, *job, "--steps", 8, "--fill", jobs, "--gaps-of", first)
    sub_s = command("why", second)["sub"]

    (row,) = [row for row in proposals if row["name"] == "parallel.fill"]
    assert (row["predicted_speedup"], row["applies"]) == (1.0, False)
    assert f"--run {first}" in row["reason"]
    assert [row["rank"] for row in planned["rows"]] == [0, 1]
    assert 0.5 < planned["used_fraction"] < 1
    assert sub_s["bubble.filled"] > sub_s["bubble.fill_drain"] / 4
    with pytest.raises(InputError, match="Record it without"):
        bubbles(second)
