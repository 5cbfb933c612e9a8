"""A verb that takes long says on stderr that it is at work; its answer stands alone."""

import io
import json
import os
import pty
import sys

from headway.verbs.shared import output as at_work
from headway.verbs.shared.output import emit
from tests.launching import wait_for


def answer():
    emit({"answer": 1}, lambda _: "", as_json=True)


def test_elsewhere_than_on_a_terminal_a_line_is_written_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(at_work, "LINE_S", 0.01)
    heard = io.StringIO()
    monkeypatch.setattr(sys, "stderr", heard)
    with at_work.at_work("plan"):
        wait_for(lambda: heard.getvalue().count("headway: plan has worked for 0 s\n") > 1)
        answer()
    told = heard.getvalue()
    with at_work.at_work("trace info"):
        answer()

    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"answer": 1}] * 2
    assert heard.getvalue() == told


def test_on_a_terminal_one_line_moves_and_is_gone_before_the_answer(monkeypatch):
    monkeypatch.setattr(at_work, "FIRST_S", 0.01)
    monkeypatch.setattr(at_work, "TURN_S", 0.02)
    ours, theirs = pty.openpty()
    text = ""

    def seen(what):
        nonlocal text
        while what not in text:
            text += os.read(ours, 65536).decode()

    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(sys, "stdout", terminal)
        with at_work.at_work("comm bench"):
            seen(" headway comm bench  0 s")
            answer()
            terminal.flush()
            seen("}")
        before, printed = text.rstrip().rsplit(at_work.CLEAR, 1)
        monkeypatch.undo()
    os.close(ours)

    assert " headway comm bench  0 s" in before
    assert json.loads(printed) == {"answer": 1}
