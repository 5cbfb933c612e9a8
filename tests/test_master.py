"""The master: whatever dies in whatever order, each rank's loop gets every batch of its pass once, in order."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import FormatError, InputError
from headway.data.fleet.master import MAX_ENDED, SAVE_S, Master
from headway.data.fleet.splits import FleetPass, WorkerReport
from tests.test_leases import Clock

ROOM = 4
"""Batches that a worker of the model holds before it asks only for what a reader waits for."""


class Fleet:
    """Master, workers and readers as plain objects on one clock: what processes do, one call at a time."""

    def __init__(self, work: FleetPass, num_workers: int, split_batches: int, window: int, folder: Path) -> None:
        self.work, self.clock, self.folder = work, Clock(), folder
        self.options = {
            "split_batches": split_batches, "window": window, "most_workers": 2, "lease_s": 10.0, "clock": self.clock,
            "checkpoint": folder / "master.json",
        }  # fmt: skip
        self.master = Master(work.num_items, **self.options)
        self.held: dict[str, dict] = {}
        self.next_worker = 0
        for _ in range(num_workers):
            self.start_worker()
        self.loops = [[] for _ in range(work.world_size)]
        self.saved = [0] * work.world_size
        self.clients: list[str | None] = [None] * work.world_size
        self.next_client = 0

    def start_worker(self):
        name = f"w{self.next_worker}"
        self.next_worker += 1
        self.held[name] = {}
        self.master.register(name, name)

    def work_on(self, name):
        """Ask for a split and prepare it, as a worker does."""
        if name not in self.master.workers:  # it was silent, or the master is a new one
            kept = self.master.register(name, name, list(self.held[name]))
            self.held[name] = {lease: self.held[name][lease] for lease in kept}
        self.master.beat(name, WorkerReport())
        for lease in self.master.revoked(name):
            self.held[name].pop(lease, None)
        lease = self.master.next_split(name, room=sum(map(len, self.held[name].values())) < ROOM)
        if lease is not None:
            first = self.master.begin(lease.key)
            self.held[name][lease.key, lease.generation] = set(range(first, lease.key.end))
            self.master.ready(name, lease.key, lease.generation)

    def read(self, rank):
        """Take the next batch if a worker has it, as a reader does."""
        taken = len(self.loops[rank])
        client = self.clients[rank]
        if client is None:
            client = self.clients[rank] = f"r{self.next_client}"
            self.next_client += 1
            assert self.master.join(client, self.work, rank, taken) == taken
        for place in self.master.placements(client):
            if place.split.first <= taken < place.split.end:
                batches = self.held.get(place.worker, {}).get((place.split, place.generation), set())
                if taken in batches:
                    batches.remove(taken)
                    self.loops[rank].append(taken)
                    self.master.took(client, taken + 1)
                    return
                self.master.lost(client, place.split, place.generation)

    def kill_worker(self, name):
        self.held.pop(name)
        self.master.gone(name)
        self.start_worker()

    def kill_reader(self, rank):
        """A reader dies, and the next one goes on from its checkpoint."""
        if self.clients[rank] is not None:
            self.master.leave(self.clients[rank])
        self.clients[rank] = None
        del self.loops[rank][self.saved[rank] :]

    def kill_master(self):
        """The next master has the checkpoint; workers and readers come back."""
        self.master = Master(self.work.num_items, **self.options)
        self.clients = [None] * self.work.world_size

    def do(self, what, which):
        names = list(self.held)
        rank = which % self.work.world_size
        if what == "work":
            self.work_on(names[which % len(names)])
        elif what == "read":
            self.read(rank)
        elif what == "save":
            self.saved[rank] = len(self.loops[rank])
        elif what == "kill worker":
            self.kill_worker(names[which % len(names)])
        elif what == "kill reader":
            self.kill_reader(rank)
        elif what == "kill master":
            self.kill_master()
        else:
            self.clock.now_s += 6.0
            self.master.tick()


EVENTS = ["work", "work", "work", "read", "read", "read", "save", "kill worker", "kill reader", "kill master", "wait"]


@settings(max_examples=60)
@given(
    work=st.builds(FleetPass, st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), seed=st.integers(0, 3)),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 11)), max_size=120),
)
def test_every_loop_gets_every_batch_once_whatever_dies(work, shape, events):
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(work, *shape, Path(folder))
        for what, which in events:
            fleet.do(what, which)
        for _ in range(400):  # from here on nothing dies: it must end
            if all(len(fleet.loops[rank]) == work.num_batches(rank) for rank in range(work.world_size)):
                break
            for name in list(fleet.held):
                fleet.work_on(name)
            for rank in range(work.world_size):
                fleet.read(rank)

        assert fleet.loops == [list(range(work.num_batches(rank))) for rank in range(work.world_size)]
        assert fleet.master.committed(work) == work.num_items


def begun(num_workers=2, **options):
    """A master with workers and one reader, on a clock of its own."""
    clock = Clock()
    master = Master(40, split_batches=2, window=4, lease_s=10.0, clock=clock, **options)
    for k in range(num_workers):
        master.register(f"w{k}", f"at{k}")
    master.join("r", FleetPass(40, 2), 0)
    return master, clock


def test_a_window_of_splits_is_out_and_moves_with_what_the_loop_took():
    master, _ = begun()

    first = [master.next_split("w0").key.first for _ in range(4)]
    assert (first, master.next_split("w0")) == ([0, 2, 4, 6], None)
    master.took("r", 5)
    assert [master.next_split("w1").key.first, master.next_split("w1").key.first] == [8, 10]
    assert master.revoked("w0")[0][0].first in (0, 2)


def test_a_worker_without_room_gets_only_what_a_reader_waits_for():
    master, _ = begun()

    first = master.next_split("w0")
    assert master.next_split("w1", room=False) is None
    master.gone("w0")
    assert master.next_split("w1", room=False).key == first.key


def test_the_words_of_a_worker_that_was_given_up_are_refused():
    master, clock = begun()
    lease = master.next_split("w0")
    clock.now_s = 11.0

    assert master.tick() == ["w0", "w1"]
    assert not master.ready("w0", lease.key, lease.generation)
    assert master.counts.refused == 1
    assert master.register("w0", "at0", [(lease.key, lease.generation)]) == [(lease.key, lease.generation)]


def test_a_straggler_is_prepared_twice_and_both_places_are_told():
    master, clock = begun()
    for _ in range(3):
        quick = master.next_split("w0")
        clock.now_s += 0.1
        master.ready("w0", quick.key, quick.generation)
    slow = master.next_split("w0")
    clock.now_s += 0.2
    assert master.next_split("w1") is None
    clock.now_s += 5.0

    again = master.next_split("w1")

    assert (again.key, master.counts.repeated) == (slow.key, 1)
    assert [p.worker for p in master.placements("r") if p.split == slow.key] == ["w0", "w1"]


def test_a_draining_worker_goes_once_its_readers_took_what_it_has():
    master, _ = begun()
    master.next_split("w0")
    master.drain("w0")

    assert (master.next_split("w0"), master.drained()) == (None, [])
    assert master.next_split("w1").key.first == 2
    master.took("r", 2)
    assert master.drained() == ["w0"]


def test_a_reader_that_comes_back_gets_what_it_had_not_saved():
    master, _ = begun()
    work = FleetPass(40, 2)
    master.next_split("w0")
    master.took("r", 4)
    master.leave("r")

    assert master.join("again", work, 0, None) == 4
    assert master.join("earlier", work, 0, 1) == 1
    assert master.next_split("w1").key.first == 0
    with pytest.raises(InputError, match="another process reads this rank now"):
        master.took("again", 5)


def test_a_split_that_ends_workers_is_an_error_of_its_reader():
    master, _ = begun()
    for k in range(MAX_ENDED):
        assert master.broken("r") is None
        master.register(f"x{k}", "at")
        while (lease := master.next_split(f"x{k}")) and lease.key.first:
            pass
        master.gone(f"x{k}")
        for other in ("w0", "w1"):
            master.drain(other)

    assert "workers ended while they prepared batches 0 to 1" in master.broken("r")


def test_a_master_goes_on_from_its_checkpoint_in_a_new_term(tmp_path):
    path = tmp_path / "master.json"
    master, clock = begun(checkpoint=path)
    held = [(lease.key, lease.generation) for lease in (master.next_split("w0"), master.next_split("w0"))]
    master.took("r", 2)
    clock.now_s += SAVE_S
    master.tick()

    after = Master(40, split_batches=2, window=4, lease_s=10.0, clock=clock, checkpoint=path)

    assert after.register("w0", "at0", held) == held[1:]
    assert after.join("r2", FleetPass(40, 2), 0, None) == 2
    assert after.next_split("w0").generation > 1 << 32
    assert after.statistics()["term"] == 1
    path.write_text("{}")
    with pytest.raises(FormatError, match=r"is no checkpoint of a master.*Remove it"):
        Master(40, checkpoint=path)


def test_passes_that_nobody_reads_are_put_away_and_their_workers_told():
    master, _ = begun()
    lease = master.next_split("w0")
    master.leave("r")
    for epoch in range(1, 8):
        master.join("r", FleetPass(40, 2, epoch=epoch), 0)

    assert master.revoked("w0") == [(lease.key, lease.generation)]
    assert len(master.statistics()["passes"]) <= 5


@pytest.mark.parametrize(("call", "message"), [
    (lambda m: m.join("x", FleetPass(41, 2), 0), r"expects 41 items .* prepares 40 .*Connect to the fleet of your "),
    (lambda m: m.join("x", FleetPass(40, 2), 0, data="other"), r"of 'other'"),
    (lambda m: m.join("x", FleetPass(40, 2), 1), r"rank is 1; a world of 1 has ranks"),
    (lambda m: m.join("x", FleetPass(40, 2), 0, 21), r"cannot have taken 21 of 20 batches"),
    (lambda m: Master(1, window=0), r"window is 0; pass 1 or more"),
])  # fmt: skip
def test_bad_input_is_told_with_rule_and_fix(call, message):
    with pytest.raises(InputError, match=message):
        call(begun()[0])
