"""The server's loop: each rank gets its items once, the dead and the mute harm nobody, nonsense is one clear error."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headway.core.machine.ring import RingReader
from headway.core.wire.channel import ChannelClosed, Listener, connect
from headway.data.bytes.packing import collated, pack, unpack
from headway.data.service.batches import PreparationTime
from headway.data.service.messages import (
    FROM_CLIENT,
    FROM_SERVER,
    PROTOCOL,
    Begin,
    Decided,
    Filled,
    Freed,
    Join,
    Over,
    RequestFailed,
    Rings,
    StatusReply,
    StatusRequest,
    Welcome,
)
from headway.data.service.server import Daemon
from headway.data.service.stock import DataServer
from tests.launching import wait_for
from tests.paths import ROOT
from tests.refusals import refused
from tests.spawn import run_threads

SIZE = 60


class Squares:
    """Item -> {"x": an array of it, "id": it}; counts what it prepared."""

    size, fingerprint, forms, notes = SIZE, "squares", ("decoded",), ["a note"]

    def __init__(self, length=lambda item: 3, fails=()):
        self.length, self.fails, self.prepared = length, fails, []

    def prepare(self, work):
        if work.item in self.fails:
            raise ZeroDivisionError(f"item {work.item} is bad")
        self.prepared.append(work.item)
        return {
            "decoded": pack({"x": np.full(self.length(work.item), work.item), "id": work.item}).to_bytes()
        }, PreparationTime()

    def assemble(self, items, examples):
        return collated(examples)


class Caller:
    """A client of the test's: takes batches, and frees what it is told to."""

    def __init__(self, path, job="job", **terms):
        self.channel = connect(path, types=FROM_SERVER)
        self.readers, self.decided = {}, {}
        self.rank, self.world_size = terms.get("rank", 0), terms.get("world_size", 1)
        told = {"rank": 0, "world_size": 1, "batch_size": 4, "shuffle": True, "tail": "short", "fingerprint": "squares"}
        self.channel.send(Join(protocol=PROTOCOL, job=job, **{**told, **terms}))
        self.welcome = self.next()

    def begin(self, number=0, epoch=0, **more):
        self.channel.send(Begin(number, epoch, **more))
        return self

    def next(self, timeout_s=20.0):
        while True:
            message, fds = self.channel.receive(timeout_s)
            if isinstance(message, Decided):
                self.decided[message.begun] = message
                continue
            if not isinstance(message, Rings):
                return message
            self.readers[message.number] = RingReader(fds[0])
            os.close(fds[0])

    def free(self, filled):
        self.readers[filled.ring].release(filled.slot, filled.generation)
        self.channel.send(Freed())

    def batch(self, filled):
        return self.whole(filled)[1]

    def items(self, filled):
        return self.whole(filled)[0][self.rank :: self.world_size].tolist()

    def whole(self, filled):
        return unpack(self.readers[filled.ring].view(filled.slot, filled.generation))

    def all(self):
        """Take a whole pass; return the items of each batch, checked against what lies in the slot."""
        taken = []
        while isinstance(filled := self.next(), Filled):
            assert filled.error is None
            found = self.batch(filled)
            assert found["id"].array.tolist() == self.items(filled)
            assert all((row == item).all() for row, item in zip(found["x"].array, found["id"].array, strict=True))
            taken.append(self.items(filled))
            self.free(filled)
        assert isinstance(filled, Over)
        return taken


@pytest.fixture
def serve():
    """Start servers in threads; returns (daemon, path) of each."""
    folder = Path(tempfile.mkdtemp())
    running = []

    def start(preparer=None, **options):
        path = folder / f"s{len(running)}"
        daemon = Daemon(
            Listener(path, types=FROM_CLIENT), preparer or Squares(), DataServer(**{"threads": 2, **options}), seed=7
        )
        thread = threading.Thread(target=daemon.run)
        thread.start()
        running.append((daemon, thread))
        return daemon, path

    yield start
    for daemon, thread in running:
        daemon.stop()
        thread.join(20)
        assert not thread.is_alive()
    assert not list(folder.glob("s*"))
    shutil.rmtree(folder)


def flat(batches):
    return [item for batch in batches for item in batch]


def facts(path):
    channel = connect(path, types=FROM_SERVER)
    channel.send(StatusRequest())
    told = channel.receive(10.0)[0]
    channel.close()
    assert isinstance(told, StatusReply)
    return told.facts


@pytest.mark.parametrize("order", ["independent", "shared", "dependent", "opportunistic", "auto"])
def test_two_jobs_at_once_each_get_every_item_once_an_epoch_for_several_epochs(serve, order):
    _, path = serve(order=order, cache_bytes=2000)
    taken = {}

    def job(name, items):
        caller = Caller(path, name, items=items)
        taken[name] = [sorted(flat(caller.begin(epoch, epoch).all())) for epoch in range(3)]

    mine = {"all": None, "some": np.arange(20, 50)}
    run_threads(job, mine.items())

    assert taken == {"all": [list(range(60))] * 3, "some": [list(range(20, 50))] * 3}


def test_a_full_ring_is_backpressure_and_a_freed_slot_lets_it_go_on(serve):
    _, path = serve(window=2)
    caller = Caller(path, num_held=1).begin()
    taken = [caller.next() for _ in range(3)]
    before = [caller.batch(filled)["id"].array.tolist() for filled in taken]
    with pytest.raises(TimeoutError):
        caller.next(0.3)

    assert [caller.batch(filled)["id"].array.tolist() for filled in taken] == before
    caller.free(taken[1])
    assert isinstance(caller.next(), Filled)


def test_a_batch_larger_than_the_slots_gets_larger_ones_and_the_old_ones_stay(serve):
    _, path = serve(Squares(length=lambda item: 1 if item < 30 else 5000))
    small = Caller(path, shuffle=False, batch_size=1).begin()
    first = small.next()
    taken = [small.next() for _ in range(3)]
    for filled in taken:
        small.free(filled)
    rest = []
    while isinstance(filled := small.next(), Filled):
        rest.append(small.batch(filled)["x"].array.shape[1])
        small.free(filled)

    assert rest == [1] * 26 + [5000] * 30
    assert len(small.readers) == 2
    assert small.batch(first)["id"].array.tolist() == [0]


def test_a_client_that_goes_leaves_its_job_and_the_others_go_on(serve):
    _, path = serve(order="shared", window=2)
    one, other = Caller(path, "one").begin(), Caller(path, "other").begin()
    one.next()
    one.channel.close()
    wait_for(lambda: list(facts(path)["jobs"]) == ["other"])

    assert sorted(flat(other.all())) == list(range(SIZE))


def test_a_client_killed_with_a_child_that_holds_its_socket_is_noticed_too(serve):
    _, path = serve()
    code = (
        "import os, sys; from tests.test_server import Caller; caller = Caller(sys.argv[1], 'doomed').begin();"
        "caller.next(); os.set_inheritable(caller.channel.fileno(), True); child = os.fork();\n"
        "if child == 0: os.execvp('sleep', ['sleep', '30'])\n"
        "print(child, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child = int(process.stdout.readline())
    assert list(facts(path)["jobs"]) == ["doomed"]
    process.kill()
    process.wait(20)

    wait_for(lambda: facts(path)["jobs"] == {})
    os.kill(child, signal.SIGKILL)
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize("nonsense", [b"\xff", msgspec.msgpack.encode(["x"]), msgspec.msgpack.encode({"type": "Join"})])
def test_nonsense_drops_its_sender_and_nobody_else(serve, nonsense):
    _, path = serve()
    good, bad = Caller(path), connect(path, types=FROM_SERVER)
    bad._wire.send(nonsense, ())

    with pytest.raises(ChannelClosed, match="an undecodable message"):
        bad.receive(10.0)
    assert sorted(flat(good.begin().all())) == list(range(SIZE))


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        ({"fingerprint": "cubes"}, "DataShareError", "reads 'cubes', this server serves 'squares'"),
        ({"batch_size": 0}, "InputError", "batch_size is 0"),
        ({"rank": 3}, "InputError", "rank is 3"),
        ({"tail": "shrot"}, "UnknownNameError", "Did you mean 'short'"),
        ({"items": np.zeros(0, np.int64)}, "InputError", "item"),
        ({"items": np.array([1, 1])}, "InputError", "twice"),
        ({"items": np.array([99])}, "InputError", "99"),
        ({"job": "there"}, "InputError", "is here already"),
        ({"job": "there", "rank": 1, "world_size": 2}, "InputError", "differs from rank 0 in world_size"),
    ],
)
def test_a_wrong_request_is_refused_with_its_reason_and_changes_nothing(serve, wrong, kind, said):
    _, path = serve()
    there = Caller(path, "there")

    refused = Caller(path, **{"job": "wrong", **wrong}).welcome
    assert isinstance(refused, RequestFailed)
    assert refused.kind == kind
    assert said in refused.text
    assert list(facts(path)["jobs"]) == ["there"]
    assert sorted(flat(there.begin().all())) == list(range(SIZE))


def test_who_begins_before_joining_is_refused(serve):
    _, path = serve()
    channel = connect(path, types=FROM_SERVER)
    channel.send(Begin(0, 0))

    assert channel.receive(10.0)[0].text.startswith("a client begins before it has joined")


def test_what_remains_and_the_batches_of_a_lost_server_are_not_given_again(serve):
    _, path = serve()
    caller = Caller(path).begin(1, 3, remaining=np.arange(10, 40), history=[np.array([12, 30, 11, 39])])

    assert sorted(flat(caller.all())) == [k for k in range(10, 40) if k not in (12, 30, 11, 39)]


def test_a_server_without_clients_ends_and_removes_its_socket(serve):
    _, path = serve(idle_s=0.1)
    caller = Caller(path)
    assert isinstance(caller.welcome, Welcome)
    caller.channel.close()

    wait_for(lambda: not path.exists())


def test_it_tells_how_it_is(serve):
    _, path = serve(threads=3, order="shared")
    caller = Caller(path).begin()
    caller.all()
    told = facts(path)

    assert (told["pid"], told["threads"], told["order"], told["clients"]) == (os.getpid(), 3, "shared", 1)
    assert told["notes"] == caller.welcome.notes == ["a note"]
    assert told["ring_bytes"] > 0
    assert list(told["jobs"]) == ["job"]


test_bad_options_are_refused_where_they_are_given = refused(
    ({"order": "sharde"}, "Did you mean 'shared'"), ({"threads": -1}, "threads is -1"), ({"idle_s": 0}, "idle_s 0"),
    ({"window": 0}, "window is 0"), ({"cache_bytes": -1}, "cache_bytes -1"),
    by=lambda options: DataServer(**options),
)  # fmt: skip
