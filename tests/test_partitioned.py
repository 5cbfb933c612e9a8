"""A cache over hosts: every read is the source's, storage is read once for what is held, a dead host harms nobody."""

import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.wire.channel import ChannelClosed
from headway.data.bytes.order import permute
from headway.data.bytes.source import SyntheticJpeg, digest_of
from headway.data.cached.partition import PartitionMap
from headway.data.orders.job_order import DataShareError
from headway.data.partitioned import partitioned
from headway.data.partitioned.partitioned import Partitioned
from headway.data.partitioned.peers import Identity, listen
from tests.launching import wait_for
from tests.spawn import run_threads

TOKEN = "a secret"


class Blobs:
    """A source of bytes whose sizes and contents follow from the index; counts what is read of it."""

    def __init__(self, sizes, name="blobs"):
        self.sizes, self.name = list(sizes), name
        self.reads, self.bytes_read = [], 0

    def __len__(self):
        return len(self.sizes)

    def read(self, index):
        self.reads.append(index)
        self.bytes_read += self.sizes[index]
        return self.payload(index)

    def payload(self, index):
        return bytes([index % 251]) * self.sizes[index]

    def meta(self, index):
        return {"label": index}

    def fingerprint(self):
        return self.name


def listeners(num):
    return [listen("127.0.0.1", 0, TOKEN) for _ in range(num)]


def made(sources, capacities, *, ports=None, seed=0, **options):
    """One host per source, each to be started."""
    ports = ports or listeners(len(sources))
    names = {f"host{k}": f"127.0.0.1:{port.port}" for k, port in enumerate(ports)}
    return [
        Partitioned(
            source, hosts=names, host=f"host{k}", capacity_bytes=capacity, token=TOKEN, seed=seed, listener=port,
            **{"timeout_s": 5.0, **options},
        )
        for k, (source, capacity, port) in enumerate(zip(sources, capacities, ports, strict=True))
    ]  # fmt: skip


@contextmanager
def started(hosts):
    """All hosts, having met each other."""
    with ExitStack() as stack:
        run_threads(lambda host: host.start(20.0), [(host,) for host in hosts])
        for host in hosts:
            stack.callback(host.close)
        yield hosts


def epoch(hosts, sources, seed, number):
    """Read every item once, dealt to the hosts in an order of its own; returns the bytes read from storage."""
    before = sum(source.bytes_read for source in sources)
    order = permute(len(sources[0]), seed, number)
    for position in range(len(sources[0])):
        host, item = position % len(hosts), order(position)
        assert hosts[host].read(item) == sources[host].payload(item)
    return sum(source.bytes_read for source in sources) - before


def read_all(host, source, items):
    """Read items through a host, and compare them with the source."""
    for item in items:
        assert host.read(item) == source.payload(item)


def unheld(hosts, sources):
    """Bytes of the items that no host holds."""
    return sum(size for item, size in enumerate(sources[0].sizes) if not any(host.holds(item) for host in hosts))


@settings(max_examples=12)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=40),
    capacities=st.lists(st.integers(1, 4000), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_storage_is_read_once_for_what_is_held_and_once_per_epoch_for_the_rest(sizes, capacities, seed):
    sources = [Blobs(sizes) for _ in capacities]
    with started(made(sources, capacities, seed=seed)) as hosts:
        first = epoch(hosts, sources, seed, 0)
        later = [epoch(hosts, sources, seed, number) for number in (1, 2)]
        found = [host.statistics() for host in hosts]

        assert first == sum(sizes)
        assert later == [unheld(hosts, sources)] * 2
    assert sum(one.storage_bytes for one in found) == first + sum(later)
    assert sum(one.peer_hits for one in found) == sum(one.served_hits for one in found)
    assert sum(one.local_hits + one.peer_hits + one.storage_reads for one in found) == 3 * len(sizes)
    assert all(one.held_bytes <= one.capacity_bytes for one in found)


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_a_cache_as_large_as_the_dataset_needs_no_storage_after_the_first_epoch(num_hosts):
    """Hosts of unequal size: what does not fit on an item's host goes to the next in its list."""
    sizes = np.random.default_rng(0).integers(500, 1500, 200).tolist()
    total = sum(sizes) + len(sizes)
    shares = {2: (0.35, 0.68), 3: (0.2, 0.5, 0.36)}[num_hosts]
    sources = [Blobs(sizes) for _ in shares]
    with started(made(sources, [int(total * share) for share in shares])) as hosts:
        bytes_read = [epoch(hosts, sources, 1, number) for number in range(4)]

    assert bytes_read == [sum(sizes), 0, 0, 0]


def test_items_lie_where_the_map_says_without_a_message():
    sources = [Blobs([100] * 60) for _ in range(3)]
    with started(made(sources, [60 * 101] * 3, seed=5)) as hosts:
        epoch(hosts, sources, 0, 0)
        owners = PartitionMap(60, [f"host{k}" for k in range(3)], seed=5)

        for k, host in enumerate(hosts):
            assert all(host.holds(int(item)) for item in owners.items(f"host{k}"))


def test_room_that_is_left_is_filled_with_copies_and_then_every_read_is_local():
    sources = [Blobs([100] * 50) for _ in range(2)]
    with started(made(sources, [50 * 101, 30 * 101])) as hosts:
        epoch(hosts, sources, 0, 0)
        held = [host.statistics().held_items for host in hosts]
        wait_for(lambda: [host.statistics().held_items for host in hosts] == [50, 30], 60)
        before = hosts[0].statistics()
        for item in range(50):
            assert hosts[0].read(item) == sources[0].payload(item)
        after = hosts[0].statistics()

        assert sum(held) == 50
    assert after.copies == 50 - held[0]
    assert after.local_hits - before.local_hits == 50
    assert sum(source.bytes_read for source in sources) == 5000


def test_threads_of_all_hosts_may_read_at_once():
    sources = [Blobs(range(0, 800, 4)) for _ in range(2)]
    wrong = []
    with started(made(sources, [50_000, 50_000])) as hosts:

        def read(host, source, first):
            for number in range(3):
                order = permute(200, first, number)
                wrong.extend(k for k in range(200) if host.read(order(k)) != source.payload(order(k)))

        run_threads(
            read, [(host, source, first) for host, source in zip(hosts, sources, strict=True) for first in range(3)]
        )
        assert all(host.statistics().peer_losses == 0 for host in hosts)

    assert wrong == []


class Arrays(Blobs):
    """A source of arrays with labels."""

    def payload(self, index):
        return {"pixels": np.full((index, 3), index, np.uint8), "label": index}

    def read(self, index):
        super().read(index)
        return self.payload(index)


def test_arrays_come_back_as_arrays_that_may_be_changed():
    sources = [Arrays([1] * 12) for _ in range(2)]
    with started(made(sources, [10**5] * 2)) as hosts:
        for _ in range(2):
            for host in hosts:
                for item in range(12):
                    found = host.read(item)

                    assert found["pixels"].shape == (item, 3)
                    assert (found["pixels"] == item).all()
                    assert found["label"] == item
                    found["pixels"][:] = 255

    assert sum(len(source.reads) for source in sources) == 12


def test_an_item_that_no_message_can_carry_comes_from_storage(monkeypatch):
    monkeypatch.setattr(partitioned, "MOST_PAYLOAD_BYTES", 100)
    sources = [Blobs([99, 100] * 5) for _ in range(2)]
    with started(made(sources, [10_000] * 2)) as hosts:
        assert [epoch(hosts, sources, 0, number) for number in range(2)] == [995, 500]


def test_it_is_the_source_to_whoever_asks():
    source = Blobs([5, 6])
    with Partitioned(source, hosts=["127.0.0.1:0"], host="127.0.0.1:0", capacity_bytes=100, token=TOKEN) as cached:
        assert (len(cached), cached.meta(1), cached.fingerprint()) == (2, {"label": 1}, "blobs")
        assert cached.read(np.int64(1)) == source.payload(1)


def test_a_host_that_dies_and_comes_back_costs_storage_reads_and_nothing_else(monkeypatch):
    monkeypatch.setattr(Partitioned, "fill", lambda host: 0)
    sources = [Blobs([100] * 40) for _ in range(2)]
    ports = listeners(2)
    one, other = made(sources, [40 * 101, 20 * 101], ports=ports, timeout_s=0.5)
    owned = PartitionMap(40, ["host0", "host1"], seed=0).items("host1").tolist()
    with started([one, other]):
        for item in range(40):
            one.read(item)
        held = [item for item in owned if other.holds(item)]
        other.close()
        fresh = [item for item in held if not one.holds(item)]
        before = sources[0].bytes_read
        with pytest.warns(RuntimeWarning, match="host1 is away.*Its items come from storage"):
            read_all(one, sources[0], range(40))
        lost = sources[0].bytes_read - before
        for item in range(40):
            one.read(item)

        assert lost == 100 * len(fresh)
        assert sources[0].bytes_read - before == lost  # this host took over what it has room for
        assert one.statistics().peer_losses == 1
        where = {"host0": f"127.0.0.1:{ports[0].port}", "host1": f"127.0.0.1:{ports[1].port}"}
        again = Partitioned(
            sources[1], hosts=where, host="host1", capacity_bytes=4040, token=TOKEN, timeout_s=5.0,
            listener=listen("127.0.0.1", ports[1].port, TOKEN),
        )  # fmt: skip
        with started([again]):
            item = held[0]
            assert again.read(item) == sources[1].payload(item)
            wait_for(lambda: not one._away("host1"), 20)
            assert again.holds(item) == (again.statistics().held_items == 1)


def test_a_host_that_leaves_between_reads_is_named_by_the_next_read_that_needs_another_host():
    """The thread that finds it out warns nobody: hosts end one after the other, and most read no more."""
    sources = [Blobs([100] * 40) for _ in range(2)]
    one, other = made(sources, [40 * 101] * 2)
    with started([one, other]):
        mine, theirs = (PartitionMap(40, ["host0", "host1"]).items(host).tolist() for host in ("host0", "host1"))
        read_all(one, sources[0], mine)
        other.close()
        wait_for(lambda: one.statistics().peer_losses == 1, 20)

        read_all(one, sources[0], mine)
        with pytest.warns(RuntimeWarning, match="host1 is away"):
            one.read(theirs[0])


def test_a_peer_that_answers_no_more_is_waited_for_once():
    """It accepts and says who it is, and then is silent: reads go on from storage at once."""
    port, silent = listeners(2)
    source = Blobs([10] * 30)
    where = {"host0": f"127.0.0.1:{port.port}", "host1": f"127.0.0.1:{silent.port}"}
    group = digest_of([0, "host0", "host1"])
    asked, done = [], threading.Event()

    def serve():
        while not done.is_set():
            try:
                channel = silent.accept(0.1)
                channel.receive(5.0)
                channel.send(Identity("host1", "blobs[30]", group))
                threading.Thread(target=listening, args=(channel,), daemon=True).start()
            except (ChannelClosed, TimeoutError):
                continue

    def listening(channel):
        try:
            while True:
                asked.append(channel.receive(20.0)[0])
        except (ChannelClosed, TimeoutError):
            channel.close()

    threading.Thread(target=serve, daemon=True).start()
    cached = Partitioned(
        source, hosts=where, host="host0", capacity_bytes=10, token=TOKEN, listener=port, timeout_s=0.3
    )
    owned = PartitionMap(30, ["host0", "host1"]).items("host1").tolist()
    with started([cached]):
        with pytest.warns(RuntimeWarning, match="host1 is away"):
            read_all(cached, source, owned)
        found = cached.statistics()
    done.set()

    # It may have been tried again meanwhile, on a host busy enough; but far less often than there were items.
    assert 1 <= len(asked) == found.peer_losses < len(owned) / 2


def test_forked_children_read_over_connections_of_their_own_and_fill_the_same_memory():
    sources = [Blobs([50] * 40) for _ in range(2)]
    with started(made(sources, [5000, 5000])) as hosts:
        one, other = hosts
        for item in range(10):
            other.read(item)
        children = []
        for child in range(2):
            pid = os.fork()
            if pid == 0:
                right = all(one.read(item) == sources[0].payload(item) for item in range(child, 40, 2))
                os._exit(0 if right else 1)
            children.append(pid)
        codes = [os.waitpid(pid, 0)[1] for pid in children]
        again = [one.read(item) == sources[0].payload(item) for item in range(40)]
        found = one.statistics()

    assert codes == [0, 0]
    assert all(again)
    assert found.storage_reads == 30  # the children's: the other host had read ten of the items
    assert found.local_hits + found.peer_hits == 50
    assert found.peer_losses == 0


def test_a_process_that_gets_it_by_pickle_shares_the_memory(tmp_path):
    source = Blobs([50] * 10)
    with Partitioned(source, hosts=["127.0.0.1:0"], host="127.0.0.1:0", capacity_bytes=5000, token=TOKEN) as cached:
        (tmp_path / "cached").write_bytes(pickle.dumps(cached))
        code = (
            "import pickle, sys\n"
            "cached = pickle.load(open(sys.argv[1], 'rb'))\n"
            "assert all(cached.read(k) == bytes([k]) * 50 for k in range(10))\n"
        )
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "cached")], check=True, timeout=60, cwd=os.getcwd())
        found = cached.statistics()

        assert (found.storage_reads, found.held_items) == (10, 10)
        assert cached.read(3) == source.payload(3)
        assert source.reads == []


HOST = """
import json, sys
from headway.data.partitioned.partitioned import Partitioned
from headway.data.partitioned.peers import listen
from headway.data.bytes.source import SyntheticJpeg
number, ports = int(sys.argv[1]), json.loads(sys.argv[2])
names = {f"host{k}": f"127.0.0.1:{port}" for k, port in enumerate(ports)}
listener = listen("127.0.0.1", ports[number], "a secret")
cached = Partitioned(
    SyntheticJpeg(24, 32, 24), hosts=names, host=f"host{number}", capacity_bytes=10**6, token="a secret",
    listener=listener, timeout_s=1.0,
).start()
for line in sys.stdin:
    print(len(cached.read(int(line))), flush=True)
"""


def test_a_host_killed_outright_is_noticed_and_its_items_come_from_storage():
    images = SyntheticJpeg(24, 32, 24)
    images.payload = images.read
    free = listeners(2)
    ports = [port.port for port in free]
    free[1].close()
    names = {f"host{k}": f"127.0.0.1:{port}" for k, port in enumerate(ports)}
    other = subprocess.Popen(
        [sys.executable, "-c", HOST, "1", str(ports)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    own = PartitionMap(24, names).items("host0").tolist()
    capacity = sum(len(images.read(item)) + 1 for item in own)  # no room for copies, nor to take over
    cached = Partitioned(
        images, hosts=names, host="host0", capacity_bytes=capacity, token=TOKEN, listener=free[0], timeout_s=2.0
    )
    try:
        with started([cached]):
            read_all(cached, images, range(24))
            read_all(cached, images, range(12))
            assert cached.statistics().storage_reads == 24
            other.send_signal(signal.SIGKILL)
            other.wait(10)
            with pytest.warns(RuntimeWarning, match="host1 is away"):
                read_all(cached, images, range(24))
            found = cached.statistics()
    finally:
        other.kill()
        other.communicate()

    assert found.storage_reads == 24 + (24 - len(own))
    assert found.peer_losses == 1


def test_hosts_with_different_data_say_so_at_the_start_and_name_both():
    one, other = made([Blobs([1, 2]), Blobs([1, 2], name="other blobs")], [100, 100])
    failures = []

    def start(host):
        try:
            host.start(20.0)
        except DataShareError as error:
            failures.append(str(error))

    run_threads(start, [(host,) for host in (one, other)])
    one.close()
    other.close()

    with pytest.raises(InputError, match="not started"):
        one.read(0)
    assert failures
    assert all("blobs[2]" in failure and "other blobs[2]" in failure for failure in failures)


def test_a_host_that_does_not_come_is_named_and_left_out():
    nobody = listeners(1)[0]
    nobody.close()
    port = listeners(1)[0]
    where = {"host0": f"127.0.0.1:{port.port}", "host1": f"127.0.0.1:{nobody.port}"}
    source = Blobs([10] * 20)
    cached = Partitioned(
        source, hosts=where, host="host0", capacity_bytes=500, token=TOKEN, listener=port, timeout_s=0.1
    )
    with pytest.warns(RuntimeWarning, match="host1 is away"):
        cached.start(wait_s=0.2)

    assert [cached.read(k) for k in range(20)] == [source.payload(k) for k in range(20)]
    assert cached.statistics().held_items == 20
    cached.close()


def test_a_host_with_another_token_is_not_let_in():
    ports = listeners(2)
    where = {f"host{k}": f"127.0.0.1:{port.port}" for k, port in enumerate(ports)}
    one = Partitioned(Blobs([1]), hosts=where, host="host0", capacity_bytes=10, token="another", listener=ports[0])
    with pytest.warns(RuntimeWarning, match=r"host1 is away.*token"):
        one.start(wait_s=0.0)
    one.close()
    ports[1].close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hosts": ["a:1", "a:1"]}, "name each once"),
        ({"hosts": []}, "pass 1 to 4096"),
        ({"host": "127.0.0.1:1"}, "unknown host.*127.0.0.1:0"),
        ({"timeout_s": 0}, "a time above 0"),
        ({"capacity_bytes": 0}, "Give at least 1 of each"),
        ({"hosts": ["127.0.0.1:0", "nowhere"]}, "Give host:port"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(change, message):
    arguments = {"hosts": ["127.0.0.1:0"], "host": "127.0.0.1:0", "capacity_bytes": 10, "token": TOKEN, **change}
    with pytest.raises(InputError, match=message):
        Partitioned(Blobs([1, 2]), **arguments)


def test_reading_too_early_or_outside_is_one_clear_error():
    cached = Partitioned(Blobs([1, 2]), hosts=["127.0.0.1:0"], host="127.0.0.1:0", capacity_bytes=10, token=TOKEN)
    with pytest.raises(InputError, match=r"Call start\(\)"):
        cached.read(0)
    with cached:
        with pytest.raises(InputError, match="Use 0 to 1"):
            cached.read(2)
        with pytest.raises(InputError, match="started already"):
            cached.start()
