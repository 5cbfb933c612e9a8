"""Serves the live page to browsers: one page, one stream of events, nothing else.

Only GET is answered, only to this host's own names (a page of another site
that had its name rebound to this address is refused), only to the page's own
origin, or to origins that were allowed, and only to who shows the token: every
user of this machine can reach loopback. It comes in the address at the first
visit, as a cookie from then on, or as a bearer header. A connection that has
not shown it gives way once there are `MOST_STRANGERS` of them. Events hold whole states, not
changes: a browser that was away for a while misses nothing, and one that
knows the newest state (Last-Event-ID) is not told again. Seconds.

>>> refusal({"host": "127.0.0.1:8000"}, Allowed()), refusal({"host": "evil.example"}, Allowed())[0]
(None, 421)
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from headway.core.errors import InputError

_LOG = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between looks at the run."""

CHART_COST = 500
"""Pictures that took c seconds to make are not made again for so many times c: at most 0.2 % of a core."""

MOST_READERS = 64
"""Browsers that follow at one time."""

MOST_STRANGERS = 64
"""Connections that have not shown the token; of more, the oldest is closed."""

COOKIE = "headway-watch"
"""Cookie, with the port behind it: browsers tell cookies of one address apart by nothing else."""

HEADERS = {
    "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer", "Content-Security-Policy": "frame-ancestors 'none'",
}  # fmt: skip


class LiveSource(Protocol):
    """What is served: a run that is followed, or its report once it is over."""

    def poll(self) -> None:
        """Read what is new."""
        ...

    def key(self) -> str:
        """Return what the page's sections depend on."""
        ...

    def page(self) -> str:
        """Return the page."""
        ...

    def parts(self) -> dict[str, str]:
        """Return id -> markup of what changes."""
        ...

    def charts(self) -> dict[str, object]:
        """Return what the pictures show."""
        ...


@dataclass(frozen=True, slots=True)
class Allowed:
    """Who may ask, beside this host's own addresses."""

    origins: frozenset[str] = frozenset()
    """Origins such as 'https://grafana.example'."""

    hosts: frozenset[str] = frozenset()
    """Names by which this server may be called."""

    @classmethod
    def of(cls, host: str, origins: Sequence[str] = ()) -> Allowed:
        """Return who may ask a server bound to `host`; raises `InputError` for what is no origin."""
        for origin in origins:
            parts = urlsplit(origin)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path or parts.query:
                raise InputError(f"--allow-origin is {origin!r}; an origin is a scheme, a host and a port. "
                                 "Write it as in: --allow-origin http://dashboard:3000")  # fmt: skip
        names = {host.lower()} | ({socket.gethostname().lower()} if not _is_loopback(host) else set())
        hosts = names | {str(urlsplit(origin).hostname) for origin in origins}
        return cls(frozenset(origin.lower() for origin in origins), frozenset(hosts))


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def refusal(headers: Mapping[str, str], allowed: Allowed) -> tuple[int, str] | None:
    """Return (status, sentence) when a request is refused, None when it is answered.

    `headers` have lower-case names. A host that is an address cannot have been rebound; a name must be known.
    starlette's TrustedHostMiddleware knows no such rule: behind a NAT nobody here can list the addresses.
    """
    host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
    if not _known_host(host, allowed):
        return 421, f"This server is not {host[:80]!r}. Open the address that headway watch printed."
    if origin and origin in allowed.origins:
        return None
    if origin and origin not in (f"http://{host}", f"https://{host}"):
        return 403, "Another origin asked. Allow it with: headway watch RUN --allow-origin ORIGIN"
    site, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode", "")
    if site not in ("none", "same-origin") and mode != "navigate":
        return 403, "A page of another origin asked. Open the address itself."
    return None


def _known_host(host: str, allowed: Allowed) -> bool:
    with contextlib.suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or name in allowed.hosts or bool(ipaddress.ip_address(name))
    return False


class PendingConnections:
    """Connections that have not shown the token, oldest first: `MOST_STRANGERS` of them at most stay open."""

    def __init__(self) -> None:
        self._open: dict[Any, asyncio.Transport] = {}

    def add(self, client: Any, transport: asyncio.Transport) -> None:
        """Note a new connection of `client` (address and port); the oldest gives way."""
        self._open[client] = transport
        if len(self._open) > MOST_STRANGERS:
            self._open.pop(next(iter(self._open))).abort()

    def forget(self, client: Any) -> None:
        """Note that a connection is gone, or no stranger's any more."""
        self._open.pop(client, None)


class AccessGuard:
    """Stands before the application: refuses who shows no token and what `refusal` refuses, sets answers' headers."""

    def __init__(self, app: ASGIApp, allowed: Allowed, token: str, strangers: PendingConnections) -> None:
        """Guard `app`."""
        self._app, self._allowed, self._token, self._strangers = app, allowed, token, strangers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, added = HTTPConnection(scope), dict(HEADERS)
        cookie = f"{COOKIE}-{(scope.get('server') or ('', 0))[1]}"
        refused = refusal(request.headers, self._allowed)
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        bearer = bearer.strip() if scheme.lower() == "bearer" else ""
        shown = request.query_params.get("token") or bearer or request.cookies.get(cookie, "")
        if refused is None and not hmac.compare_digest(shown.encode(), self._token.encode()):
            refused = 403, "The token is missing or wrong. Open the whole address that headway watch printed."
        if refused is None:
            self._strangers.forget(scope.get("client"))
            added["Set-Cookie"] = f"{cookie}={self._token}; HttpOnly; SameSite=Lax; Path=/"

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(added)
            await send(message)

        app = self._app if refused is None else PlainTextResponse(f"{refused[1]}\n", refused[0])
        await app(scope, receive, answer)


class LiveServer:
    """Polls a source and tells every reader; run it with `serve`."""

    def __init__(self, source: LiveSource, allowed: Allowed, token: str) -> None:
        """Serve `source` to those who are `allowed` and show `token`."""
        self._source = source
        self._server_id = secrets.token_hex(4)
        self.strangers = PendingConnections()
        """Connections that have not shown the token."""
        self._changed = asyncio.Event()
        self._parts, self._parts_id = "", 0
        self._charts, self._charts_id = "", 0
        self._charts_due_s = 0.0
        self._key = ""
        self._told = ""
        self._readers = 0
        self.closing: Callable[[], bool] = lambda: False
        """Whether the server is about to stop: the streams then end."""
        routes = [Route("/", self._page, methods=["GET"]), Route("/events", self._events, methods=["GET"])]
        guarded = AccessGuard(Starlette(routes=routes, lifespan=self._lifespan), allowed, token, self.strangers)
        self.app: ASGIApp = CORSMiddleware(guarded, allow_origins=allowed.origins, allow_headers=("Authorization",))
        """The application."""

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _watch(self) -> None:
        """Look at the run for as long as the server runs."""
        while True:
            begun_s = time.monotonic()
            try:
                self.look()
            except Exception as reason:  # a disk that is away, say: the next look tries again
                text = f"{type(reason).__name__}: {reason}"
                if text != self._told:  # once for each kind
                    _LOG.warning("the run could not be read: %s", text)
                    self._told = text
            self._changed.set()
            self._changed = asyncio.Event()
            await asyncio.sleep(max(POLL_S - (time.monotonic() - begun_s), 0.05))

    def look(self) -> None:
        """Poll once; what readers are told is made only while there are any."""
        self._source.poll()
        self._key = self._source.key()
        if self._readers:
            self._render()

    def _render(self) -> None:
        parts = json.dumps(self._source.parts())
        if parts != self._parts:
            self._parts, self._parts_id = parts, self._parts_id + 1
        now_s = time.monotonic()
        if now_s >= self._charts_due_s:
            begun_s = time.thread_time()
            charts = json.dumps(self._source.charts(), allow_nan=False)
            self._charts_due_s = now_s + CHART_COST * (time.thread_time() - begun_s)
            if charts != self._charts:
                self._charts, self._charts_id = charts, self._charts_id + 1

    async def _page(self, _: Request) -> Response:
        return HTMLResponse(await asyncio.to_thread(self._source.page))

    async def _events(self, request: Request) -> Response:
        if self._readers >= MOST_READERS:
            return PlainTextResponse(f"{MOST_READERS} browsers follow this run already. Close one.\n", 503)
        known = self._known(request.headers.get("last-event-id", ""))
        stream = self._stream(request.query_params.get("page", ""), *known)
        return StreamingResponse(stream, media_type="text/event-stream")

    def _known(self, last: str) -> tuple[int, int]:
        """Return what a reader has seen, by the id of its last event; nothing when another server told it."""
        server_id, _, numbers = last.partition("-")
        parts, _, charts = numbers.partition("-")
        same = server_id == self._server_id and parts.isdigit() and charts.isdigit()
        return (int(parts), int(charts)) if same else (0, 0)

    async def _stream(self, page: str, parts_seen: int, charts_seen: int) -> AsyncIterator[str]:
        """Tell one reader the newest state whenever there is a newer one."""
        self._readers += 1
        try:
            yield "retry: 1000\n\n"
            self._render()
            while not self.closing():
                changed = self._changed
                if page and page != self._key:
                    yield "event: reload\ndata: {}\n\n"
                    return
                if self._parts_id > parts_seen:
                    parts_seen = self._parts_id
                    yield self._event("parts", self._parts, parts_seen, charts_seen)
                if self._charts_id > charts_seen:
                    charts_seen = self._charts_id
                    yield self._event("charts", self._charts, parts_seen, charts_seen)
                await changed.wait()
            yield "event: bye\ndata: {}\n\n"
        finally:
            self._readers -= 1

    def _event(self, name: str, data: str, parts: int, charts: int) -> str:
        return f"id: {self._server_id}-{parts}-{charts}\nevent: {name}\ndata: {data}\n\n"


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host`, `port` (0 = a free one). Raises `InputError` when that cannot be."""
    if not 0 <= port < 1 << 16:
        raise InputError(f"--port is {port}; a port is a number from 0 to 65535. Pass 0 for a free one.")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as cause:
        # The system's own words: `socket.create_server` adds the address, which the message already has.
        reason = os.strerror(cause.errno) if cause.errno and cause.errno > 0 else cause.strerror or str(cause)
        raise InputError(
            f"{host} port {port} cannot be served: {reason}. Pass --port 0 for a free port, "
            "and a --host that is an address of this machine."
        ) from cause


class _QuietServer(uvicorn.Server):
    """A server that looks for its end twice a second; uvicorn's own loop, at ten times, costs as much as the page."""

    async def main_loop(self) -> None:
        """Wait until the server is told to stop."""
        while not self.should_exit:
            await asyncio.sleep(0.5)


def server_of(live: LiveServer) -> uvicorn.Server:
    """Return the server of `live`; `run(sockets=[...])` runs it until `should_exit` is set or a signal comes."""

    class Protocol(H11Protocol):
        """One connection; uvicorn itself would keep any number that never ask for anything."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's own
            super().connection_made(transport)
            live.strangers.add(self.client, transport)

        def connection_lost(self, exc: Exception | None) -> None:
            live.strangers.forget(self.client)
            super().connection_lost(exc)

    config = uvicorn.Config(
        live.app, log_level="critical", access_log=False, ws="none", lifespan="on", loop="asyncio", http=Protocol,
        server_header=False, timeout_graceful_shutdown=3,
    )  # fmt: skip
    server = _QuietServer(config)
    live.closing = lambda: server.should_exit
    return server
