"""A run folder followed from outside: begun or not, in a later attempt, ended, or left alone."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from headway.ledger.answers.ledger import Ledger
from headway.runtime.run_folder import live_feed
from headway.runtime.run_folder.finalise import finalise
from headway.runtime.run_folder.live_feed import LiveFeed, finalised, records_of
from headway.trace.recording.runs import Run
from headway.trace.rings.ring import Recorder
from tests.live_writers import write_meta, write_step
from tests.paths import ROOT
from tests.rings_made import Process, read_ring
from tests.runs_made import RunMaker, joined, write_folder


def begun(run, ranks=2, *, attempt=0, steps=5):
    """Write a run that is going on: run.json and the rings of `ranks` ranks; returns their recorders."""
    start_ns = write_meta(run, ranks)
    recorders = [Recorder(str(run / "rings"), rank=rank, attempt=attempt) for rank in range(ranks)]
    for rank, recorder in enumerate(recorders):
        recorder.open()
        for step in range(steps):
            write_step(recorder, rank, step, start_ns + 1000 + step * 20_000, 20_000, slow=0)
    return recorders


def test_a_run_that_begins_while_watched_is_met(tmp_path):
    feed, states = LiveFeed(tmp_path / "run"), []
    feed.poll()
    states.append((feed.state, feed.figures()))
    write_meta(tmp_path / "run", 2)
    feed.poll()
    starting = feed.figures()
    begun(tmp_path / "run")
    feed.poll()
    figures = feed.figures()

    assert states == [("waiting", None)]
    assert (starting.devices, starting.steps) == (2, 0)
    assert (feed.state, figures.steps, figures.devices) == ("running", 5, 2)


def test_a_run_that_ends_while_watched_has_ended(tmp_path):
    begun(tmp_path / "run")
    feed = LiveFeed(tmp_path / "run")
    feed.poll()
    assert feed.state == "running"
    meta = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**meta, "end_ns": meta["start_ns"] + 10**9}))
    os.utime(tmp_path / "run" / "run.json", ns=(1, 1))
    feed.poll()

    assert feed.state == "ended"


def test_a_run_whose_launcher_was_killed_is_lost_after_a_while(tmp_path, monkeypatch):
    child = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from tests.test_live_feed import begun"
    )
    subprocess.run([sys.executable, "-c", f"{child}; begun(Path(sys.argv[2]))", str(ROOT), str(tmp_path)], check=True)
    feed = LiveFeed(tmp_path)
    feed.poll()
    early = feed.state
    monkeypatch.setattr(live_feed, "LEFT_ALONE_NS", 0)
    time.sleep(0.001)
    feed.poll()

    assert (early, feed.state) == ("running", "lost")


def test_events_without_a_launcher_are_those_of_a_run_that_is_over(tmp_path):
    write_folder(RunMaker(ranks=1, steps=5).make(), tmp_path)
    (tmp_path / "run.json").unlink()
    feed = LiveFeed(tmp_path)
    feed.poll()

    assert feed.state == "ended"


def test_attempts_that_were_over_before_anybody_watched_are_accounted_for(tmp_path):
    first = RunMaker(ranks=2, steps=30).make()
    second = RunMaker(ranks=2, steps=20, start_ns=first.meta["end_ns"], attempt=1).make()
    write_folder(joined(first, second), tmp_path)
    for rank in range(2):
        os.unlink(tmp_path / "events" / f"a1-r{rank}.parquet")
    meta = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**meta, "end_ns": None}))
    records = records_of(second.trace.select(ranks=[0]))
    recorder = Recorder(str(tmp_path / "rings"), rank=0, attempt=1)
    for record in records:
        recorder.emit(*(int(record[name]) for name in ("code", "start_ns", "duration_ns", "a", "b", "c", "d")))

    feed = LiveFeed(tmp_path)
    feed.poll()
    figures = feed.figures()

    assert (figures.attempt, figures.steps, figures.total_steps) == (1, 20, 50)
    assert figures.bucket_ns["rework"] > 0


def test_finalised_events_become_the_records_that_they_were_made_of(tmp_path):
    process = Process(tmp_path)
    process.train(12)
    process.write("checkpoint.save", 3_000, 77, 5)
    _, recorded, _ = read_ring(process.recorder.path)
    finalise(tmp_path)
    ((header, records),) = finalised(tmp_path, 0)

    assert (header.rank, header.attempt, header.pid) == (0, 0, os.getpid())
    assert len(records) == len(recorded)
    order = np.argsort(recorded["start_ns"] + recorded["duration_ns"], kind="stable")
    for name in ("code", "start_ns", "duration_ns", "a"):
        assert (records[name] == recorded[name][order]).all()


def test_following_a_whole_run_counts_what_the_finished_run_counts(tmp_path):
    run = tmp_path / "run"
    recorders = begun(run, 2, steps=50)
    feed = LiveFeed(run)
    feed.poll()
    figures = feed.figures()
    for recorder in recorders:
        recorder.close()
    ledger = Ledger.of(Run.open(run))

    assert figures.steps == ledger.steps == 50
    for bucket in ("useful", "input", "comm", "straggler", "host"):
        assert figures.bucket_ns[bucket] == pytest.approx(ledger.ledger_ns[bucket], abs=100_000)


def test_a_half_written_run_json_is_read_again(tmp_path):
    begun(tmp_path)
    whole = (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").write_text(whole[: len(whole) // 2])
    feed = LiveFeed(tmp_path)
    feed.poll()
    assert (feed.state, feed.meta) == ("running", {})
    (tmp_path / "run.json").write_text(whole)
    os.utime(tmp_path / "run.json", ns=(5, 5))
    feed.poll()

    assert feed.meta["run_id"] == "made"
