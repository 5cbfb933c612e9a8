"""A verb that takes long says on stderr that it is at work; its answer stands alone."""

from __future__ import annotations

import json
import os
import pty
import sys
import time

from headway.verbs.shared import at_work
from headway.verbs.shared.output import emit


def work():
    time.sleep(0.2)
    emit({"answer": 1}, lambda _: "", as_json=True)


def test_elsewhere_than_on_a_terminal_a_line_is_written_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(at_work, "LINE_S", 0.02)
    with at_work.at_work("plan"):
        work()
    told = capsys.readouterr()
    with at_work.at_work("trace info"):
        work()

    assert json.loads(told.out) == {"answer": 1}
    assert "headway: plan has worked for 0 s\n" in told.err
    assert not capsys.readouterr().err


def test_on_a_terminal_one_line_moves_and_is_gone_before_the_answer(monkeypatch):
    monkeypatch.setattr(at_work, "FIRST_S", 0.01)
    monkeypatch.setattr(at_work, "TURN_S", 0.02)
    ours, theirs = pty.openpty()
    terminal = os.fdopen(theirs, "w")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    with at_work.at_work("comm bench"):
        work()
    terminal.flush()
    text = ""
    while "}" not in text:
        text += os.read(ours, 65536).decode()

    before, answer = text.rstrip().rsplit(at_work.CLEAR, 1)
    assert " headway comm bench  0 s" in before
    assert json.loads(answer) == {"answer": 1}
    terminal.close()
    os.close(ours)
