"""Ranks outlive their server exactly, also without those that are done or gone; waiting for one has a bound."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.data.bytes.order import TAILS
from headway.data.service.batches import Ended
from headway.data.service.jobs import JobTerms, Known
from headway.data.service.messages import Decided
from headway.data.service.service import PreparationScheduler
from headway.data.service.stock import DataServer
from tests.data_clients import PRINT, work_off
from tests.launching import wait_for
from tests.refusals import refused
from tests.test_server import Caller, facts, flat
from tests.test_server import serve as serve

SIZE = 60


class Ranks:
    """The ranks of one job as their processes keep them: what each took, what its server told, where it stands."""

    def __init__(self, world_size, tail="short"):
        self.terms = JobTerms(batch_size=2, world_size=world_size, tail=tail)
        self.here = list(range(world_size))
        self.epoch = [0] * world_size
        self.history = [[] for _ in range(world_size)]
        self.taken = [{} for _ in range(world_size)]
        self.told = [{} for _ in range(world_size)]
        self.over = [False] * world_size
        self.away: set[int] = set()
        """Ranks that had their last batch, and do not know yet that their server is gone."""

    def join(self, service):
        """Come to a server, the first or another one: each rank by itself, with what it knows."""
        self.service, again = service, bool(self.taken[0])
        service.join("job", fingerprint=PRINT, terms=self.terms)
        self.away = {rank for rank in self.here if self.over[rank]}
        for rank in [rank for rank in self.here if rank not in self.away]:
            service.attach("job", rank)
            self.taken[rank].setdefault(self.epoch[rank], [])
            self.begin(rank, again=again)

    def begin(self, rank, *, again=False):
        known, epoch = self.told[rank].get(self.epoch[rank], Known()), self.epoch[rank]
        self.over[rank] = False
        self.service.begin(
            "job", rank, epoch=epoch, history=self.history[rank] if again or known.decided else None, index=epoch,
            known=known,
        )  # fmt: skip
        self.hear()

    def hear(self):
        """Let each rank hear what the server tells it: at once, as messages come in order."""
        for rank in [rank for rank in self.here if rank not in self.away]:
            for ahead, number, known in self.service.known("job", rank):
                assert number == (0 if ahead else len(self.history[rank]))
                self.told[rank][self.epoch[rank] + ahead] = known

    def step(self, rank):
        """Take one batch of a rank, if it is there."""
        work_off(self.service)
        found = self.service.take("job", rank)
        if isinstance(found, Ended):
            self.over[rank] = True
            self.hear()
        elif found is None:
            assert set(self.service._jobs["job"].missing()) <= self.away
        else:
            self.history[rank].append(found.everybody)
            self.taken[rank][self.epoch[rank]].append(found.items)
            known = self.told[rank].get(self.epoch[rank])
            if known is not None:
                self.told[rank][self.epoch[rank]] = Known(known.decided[1:], known.complete, known.gone)
        return found

    def finish(self, rank):
        while not self.over[rank]:
            assert self.step(rank) is not None, f"rank {rank} waits"

    def next_epoch(self, rank):
        self.epoch[rank] += 1
        self.history[rank] = []
        self.taken[rank].setdefault(self.epoch[rank], [])
        again = rank in self.away
        if again:
            self.service.attach("job", rank)
            self.away.remove(rank)
        self.begin(rank, again=again)

    def leave(self, rank):
        self.here.remove(rank)
        if rank in self.away:
            self.away.remove(rank)
        else:
            self.service.detach("job", rank)
            self.hear()

    def items(self, epoch):
        return Counter(np.concatenate([items for taken in self.taken for items in taken.get(epoch, [])]).tolist())


def server(order="shared", seed=0, grace_s=600.0, **more):
    options = DataServer(order, window=2, threads=1, grace_s=grace_s)
    return PreparationScheduler(SIZE, fingerprint=PRINT, seed=seed, options=options, **more)


@settings(max_examples=40)
@given(data=st.data(), world_size=st.integers(1, 4), tail=st.sampled_from([*TAILS]))
def test_each_item_comes_once_however_far_apart_ranks_are_when_servers_die_and_ranks_go_at_their_ends(
    data, world_size, tail
):
    ranks, dies, last = Ranks(world_size, tail), 0, 1
    ranks.join(server(seed=0))
    while ranks.here:
        act = data.draw(st.integers(0, 9))
        rank = data.draw(st.sampled_from(ranks.here))
        if act == 0 and dies < 4:
            dies += 1
            ranks.join(server(seed=dies))
        elif not ranks.over[rank]:
            for _ in range(data.draw(st.integers(1, 8))):
                ranks.over[rank] or ranks.step(rank)
        elif ranks.epoch[rank] < last:
            ranks.next_epoch(rank)
        else:
            ranks.leave(rank)

    steps, over = divmod(SIZE, ranks.terms.global_batch)
    whole = {"short": SIZE, "drop": SIZE - over, "pad": (steps + (over > 0)) * ranks.terms.global_batch}[tail]
    for epoch in range(last + 1):
        given = ranks.items(epoch)
        assert given.total() == whole
        assert len(given) == min(whole, SIZE)


def test_a_rank_that_left_in_mid_epoch_takes_its_part_along_and_the_others_get_theirs():
    """As where the server lives: what a rank did not take, nobody else gets."""
    ranks = Ranks(2)
    ranks.join(server())
    for _ in range(4):
        ranks.step(0)
    ranks.step(1)
    ranks.leave(0)
    ranks.join(server(seed=1))
    ranks.finish(1)

    assert max(ranks.items(0).values()) == 1
    assert sum(map(len, ranks.taken[1][0])) == SIZE // 2


def late(now):
    """Rank 1 of two goes on from a lost server, of whose end rank 0 was not heard."""
    service = server(clock=lambda: now[0], grace_s=60.0)
    service.join("job", fingerprint=PRINT, terms=JobTerms(2, 2))
    service.attach("job", 1)
    service.begin("job", 1, epoch=0, history=[np.array([1, 2, 3, 4])])
    return service


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_grace_and_then_named():
    now = [0]
    service = late(now)
    now[0] = 59_999_999_999
    assert (service.overdue(), service.ready(), work_off(service)) == ({}, [], 0)
    now[0] += 1

    assert service.overdue() == {"job": [0]}
    service.give_up("job", [0])
    assert (service.jobs, service.overdue()) == ([], {})
    with pytest.raises(InputError, match=r"rank 0 of job 'job' came more than 60 s \(grace_s\) after the others"):
        service.check_on_time("job", 0)
    service.check_on_time("job", 0)


def test_who_comes_within_the_grace_is_not_late():
    now = [0]
    service = late(now)
    now[0] = 50_000_000_000
    service.attach("job", 0)
    service.begin("job", 0, epoch=0, history=[])
    now[0] = 500_000_000_000

    assert service.overdue() == {}
    assert work_off(service) > 0


def test_a_job_of_which_nobody_is_left_and_one_never_came_goes_after_the_grace_while_others_go_on():
    now = [0]
    service = server(clock=lambda: now[0], grace_s=60.0)
    for name in ("short", "other"):
        service.join(name, fingerprint=PRINT, terms=JobTerms(2, 2 if name == "short" else 1))
        service.attach(name, 0)
        service.begin(name, 0, epoch=0)
    now[0] = 10**12
    assert service.overdue() == {}
    service.detach("short", 0)
    now[0] += 59_000_000_000
    assert service.overdue() == {}
    now[0] += 1_000_000_000

    assert service.overdue() == {"short": [1]}
    service.give_up("short", [1])
    assert service.jobs == ["other"]
    service.check_on_time("short", 0)  # the next job of that name
    assert work_off(service) == 4


def test_names_of_jobs_that_were_given_up_do_not_pile_up():
    service = server()
    for number in range(1200):
        service.give_up(f"job{number}", [0])

    assert len(service._given_up) == 1000
    with pytest.raises(InputError, match="rank 0 of job 'job1199'"):
        service.check_on_time("job1199", 0)


test_a_grace_of_nothing_is_refused = refused((lambda: DataServer(grace_s=0), "grace_s is 0; pass the seconds"))


def test_the_loop_tells_who_waits_whom_it_waited_for_and_the_other_jobs_go_on(serve):
    _, path = serve(grace_s=0.2)
    other = Caller(path, "other")
    waits = Caller(path, "job", rank=1, world_size=2).begin(1, 0, history=[np.array([1, 2, 3, 4])])
    failed = waits.next()

    assert failed.kind == "BackgroundError"
    assert "job 'job' lost a data server and waits for rank 0: what it had" in failed.text
    assert list(facts(path)["jobs"]) == ["other"]
    assert "came more than 0.2 s" in Caller(path, "job", rank=0, world_size=2).welcome.text
    assert sorted(flat(other.begin().all())) == list(range(SIZE))


def test_the_loop_lets_a_job_go_whose_second_rank_never_comes(serve):
    _, path = serve(grace_s=0.2)
    other, first = Caller(path, "other"), Caller(path, "job", world_size=2).begin()
    first.all()
    first.channel.close()
    wait_for(lambda: list(facts(path)["jobs"]) == ["other"])

    assert sorted(flat(other.begin().all())) == list(range(SIZE))


def test_who_had_its_last_batch_hears_so_after_the_others_know(serve):
    _, path = serve()
    first, second = (Caller(path, "job", rank=rank, world_size=2).begin(5) for rank in (0, 1))
    mine = second.next()
    first.all()
    rest = second.all()

    told = second.decided[5]
    assert (told.known.complete, told.known.gone) == (True, [])
    assert told.number + len(told.known.decided) == -(-SIZE // 8)
    assert len(rest) == -(-SIZE // 8) - 1
    assert second.items(mine)


def test_what_was_decided_must_lie_behind_the_history(serve):
    _, path = serve()
    caller = Caller(path).begin(1, 0, decided=Decided(begun=1, number=2, known=Known(complete=True)))

    assert "what was decided begins at batch 2" in caller.next().text
