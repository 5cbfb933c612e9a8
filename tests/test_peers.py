"""Hosts that ask each other: answers, strangers, and peers that are gone, silent or wrong."""

import threading
import time
from contextlib import suppress

import msgspec
import pytest

from headway.core.errors import InputError
from headway.core.wire.channel import ChannelClosed, connect_tcp
from headway.data.orders.job_order import DataShareError
from headway.data.partitioned.peers import (  # fmt: skip
    ANSWERS,
    LOST,
    Absent,
    AskSettled,
    CachePeer,
    CacheShare,
    Found,
    Get,
    Identity,
    PeerServer,
    Put,
    listen,
    split_address,
)
from tests.spawn import run_threads

TOKEN = "a secret"


def identity(host="a", dataset="10 items", group="seed 0"):
    return Identity(host, dataset, group)


@pytest.fixture
def served():
    """A share of 10 items, its server, and a function that makes peers of it."""
    share = CacheShare(10, 1000, own=range(5), num_hosts=2)
    listener = listen("127.0.0.1", 0, TOKEN)
    server = PeerServer(listener, identity("a"), share)
    peers = []

    def peer(host="a", *, token=TOKEN, mine=None, timeout_s=0.5):
        peers.append(CachePeer(host, f"127.0.0.1:{listener.port}", token, mine or identity("b"), timeout_s))
        return peers[-1]

    yield share, server, peer
    for made in peers:
        made.close()
    server.close()


def test_a_peer_gives_what_it_holds_and_says_what_it_never_will(served):
    share, _, peer = served
    asked = peer()
    share.keep(2, b"two")
    share.keep(3, b"x" * 2000)

    assert bytes(asked.get(2).payload) == b"two"
    assert asked.get(3) == Absent(refused=True)
    assert asked.get(4) == Absent(refused=False)
    assert asked.keep(4, b"four")
    assert not asked.keep(5, b"y" * 2000)
    assert bytes(share.get(4)) == b"four"
    assert (share.counts()["served_hits"], share.counts()["served_bytes"]) == (1, 3)
    assert not asked.settled()
    for item in (0, 1):
        asked.keep(item, b"")
    assert asked.settled()


def test_payloads_of_any_size_come_whole_to_threads_that_ask_together():
    share = CacheShare(40, 50_000_000, own=[], num_hosts=2)
    payloads = [bytes([k]) * (k * 30_001) for k in range(40)]
    for item, payload in enumerate(payloads):
        share.keep(item, payload)
    listener = listen("127.0.0.1", 0, TOKEN)
    server = PeerServer(listener, identity("a"), share)
    peer = CachePeer("a", f"127.0.0.1:{listener.port}", TOKEN, identity("b"), 20.0)
    found = {}

    def ask(first):
        for item in range(first, 40, 4):
            found[item] = bytes(peer.get(item).payload)

    run_threads(ask, [(first,) for first in range(4)])
    peer.close()
    server.close()

    assert [found[k] for k in range(40)] == payloads


def test_a_host_without_the_token_learns_nothing(served):
    share, _, peer = served
    share.keep(0, b"secret data")

    with pytest.raises(ChannelClosed, match="token"):
        peer(token="a guess").get(0)
    assert share.counts()["served_hits"] == 0
    assert bytes(peer().get(0).payload) == b"secret data"


@pytest.mark.parametrize("request_", [Get(10), Get(-1), Put(10, b"x"), Put(-1, b"x")])
def test_an_item_outside_the_dataset_ends_that_connection_only(served, request_):
    share, _, peer = served
    port = int(peer().address.rpartition(":")[2])
    channel = connect_tcp("127.0.0.1", port, TOKEN, types=ANSWERS)
    channel.send(request_)

    with pytest.raises(ChannelClosed, match="not in the dataset"):
        channel.receive(5.0)
    assert peer().get(0) == Absent(refused=False)
    assert share.held_items == 0


@pytest.mark.parametrize(
    ("mine", "host", "message"),
    [
        (identity("b", dataset="folder:12[10]"), "a", r"b shares data folder:12\[10\], a 10 items.*the same source"),
        (identity("b", group="seed 1"), "a", "b shares a cache seed 1, a seed 0"),
        (identity("b"), "c", "is a, not c. Give each host its own address"),
    ],
)
def test_hosts_that_share_other_data_say_what_each_has(served, mine, host, message):
    with pytest.raises(DataShareError, match=message):
        served[2](host, mine=mine).get(0)


def test_a_peer_that_began_anew_is_asked_over_a_new_connection(served):
    share, server, peer = served
    asked = peer()
    port = int(asked.address.rpartition(":")[2])
    assert asked.get(0) == Absent(refused=False)
    server.close()
    with pytest.raises(ChannelClosed):
        asked.get(0)
    share.keep(0, b"again")
    again = PeerServer(listen("127.0.0.1", port, TOKEN), identity("a"), share)

    assert bytes(asked.get(0).payload) == b"again"
    asked.close()
    again.close()


def test_a_silent_peer_costs_one_timeout_and_its_late_answer_is_not_taken_for_the_next():
    listener = listen("127.0.0.1", 0, TOKEN)
    asked = threading.Event()

    def serve():
        silent = listener.accept(10.0)
        silent.receive(10.0)
        silent.send(identity("a"))
        silent.receive(10.0)
        asked.wait(10.0)
        with suppress(ChannelClosed):
            silent.send(Found(memoryview(b"late")))
        channel = listener.accept(10.0)
        channel.receive(10.0)
        channel.send(identity("a"))
        channel.receive(10.0)
        channel.send(Found(memoryview(b"in time")))
        with suppress(ChannelClosed):
            channel.receive(10.0)

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    peer = CachePeer("a", f"127.0.0.1:{listener.port}", TOKEN, identity("b"), timeout_s=0.5)
    start = time.monotonic()

    with pytest.raises(TimeoutError):
        peer.get(1)
    waited = time.monotonic() - start
    asked.set()
    assert waited >= 0.5
    assert bytes(peer.get(2).payload) == b"in time"
    peer.close()
    listener.close()


def test_an_answer_to_another_question_is_one_clear_error():
    listener = listen("127.0.0.1", 0, TOKEN)

    def serve():
        channel = listener.accept(10.0)
        channel.receive(10.0)
        channel.send(identity("a"))
        channel.receive(10.0)
        channel.send(identity("a"))
        with suppress(ChannelClosed):
            channel.receive(10.0)

    threading.Thread(target=serve, daemon=True).start()
    peer = CachePeer("a", f"127.0.0.1:{listener.port}", TOKEN, identity("b"), timeout_s=5.0)

    with pytest.raises(ChannelClosed, match=r"a answered AskSettled.*Run one release"):
        peer.settled()
    listener.close()


def test_nobody_there_is_one_error_of_those_that_are_expected():
    listener = listen("127.0.0.1", 0, TOKEN)
    listener.close()

    with pytest.raises(LOST):
        CachePeer("a", f"127.0.0.1:{listener.port}", TOKEN, identity("b"), timeout_s=0.1).get(0)


@pytest.mark.parametrize("address", ["", "10.0.0.1", "10.0.0.1:", ":7000", "10.0.0.1:http", "10.0.0.1:70000"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(InputError, match="Give host:port"):
        split_address(address)


def test_addresses_of_both_families_are_understood():
    assert split_address("10.0.0.1:7000") == ("10.0.0.1", 7000)
    assert split_address("[::1]:0") == ("::1", 0)


def test_messages_are_data_of_declared_types():
    """Whatever else comes is refused by the channel: nothing here is ever unpickled."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(AskSettled())) == {"type": "AskSettled"}
