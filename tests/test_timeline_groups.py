"""The merged timeline: groups of ranks to choose among, and what an operation waited for, over ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._synthetic import SyntheticJob, generate
from headway.ledger.waited_for import waited_for
from headway.report.page.html import ReportData, write_report
from headway.report.page.timeline import MOST_GROUPED_RANKS, Timeline, rank_groups, timeline
from headway.trace.events.trace import Trace
from headway.verbs.runs.report import report_data
from headway.why.explanation import explain
from tests.report_data import decode, demo_why

JOB = SyntheticJob(dp=4, pp=4, num_microbatches=4, num_steps=2)


def one_step() -> Trace:
    trace = generate(JOB, seed=3).trace
    return trace.select(steps=[int(trace.events["step"].min())])


def spans(line: Timeline) -> list[tuple[int, str, int]]:
    """Return (rank, name, start) of every span, in the order in which they are numbered."""
    return [
        (row.rank, line.names[code], start)
        for row in line.rows
        for code, start in zip(row.name_code.tolist(), row.start_ns.tolist(), strict=True)
    ]


@given(st.integers(0, 20), st.integers(1, 40))
def test_links_point_at_the_spans_of_their_rows(seed, most):
    rng = np.random.default_rng(seed)
    n = 30
    columns = {
        "rank": rng.integers(0, 4, n), "start_ns": rng.permutation(n) * 100, "duration_ns": np.full(n, 90),
        "name": np.arange(n), "kind": np.zeros(n),
    }  # fmt: skip
    trace = Trace.from_columns(columns, names=[f"op {i}" for i in range(n)], meta={"device_type": "NVIDIA H200"})
    pairs = rng.integers(0, n, (2, 25))

    line = timeline(trace, links=pairs, most_spans=most)

    drawn = spans(line)
    shown = {(drawn[a][1], drawn[b][1]) for a, b in line.links.T.tolist()}
    kept = {name for _, name, _ in drawn}
    joined = {line.names[c] for row in line.rows for c, k in zip(row.name_code, row.joined, strict=True) if k > 1}
    assert shown <= {(f"op {a}", f"op {b}") for a, b in pairs.T.tolist()}
    assert {(f"op {a}", f"op {b}") for a, b in pairs.T.tolist() if {f"op {a}", f"op {b}"} <= kept - joined} <= shown


def test_links_cross_ranks_and_survive_the_page_s_encoding():
    trace = one_step()

    line = timeline(trace, links=waited_for(trace), groups=rank_groups(trace))

    drawn, told = spans(line), [decode(side).astype(int).tolist() for side in line.to_json()["links"]]
    assert told == line.links.tolist()
    crossing = {(drawn[a][1], drawn[b][1]) for a, b in line.links.T.tolist() if drawn[a][0] != drawn[b][0]}
    assert ("forward-recv", "forward-send") in crossing or ("forward-send", "forward-recv") in crossing
    assert any(a == b == "grads-reduce-scatter" for a, b in crossing)


def test_groups_are_those_of_the_coordinates():
    groups = {group.name: group.ranks for group in rank_groups(one_step())}
    where = one_step().ranks

    assert len(groups) == 8
    assert all(len({where[rank]["pp"] for rank in ranks}) == 1 for name, ranks in groups.items() if name[0] == "d")
    assert all(len({where[rank]["dp"] for rank in ranks}) == 1 for name, ranks in groups.items() if name[0] == "p")
    assert sorted(rank for name, ranks in groups.items() if name[0] == "d" for rank in ranks) == sorted(where)


def test_without_coordinates_the_table_of_groups_is_offered_but_for_the_group_of_all():
    groups = {0: {"name": "0", "ranks": [0, 1, 2, 3]}, 7: {"name": "7", "description": "tp\x1b", "ranks": [2, 3]}}
    trace = Trace.from_columns({}, groups=groups, ranks={rank: {} for rank in range(4)})

    assert [(group.name, group.ranks) for group in rank_groups(trace)] == [("group tp", (2, 3))]


def test_all_ranks_are_there_to_choose_among_though_few_are_shown_at_first():
    trace = one_step()

    line = timeline(trace, groups=rank_groups(trace))

    assert len(line.ranks) == 16
    assert 2 <= len(line.first_ranks) < 16
    assert set(line.first_ranks) <= set(line.ranks)
    assert line.ranks[-1] == line.first_ranks[-1]
    assert len(timeline(trace).ranks) < 16


def test_of_very_many_ranks_only_spread_ones_are_held():
    n = MOST_GROUPED_RANKS + 20
    where = {rank: {"dp": rank % 2, "pp": rank // 2} for rank in range(n)}
    columns = {"rank": np.arange(n), "duration_ns": np.full(n, 9), "kind": np.zeros(n), "name": np.zeros(n)}
    trace = Trace.from_columns(columns, names=["forward"], ranks=where)

    assert len(timeline(trace, groups=rank_groups(trace)).ranks) < MOST_GROUPED_RANKS


def test_a_report_of_an_operation_trace_shows_one_step_and_not_others_over_it(tmp_path):
    generate(JOB, seed=3).trace.save(tmp_path / "t.straggler.parquet")

    data = report_data(explain([tmp_path / "t.straggler.parquet"]))

    assert all((row.joined == 1).all() for row in data.timeline.rows)
    assert data.timeline.links.shape[1] > 100


@pytest.fixture(scope="module")
def shown(tmp_path_factory, browser) -> Any:
    """The page of one step in Chromium, with everything that it complained about."""
    trace, path = one_step(), tmp_path_factory.mktemp("page") / "report.html"
    line = timeline(trace, links=waited_for(trace), groups=rank_groups(trace))
    write_report(ReportData("t", demo_why(), timeline=line), path)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.complaints = []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda request: page.complaints.append(request.url) if request.url[:4] == "http" else None)
    page.goto(Path(path).as_uri())
    page.wait_for_selector("html[data-drawn=yes]", state="attached", timeout=30_000)
    return page


@pytest.mark.slow
def test_a_group_is_shown_alone(shown):
    before = shown.eval_on_selector("#timeline-canvas", "c => c.height")

    shown.select_option("#timeline-group", label="dp group, pp 2")

    assert shown.eval_on_selector("#timeline-canvas", "c => c.height") != before
    shown.select_option("#timeline-group", value="")
    assert shown.eval_on_selector("#timeline-canvas", "c => c.height") == before
    assert shown.complaints == []


@pytest.mark.slow
def test_keys_choose_an_operation_and_follow_what_it_waited_for(shown):
    shown.focus("#timeline-figure")
    for key in ("Shift+ArrowRight", "Shift+ArrowDown", "Shift+ArrowRight", "Shift+ArrowRight"):
        shown.keyboard.press(key)
    chosen = shown.inner_text("#timeline-waits p")

    shown.keyboard.press("w")

    assert "Waited for:" in shown.inner_text("#timeline-waits")
    assert shown.inner_text("#timeline-waits p") != chosen
    shown.keyboard.press("d")
    shown.keyboard.press("Escape")
    assert shown.inner_text("#timeline-waits") == ""
    assert shown.complaints == []


@pytest.mark.slow
def test_a_click_chooses_and_a_drag_does_not(shown):
    shown.locator("#timeline-canvas").scroll_into_view_if_needed()
    box = shown.locator("#timeline-canvas").bounding_box()
    at = shown.evaluate(
        """() => {
            const c = document.getElementById("timeline-canvas"), r = c.width / c.clientWidth;
            const { data } = c.getContext("2d").getImageData(0, 0, c.width, c.height);
            for (let y = 45; y < c.clientHeight; y++)
                for (let x = 200; x < c.clientWidth; x += 3) {
                    const at = 4 * (Math.round(y * r) * c.width + Math.round(x * r));
                    if (data[at + 2] > 180 && data[at] < 90) return [x + 3, y + 4];
                }
        }"""
    )

    shown.mouse.click(box["x"] + at[0], box["y"] + at[1])
    assert "compute" in shown.inner_text("#timeline-waits p")
    told = shown.inner_text("#timeline-waits")
    shown.mouse.move(box["x"] + at[0], box["y"] + at[1])
    shown.mouse.down()
    shown.mouse.move(box["x"] + at[0] + 60, box["y"] + at[1], steps=4)
    shown.mouse.up()

    assert shown.inner_text("#timeline-waits") == told
    assert shown.complaints == []
