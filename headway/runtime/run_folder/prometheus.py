"""The Prometheus endpoint of a host: where its ranks' time goes, as counters that never fall.

Use it through `headway run --metrics-port 9400`. One endpoint stands for all
ranks that this launcher started; attempts add up, so a restart shows as
`headway_restarts_total` and never as a counter that begins again. Bound to
loopback unless told otherwise. Every user of this machine can read it there:
figures, the run's id and the host's name, no path and no argument. With
HEADWAY_METRICS_TOKEN set, only who shows that token, as a bearer header or as
`?token=`, is answered. Seconds are device-seconds unless a name says
otherwise. Text format and server are prometheus-client's.

>>> collector = LedgerCollector(LiveLedger(start_ns=0, world_size=1), {"run_id": "x"}, clock=lambda: 3_000_000_000)
>>> [s.value for m in collector.collect() for s in m.samples if s.labels.get("cause") == "startup"]
[3.0]
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import math
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from headway import __version__
from headway.core.errors import InputError
from headway.core.units import NS_PER_S
from headway.ledger.buckets import BUCKETS
from headway.ledger.live_ledger import STEP_BOUNDS_S, LiveFigures, LiveLedger
from headway.trace.rings.rank_tables import json_object

if TYPE_CHECKING:
    from headway.runtime.run_folder.drain import Drainer
    from headway.runtime.run_folder.recording import RunRecording

LOOPBACK = "127.0.0.1"

TOKEN = "HEADWAY_METRICS_TOKEN"
"""Environment variable with what a scrape must show; unset or empty: nothing."""

MOST_OPEN = 32
"""Connections at one time."""

GROWING = ("startup", "restart")
"""Causes that grow before anything is booked: a rank that has not begun is starting up."""


class LedgerCollector(Collector):
    """Turns a `LiveLedger` into metric families; what is a counter is never reported lower than before."""

    def __init__(
        self, ledger: LiveLedger, info: Mapping[str, str], *, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        """`info` are the labels of `headway_run_info`; `clock` gives ns on CLOCK_MONOTONIC."""
        self._ledger, self._info, self._clock = ledger, info, clock
        self._highest: dict[str, float] = {}
        self._realtime_ns = time.time_ns() - time.perf_counter_ns()

    def collect(self) -> Iterator[Metric]:
        """Return every family as of now."""
        figures = self._ledger.figures(self._clock())
        yield from self._seconds(figures)
        yield from self._steps(figures)
        yield from self._ranks(figures)
        info = GaugeMetricFamily("headway_run_info", "What runs here; always 1.", labels=list(self._info))
        info.add_metric(list(self._info.values()), 1)
        yield info

    def _seconds(self, figures: LiveFigures) -> Iterator[Metric]:
        booked = dict(zip(BUCKETS, figures.booked_ns.tolist(), strict=True))
        booked |= {name: amount for name, amount in figures.bucket_ns.items() if name in GROWING}
        lost = CounterMetricFamily(
            "headway_lost_seconds", "Device-seconds that were no useful work, by ledger bucket.", labels=["cause"]
        )
        for name in BUCKETS:
            if name != "useful":
                lost.add_metric([name], self._never_less(f"lost {name}", booked[name] / NS_PER_S))
        yield lost
        total = self._never_less("device", sum(booked.values()) / NS_PER_S)
        yield _counter("headway_device_seconds", "Device-seconds accounted for so far.", total)
        goodput = "Useful device-time whose result was kept, over accounted device-time."
        ratio = figures.goodput if figures.tells_goodput else math.nan  # Prometheus' word for a value that nobody knows
        yield GaugeMetricFamily("headway_goodput_ratio", goodput, value=ratio)

    def _steps(self, figures: LiveFigures) -> Iterator[Metric]:
        steps = "Optimizer steps completed, those done again after a restart included."
        yield _counter("headway_steps", steps, figures.total_steps)
        counts = figures.step_counts.cumsum().tolist()
        bounds = [*map(str, STEP_BOUNDS_S), "+Inf"]
        yield HistogramMetricFamily(
            "headway_step_seconds",
            "Length of the steps of every rank, in wall seconds.",
            buckets=list(zip(bounds, counts, strict=True)),
            sum_value=figures.step_sum_s,
        )
        dropped = "Records overwritten before they were drained."
        yield _counter("headway_dropped_records", dropped, self._never_less("dropped", figures.dropped))
        yield _counter("headway_restarts", "Attempts after the first one.", figures.attempt)

    def _ranks(self, figures: LiveFigures) -> Iterator[Metric]:
        training = sum(rank.begun and not rank.ended for rank in figures.ranks)
        yield GaugeMetricFamily("headway_ranks_training", "Ranks that have begun their first step.", value=training)
        last = GaugeMetricFamily(
            "headway_last_step_timestamp_seconds", "Unix time of a rank's last complete step.", labels=["rank"]
        )
        for rank in figures.ranks:
            if rank.last_step_ns:
                last.add_metric([str(rank.rank)], (rank.last_step_ns + self._realtime_ns) / NS_PER_S)
        yield last

    def _never_less(self, name: str, value: float) -> float:
        """Return the largest value so far: start-up that a first step cuts short was reported a moment too long."""
        self._highest[name] = max(value, self._highest.get(name, 0.0))
        return self._highest[name]


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


class _RunInfo(Mapping[str, str]):
    """Labels of `headway_run_info`; the device is known once a rank has taken its first step."""

    def __init__(self, run: Path, run_id: str) -> None:
        self._tables = run / "tables"
        self._known = {"run_id": run_id, "host": socket.gethostname(), "version": __version__, "device_type": ""}

    def __getitem__(self, name: str) -> str:
        if name == "device_type" and not self._known[name]:
            found = (json_object(file).get(name) for file in sorted(self._tables.glob("r*.json")))
            self._known[name] = str(next(filter(None, found), ""))
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class Metrics:
    """The endpoint of one launcher; `follow` every attempt's drainer, `close` at the end."""

    def __init__(self, recording: RunRecording, port: int, host: str = LOOPBACK) -> None:
        """Begin to serve `http://host:port/metrics`; port 0 takes a free one. Raises `InputError` when it is taken."""
        self._ledger = LiveLedger(start_ns=recording.start_ns, world_size=recording.nproc)
        registry = CollectorRegistry()
        registry.register(LedgerCollector(self._ledger, _RunInfo(recording.path, recording.run_id)))
        try:
            self._server = _MetricsServer(port, host)
        except OSError as cause:
            raise _refused(port, host, cause) from cause
        self._server.set_app(_only_with(os.environ.get(TOKEN, ""), make_wsgi_app(registry)))
        self._thread = threading.Thread(target=self._server.serve_forever, name="headway-metrics", daemon=True)
        self._thread.start()
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"
        """Where it is served."""

    def follow(self, drainer: Drainer) -> None:
        """Count what `drainer` drains; a later attempt's drainer carries the listener over."""
        if self._ledger.add not in drainer.listeners:
            drainer.listeners.append(self._ledger.add)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)


class _QuietHandler(WSGIRequestHandler):
    """One request; the terminal is the job's."""

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class _MetricsServer(socketserver.ThreadingMixIn, WSGIServer):
    """A thread per connection, and of those at most `MOST_OPEN`: the oldest gives way, since a scrape takes no time."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # with the 5 of the base class, connections beyond wait for a second and more

    def __init__(self, port: int, host: str) -> None:
        """Listen. Raises `OSError`."""
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._open: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        super().__init__((host, port), _QuietHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own."""
        with self._lock:
            if len(self._open) >= MOST_OPEN:
                with contextlib.suppress(OSError):  # it has gone by itself
                    self._open.pop(next(iter(self._open))).shutdown(socket.SHUT_RDWR)  # its thread reads the end
            self._open[id(request)] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a caller that hung up."""


def _only_with(token: str, app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Return `app` for those who show `token`; for everybody when that is empty."""

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        scheme, _, bearer = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        shown = parse_qs(environ.get("QUERY_STRING", "")).get("token", [""])[0]
        shown = bearer.strip() if scheme.lower() == "bearer" else shown
        if token and not hmac.compare_digest(shown.encode(), token.encode()):
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [f"Show the token of {TOKEN}: Authorization: Bearer TOKEN, or ?token=TOKEN.\n".encode()]
        return app(environ, start_response)

    return guarded


def check_port(port: int, host: str = LOOPBACK) -> None:
    """Raise `InputError` when `--metrics-port` could not be served, before any rank starts."""
    if not 0 <= port < 1 << 16:
        raise InputError(f"--metrics-port is {port}; a port is a number from 0 to 65535. Pass 0 for a free one.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server: waiting old ends do not count
            probe.bind(address)
    except OSError as cause:
        raise _refused(port, host, cause) from cause


def _refused(port: int, host: str, cause: OSError) -> InputError:
    if cause.errno == errno.EADDRINUSE:
        return InputError(f"--metrics-port {port} is taken on {host}. Pass 0 for a free port, or another number.")
    reason = cause.strerror or str(cause)
    return InputError(f"--metrics-host {host} port {port} cannot be served: {reason}. Pass an address of this host.")
