"""Headway's own saves in the record: what held training up is booked to it, what ran in the background is not."""

import os
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

import headway
from headway.checkpoint import Checkpointer, CheckpointPolicy
from headway.checkpoint.advise import recorded_saves
from headway.core.errors import UnknownNameError
from headway.ledger.answers.ledger import Ledger
from headway.runtime.in_rank import state_account
from headway.runtime.recorder.probes import now
from headway.sim.recorded.program import Program
from headway.trace.events.vocabulary import IN_BACKGROUND
from headway.trace.recording.runs import Run
from tests.recorded import recording, rows

MS = 1_000_000


def train(tmp_path, steps=4):
    """Take a few steps; each saves the way the engine does, from a hook behind the update."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    number = [0]

    def save(*_):
        number[0] += 1
        start = now()
        with state_account.inside("checkpoint.snapshot"):
            torch.save(model.state_dict(), tmp_path / "w.tmp")
            with (tmp_path / "w.tmp").open("rb") as file:
                os.fsync(file.fileno())
            os.replace(tmp_path / "w.tmp", tmp_path / "w.pt")
            time.sleep(0.004)
        end = now()
        state_account.snapshotted(start, end, bytes=80, step=number[0])
        state_account.background("checkpoint.persist", end - 2 * MS, end + 30 * MS, bytes=80, step=number[0])

    optimizer.register_step_post_hook(save)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_save_is_recorded_once_and_not_as_the_calls_it_is_made_of(tmp_path):
    with recording(tmp_path / "run"):
        train(tmp_path)
        torch.save({}, tmp_path / "own.pt")
    found = rows(tmp_path / "run")

    assert [row["b"] for row in found["checkpoint.snapshot"]] == [1, 2, 3, 4]
    assert [row["a"] for row in found["checkpoint.snapshot"]] == [80] * 4
    assert len(found["checkpoint.save"]) == 1  # the script's own
    assert "checkpoint.sync" not in found
    assert "checkpoint.rename" not in found


def test_the_copy_owns_its_time_and_background_work_none(tmp_path):
    with headway.run(tmp_path / "run"):
        train(tmp_path)
    run = Run.open(tmp_path / "run")
    ledger = Ledger.of(run)
    behind = run.trace.where(run.trace.named("checkpoint.persist"))

    assert ledger.sub_ns["checkpoint.snapshot"] >= 4 * 4 * MS
    assert sum(ledger.ledger_ns.values()) == ledger.devices * ledger.wall_ns
    assert {sub for sub in ledger.sub_ns if sub.startswith("checkpoint.")} == {"checkpoint.snapshot"}
    assert {run.trace.lanes[lane] for lane in behind.events["lane"]} == {"saver"}
    assert set(behind.events["depth"].tolist()) <= {0, 1, 2, 3}
    assert ledger.spans["checkpoint.persist"].count == 4
    assert ledger.spans["checkpoint.persist"].total_bytes == 320


def test_a_checkpointers_saves_are_booked_once_and_their_lag_is_known(tmp_path):
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        headway.run(tmp_path / "run"),
        Checkpointer(tmp_path / "state", policy=CheckpointPolicy(budget=0.5), model=model, opt=optimizer) as saver,
    ):
        for step in range(45):
            time.sleep(0.002)
            model(torch.ones(1, 200)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 9:
                saver.save(step)
                saver.wait()
    run = Run.open(tmp_path / "run")
    ledger = Ledger.of(run)
    saves = recorded_saves(Program.from_run(run))

    assert {"checkpoint.save", "checkpoint.persist", "checkpoint.commit"}.isdisjoint(ledger.sub_ns)
    assert ledger.sub_ns["checkpoint.snapshot"] > 0
    assert ledger.spans["checkpoint.snapshot"].count == ledger.spans["checkpoint.commit"].count == 4
    assert sum(ledger.ledger_ns.values()) == ledger.devices * ledger.wall_ns
    assert saves.own
    assert saves.late_s > 0


def test_waits_and_restores_are_recorded_with_their_checkpoint(tmp_path):
    with recording(tmp_path / "run"):
        state_account.waited(10, 30, step=7)
        state_account.restored(40, 90, bytes=4096, step=7, verified_bytes=1024)
        for name in IN_BACKGROUND:
            state_account.background(name, 5, 6, bytes=1, step=7)
    found = rows(tmp_path / "run")

    (wait,), (restore,) = found["checkpoint.wait"], found["checkpoint.restore"]
    assert (wait["start_ns"], wait["duration_ns"], wait["b"]) == (10, 20, 7)
    assert (restore["a"], restore["b"], restore["c"]) == (4096, 7, 1024)
    assert all(len(found[name]) == 1 for name in IN_BACKGROUND)


def test_a_stock_save_says_whether_dcp_made_it(tmp_path):
    with recording(tmp_path / "run"):
        torch.save({"w": torch.ones(10)}, tmp_path / "w.pt")
        dcp.save({"w": torch.ones(10)}, checkpoint_id=tmp_path / "dcp", no_dist=True)

    assert [row["c"] for row in rows(tmp_path / "run")["checkpoint.save"] if row["lane"] == 0] == [0, 1]


def test_a_context_inside_another_leaves_the_outer_ones_silence(tmp_path):
    with recording(tmp_path / "run"):
        with state_account.inside("checkpoint.restore"):
            with state_account.inside("checkpoint.wait"):
                pass
            torch.save({}, tmp_path / "w.pt")
        torch.save({}, tmp_path / "w.pt")

    assert len(rows(tmp_path / "run")["checkpoint.save"]) == 1


def test_without_a_recorder_a_note_costs_less_than_a_microsecond():
    rounds = []
    for _ in range(9):
        before = time.thread_time_ns()
        for _ in range(2000):
            state_account.snapshotted(0, 1, bytes=1, step=1)
        rounds.append((time.thread_time_ns() - before) / 2000)

    assert min(rounds) < 1000


def test_background_work_of_another_name_is_refused(tmp_path):
    with recording(tmp_path / "run"), pytest.raises(UnknownNameError, match=r"checkpoint\.persist"):
        state_account.background("checkpoint.persisted", 0, 1, bytes=0, step=1)


def test_a_recorder_that_fails_does_not_fail_the_save(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HEADWAY_BREAK", "run")
    with recording(tmp_path / "run"):
        state_account.snapshotted(0, 1, bytes=1, step=1)

    assert "checkpoint records" in capsys.readouterr().err
