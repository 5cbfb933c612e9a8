"""The HTML report in a real browser: it draws, asks for nothing, complains about nothing, obeys keys and themes."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.core.units import seconds
from headway.report.page.charts import HeatMap
from headway.report.page.html import ReportData, write_report
from tests.report_data import demo_report, demo_why, pipeline_report

pytestmark = pytest.mark.slow


class Opened:
    """A page, drawn, with everything it asked for and complained about."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.address = path.as_uri()
        self.page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append("dialog"), dialog.dismiss()))
        self.page.goto(self.address)
        self.page.wait_for_selector("html[data-drawn=yes]", state="attached", timeout=30_000)

    def colours(self, selector: str) -> int:
        """Return how many different pixel values a canvas holds."""
        script = """(canvas) => {
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            return new Set(new Uint32Array(data.buffer)).size;
        }"""
        return int(self.page.eval_on_selector(selector, script))


Opener = Callable[..., Opened]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Opener]:
    """Return a function that writes a report and opens it; its pages are closed after the test."""
    pages: list[Opened] = []

    def write_and_open(data: ReportData, **options: Any) -> Opened:
        write_report(data, tmp_path / "report.html")
        pages.append(Opened(browser, tmp_path / "report.html", **options))
        return pages[-1]

    yield write_and_open
    for one in pages:
        one.page.close()


def gaps() -> ReportData:
    step_s = np.array([[0.1, math.nan, 0.3, math.inf, 0.2], [0.1, math.nan, math.nan, 0.4, 0.2]])
    buckets = {"useful": np.array([0.1, 0, math.nan, 0.3, 0.2]), "input": np.zeros(5)}
    return ReportData("gaps", demo_why(), step_s=step_s, bucket_s=buckets)


def long() -> ReportData:
    step_s = np.full((1, 1_000_000), 0.01)
    step_s[0, 123_456] = 5.5
    return ReportData("long", demo_why(), step_s=step_s, bucket_s={"useful": step_s[0]})


def wide() -> ReportData:
    slowdown = 1 + np.random.default_rng(3).exponential(0.02, (1024, 2000))
    return ReportData("wide", demo_why(), heat_maps=[HeatMap("Slowdown", slowdown, "rank", "step")])


REPORTS = {
    "text job": demo_report,
    "one rank, one step": lambda: demo_report(1, 1),
    "two ranks, two steps": lambda: demo_report(2, 2),
    "no step": lambda: demo_report(2, 0),
    "nothing recorded in any step": lambda: ReportData("nan", demo_why(), step_s=np.full((2, 9), math.nan)),
    "steps of no length": lambda: ReportData("zero", demo_why(), step_s=np.zeros((2, 9))),
    "gaps": gaps,
    "a million steps": long,
    "a thousand ranks": wide,
    "operation trace": pipeline_report,
    "nothing but a verdict": lambda: ReportData("x", {"devices": 1, "steps": 0, "wall_s": 0.0}),
}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", REPORTS)
def test_the_page_is_drawn_without_a_request_or_a_complaint(opened: Opener, name: str, theme: str) -> None:
    page = opened(REPORTS[name](), color_scheme=theme)

    assert page.requests == [page.address]
    assert page.complaints == []


@pytest.mark.parametrize("width", [1280, 700, 390])
def test_nothing_reaches_beyond_the_window(opened: Opener, width: int) -> None:
    shown = opened(demo_report(8, 400), viewport={"width": width, "height": 900})

    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
    for selector in ("#steps-plot canvas", "#shares-plot canvas", "#timeline-canvas", "#heat-0-canvas"):
        assert shown.colours(selector) > 3


def test_on_a_phone_no_row_of_a_table_is_squeezed_into_a_tower(opened: Opener) -> None:
    shown = opened(demo_report(2, 40), viewport={"width": 390, "height": 900})
    heights = shown.page.eval_on_selector_all("table tr", "rows => rows.map(row => row.offsetHeight)")
    bars = shown.page.eval_on_selector_all(".ledger td.bar", "cells => cells.map(cell => cell.offsetWidth)")

    ends = shown.page.eval_on_selector_all(".proposals td", "cells => cells.map(c => c.getBoundingClientRect().right)")
    starts_px = shown.page.eval_on_selector_all(".figures div", "tiles => tiles.map(tile => tile.offsetLeft)")

    assert max(heights) < 110
    assert min(bars) > 60
    assert max(ends) <= 390
    assert starts_px[-1] > min(starts_px), "a tile is alone on its row"


def test_arrow_keys_read_the_recorded_values(opened: Opener) -> None:
    data = dataclasses.replace(demo_report(), first_step=100)
    page = opened(data).page

    page.focus("#steps-figure")
    page.keyboard.press("ArrowRight")

    said = page.inner_text("#steps-readout")
    step = int(said.split(":")[0].removeprefix("step "))
    column = data.step_s[:, step - 100]
    low, middle, high = (seconds(float(v)) for v in (column.min(), np.median(column), column.max()))
    assert said == f"step {step}: median {middle}, range {low} to {high}"
    assert page.inner_text("#shares-readout").startswith(f"step {step}: input ")


def test_a_stretch_of_steps_is_zoomed_in_both_charts(opened: Opener) -> None:
    page = opened(demo_report()).page
    page.locator("#steps-figure").scroll_into_view_if_needed()
    box = page.locator("#steps-plot .u-over").bounding_box()
    look = "document.querySelector('#shares-plot canvas').toDataURL()"
    whole = page.evaluate(look)

    page.mouse.move(box["x"] + 200, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 50, steps=4)
    page.mouse.up()
    page.wait_for_timeout(100)
    zoomed = page.evaluate(look)
    page.mouse.dblclick(box["x"] + 300, box["y"] + 50)
    page.wait_for_timeout(100)

    assert zoomed != whole
    assert page.evaluate(look) == whole


def test_a_chosen_rank_is_read_beside_the_median(opened: Opener) -> None:
    page = opened(demo_report()).page

    page.select_option("#steps-rank", "1")
    page.focus("#steps-figure")
    page.keyboard.press("ArrowLeft")

    assert ": rank 1 " in page.inner_text("#steps-readout")


def test_keys_zoom_the_timeline_and_home_shows_all_of_it(opened: Opener) -> None:
    shown = opened(demo_report())
    picture = "document.getElementById('timeline-canvas').toDataURL()"
    whole = shown.page.evaluate(picture)

    shown.page.focus("#timeline-figure")
    shown.page.keyboard.press("+")
    closer = shown.page.evaluate(picture)
    shown.page.keyboard.press("Home")

    assert closer != whole
    assert shown.page.evaluate(picture) == whole
    assert shown.complaints == []


def test_pointing_at_a_span_describes_it(opened: Opener) -> None:
    page = opened(demo_report()).page
    page.locator("#timeline-figure").scroll_into_view_if_needed()
    box = page.locator("#timeline-canvas").bounding_box()
    assert box

    seen = set()
    for x in range(150, int(box["width"]), 9):
        page.mouse.move(box["x"] + x, box["y"] + 47)
        if page.is_visible("#timeline-tip"):
            seen.add(page.inner_text("#timeline-tip b"))

    assert {"input.next", "compute", "checkpoint.save"} <= seen


def test_the_button_changes_the_theme_of_page_and_pictures(opened: Opener) -> None:
    page = opened(demo_report(), color_scheme="light").page
    look = "[getComputedStyle(document.body).backgroundColor, document.getElementById('timeline-canvas').toDataURL()]"
    before = page.evaluate(look)

    page.focus("#theme")
    page.keyboard.press("Enter")
    dark = page.evaluate(look)
    page.keyboard.press("Enter")

    assert before[0] == "rgb(255, 255, 255)"
    assert dark[0] == "rgb(20, 24, 28)"
    assert dark[1] != before[1]
    assert page.evaluate(look) == before


def test_paper_is_white_even_from_a_dark_screen(opened: Opener) -> None:
    page = opened(demo_report(), color_scheme="dark").page
    page.emulate_media(media="print", color_scheme="dark")

    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.is_visible("#theme")
    assert len(page.pdf(format="A4")) > 10_000


def test_every_control_is_reached_with_the_tab_key(opened: Opener) -> None:
    page = opened(demo_report()).page

    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('href')"))

    wanted = {"theme", "#ledger", "steps-figure", "steps-rank", "steps-log", "shares-figure", "timeline-figure"}
    assert wanted | {"timeline-in", "timeline-all", "heat-0-figure"} <= set(reached)


def test_hostile_text_does_nothing(opened: Opener) -> None:
    hostile = "<img src=x onerror=alert(1)><script>alert(2)</script></script>"
    why = demo_why()
    why["causes"][0] |= {"where": hostile, "fix": hostile, "evidence": hostile, "cause": hostile}
    data = dataclasses.replace(demo_report(), title=hostile, why=why, facts={hostile: hostile})
    shown = opened(data)

    assert shown.complaints == []
    assert shown.page.locator("main img, main script").count() == 0
    assert shown.page.inner_text(".top .name") == hostile


def test_without_scripts_the_figures_are_still_there(browser: Any, tmp_path: Path) -> None:
    write_report(demo_report(), tmp_path / "report.html")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((tmp_path / "report.html").as_uri())

    assert "went to waiting for input" in page.inner_text("h1")
    assert page.locator("#ledger rect").count() > 20
    assert page.locator(".no-script:visible").count() == 4
    context.close()
