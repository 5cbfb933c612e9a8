"""The Prometheus endpoint: text that the client library parses, counters that never fall, one endpoint per host."""

import contextlib
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from headway.core.errors import InputError
from headway.ledger.buckets import BUCKETS
from headway.ledger.live_ledger import LiveLedger
from headway.runtime.launching.options import LaunchOptions, check
from headway.runtime.run_folder.live_feed import records_of
from headway.runtime.run_folder.prometheus import LedgerCollector, Metrics, check_port
from headway.trace.rings.records import RingHeader
from tests.paths import ROOT, python_path
from tests.recorded import environment
from tests.runs_made import MS, RunMaker

INFO = {"run_id": "made", "host": "here"}


def scraped(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Parse the exposition with the client library's parser: (sample name, labels) -> value."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def counters(samples):
    """Return the samples that may never fall."""
    growing = ("_total", "_count", "_sum", "_bucket")
    return {key: value for key, value in samples.items() if key[0].endswith(growing)}


def exposition(ledger, now_ns):
    registry = CollectorRegistry()
    registry.register(LedgerCollector(ledger, INFO, clock=lambda: now_ns))
    return generate_latest(registry).decode()


@settings(max_examples=15)
@given(attempts=st.lists(st.tuples(st.integers(2, 12), st.integers(1, 4)), min_size=1, max_size=4))
def test_no_counter_falls_over_any_number_of_restarts(attempts):
    clock = [0]
    ledger = LiveLedger(start_ns=0, world_size=2)
    registry = CollectorRegistry()
    registry.register(LedgerCollector(ledger, INFO, clock=lambda: clock[0]))
    before: dict = {}
    for attempt, (steps, looks) in enumerate(attempts):
        made = RunMaker(ranks=2, steps=steps, start_ns=clock[0], attempt=attempt).make()
        records = [records_of(made.trace.select(ranks=[rank])) for rank in (0, 1)]
        for look in range(looks):
            for rank in (0, 1):
                part = records[rank][look::looks] if looks == 1 else records[rank]
                ledger.add(RingHeader(10 * attempt + rank + 1, rank, attempt=attempt), part if look == 0 else part[:0])
            clock[0] += (made.meta["end_ns"] - made.meta["start_ns"]) // looks
            after = counters(scraped(generate_latest(registry).decode()))
            assert all(after[key] >= value for key, value in before.items())
            before = after

    assert before["headway_restarts_total", ()] == len(attempts) - 1
    assert before["headway_steps_total", ()] == sum(steps for steps, _ in attempts)


def test_the_figures_are_those_of_the_account():
    made = RunMaker(ranks=2, steps=50, compute_ns=lambda rank, step: (5 + 4 * rank) * MS, gc_ns=MS).make()
    ledger = LiveLedger(start_ns=made.meta["start_ns"], world_size=2)
    for rank in (0, 1):
        ledger.add(RingHeader(rank + 1, rank), records_of(made.trace.select(ranks=[rank])))
    figures = ledger.figures(made.meta["end_ns"] - 40 * MS)
    samples = scraped(exposition(ledger, made.meta["end_ns"] - 40 * MS))

    for name in BUCKETS:
        if name != "useful":
            assert samples["headway_lost_seconds_total", (("cause", name),)] == figures.bucket_ns[name] / 1e9
    assert samples["headway_goodput_ratio", ()] == pytest.approx(figures.goodput)
    assert samples["headway_steps_total", ()] == 50
    assert samples["headway_step_seconds_count", ()] == samples["headway_step_seconds_bucket", (("le", "+Inf"),)] == 100
    assert samples["headway_device_seconds_total", ()] == pytest.approx(sum(figures.bucket_ns.values()) / 1e9)
    assert samples["headway_run_info", tuple(sorted(INFO.items()))] == 1
    assert samples["headway_ranks_training", ()] == 2


def test_lost_and_useful_time_add_up_to_the_device_time():
    made = RunMaker(ranks=1, steps=20).make()
    ledger = LiveLedger(start_ns=made.meta["start_ns"], world_size=1)
    ledger.add(RingHeader(1, 0), records_of(made.trace))
    samples = scraped(exposition(ledger, 0))
    lost = sum(value for (name, _), value in samples.items() if name == "headway_lost_seconds_total")

    device_s = samples["headway_device_seconds_total", ()]
    assert lost + samples["headway_goodput_ratio", ()] * device_s == pytest.approx(device_s)


def test_a_taken_port_is_refused_before_anything_starts(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"--metrics-port {port} is taken on 127.0.0.1. Pass 0 for a free port"):
            check(LaunchOptions(metrics_port=port), [str(script)])


@pytest.mark.parametrize(
    ("port", "host", "message"),
    [(70_000, "127.0.0.1", r"--metrics-port is 70000; a port is a number"),
     (0, "203.0.113.7", r"--metrics-host 203.0.113.7 .*cannot be served.*an address of this host")],
)  # fmt: skip
def test_an_address_that_cannot_be_is_refused(port, host, message):
    with pytest.raises(InputError, match=message):
        check_port(port, host)


def test_a_launch_line_of_somebody_else_has_no_endpoint(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(InputError, match=r"stands for the ranks that headway launches.*drop --no-launch"):
        check(LaunchOptions(metrics_port=0, no_launch=True), [str(script)])


JOB = """
import os, sys, time
from headway.trace.rings.ring import Recorder
from tests.live_writers import write_step
rank, attempt = int(os.environ["RANK"]), int(os.environ["HEADWAY_ATTEMPT"])
recorder = Recorder(os.environ["HEADWAY_RUN"] + "/rings", rank=rank, attempt=attempt)
recorder.open()
begin = time.perf_counter_ns()
for step in range(60):
    time.sleep(0.02)
    write_step(recorder, rank, step, begin + step * 20_000_000, 20_000_000, slow=1)
    if attempt == 0 and step == 30 and rank == 1:
        sys.exit(3)
recorder.close()
"""
"""A rank without torch: what its probes would write, it writes itself, so that two attempts take two seconds."""


def test_silent_connections_and_strangers_keep_no_scrape_from_its_figures(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_METRICS_TOKEN", "a token")
    metrics = Metrics(SimpleNamespace(start_ns=0, nproc=1, path=tmp_path, run_id="x"), 0)
    port = int(metrics.url.rpartition(":")[2].partition("/")[0])
    with contextlib.ExitStack() as opened:
        silent = [opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(100)]
        bearer = urllib.request.Request(metrics.url, headers={"Authorization": "Bearer a token"})
        answers = [urllib.request.urlopen(ask, timeout=20).read() for ask in (bearer, f"{metrics.url}?token=a+token")]
        let_go = silent[0].recv(1)
        for wrong in (metrics.url, f"{metrics.url}?token=a"):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(wrong, timeout=20)
    metrics.close()

    assert all(b"headway_goodput_ratio" in answer for answer in answers)
    assert let_go == b""


@pytest.mark.slow
def test_counters_of_a_real_job_go_on_over_its_restart(tmp_path):
    (tmp_path / "train.py").write_text(JOB)
    command = [sys.executable, "-m", "headway.cli", "run", "--nproc-per-node", "2", "--max-restarts", "1",
               "--metrics-port", "0", "--windows", "0", "--out", "run", "--", "train.py"]  # fmt: skip
    env = environment(None, PYTHONPATH=python_path(ROOT))
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as job:
        found = None
        while found is None:
            found = re.search(r"metrics at (http://127\.0\.0\.1:\d+/metrics)", job.stderr.readline())
        scrapes = []
        while job.poll() is None:
            try:
                with urllib.request.urlopen(found[1], timeout=10) as answer:
                    assert answer.headers["Content-Type"].startswith("text/plain")
                    scrapes.append(counters(scraped(answer.read().decode())))
            except OSError:
                break  # the job is over
            time.sleep(0.05)
        job.stderr.read()
        code = job.wait(60)

    assert code == 0
    for before, after in pairwise(scrapes):
        assert all(after[key] >= value for key, value in before.items())
    last = scrapes[-1]
    assert last["headway_restarts_total", ()] == 1
    assert 60 < last["headway_steps_total", ()] <= 120  # ranks do not wait for each other here
    assert last["headway_lost_seconds_total", (("cause", "rework"),)] > 0.5
    assert last["headway_lost_seconds_total", (("cause", "restart"),)] > 0
