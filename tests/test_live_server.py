"""The live page's server: who is answered, and that no reader misses anything, however it comes and goes."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from headway.core.errors import InputError
from headway.report.page import live_server
from headway.report.page.live_server import HEADERS, Allowed, LiveServer, listening, server_of

TOKEN = "a token"
LOOPBACK = Allowed.of("127.0.0.1")
DASHBOARD = Allowed.of("127.0.0.1", ["http://dashboard:3000"])


class Counting:
    """A source whose state is a number that each poll raises, while it `moves`."""

    def __init__(self) -> None:
        self.number, self.moves, self.sections = 0, True, "one"

    def poll(self) -> None:
        self.number += self.moves

    def key(self) -> str:
        return self.sections

    def page(self) -> str:
        return f"<!doctype html><title>{self.number}</title>"

    def parts(self) -> dict[str, str]:
        return {"now": str(self.number)}

    def charts(self) -> dict[str, Any]:
        return {"steps": list(range(self.number))}


@contextmanager
def served(source, allowed=LOOPBACK) -> Iterator[int]:
    """Serve `source` on a free port of loopback, in a thread; yields the port."""
    with listening("127.0.0.1", 0) as bound:
        server = server_of(LiveServer(source, allowed, TOKEN))
        thread = threading.Thread(target=lambda: server.run(sockets=[bound]), daemon=True)
        thread.start()
        try:
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive(), "the server did not end"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Look at the source often: tests wait for what a poll brings, not for time."""
    monkeypatch.setattr(live_server, "POLL_S", 0.02)
    monkeypatch.setattr(live_server, "CHART_COST", 0)


def ask(port, path="/", method="GET", token=TOKEN, **headers):
    """Return status, headers and text of one request."""
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, text


class Reader:
    """A browser's EventSource, as far as it matters here."""

    def __init__(self, port, *, last="", page="one") -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        path = f"/events?page={page}&token=a+token"
        self.connection.request("GET", path, headers={"Last-Event-ID": last} if last else {})
        self.answer = self.connection.getresponse()
        assert self.answer.status == 200
        self.last = last

    def next(self) -> tuple[str, Any]:
        """Return name and data of the next event; ('', None) when the stream is over."""
        name, data = "", None
        while line := self.answer.readline().decode():
            field, _, value = line.rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                data = json.loads(value)
            elif field == "id":
                self.last = value
            elif not field and name:
                return name, data
        return "", None

    def close(self) -> None:
        self.connection.close()


REQUESTS = {
    "an address": ("GET", {"host": "127.0.0.1:8000"}, None),
    "an address of the sixth version": ("GET", {"host": "[::1]:8000"}, None),
    "localhost through a tunnel": ("GET", {"host": "localhost:9999"}, None),
    "the page itself": ("GET", {"host": "localhost:1", "origin": "http://localhost:1"}, None),
    "a link of another site": (
        "GET", {"host": "localhost:1", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, None,
    ),
    "a dashboard that was allowed": ("GET", {"host": "localhost:1", "origin": "http://dashboard:3000"}, None),
    "a name that was rebound": ("GET", {"host": "evil.example"}, 421),
    "a name that ends like ours": ("GET", {"host": "localhost.evil.example:1"}, 421),
    "no host": ("GET", {"host": ""}, 421),
    "a host that is none": ("GET", {"host": "[::1"}, 421),
    "another origin": ("GET", {"host": "localhost:1", "origin": "http://evil.example"}, 403),
    "another port of this host": ("GET", {"host": "localhost:1", "origin": "http://localhost:2"}, 403),
    "a page without an origin": ("GET", {"host": "localhost:1", "origin": "null"}, 403),
    "an image in another page": (
        "GET", {"host": "localhost:1", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403,
    ),
    "a form": ("POST", {"host": "localhost:1"}, 405),
    "a removal": ("DELETE", {"host": "localhost:1"}, 405),
    "a look ahead of a request": ("OPTIONS", {"host": "localhost:1", "origin": "http://dashboard:3000"}, 405),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_only_this_hosts_own_page_is_answered(name, one_server):
    method, headers, status = REQUESTS[name]
    found, answered, text = ask(one_server, "/", method, **{key.replace("-", "_"): v for key, v in headers.items()})

    assert found == (status or 200)
    assert ("<!doctype html>" in text) == (status is None)
    assert all(answered[name.lower()] == value for name, value in HEADERS.items())


@pytest.fixture(scope="module")
def one_server():
    """A server that the requests of one table share."""
    with served(Counting(), DASHBOARD) as port:
        yield port


def test_an_allowed_origin_may_read_and_others_are_not_named(one_server):
    _, allowed, _ = ask(one_server, "/", Origin="http://dashboard:3000")
    _, plain, _ = ask(one_server, "/")

    assert allowed["access-control-allow-origin"] == "http://dashboard:3000"
    assert "access-control-allow-origin" not in plain


@pytest.mark.parametrize(("origin", "status"), [("http://dashboard:3000", 200), ("http://evil.example", 400)])
def test_a_browser_learns_beforehand_whether_an_origin_may_show_the_token_in_a_header(origin, status, one_server):
    asked = {"Access_Control_Request_Method": "GET", "Access_Control_Request_Headers": "authorization"}
    found, answered, _ = ask(one_server, "/", "OPTIONS", token="", Origin=origin, **asked)

    assert (found, origin in answered.values(), "set-cookie" in answered) == (status, status == 200, False)


def test_only_who_shows_the_token_is_answered_and_a_browser_shows_it_from_then_on(one_server):
    for path in ("/", "/events", "/run.json"):
        for wrong in ("", "another", TOKEN[:-1], "grüße"):
            status, answered, text = ask(one_server, path, token=wrong)
            assert (status, "set-cookie" in answered, "token is missing or wrong" in text) == (403, False, True)
    status, answered, _ = ask(one_server, "/?token=a+token", token="")
    cookie = answered["set-cookie"].partition(";")[0]

    assert (status, "HttpOnly" in answered["set-cookie"]) == (200, True)
    assert ask(one_server, "/", token="", Cookie=f"other=1; {cookie}")[0] == 200
    assert ask(one_server, "/", token="", Cookie=f"{cookie}x")[0] == 403


def test_strangers_lock_nobody_out_however_many_connections_they_open(one_server):
    with contextlib.ExitStack() as opened:
        strangers = []
        for number in range(live_server.MOST_STRANGERS + 40):
            stranger = socket.create_connection(("127.0.0.1", one_server), timeout=20)
            stranger.sendall(b"GET /events HTTP/1.1\r\n" if number % 2 else b"")
            strangers.append(opened.enter_context(stranger))
        reader = Reader(one_server)
        event = reader.next()
        let_go = strangers[0].recv(1)
        for _ in range(live_server.MOST_STRANGERS + 40):
            opened.enter_context(socket.create_connection(("127.0.0.1", one_server), timeout=20))
        still = reader.next()
        reader.close()

    assert (event[0], let_go, still[0] in ("parts", "charts")) == ("parts", b"", True)


def test_other_addresses_are_not_found(one_server):
    assert ask(one_server, "/run.json")[0] == 404
    assert ask(one_server, "/../../etc/passwd")[0] == 404


def test_updates_arrive_while_the_run_goes_on():
    with served(Counting()) as port:
        reader = Reader(port)
        seen = [reader.next() for _ in range(8)]
        reader.close()

    numbers = [int(data["now"]) for name, data in seen if name == "parts"]
    assert {name for name, _ in seen} == {"parts", "charts"}
    assert numbers == sorted(set(numbers))
    assert len(numbers) >= 3


def test_a_reader_that_comes_back_has_missed_nothing_and_hears_nothing_twice():
    source = Counting()
    with served(source) as port:
        first = Reader(port)
        events = [first.next() for _ in range(4)]
        first.close()
        known = max(int(data["now"]) for name, data in events if name == "parts")
        while source.number < known + 5:
            ask(port)  # the run goes on without a reader
        source.moves = False
        second = Reader(port, last=first.last)
        (name, data), (other, charts) = second.next(), second.next()
        second.close()
        third = Reader(port, last=second.last)
        source.sections = "two"
        told = third.next()
        third.close()

    assert (name, other) == ("parts", "charts")
    assert int(data["now"]) == source.number
    assert charts["steps"] == list(range(source.number))  # every step, those of the time between as well
    assert told == ("reload", {})  # and not the state that it knew already


def test_a_reader_of_an_earlier_server_is_told_everything():
    source = Counting()
    source.moves = False
    with served(source) as port:
        reader = Reader(port, last="0badc0de-99-99")
        names = [reader.next()[0], reader.next()[0]]
        reader.close()

    assert names == ["parts", "charts"]


def test_many_readers_are_told_the_same():
    with served(Counting()) as port:
        readers = [Reader(port) for _ in range(8)]
        told = [{(name, str(data)) for name, data in (reader.next() for _ in range(6))} for reader in readers]
        for reader in readers:
            reader.close()
        again = Reader(port)
        assert again.next()[0] == "parts"  # those who left harm nobody
        again.close()

    assert all(one & other for one, other in pairwise(told))


def test_beyond_the_most_readers_one_is_asked_to_wait(monkeypatch):
    monkeypatch.setattr(live_server, "MOST_READERS", 2)
    with served(Counting()) as port:
        readers = [Reader(port), Reader(port)]
        for reader in readers:
            reader.next()
        status, _, text = ask(port, "/events")
        for reader in readers:
            reader.close()

    assert (status, "Close one" in text) == (503, True)


def test_a_page_of_other_sections_is_told_to_load_anew():
    with served(Counting()) as port:
        reader = Reader(port, page="old")
        event = reader.next()
        over = reader.next()
        reader.close()

    assert (event, over) == (("reload", {}), ("", None))


def test_readers_are_sent_away_when_the_server_ends():
    with served(Counting()) as port:
        reader = Reader(port)
        reader.next()
    last = name = ""
    while name := reader.next()[0]:
        last = name

    assert last == "bye"


def test_a_source_that_fails_once_does_not_end_the_server():
    class Moody(Counting):
        def poll(self) -> None:
            super().poll()
            if self.number == 2:
                raise OSError("the disk is away for a moment")

    source = Moody()
    with served(source) as port:
        while source.number < 6:
            ask(port)
        assert ask(port)[0] == 200


@pytest.mark.parametrize("origin", ["dashboard", "http://dashboard/path", "ftp://dashboard", ""])
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(InputError, match=r"--allow-origin is .*an origin is a scheme, a host and a port"):
        Allowed.of("127.0.0.1", [origin])


def test_a_port_that_is_taken_is_refused():
    with listening("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(InputError, match=rf"127.0.0.1 port {port} cannot be served: Address already in use. Pass"):
            listening("127.0.0.1", port)
    with pytest.raises(InputError, match=r"--port is 70000"):
        listening("127.0.0.1", 70_000)
