"""Charts without scripts: boxes and lines stand where the numbers say; the verbs that draw them write whole pages."""

import html
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.fault.advise import ettr_over_time, stepped_s
from headway.fault.fleet import Scenario, simulate
from headway.ledger.answers.metrics import ettr_of_steps
from headway.ledger.runs.attempts import book_run
from headway.report.page.plots import HEIGHT, WIDTH, Bars, Candidate, Gantt, GanttSpan, Line, picture_page, write_page
from headway.sim.pipeline.orders import PipelineShape, gpipe
from headway.sim.recorded.program import Program
from headway.trace.recording.runs import Run
from headway.verbs.models.parallel_bubbles import recorded_step
from tests.launching import headway_here, json_of, refusal
from tests.paths import GOLDEN
from tests.pipelines_made import costs, played
from tests.test_cluster_prices import aws_json

BEFORE = GOLDEN / "runs" / "before"
FLEET = 'hosts = 1200\ndevices_per_host = 8\ndays = 9\nper_1000_host_days = 3.79\nmix = "published"\n'
HOSTILE = "<script>alert('x')</script>"


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=30))
def test_each_span_is_a_box_at_its_share_of_the_axis(rows):
    spans = [GanttSpan(lane, min(a, b), max(a, b), "F", HOSTILE) for lane, a, b in rows]
    found = Gantt("x", ("a", "b", HOSTILE), spans, 9.0, {"F": "forward"}).markup()
    boxes = [tuple(map(float, pair)) for pair in re.findall(r"left:([\d.]+)%;width:([\d.]+)%", found)]

    by_lane = sorted(spans, key=lambda span: span.lane)
    expected = [(100 * span.start_s / 9, 100 * (span.end_s - span.start_s) / 9) for span in by_lane]
    assert np.array(boxes) == pytest.approx(np.array(expected), abs=0.0051)
    assert HOSTILE not in found


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=3000), st.floats(1, 1e6))
def test_a_line_keeps_its_extremes_and_its_limit_on_one_axis(values, limit):
    found = Line(HOSTILE, values, ("0 s", "1 s"), limit, top=2e6).markup()
    points = [tuple(map(float, pair.split(","))) for pair in re.search(r'points="([^"]+)"', found)[1].split()]
    high = [HEIGHT * (1 - value / 2e6) for value in (max(values), min(values))]

    assert (points[0][0], points[-1][0]) == (0, WIDTH)
    assert [min(y for _, y in points), max(y for _, y in points)] == pytest.approx(high, abs=0.06)
    assert float(re.search(r'y1="([\d.]+)"', found)[1]) == pytest.approx(HEIGHT * (1 - limit / 2e6), abs=0.06)
    assert HOSTILE not in found


def test_bars_are_as_long_as_their_values_and_a_page_holds_its_charts(tmp_path):
    bars = Bars("ways", [Candidate("a", 1.0, "1 USD", chosen=True), Candidate(HOSTILE, 4.0, "4 USD")])
    path = write_page(tmp_path / "page.html", picture_page(HOSTILE, "cost", [bars, Line("up", [1.0], ("0", "1"))]))
    found = (tmp_path / "page.html").read_text()

    assert path == str(tmp_path / "page.html")
    assert re.findall(r'width="([\d.]+)%" height="11"/>', found) == ["25.0", "100.0"]
    assert found.count("<figure") == 2
    assert html.escape(HOSTILE) in found
    assert HOSTILE not in found
    with pytest.raises(InputError):
        write_page(tmp_path / "no" / "page.html", found)


def test_a_recorded_step_is_drawn_as_the_schedule_ran():
    """GPipe of 3 stages, F = 1 ms, B = 2 ms: stage s does forward m at s + m, and backward m at 4 + 2 (m + 2 - s)."""
    times = [1_000_000] * 3
    program = Program.from_trace(*played(gpipe(PipelineShape(3, 2)), costs(times, times, times), 8))
    chart = recorded_step(program.recording)
    rows = {(span.lane, span.action, span.label): (span.start_s * 1e3, span.end_s * 1e3) for span in chart.spans}

    assert rows[1, "F", "1"] == pytest.approx((2, 3), abs=0.01)
    assert rows[0, "B", "0"] == pytest.approx((8, 10), abs=0.01)
    assert chart.end_s * 1e3 == pytest.approx(12, abs=0.01)
    assert (len(rows), len(chart.lanes)) == (12, 3)


def test_an_ettr_over_time_ends_at_the_ettr(tmp_path):
    (tmp_path / "fleet.toml").write_text(FLEET)
    played_out, run = simulate(Scenario.read(tmp_path / "fleet.toml"), 1), Run.open(BEFORE)
    book = book_run(run.attempts(), run.facts)
    end_s, ettr = ettr_over_time(book)

    assert played_out.over_time[-1] == pytest.approx((9 * 86400, played_out.ettr))
    assert played_out.num_incidents > 3
    wall_s = (book.wall[1] - book.wall[0]) / 1e9
    assert (end_s[-1], ettr[-1]) == pytest.approx((wall_s, ettr_of_steps(stepped_s(book)[0], wall_s=wall_s)))
    assert (np.diff(end_s) >= 0).all()


@pytest.mark.parametrize(
    ("words", "figures"),
    [
        ("parallel schedule show 1f1b", 1),
        ("fault sim fleet.toml", 1),
        (f"power check {BEFORE} --spec moderate --device H100-SXM5-80GB --step-s 0.005", 3),
        (f"cluster prices {BEFORE} --data prices.json --device-type v100", 2),
    ],
)  # fmt: skip
def test_verbs_write_a_page_of_what_they_say(tmp_path, monkeypatch, words, figures):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.toml").write_text(FLEET)
    aws_json(tmp_path)
    done = headway_here(*words.split(), "-o", "page.html", "--json", folder=tmp_path)

    assert done.returncode in (0, 3), done.stderr
    assert (tmp_path / "page.html").read_text().count("<figure") == figures


def test_a_run_of_which_nothing_failed_has_no_ettr_to_draw(tmp_path):
    assert json_of("fault", "incidents", BEFORE, "--json")["ettr"] is None
    assert "nothing failed" in refusal("fault", "incidents", BEFORE, "-o", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
