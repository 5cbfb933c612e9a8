"""The live page: the report's own sections, made of an account that still grows."""

import re
from dataclasses import replace

import pytest

from headway.ledger.live_ledger import LiveLedger
from headway.report.page.live import LATE_NS, STATES, LiveView, live_charts, live_key, live_page, live_parts, live_why
from headway.runtime.run_folder.live_feed import records_of
from headway.trace.rings.records import RingHeader
from tests.report_data import decode
from tests.runs_made import MS, RunMaker
from tests.test_html_report import HOSTILE, _Outline

JOB = RunMaker(ranks=3, steps=40, fetch_ns=8 * MS, compute_ns=lambda rank, step: (5 + 2 * (rank == 1)) * MS)


def grown(steps=40, *, ranks=3, attempt=0):
    """Return a ledger that has seen the first `steps` steps, and a moment soon after them."""
    job = replace(JOB, ranks=ranks, steps=max(steps, 1), attempt=attempt)
    made = job.make()
    ledger = LiveLedger(start_ns=made.meta["start_ns"], world_size=ranks)
    for rank in range(ranks if steps else 0):
        ledger.add(RingHeader(100 + rank, rank, attempt=attempt), records_of(made.trace.select(ranks=[rank])))
    return ledger, made.meta["end_ns"] - 45 * MS


def view(steps=40, *, state="running", later_ns=0, **more):
    ledger, moment = grown(steps, **more)
    return LiveView("runs/x", state, ledger.figures(moment + later_ns)), ledger.series()


VIEWS = {
    "before the run": (LiveView("runs/x", "waiting"), None),
    "before the first step": view(0),
    "two steps": view(2),
    "many steps": view(),
    "a later attempt": view(attempt=1),
    "one rank": view(ranks=1),
    "a hundred ranks": view(3, ranks=100),
    "a lost launcher": view(state="lost"),
    "over, without a report": (replace(view()[0], state="ended", reason="It holds no events."), None),
}


@pytest.mark.parametrize("name", VIEWS)
def test_the_page_nests_asks_for_nothing_and_follows_its_own_origin_only(name):
    text = live_page(*VIEWS[name])
    outline = _Outline(text)

    policy = next(a["content"] or "" for _, a in outline.tags if a.get("http-equiv") == "Content-Security-Policy")
    ids = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert outline.open == []
    assert len(ids) == len(set(ids))
    assert not re.search(r"(?i)https?:|@import", text)
    assert policy.startswith("default-src 'none'; ")
    assert policy.endswith("; connect-src 'self'")
    assert "new EventSource" in text


@pytest.mark.parametrize("name", VIEWS)
def test_every_part_that_changes_has_its_place_on_the_page(name):
    shown, series = VIEWS[name]
    ids = {attributes.get("id") for _, attributes in _Outline(live_page(shown, series)).tags}

    for part, markup in live_parts(shown).items():
        assert part in ids
        assert _Outline(markup).tags[0][1]["id"] == part  # what replaces it bears its name


def test_a_report_does_not_follow_anything():
    from headway.report.page.html import page
    from tests.report_data import demo_report

    text = page(demo_report())

    assert "EventSource" not in text
    assert "connect-src" not in text


def test_the_account_on_the_page_adds_up():
    why = live_why(view()[0].figures)

    assert sum(why["ledger_ns"].values()) == pytest.approx(why["devices"] * why["wall_ns"], abs=why["devices"])
    assert why["causes"][0]["cause"] == "input"
    assert why["goodput"] == pytest.approx(why["ledger"]["useful"] / sum(why["ledger"].values()))


def test_the_charts_hold_every_booked_step():
    shown, series = view()
    charts = live_charts(series)

    medians = [sorted(column)[1] for column in series.step_s.T.tolist()]
    assert decode(charts["steps"]["middle"]).tolist() == pytest.approx(medians, rel=1e-3)
    assert charts["steps"]["ranks"] == [0, 1, 2]
    assert set(charts["shares"]["shares"]) == set(shown.figures.charted)
    assert charts["leads"]["steps"].startswith("40 steps.")


def test_the_line_says_how_far_the_run_is():
    now = live_parts(view(attempt=1)[0])["live-now"]

    assert re.search(r"step 40 · [\d.]+ steps/s · 3 of 3 ranks training · attempt 2 · .* since the start", now)


def test_the_sections_change_the_key_and_the_steps_do_not():
    keys = [live_key(shown) for shown, _ in VIEWS.values()]

    assert len(set(keys)) == len(keys) - 1  # two steps and many have the same sections
    assert live_key(VIEWS["two steps"][0]) == live_key(VIEWS["many steps"][0])


@pytest.mark.parametrize("state", STATES)
def test_until_there_is_a_verdict_a_sentence_stands_in_its_place(state):
    figures = view(0)[0].figures
    head = live_parts(LiveView("runs/x", state, figures))["head"]

    assert f"<h1>{STATES[state]}</h1>" in head


def test_a_rank_without_a_step_for_long_is_marked():
    soon, late = live_parts(view()[0])["ranks"], live_parts(view(later_ns=2 * LATE_NS)[0])["ranks"]

    assert "no step for long" not in soon
    assert late.count('<td class="bad">no step for long</td>') == 3


def test_what_a_rank_has_been_doing_for_long_is_named():
    shown, _ = view()
    now = shown.figures.now_ns
    doing = {0: ("comm.wait", now - 7_200_000_000), 1: ("input.next", now - 5_000_000)}
    rows = live_parts(replace(shown, doing=doing))["ranks"]

    assert "comm.wait for 7 s" in rows
    assert "input.next" not in rows


def test_of_very_many_ranks_those_that_are_behind_have_a_row():
    rows = live_parts(VIEWS["a hundred ranks"][0])["ranks"]

    assert rows.count("<tr>") == 1 + 64
    assert "The 64 of 100 ranks with the fewest steps." in rows


def test_text_of_the_run_is_never_markup():
    shown, series = view()
    hostile = replace(shown, title=HOSTILE, facts={HOSTILE: HOSTILE}, created=HOSTILE, state="lost", reason=HOSTILE)
    text = live_page(hostile, series) + "".join(live_parts(hostile).values())

    assert "<script>alert" not in text
    assert "<img" not in text
