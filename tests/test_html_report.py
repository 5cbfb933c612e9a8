"""The HTML report as a file: complete, closed, escaped, small; whatever is missing leaves no hole."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.report.answers import BUCKET_STYLES
from headway.report.page.charts import HeatMap
from headway.report.page.html import TERMS, TITLES, ReportData, page, write_report
from headway.trace.recording.host_series import DeviceGauges, DeviceSeries, HostSeries
from headway.trace.recording.run_facts import RankMemory
from tests.report_data import decode, demo_report, demo_why, pipeline_report

VOID = {"meta", "link", "br", "input", "img", "hr"}
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\x00\x1b[2J‮"
MEGABYTE = 1_000_000


class _Outline(HTMLParser):
    """Collects tags and checks that they nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def payload(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


REPORTS = {
    "text job": demo_report(),
    "one rank, one step": demo_report(1, 1),
    "no step": demo_report(2, 0),
    "operation trace": pipeline_report(),
    "nothing but a verdict": ReportData("x", {"devices": 1, "steps": 0, "wall_s": 0.0}),
}


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_nests_and_every_id_is_unique(name: str) -> None:
    outline = _Outline(page(REPORTS[name]))

    ids = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert outline.open == []
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_names_no_address_that_could_be_fetched(name: str) -> None:
    text = page(REPORTS[name])

    assert not re.search(r"(?i)https?:|//[a-z0-9-]+\.[a-z]{2,}|@import|url\((?!#hatch)", text)
    for tag, attributes in _Outline(text).tags:
        assert "src" not in attributes
        assert "srcset" not in attributes
        if "href" in attributes:
            assert (attributes["href"] or "").startswith("#") or (tag, attributes["href"]) == ("link", "data:,")


@pytest.mark.parametrize("name", REPORTS)
def test_every_link_leads_to_a_section(name: str) -> None:
    tags = _Outline(page(REPORTS[name])).tags

    targets = {f"#{attributes['id']}" for tag, attributes in tags if tag == "section"}
    assert {attributes["href"] for tag, attributes in tags if tag == "a"} <= targets
    assert targets <= {f"#{section}" for section in TITLES}


def test_the_policy_forbids_every_request_and_admits_only_the_pages_own_scripts() -> None:
    text = page(demo_report())

    policy = next(
        a["content"] or "" for t, a in _Outline(text).tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts}
    assert policy.startswith("default-src 'none'; ")
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == hashes
    assert len(hashes) == 2
    assert "script-src 'unsafe-inline'" not in policy
    assert not [a for _, a in _Outline(text).tags if any(name.startswith("on") for name in a)]


def test_the_library_keeps_its_licence_notice() -> None:
    text = page(demo_report())

    assert "Copyright (c) 2022 Leon Sorokin" in text
    assert "Permission is hereby granted, free of charge" in text


def spoil(value: Any) -> Any:
    """Return `value` with every string in it replaced by a hostile one; keys stay."""
    if isinstance(value, dict):
        return {key: spoil(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [spoil(inner) for inner in value]
    return HOSTILE if isinstance(value, str) else value


def test_text_of_the_run_is_never_markup() -> None:
    plain = demo_report()
    assert plain.run is not None
    run = spoil(plain.run) | {
        "exit": {"code": 1, "class": HOSTILE, "first_rank": 0, "traceback": f"{HOSTILE}\n{HOSTILE}"}
    }
    heat = HeatMap(HOSTILE, np.ones((2, 2)), HOSTILE, HOSTILE, (HOSTILE, "b"), (HOSTILE, "d"))
    hostile = dataclasses.replace(
        plain, title=HOSTILE, why=spoil(demo_why()), run=run, plan=spoil(plain.plan), heat_maps=[heat],
        facts={HOSTILE: HOSTILE, "list": [HOSTILE], "table": {HOSTILE: HOSTILE}}, created=HOSTILE,
    )  # fmt: skip

    text = page(hostile)

    tags = _Outline(text).tags
    assert len([tag for tag, _ in tags if tag == "script"]) == 3
    assert not [tag for tag, _ in tags if tag == "img"]
    assert "<script>alert" not in text
    assert not set(text) & {"\x00", "\x1b", "‮"}


@given(text=st.text(max_size=40))
def test_any_title_gives_a_page_that_nests(text: str) -> None:
    outline = _Outline(page(ReportData(text, {"devices": 1, "steps": 0, "wall_s": 1.0})))

    assert outline.open == []


@pytest.mark.parametrize("missing", ["run", "plan", "step_s", "timeline", "ideal"])
def test_what_is_not_given_is_left_out(missing: str) -> None:
    text = page(dataclasses.replace(demo_report(), **{missing: None}))

    ids = {"run": "applied", "plan": "plan", "step_s": "steps"}
    assert f'<section id="{ids.get(missing, "?")}">' not in text
    assert _Outline(text).open == []


def test_eight_ranks_of_twenty_thousand_steps_take_less_than_a_megabyte(tmp_path: Path) -> None:
    size = write_report(demo_report(8, 20_000), tmp_path / "report.html")

    assert size == (tmp_path / "report.html").stat().st_size
    assert size <= MEGABYTE


def test_a_million_steps_take_less_than_a_megabyte_and_keep_the_slowest() -> None:
    step_s = np.full((1, 1_000_000), 0.01)
    step_s[0, 123_456] = 5.5
    data = ReportData("long", demo_why(), step_s=step_s, bucket_s={"useful": step_s[0]})

    text = page(data)

    assert len(text) <= MEGABYTE
    assert decode(payload(text)["steps"]["high"]).max() == 5.5


def test_steps_that_were_not_recorded_leave_gaps() -> None:
    step_s = np.array([[0.1, math.nan, 0.3, math.inf], [0.1, math.nan, math.nan, 0.4]])

    chart = payload(page(ReportData("gaps", demo_why(), step_s=step_s)))["steps"]

    assert np.array_equal(np.isnan(decode(chart["high"])), [False, True, False, False])


def test_no_step_is_said_in_words() -> None:
    text = page(demo_report(2, 0))

    assert "No step times were recorded." in text
    assert payload(text)["steps"] is None


def test_rank_numbers_must_fit_the_step_times() -> None:
    data = dataclasses.replace(demo_report(), ranks=[0, 1, 2])

    with pytest.raises(InputError, match=r"3 rank numbers name 2 rows of step times. Give one number per row"):
        page(data)


def test_slowdowns_by_step_stand_in_the_order_of_steps() -> None:
    why = demo_why() | {"straggler": {"slowdown": 1.2, "by": {}, "step_slowdown": {"10": 1.1, "9": 1.9, "100": 1.3}}}

    text = page(ReportData("x", why))

    assert re.findall(r"<title>step (\d+): ([\d.]+x)</title>", text) == [
        ("9", "1.90x"),
        ("10", "1.10x"),
        ("100", "1.30x"),
    ]
    assert "median 1.30x, largest 1.90x" in text


def test_ten_thousand_steps_keep_their_slowest_bar() -> None:
    slowdowns = {str(step): 1.1 for step in range(10_000)} | {"7777": 3.0}

    text = page(ReportData("x", demo_why() | {"straggler": {"by": {}, "step_slowdown": slowdowns}}))

    assert "<title>step 7777: 3.00x</title>" in text
    assert text.count("<title>step ") <= 300


def test_a_report_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent does not exist. Create it first"):
        write_report(demo_report(), tmp_path / "absent" / "report.html")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("vision", ["full", "deutan", "protan", "tritan"])
def test_bucket_colours_keep_apart_for_every_eye(theme: str, vision: str) -> None:
    """Distance in OKLab after Machado's simulation; stripes count for a lightness step of their own."""
    seen = {name: _oklab(VISIONS[vision] @ _linear(getattr(s, theme))) for name, s in BUCKET_STYLES.items()}

    apart = {
        (a, b): float(np.linalg.norm(seen[a] - seen[b])) + 0.05 * (BUCKET_STYLES[a].hatched != BUCKET_STYLES[b].hatched)
        for a, b in itertools.combinations(BUCKET_STYLES, 2)
    }
    assert min(apart.values()) >= 0.10, min(apart, key=lambda pair: apart[pair])


VISIONS = {
    "full": np.eye(3),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}
"""Linear RGB seen with the three complete dichromacies (Machado, Oliveira, Fernandes 2009, severity 1.0)."""


def _linear(colour: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    part = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.asarray(np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4))


def _oklab(linear: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    cone = np.array([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                     [0.0883024619, 0.2817188376, 0.6299787005]])  # fmt: skip
    axes = np.array([[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099],
                     [0.0259040371, 0.7827717662, -0.808675766]])  # fmt: skip
    return np.asarray(axes @ np.cbrt(cone @ np.clip(linear, 0, 1)))


def _luminance(colour: str) -> float:
    return float(np.array([0.2126, 0.7152, 0.0722]) @ _linear(colour))


@pytest.mark.parametrize(
    ("ink", "paper"),
    [
        ("#1b2127", "#ffffff"), ("#59636e", "#ffffff"), ("#1f6fb8", "#ffffff"), ("#1d7a45", "#ffffff"),
        ("#e4e8ec", "#14181c"), ("#98a3ae", "#14181c"), ("#6db1ee", "#14181c"), ("#63c58a", "#14181c"),
    ],
)  # fmt: skip
def test_text_stands_out_from_the_page(ink: str, paper: str) -> None:
    """WCAG 2.1 AA: contrast of at least 4.5. The colours are those of the style sheet."""
    bright, dim = sorted((_luminance(ink), _luminance(paper)), reverse=True)

    assert (bright + 0.05) / (dim + 0.05) >= 4.5
    assert f": {ink};" in page(pipeline_report())


def test_the_terms_of_the_page_are_explained_as_in_the_glossary():
    glossary = (Path(__file__).parent.parent / "docs" / "glossary.md").read_text()
    shown = page(ReportData("a run", demo_why()))

    assert [name for name, meaning in TERMS.items() if f"| {meaning} |" not in glossary] == []
    assert "<dt>cpu_wait</dt>" in shown
    assert "<dt>result-equivalent</dt>" not in shown, "the page does not have that word"


def test_the_host_over_time_is_drawn_where_it_was_followed():
    series = HostSeries(
        end_s=(1.0, 2.0), own_cores=(0.5, 1.0), other_cores=(0.0, 1.0), memory_bytes=(10**8, 2 * 10**8), cores=2
    )
    shown = page(ReportData("a run", demo_why(), host=series))

    assert "Host over time" in shown
    assert 'points="0,72 0.0,54.0 500.0,54.0 500.0,36.0 1000.0,36.0 1000,72"' in shown
    assert "up to 200.0 MB" in shown
    assert "Host over time" not in page(ReportData("a run", demo_why()))


def test_what_the_devices_did_is_drawn_as_far_as_the_driver_told():
    told = {"name": "H<100>", "memory_total_bytes": 80 * 10**9, "power_limit_w": 700.0}
    first = DeviceGauges(utilization_fraction=(0.5, 1.0), memory_bytes=(10e9, 20e9), power_w=(None, 350.0), **told)
    second = DeviceGauges(utilization_fraction=(0.0, 0.5), memory_bytes=(10e9, 60e9), **told)
    memory = {"0": RankMemory(device_peak_bytes=18 * 10**9, device_allocated_bytes=15 * 10**9), "1": None}
    shown = page(
        ReportData("a run", demo_why(), devices=DeviceSeries(end_s=(1.0, 2.0), devices=(first, second)), memory=memory)
    )

    assert "H&lt;100&gt;: 2 devices." in shown
    assert "torch reserved 18.0 GB for a rank, 15.0 GB of it for tensors" in shown
    assert "some kernel ran: mean 50.0 %, highest 100.0 %" in shown
    assert "of all processes: mean 25.0 GB, highest 60.0 GB of 80.0 GB" in shown
    assert "Power: mean 350 W, highest 350 W of the limit of 700 W" in shown
    assert 'points="0,72 0.0,54.0 500.0,54.0 500.0,18.0 1000.0,18.0 1000,72"' in shown  # mean utilisation, 25 and 75 %
    assert "Temperature" not in shown
    assert "Device over time" not in page(ReportData("a run", demo_why()))
