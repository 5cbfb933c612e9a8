"""The status line: right counts from drained records, wiped before anything else is printed."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.ledger.buckets import BUCKET_OF, bucket_of_sub
from headway.runtime.run_folder import status
from headway.runtime.run_folder.status import RunStatus, StatusLine
from headway.trace.events.vocabulary import SPANS
from headway.trace.rings.records import RECORD_DTYPE

SECOND = 1_000_000_000


def header(rank: int = 0, role: str = "main") -> SimpleNamespace:
    """Return what `RunStatus` reads of a ring's header."""
    return SimpleNamespace(rank=rank, role=role, attempt=0, pid=rank + 1, end_ns=0)


def records(*rows: tuple[str, int, int]) -> np.ndarray:
    """Return records of (name, start_ns, duration_ns)."""
    made = np.zeros(len(rows), RECORD_DTYPE)
    for record, (name, start, duration) in zip(made, rows, strict=True):
        record["code"], record["start_ns"], record["duration_ns"] = SPANS[name].code, start, duration
    return made


@given(batches=st.lists(st.integers(0, 20), min_size=1, max_size=10))
def test_steps_are_counted_over_all_drains(batches):
    progress = RunStatus(start_ns=0, world_size=1)
    for count in batches:
        progress.add(header(), records(*[("optimizer.step", SECOND, 10)] * count))

    said, counted = progress.line(2 * SECOND), sum(batches)
    counted = 0 if counted == 1 else counted  # a first update without a gradient may be a restore's
    assert said.startswith(f"step {counted} |") or (not sum(batches) and said.startswith("starting up"))


OTHERS = ("dropped", "device.unknown")
"""Records lost, and what events of a device do not tell: then nothing else of the step is useful either."""

LOSSES = [name for name, booking in BUCKET_OF.items() if bucket_of_sub(booking.sub) != "useful" and name not in OTHERS]


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_lowers_goodput_by_its_share(name):
    progress = RunStatus(start_ns=0, world_size=1)
    steps = [("optimizer.step", 0, 10), (name, 10, 4 * SECOND), ("optimizer.step", 10 * SECOND - 10, 10)]
    progress.add(header(), records(*steps))

    bucket = bucket_of_sub(BUCKET_OF[name].sub)
    assert f"goodput 60 % | top loss {bucket} 40 %" in progress.line(10 * SECOND)


def test_what_comes_after_the_last_step_does_not_slow_the_steps_down():
    progress = RunStatus(start_ns=0, world_size=1)
    progress.add(header(), records(*[("optimizer.step", step * SECOND // 10, 10) for step in range(40)]))

    assert progress.line(4 * SECOND).startswith("step 40 | 10 steps/s | goodput")
    assert progress.line(30 * SECOND).startswith("step 40 | 10 steps/s | no step for 26.1 s | goodput")


def test_start_up_is_a_loss_and_ranks_that_have_not_begun_lose_all():
    progress = RunStatus(start_ns=0, world_size=2)
    progress.add(header(), records(("optimizer.step", 5 * SECOND, 10), ("optimizer.step", 10 * SECOND - 10, 10)))

    assert "goodput 25 % | top loss startup 75 %" in progress.line(10 * SECOND)


def test_loader_workers_and_other_threads_do_not_count():
    progress = RunStatus(start_ns=0, world_size=1)
    progress.add(header(), records(("optimizer.step", 0, 10), ("optimizer.step", 20, 10)))
    other = records(*[("optimizer.step", 40, 10)] * 5)
    other["lane"] = 3
    progress.add(header(), other)
    progress.add(header(role="loader"), records(("optimizer.step", 60, 10)))

    assert progress.line(SECOND).startswith("step 2 |")


def test_of_two_optimizers_the_first_counts_the_steps():
    progress = RunStatus(start_ns=0, world_size=1)
    both = records(*[("optimizer.step", 0, 10)] * 6)
    both["a"] = [0, 1, 0, 1, 0, 1]
    progress.add(header(), both)

    assert progress.line(SECOND).startswith("step 3 |")


@pytest.fixture
def shown(monkeypatch):
    """Return what shows the state of a run until it was written twice, and returns what was written."""

    def show(text, *, terminal, at_line_start=True):
        written: list[str] = []
        monkeypatch.setattr("os.isatty", lambda descriptor: terminal)
        monkeypatch.setattr(status, "write_all", lambda descriptor, data: written.append(data.decode()))
        monkeypatch.setattr(RunStatus, "line", lambda progress, now_ns: text)
        for pause in ("REDRAW_S", "PLAIN_EVERY_S"):
            monkeypatch.setattr(status, pause, 0.01)
        line = StatusLine(SimpleNamespace(at_line_start=at_line_start, before_output=None), world_size=1, start_ns=0)
        line.start()
        while len(written) < 2:
            pass
        line.stop()
        return written

    return show


@pytest.mark.parametrize("at_line_start", [True, False])
def test_off_a_terminal_it_is_a_plain_line_of_its_own_and_nothing_is_wiped(shown, at_line_start):
    first, *more = shown("step 1", terminal=False, at_line_start=at_line_start)

    assert first == ("" if at_line_start else "\n") + "headway: step 1\n"
    assert set(more) == {"headway: step 1\n"}


def test_the_styled_line_fits_the_terminal(monkeypatch, shown):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    line = re.sub(r"\x1b\[[0-9;]*[mK]|\r", "", shown("step 1 | " + "x" * 200, terminal=True)[0])

    assert len(line) < 40
    assert line.startswith("headway step 1")


def test_only_the_name_is_coloured_on_a_terminal_and_the_line_is_wiped_at_the_end(monkeypatch, shown):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    *drawn, last = shown("step 1 | 2 steps/s", terminal=True)
    name, _, rest = drawn[0].removeprefix("\r\x1b[2K").partition("\x1b[0m")

    assert name.endswith("mheadway ")
    assert "\x1b" not in rest
    assert last == "\r\x1b[2K"
