"""What survives a failure: steps before the checkpoint that the next attempt went on from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.ledger.answers.ledger import Ledger
from headway.ledger.booking.rows import RankSaves, saved_steps
from headway.trace.events.trace import Trace
from headway.trace.recording.runs import Run
from tests.launching import run, script
from tests.runs_made import Made

checkpoints = st.dictionaries(st.integers(0, 9), st.integers(0, 50), max_size=5)


@given(st.lists(checkpoints, min_size=1, max_size=4), st.integers(0, 9))
def test_what_the_next_attempt_restored_decides_whatever_was_known_of_commits(copied, restored):
    saves = [RankSaves(99, one, frozenset()) for one in copied]

    assert saved_steps(saves, restored=restored) == [one[restored] for one in copied if restored in one]


@given(st.lists(checkpoints, min_size=1, max_size=4), st.none() | st.integers(0, 50))
def test_a_copy_that_nobody_saw_committed_counts_for_nothing(copied, stock):
    assert saved_steps([RankSaves(stock, one, frozenset()) for one in copied]) == [stock] * len(copied)


def test_one_ranks_commit_counts_for_all():
    saves = [RankSaves(None, {10: 3, 20: 6}, frozenset({10})), RankSaves(None, {10: 4, 20: 6}, frozenset())]

    assert saved_steps(saves) == [3, 4]


def attempt(rows, columns=()):
    """Return a trace of one rank: (name, start, duration, seq) each; background rows lie on the saver's lane."""
    names = [name for name, *_ in rows]
    lanes = [int(name in ("checkpoint.commit", "checkpoint.persist")) for name in names]
    table = {
        "rank": [0] * len(rows), "start_ns": [row[1] for row in rows], "duration_ns": [row[2] for row in rows],
        "seq": [row[3] if len(row) > 3 else -1 for row in rows], "lane": lanes,
    }  # fmt: skip
    return Trace.from_columns(table, name=range(len(rows)), names=names, lanes=["main", "saver"])


FIRST = [
    ("process", 0, 1000),
    *[("step", 100 * step, 100) for step in range(1, 9)],
    *[("optimizer.step", 100 * step + 80, 20) for step in range(1, 9)],
    ("checkpoint.snapshot", 392, 8, 30),  # behind the update of the third step
    ("checkpoint.snapshot", 705, 10, 60),  # between the sixth step and the seventh
]


@pytest.mark.parametrize(
    ("commits", "restore", "kept"),
    [
        ([], ("checkpoint.restore", 1110, 50, 60), 6),
        ([], ("checkpoint.restore", 1110, 50, 30), 3),
        ([], ("checkpoint.restore", 1110, 50, 5), 0),
        ([("checkpoint.commit", 500, 10, 30)], ("checkpoint.load", 1110, 50), 3),
        ([("checkpoint.commit", 500, 10, 30), ("checkpoint.commit", 750, 9, 60)], ("checkpoint.load", 1110, 50), 6),
        ([("checkpoint.commit", 500, 10, 30)], ("host.import", 1110, 50), 0),
    ],
)
def test_compute_after_the_restored_copy_is_rework(commits, restore, kept):
    again = [("process", 1100, 400), restore, ("step", 1200, 100), ("step", 1300, 100)]
    facts = {"rank": 0, "start_ns": 1100, "end_ns": 1500, "exit_code": 0}
    meta = {"start_ns": 0, "end_ns": 1500, "attempt": 1, "ranks": [facts], "exit": {"code": 0}, "device_type": "cpu"}
    ledger = Ledger.of(Made(attempt(again), meta, {}, {}, {}, earlier=(attempt([*FIRST, *commits]),)))

    assert ledger.steps == kept + 2
    assert ledger.ledger_ns["rework"] == sum(100 - {3: 8, 7: 10}.get(step, 0) for step in range(kept + 1, 9))
    assert sum(ledger.ledger_ns.values()) == ledger.wall_ns


JOB = """
    import os, sys, time, torch
    from pathlib import Path
    from headway.checkpoint import Checkpointer
    folder = Path(sys.argv[1])
    model = torch.nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(model.parameters())
    saver = Checkpointer(folder / "state", model=model, opt=optimizer)
    again = (folder / "failed").exists()
    for step in range(saver.restore().step if again else 0, 40):
        loss = model(torch.ones(1, 50)).sum()
        time.sleep(0.005)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in (10, 20):
            saver.save(step + 1)
            saver.wait()
        if step + 1 == 27 and not again:
            (folder / "failed").touch()
            os._exit(9)
    saver.close()
"""


@pytest.mark.slow
def test_a_real_job_that_fails_behind_its_checkpoint_does_seven_steps_twice(tmp_path):
    out = tmp_path / "run"
    ended = run(out, [script(tmp_path, JOB), str(tmp_path)], env={"HEADWAY": ""}, max_restarts=1)
    assert ended.returncode == 0, ended.stderr
    ledger = Ledger.of(Run.open(out))

    assert ledger.steps == 40
    assert ledger.sub_ns["rework.steps"] >= 7 * 5_000_000
    assert ledger.sub_ns["restart.load"] > 0
    assert {sub for sub in ledger.sub_ns if sub.startswith("checkpoint.")} <= {"checkpoint.snapshot", "checkpoint.wait"}
    assert sum(ledger.ledger_ns.values()) == ledger.devices * ledger.wall_ns
