"""The data server's brain: exactly once whatever happens, one preparation for all, bounded memory, nobody waits."""

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.bytes.order import TAILS, Sequence
from headway.data.loader.audit import AuditSum
from headway.data.orders.strategies import ORDERS
from headway.data.service.batches import Ended, PreparationTime
from headway.data.service.service import PreparationScheduler
from tests.chi_square import p_value
from tests.data_clients import PRINT, Client, drawn, finish, payload, served, work_off

ALL_FORMS = ("encoded", "decoded", "augmented")
FORMS = [("decoded",), ("augmented",), ("encoded", "decoded"), ALL_FORMS]
NAMES = ["auto", *ORDERS]


class Story:
    """Random jobs, servers and mishaps, told by a seed; at the end each epoch of each job was complete, once."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.size = int(self.rng.integers(1, 40))
        self.num_servers = 0
        self.clients, self.num_names = [], 0
        self.start_server()

    def start_server(self):
        order, forms = self.rng.choice(NAMES), FORMS[self.rng.integers(len(FORMS))]
        self.service = served(
            self.size, forms, order, seed=self.num_servers, cache_bytes=int(self.rng.integers(0, 400)),
            window=int(self.rng.integers(1, 4)),
        )  # fmt: skip
        self.num_servers += 1

    def start_client(self, items=None, state=None, shuffle=True, taken=None):
        if items is None:
            items = drawn(int(self.rng.integers(1 << 30)), self.size, int(self.rng.integers(1, self.size + 1)))
            shuffle = bool(self.rng.random() < 0.8)
        client = Client(
            f"job{self.num_names}", items, batch_size=int(self.rng.integers(1, 5)),
            world_size=int(self.rng.integers(1, 4)), shuffle=shuffle, states=state,
        )  # fmt: skip
        self.num_names += 1
        client.taken = {} if taken is None else taken
        client.join(self.service)
        self.clients.append(client)

    def in_step(self, client):
        """Let the ranks that are behind take as many batches as the foremost, as training steps do."""
        while not client.in_step and not client.over:
            most = max(len(progress.history) for progress in client.progress)
            work_off(self.service)
            moved = False
            for rank, progress in enumerate(client.progress):
                if len(progress.history) < most and not client.ended[rank]:
                    moved = client.take(rank) is not None or moved
            if not moved:
                return  # a short last batch: the others have had their last

    def resume(self, client):
        """Kill a job and start it again from the state of any rank, in another world."""
        self.in_step(client)
        most = max(client.progress, key=lambda progress: len(progress.history))
        state = most.state_dict()
        if client.over:
            self.check(client)
        self.service.leave(client.name)
        self.clients.remove(client)
        self.start_client(client.items, state, client.terms.shuffle, client.taken)

    def crash(self):
        """Kill the server: every rank goes on from what its own loop took."""
        self.start_server()
        for client in self.clients:
            client.ended = [False] * client.world_size
            client.join(self.service, again=True)

    def act(self):
        choice = self.rng.random()
        client = self.clients[self.rng.integers(len(self.clients))] if self.clients else None
        if client is None or (choice < 0.05 and len(self.clients) < 4):
            self.start_client()
        elif choice < 0.35:
            work_off(self.service, int(self.rng.integers(1, 8)))
        elif choice < 0.38:
            self.crash()
        elif choice < 0.42:
            self.resume(client)
        elif choice < 0.44:
            self.service.leave(client.name)
            self.clients.remove(client)
        elif client.over:
            self.check(client)
            client.next_epoch()
        elif choice < 0.46:
            client.taken.pop(client.progress[0].epoch, None)  # the loop breaks off
            client.next_epoch()
        else:
            client.take(int(self.rng.integers(client.world_size)))

    def check(self, client):
        epoch = client.progress[0].epoch
        assert client.taken[epoch] == Counter(client.items.tolist())

    def tell(self, acts):
        for _ in range(acts):
            self.act()
        finish(self.service, *self.clients)
        for client in self.clients:
            self.check(client)
            self.service.leave(client.name)
        status = self.service.status()
        assert (status["held_bytes"], status["flights"], status["jobs"]) == (0, 0, {})


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_each_item_comes_once_per_job_and_epoch_over_joins_kills_crashes_and_other_worlds(first):
    for seed in range(first, first + 50):
        Story(seed).tell(35)


def in_step(service, clients, epochs, speeds=None, seed=0):
    """Let each job take `speeds` batches per round on average (default: one, in turn); return loads by first epoch."""
    rng, credit = np.random.default_rng(seed), [0.0] * len(clients)
    loads, most_held, left = [], 0, [epochs] * len(clients)
    while any(left):
        for k, client in enumerate(clients):
            credit[k] += 2 * speeds[k] * rng.random() if speeds else 1.0
            while credit[k] >= 1 and left[k]:
                credit[k] -= 1
                work_off(service)
                most_held = max(most_held, service.status()["held_bytes"])
                client.take()
                if client.over:
                    left[k] -= 1
                    loads += [service.status()["loads"]] if k == 0 else []
                    if left[k]:
                        client.next_epoch()
    return np.diff([0, *loads]).tolist(), most_held


@pytest.mark.slow
@pytest.mark.parametrize("forms", [("decoded",), ("augmented",)])
@pytest.mark.parametrize("num_jobs", [1, 2, 5])
@pytest.mark.parametrize("order", ["auto", "shared"])
def test_jobs_in_step_prepare_each_item_once_per_pass_for_all_of_them_without_a_cache(forms, num_jobs, order):
    """CoorDL's coordinated preparation: k jobs, N preparations, staging of no more than their windows."""
    num, window = 300, 2
    service = served(num, forms, order, window=window)
    clients = [Client(f"j{k}", range(num), batch_size=4) for k in range(num_jobs)]
    for client in clients:
        client.join(service)
    loads, most_held = in_step(service, clients, 3)

    assert loads == [num] * 3
    assert most_held <= (window + 1) * 4 * 30
    assert all(client.taken[epoch] == Counter(range(num)) for client in clients for epoch in range(3))


@pytest.mark.parametrize("batches", [0, 3, 30])
@pytest.mark.parametrize("share", [0.8, 1.0])
def test_the_default_order_counts_on_the_batches_under_way(share, batches):
    """Jobs that come `batches` one after the other share what windows hold, whether or not their sets are equal."""

    def loads(order):
        service = served(400, ("decoded",), order, window=8)
        clients = [Client(f"j{k}", drawn(k, 400, int(400 * share)), batch_size=4) for k in range(3)]
        for k, client in enumerate(clients):
            client.join(service)
            for other in clients[: k + 1] * batches if k < 2 else []:
                work_off(service)
                other.take()
        finish(service, *clients)
        assert all(client.taken[0] == Counter(client.items.tolist()) for client in clients)
        return service.status()["loads"]

    assert loads("auto") <= 1.02 * min(loads("shared"), loads("dependent"))


def test_a_job_that_goes_in_mid_epoch_stalls_nobody_and_takes_its_share_along():
    service = served(60, ("augmented",))
    clients = [Client(f"j{k}", range(60), batch_size=5) for k in range(3)]
    for client in clients:
        client.join(service)
    for _ in range(4):
        work_off(service, 7)
        for client in clients:
            client.take()
    service.leave("j1")
    finish(service, clients[0], clients[2])

    assert all(client.taken[0] == Counter(range(60)) for client in (clients[0], clients[2]))
    assert service.status()["loads"] == 60
    assert service.status()["held_bytes"] == 0


def test_a_job_that_joins_in_mid_epoch_shares_from_there():
    service = served(100)
    first, late = Client("first", range(100), batch_size=5), Client("late", range(100), batch_size=5)
    first.join(service)
    for _ in range(8):
        work_off(service)
        first.take()
    late.join(service)
    for _ in range(20):
        work_off(service)
        first.take()
        late.take()

    assert first.taken[0] == late.taken[0] == Counter(range(100))
    assert service.status()["loads"] == 100 + 8 * 5


@pytest.mark.parametrize("order", ORDERS)
def test_a_job_that_takes_nothing_delays_nobody_and_holds_its_window_only(order):
    service = served(200, ("augmented",), order, cache_bytes=500, window=2)
    fast, slow = Client("fast", range(200), batch_size=4), Client("slow", range(200), batch_size=4)
    slow.join(service)
    fast.join(service)
    for _ in range(3):
        finish(service, fast)
        fast.next_epoch()

    status = service.status()
    assert status["jobs"]["slow"]["ahead"] == [2]
    assert status["held_bytes"] <= 2 * 2 * 4 * 30
    finish(service, slow)
    assert slow.taken[0] == Counter(range(200))


@pytest.mark.slow
@pytest.mark.parametrize("forms", [("decoded",), ("augmented",)])
@pytest.mark.parametrize("speeds", [None, (1.0, 1.0, 1.0, 1.0)])
def test_opportunistic_jobs_read_storage_as_often_as_one(forms, speeds):
    """Seneca's law through the service: four jobs, a cache of 20 %, at most 1.03 N reads an epoch, exactly once."""
    num = 500
    service = served(num, forms, "opportunistic", cache_bytes=num * 24 // 5, window=2)
    clients = [Client(f"j{k}", range(num), batch_size=4) for k in range(4)]
    for client in clients:
        client.join(service)
    in_step(service, clients, 3, speeds, seed=1)

    assert service.status()["loads"] <= 1.03 * 3 * num
    assert all(client.taken[epoch] == Counter(range(num)) for client in clients for epoch in range(3))
    assert service.status()["jobs"]["j1"]["substituted_fraction"] > 0.2


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=10)
@given(seed=st.integers(0, 999), num_jobs=st.integers(1, 4), cache=st.integers(0, 300), tail=st.sampled_from([*TAILS]))
def test_no_job_meets_one_augmented_example_twice_over_epochs_and_tails(order, seed, num_jobs, cache, tail):
    service = served(30, ALL_FORMS if seed % 2 else ("augmented",), order, cache_bytes=cache, window=2)
    clients = [
        Client(f"j{k}", drawn(seed + k, 30, 10 + 5 * k), batch_size=3, world_size=2, tail=tail) for k in range(num_jobs)
    ]
    for client in clients:
        client.join(service)
    for _ in range(3):
        finish(service, *clients)
        for client in clients:
            client.next_epoch()

    assert all(max(client.payloads.values()) == 1 for client in clients)


@pytest.mark.parametrize("tail", TAILS)
@settings(max_examples=30)
@given(num=st.integers(1, 30), batch_size=st.integers(1, 7), world_size=st.integers(1, 4))
def test_batches_are_those_of_the_global_sequence(tail, num, batch_size, world_size):
    """In order, so that positions are items: global batch g, rank r takes r::world_size, the tail as declared."""
    service = served(num)
    client = Client("job", range(num), batch_size=batch_size, world_size=world_size, shuffle=False, tail=tail)
    client.join(service)
    oracle = Sequence(num, batch_size, world_size, tail)
    for rank in range(world_size):
        given = []
        while not client.ended[rank]:
            work_off(service)
            batch = client.take(rank)
            given += [batch] if not isinstance(batch, Ended) else []
        expected = [oracle.positions(g, rank) for g in range(oracle.num_batches(rank))]

        assert [batch.items.tolist() for batch in given] == [(places % num).tolist() for places in expected]
        assert [batch.occurrence.tolist() for batch in given] == [(places // num).tolist() for places in expected]
        assert [batch.number for batch in given] == list(range(len(expected)))


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_a_job_is_equally_likely_beside_a_faster_one(order):
    """Also in the shared order, where the slower job catches up."""
    counts = Counter()
    for seed in range(180):
        service = served(12, order=order, seed=seed, window=1)
        fast, slow = Client("fast", range(12), batch_size=2), Client("slow", [1, 4, 7], batch_size=1)
        slow.join(service)
        fast.join(service)
        sequence = []
        while not slow.over:
            work_off(service)
            for _ in range(3):
                fast.take()
                fast.over and fast.next_epoch()
            batch = slow.take()
            sequence += [int(batch.items[0])] if batch is not None and not slow.over else []
            if len(sequence) == 1:
                service._ordering.catch_up("slow", {})
        counts[tuple(sequence)] += 1

    assert len(counts) == 6
    assert p_value(list(counts.values()), [30] * 6) > 1e-3


def test_a_lagging_rank_gets_its_part_of_every_global_batch_also_of_an_abandoned_epoch():
    service = served(60, window=2)
    client = Client("job", range(60), batch_size=3, world_size=2)
    client.join(service)
    work_off(service)
    first = client.take(0)
    client.progress[0] = client.fresh(epoch=1)
    service.begin("job", 0, epoch=1)
    rest = []
    while not client.ended[1]:
        work_off(service)
        rest += [batch] if (batch := client.take(1)) is not None and not client.ended[1] else []

    assert np.array_equal(rest[0].everybody, first.everybody)
    assert len(rest) == 10
    assert sorted(np.concatenate([batch.everybody for batch in rest]).tolist()) == list(range(60))


def test_a_failure_reaches_every_batch_that_needs_the_item_and_it_is_tried_again():
    service = served(4)
    clients = [Client(name, range(4), batch_size=2) for name in "ab"]
    for client in clients:
        client.join(service)
    calls = []
    while (work := service.next_work()) is not None:
        calls.append(work.item)
        service.failed(work, "boom") if work.item == 2 else service.done(work, {"decoded": payload(work)})
    batches = [service.take(name, 0) for name in "aabb"]

    assert sorted(calls) == [0, 1, 2, 3]
    assert [batch.error for batch in batches].count("boom") == 2
    assert all((2 in batch.items) == (batch.error is not None) for batch in batches)
    clients[0].next_epoch()
    assert work_off(service) == 4
    assert service.status()["failed"] == 1


def test_an_example_that_is_left_out_leaves_its_place_empty():
    service = served(3)
    client = Client("a", range(3), batch_size=3, shuffle=False)
    client.join(service)
    while (work := service.next_work()) is not None:
        service.failed(work, None) if work.item == 1 else service.done(work, {"decoded": b"x"})
    batch = service.take("a", 0)

    assert batch.payloads == [b"x", None, b"x"]
    assert batch.error is None
    assert service.status()["dropped"] == 1


def test_work_is_due_in_the_order_in_which_batches_are_needed():
    service = served(40, window=3)
    slow = Client("slow", range(20), batch_size=2, shuffle=False)
    other = Client("other", range(20, 40), batch_size=2, shuffle=False)
    slow.join(service)
    other.join(service)

    items = [service.next_work().item for _ in range(12)]
    assert [sorted(items[k : k + 4]) for k in (0, 4, 8)] == [[0, 1, 20, 21], [2, 3, 22, 23], [4, 5, 24, 25]]


def test_waits_are_booked_on_what_the_last_example_was_doing():
    now = [0]
    service = PreparationScheduler(1, fingerprint=PRINT, clock=lambda: now[0])
    client = Client("a", range(1))
    client.join(service)
    assert client.take() is None
    now[0] = 10
    work = service.next_work()
    now[0] = 100
    service.done(
        work,
        {"decoded": payload(work)},
        PreparationTime(fetch_start_ns=10, fetch_end_ns=60, decode_ns=40, read_bytes=7),
    )
    batch = client.take()

    assert service.status()["wait_ns"] == {"queue": 10, "fetch": 50, "prep": 40}
    assert (batch.fetch_ns, batch.prep_ns, batch.read_bytes) == (50, 40, 7)


def test_costs_are_booked_once_and_sums_prove_what_was_handed_out():
    service = served(20)
    clients = [Client(name, range(20), batch_size=4, world_size=2) for name in "ab"]
    for client in clients:
        client.join(service)
    fetched = 0
    while not all(client.over for client in clients):
        work_off(service, spent=PreparationTime(fetch_start_ns=5, fetch_end_ns=8))
        for client in clients:
            for rank in range(2):
                batch = client.take(rank)
                fetched += batch.fetch_ns if batch is not None and not isinstance(batch, Ended) else 0

    assert fetched == service.status()["fetch_ns"] == 3 * 20
    whole = AuditSum.of_range(0, 20)
    assert {job["audit"]["0"]["sum"] for job in service.status()["jobs"].values()} == {whole.text}


def test_each_example_is_a_hit_shared_or_prepared():
    service = served(50, ALL_FORMS, cache_bytes=900, split=(0.4, 0.4, 0.2))
    clients = [Client(f"j{k}", drawn(k, 50, 30), batch_size=3) for k in range(3)]
    for client in clients:
        client.join(service)
    for _ in range(3):
        finish(service, *clients)
        for client in clients:
            client.next_epoch()
    finish(service, *clients)

    status = service.status()
    assert sum(status["hits"].values()) + status["shared"] + sum(status["prepared"].values()) == 4 * 3 * 30
    assert min(status["prepared"]["encoded"], status["prepared"]["decoded"]) > 0


def test_threads_may_call_it_all_at_once():
    service = served(300, ("augmented",), "shared", cache_bytes=1000)
    clients = [Client(f"j{k}", range(300), batch_size=7) for k in range(3)]
    for client in clients:
        client.join(service)

    def prepare():
        while not service._closed:
            work = service.next_work(timeout_s=10)
            if work is not None:
                service.done(work, {"augmented": payload(work)})

    preparing = [threading.Thread(target=prepare) for _ in range(3)]
    woken = threading.Event()
    service._on_ready = woken.set

    def loop(client):
        while not client.over:
            woken.clear()
            if client.take() is None:
                woken.wait(0.01)

    loops = [threading.Thread(target=loop, args=(client,)) for client in clients]
    for thread in [*preparing, *loops]:
        thread.start()
    for thread in loops:
        thread.join(30)
    service.close()
    for thread in preparing:
        thread.join(30)

    assert not any(thread.is_alive() for thread in [*preparing, *loops])
    assert all(client.taken[0] == Counter(range(300)) for client in clients)
    assert all(max(client.payloads.values()) == 1 for client in clients)


def test_ranks_that_come_back_after_a_crash_wait_for_the_foremost_and_go_on_behind_it():
    service = served(24, seed=1)
    client = Client("job", range(24), batch_size=2, world_size=2)
    client.join(service)
    for rank in (0, 0, 0, 1):
        work_off(service)
        client.take(rank)
    history = [progress.history for progress in client.progress]
    again = served(24, seed=2)
    again.join("job", fingerprint=PRINT, terms=client.terms)
    for rank in (0, 1):
        again.attach("job", rank)
    again.begin("job", 1, epoch=0, history=history[1])
    assert (work_off(again), again.ready()) == (0, [])
    again.begin("job", 0, epoch=0, history=history[0])
    client.service = again
    finish(again, client)

    assert client.taken[0] == Counter(range(24))
    assert np.array_equal(client.progress[1].history[1], history[0][1])
    assert np.array_equal(client.progress[1].history[2], history[0][2])
