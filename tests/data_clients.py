"""Clients of a data server's service, in one thread and without time: who takes what is decided by the test."""

from collections import Counter

import numpy as np

from headway.data.service.batches import Ended, JobProgress, PreparationTime
from headway.data.service.jobs import JobTerms
from headway.data.service.service import PreparationScheduler
from headway.data.service.stock import DataServer

PRINT = "numbers"


def served(size=40, forms=("decoded",), order="shared", seed=0, **more):
    """A service over numbers."""
    return PreparationScheduler(
        size, fingerprint=PRINT, forms=forms, seed=seed, options=DataServer(order=order, threads=1, **more)
    )


def payload(work):
    """An example that says its item and its draw."""
    return b"%d:%d" % (work.item, work.draw)


def item_of(made):
    return int(bytes(made).split(b":")[0])


def work_off(service, most=None, spent=None):
    """Prepare what is due, `most` examples of it; return how many it was."""
    count = 0
    while (most is None or count < most) and (work := service.next_work()) is not None:
        forms = {form: payload(work) for form in (*work.keep, service.forms[-1])}
        service.done(work, forms, PreparationTime() if spent is None else spent)
        count += 1
    return count


class Client:
    """All ranks of one job, each with a progress of its own, as processes would keep it."""

    def __init__(self, name, items, *, batch_size=2, world_size=1, shuffle=True, tail="short", states=None):
        self.name, self.items = name, items
        self.terms = JobTerms(batch_size=batch_size, world_size=world_size, shuffle=shuffle, tail=tail)
        self.progress = [self.fresh() for _ in range(world_size)]
        for progress in self.progress if states else ():
            progress.load_state_dict(states)
        self.ended = [False] * world_size
        self.taken: dict[int, Counter] = {}
        """Epoch -> items that the loops took, all ranks together."""
        self.payloads: Counter = Counter()

    def fresh(self, epoch=0):
        """Return the progress of a rank at the beginning of an epoch."""
        progress = JobProgress(self.items, global_batch=self.terms.global_batch, tail=self.terms.tail)
        progress.epoch = epoch
        return progress

    @property
    def world_size(self):
        return self.terms.world_size

    def join(self, service, *, again=False):
        """Join and begin; `again`: behind what was taken from a server that is gone."""
        self.service = service
        service.join(self.name, fingerprint=PRINT, terms=self.terms, items=self.items)
        for rank, progress in enumerate(self.progress):
            service.attach(self.name, rank)
            service.begin(
                self.name, rank, epoch=progress.epoch, remaining=progress.base(),
                history=progress.history if again else None,
            )  # fmt: skip

    def take(self, rank=0):
        """Take a batch of a rank if it is there; return it, an end, or None."""
        if self.ended[rank]:
            return None
        found = self.service.take(self.name, rank)
        if isinstance(found, Ended):
            self.ended[rank] = True
        elif found is not None:
            assert found.error is None
            assert [item_of(made) for made in found.payloads] == found.items.tolist()
            assert found.epoch == self.progress[rank].epoch
            self.taken.setdefault(found.epoch, Counter()).update(found.items.tolist())
            self.payloads.update(bytes(made) for made in found.payloads)
            self.progress[rank].took(found.everybody)
        return found

    def next_epoch(self):
        """Begin the next epoch on every rank."""
        for rank, progress in enumerate(self.progress):
            self.progress[rank] = self.fresh(progress.epoch + 1)
            self.ended[rank] = False
            self.service.begin(self.name, rank, epoch=progress.epoch + 1)

    @property
    def over(self):
        return all(self.ended)

    @property
    def in_step(self):
        return len({len(progress.history) for progress in self.progress}) == 1


def finish(service, *clients):
    """Prepare and take until every client's epoch is over."""
    while not all(client.over for client in clients):
        moved = work_off(service)
        for client in clients:
            for rank in range(client.world_size):
                while client.take(rank) is not None:
                    moved += 1
        assert moved, "nothing moves any more"


def drawn(seed, size, count):
    """Return a random subset."""
    return np.random.default_rng(seed).permutation(size)[:count]
