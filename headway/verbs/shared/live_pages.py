"""Serve a live page until Ctrl-C: what `headway watch` and `headway cluster watch` do."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence

from headway.report.page.live_server import Allowed, LiveServer, LiveSource, listening, server_of
from headway.verbs.shared.output import emit


def serve_page(
    source: LiveSource, answer: Callable[[str], tuple[Mapping[str, object], str]], *, host: str, port: int,
    allow_origin: Sequence[str], as_json: bool,
) -> int:  # fmt: skip
    """Serve `source` until Ctrl-C, return 0; what `answer` makes of the address is printed before, as JSON or as text.

    Raises `InputError` for an address that cannot be bound, or a
    misspelt origin.
    """
    allowed = Allowed.of(host, allow_origin)
    with listening(host, port) as bound:
        source.poll()
        shown = f"[{host}]" if ":" in host else host
        token = secrets.token_urlsafe(16)
        row, line = answer(f"http://{shown}:{bound.getsockname()[1]}/?token={token}")
        emit(row, lambda _: f"{line}   Ctrl-C ends it", as_json=as_json)
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):  # the usual way to end it
            server_of(LiveServer(source, allowed, token)).run(sockets=[bound])
    return 0
