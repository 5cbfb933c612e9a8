"""Terminal screens: what they say, how they fit, and that they are safe to print anywhere."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.data.stalls.model import StallReport
from headway.ledger.answers.compare import BucketChange, RunComparison
from headway.report.paper import bar, screen_of, thin_bar, to_ascii
from headway.report.screens import (
    render_compare,
    render_doctor,
    render_plan,
    render_run,
    render_stalls,
    render_trace_info,
    render_whatif,
)
from headway.report.terminal import render_why
from headway.runtime.host.doctor import Finding
from headway.sim.whatif import Prediction
from headway.why.verdict import named_causes
from tests.report_data import demo_plan, demo_run, demo_why, pipeline_why

GOLDEN = Path(__file__).parent / "golden"
ESCAPE = "\x1b"

STALLS = StallReport(
    0.0241, 0.0482, 0.0109, 0.0011, 3.2 / 0.0241, "fetch", (("cache_fraction=1.0", 0.0482), ("workers=4", 0.0449)),
    note="storage is taken as unlimited: reads of 4 workers overlap",
)  # fmt: skip
FINDINGS = [
    Finding("shared memory", "64.0 MB", "1.2 GB", ok=False, fix="docker run --shm-size 2g"),
    Finding("open files", 1048576, 4096, ok=True),
    Finding("CUDA", "none", "", ok=None),
]
INFO = {
    "path": "runs/text-1", "source": "own", "events": 40112, "ranks": [0, 1], "span_ns": 41_302_000_000,
    "coverage": 0.998,
    "kinds": {"DATA": {"events": 30000, "duration_ns": 51_200_000_000}, "OPTIM": {"events": 1, "duration_ns": 400}},
    "longest": {"void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": 4},
}  # fmt: skip
COMPARISON = RunComparison(
    steps_per_s=(10.8, 4.97), speedup=0.46, goodput=(0.25, 0.12), step_goodput=(0.3, 0.14), threshold=0.05,
    slower=False, interval=(0.44, 0.48),
    changes=(
        BucketChange("useful", "step", 0.0524, 0.0524, regressed=False),
        BucketChange("input", "step", 0.125, 0.41, regressed=True),
        BucketChange("bubble", "step", 0.0, 0.0, regressed=False),
        BucketChange("startup", "run", 1.9, 1.8, regressed=False),
    ),
)  # fmt: skip
SCREENS: dict[str, Any] = {
    "why": lambda **screen: render_why(demo_why(), source="runs/text-1", **screen),
    "why_pipeline": lambda **screen: render_why(pipeline_why(), source="trace-AR.parquet", **screen),
    "plan": lambda **screen: render_plan(
        demo_plan(), source="runs/text-1", apply="headway run --apply runs/text-1/plan.json -- train.py", **screen
    ),
    "run": lambda **screen: render_run(demo_run(), **screen),
    "stalls": lambda **screen: render_stalls(STALLS, source="runs/text-1", **screen),
    "doctor": lambda **screen: render_doctor(FINDINGS, **screen),
    "trace_info": lambda **screen: render_trace_info(INFO, **screen),
    "compare": lambda **screen: render_compare(COMPARISON, names=("runs/text-1", "runs/text-2"), **screen),
    "whatif": lambda **screen: render_whatif(Prediction(0.1033, 0.0542, (1.8, 2.0), ("workers=4",)), **screen),
}


@pytest.mark.parametrize("name", SCREENS)
@pytest.mark.parametrize("width", [60, 80, 88, 100])
@pytest.mark.parametrize("unicode", [True, False])
def test_no_line_is_wider_than_the_screen(name: str, width: int, unicode: bool) -> None:
    lines = SCREENS[name](width=width, unicode=unicode).split("\n")

    assert max(len(line) for line in lines if not line.startswith("  Next  ")) <= width  # a command is never broken
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("name", SCREENS)
def test_colour_changes_no_character(name: str) -> None:
    plain, coloured = SCREENS[name](width=88), SCREENS[name](width=88, color=True)

    assert ESCAPE not in plain
    assert ESCAPE in coloured
    without = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in without.split("\n")] == plain.split("\n")


@pytest.mark.parametrize("name", SCREENS)
def test_the_ascii_screen_is_ascii_and_has_the_same_lines(name: str) -> None:
    text = SCREENS[name](width=88, unicode=False)

    assert text.isascii()
    assert len(text.split("\n")) == len(SCREENS[name](width=88).split("\n"))


@given(fraction=st.floats(-1, 2), columns=st.integers(1, 60))
def test_a_bar_is_as_long_as_its_fraction(fraction: float, columns: int) -> None:
    exact = columns * max(0.0, min(1.0, fraction))

    assert abs(len(bar(fraction, columns)) - exact) <= 1
    assert abs(len(thin_bar(fraction, columns)) - exact) <= 1
    assert len(bar(fraction, columns, unicode=False)) <= columns
    assert (len(bar(fraction, columns)) > 0) == (fraction > 0)


@given(text=st.text())
def test_ascii_keeps_the_number_of_characters(text: str) -> None:
    assert len(to_ascii(text)) == len(text)
    assert to_ascii(text).isascii()


def test_a_sub_line_alone_in_its_bucket_is_shown_where_its_name_says_more() -> None:
    why = {"devices": 2, "steps": 9, "wall_s": 10.0, "ledger": {"useful": 15.0, "restart": 5.0}}
    lines = render_why({**why, "sub": {"useful.compute": 15.0, "restart.reroute": 5.0}}, width=88).split("\n")

    assert [line.split()[0] for line in lines if " s " in line and line.startswith("    ")] == ["reroute"]


@pytest.mark.parametrize("name", SCREENS)
def test_the_screen_is_the_one_on_record(name: str) -> None:
    """Set HEADWAY_WRITE_GOLDEN=1 to record the screens anew, then read the difference."""
    path = GOLDEN / f"screen_{name}.txt"
    text = SCREENS[name](width=88) + "\n"
    if os.environ.get("HEADWAY_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")

    assert text == path.read_text(encoding="utf-8")


def test_a_fix_that_answers_three_causes_stands_once_with_its_gain_and_a_gain_by_hand_says_so() -> None:
    def cause(name: str, lost_s: float, **more: Any) -> dict[str, Any]:
        return {"cause": name, "lost_device_s": lost_s, "where": "x", "evidence": "y", "script": "",
                "interval": [1.1, 1.6], "at_most": False, "remedy": "", **more}  # fmt: skip

    workers = {"fix": "data.workers: workers=2", "predicted_speedup": 1.5, "remedy": "data.workers"}
    links = cause("comm.exposed", 4.0, fix="faster links", predicted_speedup=1.2)
    rows = [cause("input.fetch", 5.0, **workers), links]
    rows += [cause(name, 3.0, **workers) for name in ("input.prep", "input.transfer")]
    why = {**demo_why(), "causes": rows}

    named, screen = named_causes(why), render_why(why)

    assert [row.cause for row in named] == ["input.fetch", "input.prep", "input.transfer", "comm.exposed"]
    assert screen.partition("Causes and fixes")[2].count("1.50x") == 1
    assert screen.count("won with cause 1") == screen.count("as for cause 1") == 2
    assert screen.count("by hand, predicted 1.20x (1.10 to 1.60)") == 1


def test_a_warning_is_shown_with_its_fix_however_many_causes_lost_time() -> None:
    why = demo_why()
    row = why["causes"][-1]
    many = [{**row, "cause": "host.gc", "lost_device_s": 9.0 - n, "fix": f"fix {n}"} for n in range(8)]
    warning = {**row, "cause": "input.ranks", "lost_device_s": 0.0, "fix": "a share for each rank"}
    screen = render_why({**why, "causes": [*many, warning]})

    assert "a share for each rank" in screen
    assert "and 2 smaller: host.gc, host.gc" in screen
    assert "input.ranks" not in screen.partition("smaller: ")[2]


@pytest.mark.parametrize("name", ["\x1b[2J\x1b[31mred", "a\r\nb", "[bold]x[/bold]", ":smile:", "‮txt.exe"])
def test_a_hostile_name_cannot_steer_the_terminal(name: str) -> None:
    why = demo_why()
    why["causes"][0] |= {"where": name, "fix": name, "evidence": name}

    text = render_why(why, source=name)

    assert not set(text) & {"\x1b", "\r", "‮"}
    assert "[bold]x[/bold]" in text or name != "[bold]x[/bold]"
    assert ":smile:" in text or name != ":smile:"


def test_a_long_source_loses_its_beginning_not_the_heading() -> None:
    head = render_why(demo_why(), source="/a/very/long/path/" + "x" * 80 + "/run-1", width=70).splitlines()[0]

    assert head.startswith("headway why  …")
    assert head.endswith("/run-1 · 2 devices · 400 steps · 41.3 s")
    assert len(head) == 70


GONE = [{"cause": "input.fetch", "where": "", "lost_device_s": 0.5, "predicted_speedup": float("nan")}]
BLANK = render_why({"devices": 1, "steps": 3, "wall_s": 1.0, "ledger": {"useful": 1.0}, "causes": GONE})
HEALTHY = {"goodput": 0.973, "causes": [], "ledger": {"useful": 80.4, "input": 2.2}}
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: bad\x1b[0m batch'
ENDED = {"exit": {"code": 1, "class": "user", "first_rank": 1, "traceback": TRACEBACK}, "applied": []}
ONE, WHOLE = {"name": "host.gc", "measured_speedup": 1.5}, {"name": "plan", "measured_speedup": 1.5}
UNFIT = {"name": "data.cache", "reason_not_applied": "not pure"}
REFUSED = {"refused": [{"name": "comm.bucket", "room": "comm", "reason": "one process has no gradients"}]}
SLOW = {"name": "data.workers", "predicted_speedup": 0.81, "left_out": {"kind": "noise", "reason": "it costs time"}}
TWICE = {"name": "data.workers", "predicted_speedup": 2.0, "measured_speedup": 1.9, "measured_with_start": 1.5}
VERIFIED = {"batches": 60, "compared": 5, "equal": 5, "unequal": 0, "not_compared": {}}
OPEN = "not resolved: data.workers may win 1.10x (0.95 to 1.25); record for longer, or on a quieter host"
ASYNC = {"name": "checkpoint.async", "predicted_speedup": 1.6, "interval": [1.3, 1.7], "reason": "Copy."}
UNSURE = {"name": "comm.links", "predicted_speedup": 1.9, "interval": [1.0, 3.0], "cost": "links"}
WAITS = """60 % of 2 devices x 41.3 s went to waiting for input. Fix: load with 4 workers: num_workers=4,
 prefetch_factor=4. Predicted 1.90x (1.75 to 2.02) the steps per second. Next headway plan RUN"""
SAYS = [
    (render_why(demo_why() | {"steps": 0, "causes": []}), 1, "No training step was recorded"),
    (render_why(demo_why() | HEALTHY), 1, "97.3 % of 2 devices x 41.3 s was useful work; no loss stands out."),
    *((BLANK, times, words) for words, times in {"goodput unknown": 1, "no prediction": 1, "nan": 0}.items()),
    (render_why(demo_why() | {"notes": ["the end of 1 processes was not seen"]}), 1, "the end of 1 processes was not"),
    (render_run(demo_run(), why=demo_why(), command="headway plan RUN"), 1, " ".join(WAITS.split())),
    (render_run(demo_run() | ENDED), 1, "Rank 1 failed (exit code 1): ValueError: bad [0m batch (train.py, line 3)."),
    (render_run(demo_run() | ENDED), 1, 'last): File "train.py", line 3 ValueError: bad [0m batch'),
    (render_run({"applied": [ONE, WHOLE]}), 1, "1.50x"),
    (render_run({"applied": [ONE, UNFIT, WHOLE]}), 2, "1.50x"),  # the plan's gain is that of one of two
    (render_run({"verified": VERIFIED}), 1, "Verified: 5 of 5 compared batches equal the script's own; 60 came under"),
    (render_run({"steps_per_s": 4.0, "applied": [TWICE]}), 1, "1.90x is of the steps behind the start; over as many "
     "steps of both, the first included: 1.50x."),
    (render_plan(demo_plan() | REFUSED), 1, "comm.bucket: one process has no gradients"),
    (render_plan({"proposals": [SLOW]}), 1, "data.workers"),
    (render_plan({"proposals": [SLOW]}), 1, "not proposed data.workers: predicted 0.81x, it costs time"),
    (render_plan({"proposals": [], "chosen": [], "predicted_speedup": 1.0}), 1, "Nothing to apply"),
    (render_plan({"verdict": {"sentence": "x", "fix": OPEN}}), 1, f"N{OPEN[1:]}."),
    (render_plan({"verdict": {"sentence": "x", "fix": OPEN}}), 0, "For you to do"),
    (render_plan({"verdict": {"sentence": "x", "fix": "read ahead"}}), 1, "For you to do: read ahead."),
    (render_plan({"proposals": [UNSURE, ASYNC]}), 1, "By hand: checkpoint.async, predicted 1.60x (1.30 to 1.70). Copy"),
    (render_plan({"proposals": [UNSURE]}), 0, "By hand"),
]  # fmt: skip
"""A screen, and how often words stand on it."""


@pytest.mark.parametrize(("screen", "times", "words"), SAYS, ids=[f"{words[:40]}-{n}" for _, n, words in SAYS])
def test_a_screen_says_what_matters(screen: str, times: int, words: str) -> None:
    assert " ".join(screen.split()).count(words) == times


class _Tty(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("tty", "encoding", "environ", "color", "unicode"),
    [
        (True, "utf-8", {"TERM": "xterm-256color"}, True, True),
        (True, "utf-8", {"TERM": "xterm", "NO_COLOR": "1"}, False, True),
        (True, "utf-8", {"TERM": "xterm", "NO_COLOR": ""}, True, True),
        (True, "utf-8", {"TERM": "dumb"}, False, False),
        (True, "latin-1", {"TERM": "xterm"}, True, False),
        (False, "utf-8", {"TERM": "xterm"}, False, True),
        (False, "ascii", {}, False, False),
    ],
)
def test_the_screen_fits_where_it_is_shown(tty, encoding, environ, color, unicode):
    output = (_Tty if tty else io.TextIOWrapper)(io.BytesIO(), encoding=encoding)

    screen = screen_of(output, environ)

    assert (screen["color"], screen["unicode"]) == (color, unicode)
    assert 56 <= screen["width"] <= 100


def test_a_standard_output_that_was_closed_is_no_error() -> None:
    assert screen_of(None, {"TERM": "xterm"}) == {"width": 88, "color": False, "unicode": False}
    assert screen_of(None, {"COLUMNS": "60"})["width"] == 60


def test_a_command_to_copy_stands_on_one_line_and_takes_a_path_with_spaces():
    path = "/data/a folder of runs with a long name/that has others in it/headway-runs/train-1"
    plan = {"proposals": [], "chosen": ["data.workers"], "predicted_speedup": 1.5}

    apply = f"headway run --apply '{path}/plan.json' -- train.py"
    told = render_plan(plan, apply=apply, width=60)
    command = f"headway report '{path}' -o report.html"
    why = render_why({"ledger": {"useful": 1.0}, "verdict": {"command": command}}, source=path, width=60)

    assert f"  Next  {apply}" in told.splitlines()
    assert f"  Next  {command}" in why.splitlines()
