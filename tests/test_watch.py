"""`headway watch` as a person meets it: the command, a run of eight ranks, a real browser."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import InputError
from headway.trace.recording.runs import Run
from headway.verbs.runs.watch import WatchedRun, watch
from tests.paths import ROOT, python_path
from tests.runs_made import RunMaker, write_folder

ENV = {**os.environ, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}


@contextmanager
def writers(run: Path, *, ranks: int = 8, rate: int = 50, seconds: float = 60) -> Iterator[None]:
    """Let `ranks` processes train in `run` at `rate` steps a second."""
    command = [sys.executable, str(ROOT / "tests" / "live_writers.py"), str(run), str(ranks), str(rate), str(seconds)]
    with subprocess.Popen(command, env=ENV, start_new_session=True) as job:
        try:
            yield
        finally:
            os.killpg(job.pid, signal.SIGKILL)


@contextmanager
def watching(run: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `headway watch RUN --json`; yields the address and the process."""
    command = [sys.executable, "-m", "headway.cli", "watch", str(run), "--json", "--wait", *options]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            answer = json.loads(server.stdout.readline())
            assert answer["schema"] == "headway.watch/1"
            yield answer["url"], server
        finally:
            server.kill()


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def end(run: Path) -> None:
    """Complete run.json as a launcher does at its end."""
    meta = json.loads((run / "run.json").read_text())
    meta |= {"end_ns": time.perf_counter_ns(), "exit": {"code": 0, "class": "ok", "first_rank": None, "traceback": ""}}
    (run / "half").write_text(json.dumps(meta))
    (run / "half").replace(run / "run.json")


def test_it_serves_loopback_on_a_free_port_by_default_and_ctrl_c_ends_it_without_an_error(tmp_path):
    with watching(tmp_path / "a") as (one, server), watching(tmp_path / "b") as (other, _):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{16,}", one)
        assert one != other
        assert "Waiting for the run to begin" in fetched(one)
        server.send_signal(signal.SIGINT)
        output, error = server.communicate(timeout=30)

    assert (server.returncode, output, error) == (0, "", "")


def test_a_finished_run_is_shown_as_its_report(tmp_path):
    write_folder(RunMaker(ranks=2, steps=60, fetch_ns=5_000_000).make(), tmp_path)
    source = WatchedRun(tmp_path)
    source.poll()
    text = source.page()

    assert source.state == "ended"
    assert "This file is complete: it loads nothing." in text
    assert "EventSource" not in text
    assert "Causes and fixes" in text


def test_a_run_that_left_nothing_says_why_there_is_no_report(tmp_path):
    meta = RunMaker(ranks=1, steps=1).make().meta
    (tmp_path / "run.json").write_text(json.dumps(meta))
    source = WatchedRun(tmp_path)
    source.poll()
    text = source.page()

    assert "The run has ended." in text
    assert source.standing.startswith(f"ended; {tmp_path} holds no events: the script never imported torch")
    assert "holds no events: the script never imported torch" in text
    assert source.key() in json.loads(text.split('id="data">')[1].split("</script>")[0])["live"]


def test_watching_changes_nothing_in_the_run(tmp_path):
    write_folder(RunMaker(ranks=1, steps=20).make(), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    source = WatchedRun(tmp_path)
    source.poll()
    source.page()
    source.close()

    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("run", "words"), [("file", "file is a file; a run is a folder"), ("", "folder is no run")])
def test_what_is_no_run_is_not_watched(run, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=words):
        watch(Path(run))


# ---- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run of eight ranks that the tests below look at; yields the address of its page."""
    run = tmp_path_factory.mktemp("watched") / "run"
    with writers(run, seconds=300), watching(run) as (url, _):
        yield url


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens an address; what its pages complained of is in `complaints`."""
    pages: list[Any] = []

    def open_page(url: str, **options: Any) -> Any:
        page = browser.new_page(viewport={"width": 1280, "height": 900}, **options)
        page.complaints, page.asked = [], []
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(url)
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()


def step_of(page: Any) -> int:
    """Return the step that the page says the run is at."""
    found = re.search(r"step ([\d,]+)", page.inner_text("#live-now"))
    return int(found[1].replace(",", "")) if found else -1


def until(page: Any, holds: Callable[[], bool]) -> None:
    """Wait until `holds()`; the page's policy allows no script of ours inside it that could wait there."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, f"it never came true; the page says: {page.inner_text('body')[:500]}"
        page.wait_for_timeout(50)


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_eight_ranks_at_fifty_steps_a_second_are_followed_without_a_complaint(followed, opened, theme):
    page = opened(followed, color_scheme=theme)
    page.wait_for_selector("html[data-charts]", state="attached", timeout=30_000)
    until(page, lambda: "8 of 8 ranks training" in page.inner_text("#live-now"))
    page.wait_for_selector("#steps-plot canvas")
    picture = "document.querySelector('#steps-plot canvas').toDataURL()"
    first, drawn = step_of(page), page.evaluate(picture)
    until(page, lambda: step_of(page) > first + 60)
    until(page, lambda: page.evaluate(picture) != drawn)
    rows = page.locator("#ranks tr").count()
    link, lead = page.inner_text("#live-link"), page.inner_text("#steps .lead")
    verdict = page.inner_text("h1")

    assert page.complaints == []
    address = followed.partition("?")[0]
    assert {re.sub(r"\?.*", "", asked) for asked in page.asked} == {address, f"{address}events"}
    assert (rows, link) == (9, "live")
    assert re.match(r"[\d,]+ steps\. The line is the median over ranks", lead)
    assert "8 devices" in verdict


@pytest.mark.slow
def test_a_zoomed_chart_stays_zoomed_while_steps_arrive(followed, opened):
    page = opened(followed)
    page.wait_for_selector("html[data-charts]", state="attached", timeout=30_000)
    until(page, lambda: step_of(page) > 60)
    page.focus("#steps-figure")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("+")
    shown = "(() => { const u = uPlot.sync('steps').plots[1]; return [u.scales.x.min, u.scales.x.max]; })()"
    zoomed = page.evaluate(shown)
    seen = page.evaluate("document.documentElement.dataset.charts")
    until(page, lambda: page.evaluate("document.documentElement.dataset.charts") != seen)

    assert page.evaluate(shown) == zoomed
    assert zoomed[1] - zoomed[0] < step_of(page)
    assert page.complaints == []


@pytest.mark.slow
def test_a_page_opened_before_the_run_follows_it_from_its_first_step_to_its_report(tmp_path, opened):
    run = tmp_path / "run"
    with watching(run) as (url, _):
        page = opened(url)
        waiting = page.inner_text("h1")
        with writers(run, ranks=2, seconds=3):
            page.wait_for_selector("#steps-plot canvas", timeout=30_000)
            until(page, lambda: step_of(page) > 100)
        end(run)
        until(page, lambda: "This file is complete" in page.inner_text("footer"))

        assert waiting == "Waiting for the run to begin."
        assert page.locator("#live-now").count() == 0
        assert f"{Run.open(run).trace.meta['num_steps']} steps" in page.inner_text("#steps .lead")
        assert page.complaints == []


@pytest.mark.slow
def test_a_page_of_another_origin_reads_nothing(followed, opened):
    read = f"fetch({json.dumps(followed.replace('?', 'events?'))}).then((r) => r.status, () => 'refused')"
    assert opened("data:text/html,<title>stranger</title>").evaluate(read) == "refused"
    rebound = urllib.request.Request(followed, headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="421"):
        urllib.request.urlopen(rebound, timeout=30)


@pytest.mark.slow
def test_a_page_that_loses_its_server_says_so(tmp_path, opened):
    with watching(tmp_path / "run") as (url, server):
        page = opened(url)
        until(page, lambda: page.inner_text("#live-link") == "live")
        server.send_signal(signal.SIGINT)
        server.wait(30)
    until(page, lambda: page.get_attribute("#live-link", "data-link") == "lost")

    assert page.inner_text("#live-link") in ("no longer watched", "connection lost, trying again")
