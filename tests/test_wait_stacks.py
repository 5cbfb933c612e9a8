"""Lines that wait for a device: which call a frame is in, what counts as a wait, and what ending the waits wins."""

from __future__ import annotations

import dis
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from headway.ledger.answers.causes import find_causes
from headway.ledger.answers.ledger import Ledger
from headway.ledger.buckets import BUCKETS
from headway.ledger.cause import SampledLine
from headway.runtime.script.gap_stacks import stack_of
from headway.runtime.script.stack_looks import WaitStacks, callee
from headway.trace.recording.runs import Run
from tests.recorded_device import recorded_loop

MS = 1_000_000

CALLS = {
    "loss.item()": {"item"},
    "total = total + float(loss.sum())": {"float", "sum"},
    "torch.cuda.synchronize(device)": {"synchronize"},
    "rows.append(model(x).cpu())": {"append", "model", "cpu"},
    "int(values[read(\n  3)])": {"int", "read"},
    "(f or g)()": set(),
}


@pytest.mark.parametrize("text", CALLS)
def test_the_name_of_a_call_is_read_from_its_bytecode(text):
    code = compile(text, "train.py", "exec")

    offsets = [step.offset for step in dis.get_instructions(code) if step.opname.startswith("CALL")]

    assert {name for offset in offsets if (name := callee(code, offset))} == CALLS[text]
    assert callee(code, 0) == ""


class Loss:
    """A loss whose value is there after a while."""

    item = staticmethod(time.sleep)

    def __float__(self) -> float:
        """Wait likewise."""
        time.sleep(0.02)
        return 1.0


def train(loss: Any, rounds: int) -> None:
    """Read it in two ways, and sleep in another."""
    for _ in range(rounds):
        loss.item(0.02)
        float(loss)
        time.sleep(0.02)


def looked(late_s: float) -> list[dict[str, Any]]:
    """Look at a thread that trains so; return the lines that waited."""
    waits, thread = WaitStacks(), threading.Thread(target=train, args=(Loss(), 10))
    thread.start()
    while thread.is_alive():
        time.sleep(0.004)
        waits.look(stack_of(thread.ident or 0), 4 * MS, late_s)
    return waits.report()


def test_a_line_that_waits_is_named_and_others_are_not():
    line = train.__code__.co_firstlineno

    rows = looked(0.0)

    assert {(row["line"], row["function"]) for row in rows} == {
        (f"test_wait_stacks.py:{line + 3}", "item"), (f"test_wait_stacks.py:{line + 4}", "float"),
    }  # fmt: skip
    assert all(row["ns"] == 4 * MS * row["count"] > 0 for row in rows)


def test_a_look_that_waited_for_the_interpreter_counts_for_no_line():
    assert looked(0.005) == []


@pytest.mark.parametrize(("waited", "won"), [(0.5, 0.3), (0.1, 0.1)], ids=["most of the step", "little of it"])
def test_ending_the_waits_wins_no_more_than_they_take_nor_than_the_device_idles(waited, won):
    total_ns = 1000 * MS
    booked = {**dict.fromkeys(BUCKETS, 0), "useful": 700 * MS, "host": 300 * MS}
    lines = {"host.launch": 300 * MS}
    row = SampledLine("train.py:41", "item", int(waited * total_ns), count=40)
    ledger = Ledger(
        devices=1, steps=1, wall_ns=total_ns, ledger_ns=booked, sub_ns=lines, basis={}, coverage=1.0, wait_lines=(row,)
    )

    causes = {cause.cause: cause for cause in find_causes(ledger)}

    sync = causes["compute.sync"]
    assert sync.lost_device_s == pytest.approx(won)
    assert sync.where == "item at train.py:41"
    assert "loss.detach()" in sync.script
    assert sum(cause.lost_device_s for cause in causes.values()) == pytest.approx(0.3)
    few = replace(ledger, wait_lines=(SampledLine("a:1", "", 9, 2),))
    assert [cause.cause for cause in find_causes(few)] == ["host.launch"]
    [launch] = find_causes(replace(few, loop_lines=(SampledLine("loss.py:7", "pow", 9, 20), SampledLine("", "", 3, 5))))
    assert (
        "75 % of the samples of forwards and losses lie in Python loops of the script: pow at loss.py:7"
        in launch.evidence
    )
    assert launch.fix.startswith("let one call do all passes of the loop")


@pytest.mark.slow
def test_a_loss_that_is_read_in_each_step_is_named_on_a_device(tmp_path):
    recorded_loop(
        tmp_path, {"forward_ms": 8, "backward_ms": 16, "update_ms": 1}, {"steps": 120, "host_ms": 10, "read_every": 1}
    )

    causes = find_causes(Ledger.of(Run.open(tmp_path / "run")))

    assert causes[0].cause == "compute.sync"
    assert causes[0].where.startswith("item at device_loop.py:")
