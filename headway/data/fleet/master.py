"""The master of disaggregated preparation: it leases splits to workers, and only what readers took counts as done.

One class for processes and for Ray: it holds no socket, thread or clock of its
own; whoever runs it calls it. Workers ask for splits, prepare them and keep
the batches until the reader fetches them. A reader (one rank of a training
job) gets its batches in the order of the pass, and reports how many its loop
has taken: one number, cumulative, so a repeated or late report does no harm.
Hence exactly once: a batch has one reader, and the reader's own count decides
what it still needs, whoever else dies.

- A worker that dies or falls silent loses its leases; the rest of its splits
  is prepared again elsewhere. What it says later is known by its generation.
- A reader that comes back with an earlier count gets those batches again.
- A master that dies goes on from its checkpoint in a new term; workers that
  outlived it keep the splits that are still wanted.
- A split that takes much longer than others is leased a second time to a
  worker with nothing else to do; the batch that comes first is used.

The roles are DPP's (Zhao et al., ISCA 2022); units, order and the rules for
deaths are ours. Seconds on the injected clock.

>>> master = Master(num_items=8, split_batches=2, clock=lambda: 0.0)
>>> master.register("w0", "here"), master.join("r0", FleetPass(8, batch_size=2), rank=0)
([], 0)
>>> lease = master.next_split("w0")
>>> lease.key, [(p.worker, p.split.first) for p in master.placements("r0")]
(Split(rank=0, first=0, end=2), [('w0', 0)])
>>> master.took("r0", 3)
>>> master.next_split("w0").key, master.committed(FleetPass(8, batch_size=2))
(Split(rank=0, first=2, end=4), 6)
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import whole_file
from headway.core.wire.leases import Lease, Leases
from headway.data.fleet.splits import FleetPass, Split, SplitPlacement, WorkerReport, partners

SLOW = 3.0
"""A split is a straggler when it takes so many times the median."""
SLOW_S = 0.5
"""... and longer than this: short splits vary by more than their length."""
MAX_ENDED = 5
"""Workers that may end while they prepare one split; then its reader gets an error instead."""
KEPT_PASSES = 4
"""Passes that nobody reads of which the counts are kept."""
SAVE_S = 0.5
"""How often a checkpoint is written at most, besides at starts and joins."""


NOTHING_YET = WorkerReport()


@dataclass(slots=True)
class WorkerState:
    """A worker as the master knows it."""

    address: str
    report: WorkerReport = NOTHING_YET
    draining: bool = False


@dataclass(slots=True)
class ReaderState:
    """One rank of a pass: how far it is, and who reads it now."""

    taken: int = 0
    """Batches that the training loop took."""
    client: str = ""
    waited_s: float = 0.0
    """How long its loop has waited for batches, as its client counts."""


@dataclass(slots=True)
class MasterCounts:
    """What happened since this master started."""

    leased: int = 0
    repeated: int = 0
    """Second leases of stragglers."""
    lost: int = 0
    """Leases that ended with their worker, or because a reader could not get at them."""
    adopted: int = 0
    """Leases of an earlier term that went on."""
    refused: int = 0
    """Words of workers about leases that they no longer have."""
    taken: int = 0
    """Batches that loops took, of all ranks."""
    waited_s: float = 0.0
    """How long loops waited for them, summed over ranks."""


class Master:
    """Leases the splits of passes to workers, and tracks what readers took. Not safe for threads: one calls it."""

    def __init__(
        self,
        num_items: int,
        *,
        data: str = "",
        split_batches: int = 4,
        window: int = 8,
        most_workers: int = 4,
        lease_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        checkpoint: str | Path | None = None,
    ) -> None:
        """Go on from `checkpoint` where that exists.

        `data` is the fingerprint that readers must name. Per reader at most
        `window` splits are out, at `most_workers` workers. Raises `InputError`
        on sizes below 1, `FormatError` on a checkpoint that is none.
        """
        for name, value in (("split_batches", split_batches), ("window", window), ("most_workers", most_workers)):
            if value < 1:
                raise InputError(f"{name} is {value}; pass 1 or more.")
        self.num_items, self.data, self.split_batches = num_items, data, split_batches
        self.counts = MasterCounts()
        self._window, self._most, self._clock = window, most_workers, clock
        self._workers: dict[str, WorkerState] = {}
        self._passes: dict[FleetPass, list[ReaderState]] = {}
        self._where: dict[str, tuple[FleetPass, int]] = {}
        self._ready: set[tuple[Split, int]] = set()
        self._durations: deque[float] = deque(maxlen=64)
        self._known: dict[tuple[FleetPass, int], set[Split]] = {}
        self._ended: dict[Split, int] = {}
        self._revoked: dict[str, list[tuple[Split, int]]] = {}
        self._path, self._saved_s, self._changed = (None if checkpoint is None else Path(checkpoint)), -SAVE_S, True
        term = self._load()
        self._leases: Leases[Split] = Leases(lease_s=lease_s, clock=clock, term=term)
        for work, readers in self._passes.items():
            for rank in range(len(readers)):  # workers may be back before readers are, with splits of theirs
                self._known[work, rank] = set(self._near(work, rank))
                self._leases.add(self._near(work, rank))
        self._save()

    # Workers

    def register(self, worker: str, address: str, held: Iterable[tuple[Split, int]] = ()) -> list[tuple[Split, int]]:
        """Let a worker in; returns which of the leases it `held` (from before a master died) it keeps."""
        self._workers.setdefault(worker, WorkerState(address)).address = address
        self._leases.beat(worker)
        kept = [(split, generation) for split, generation in held if self._kept(worker, split, generation)]
        self.counts.adopted += len(kept)
        return kept

    def beat(self, worker: str, report: WorkerReport) -> None:
        """Note that a worker lives, and how it is."""
        if worker in self._workers:
            self._workers[worker].report = report
            self._leases.beat(worker)

    def next_split(self, worker: str, *, room: bool = True) -> Lease[Split] | None:
        """Lease to `worker` the split that a reader needs soonest; failing that, a straggler of another worker.

        One without `room` gets only what a reader needs next of all: all
        workers may be full of what that reader cannot take before.
        """
        state = self._workers.get(worker)
        if state is None or state.draining:
            return None
        names = [name for name, worker in self._workers.items() if not worker.draining]
        farthest = math.inf if room else 0
        lease = self._leases.take(worker, lambda split: self._lead(split, names.index(worker), len(names), farthest))
        if lease is None and room:
            median_s = statistics.median(self._durations) if self._durations else self._leases.lease_s
            slow_s = max(SLOW_S, SLOW * median_s)
            lease = self._leases.repeat(worker, older_than_s=slow_s, choose=self._straggling)
            self.counts.repeated += lease is not None
        self.counts.leased += lease is not None
        return lease

    def begin(self, split: Split) -> int:
        """Return the first batch of a split that is still wanted."""
        readers = self._passes.get(split.work)
        return split.first if readers is None else max(split.first, readers[split.rank].taken)

    def ready(self, worker: str, split: Split, generation: int) -> bool:
        """Note that a split is prepared; False, and nothing happens, when that lease has ended."""
        for lease in self._leases.held(split):
            if (lease.holder, lease.generation) == (worker, generation):
                self._ready.add((split, generation))
                self._durations.append(self._clock() - lease.taken_s)
                return True
        self.counts.refused += 1
        return False

    def gone(self, worker: str) -> None:
        """Forget a worker that ended: what it had goes back, first in line."""
        self._workers.pop(worker, None)
        self._revoked.pop(worker, None)
        self._back(self._leases.drop(worker))

    def drain(self, worker: str) -> None:
        """Lease nothing more to a worker; it may go once readers took what it has (`drained`)."""
        if worker in self._workers:
            self._workers[worker].draining = True

    def drained(self) -> list[str]:
        """Return the workers that drain and have nothing left that anybody reads."""
        done = []
        for name, worker in self._workers.items():
            left = self._leases.holding(name) if worker.draining else []
            if worker.draining and not any(self._client_of(lease.key) for lease in left):
                done.append(name)
        return done

    def num_held(self, worker: str) -> int:
        """Return how many leases a worker has."""
        return len(self._leases.holding(worker))

    def revoked(self, worker: str) -> list[tuple[Split, int]]:
        """Return, once, the leases of a worker that ended since it was last asked: it may drop those batches."""
        return self._revoked.pop(worker, [])

    # Readers

    def join(
        self, client: str, work: FleetPass, rank: int, taken: int | None = None, *, data: str | None = None
    ) -> int:
        """Let `client` read one rank of a pass, after `taken` batches (None: after what the master knows it took).

        Returns that number. Whoever read the rank before is put out. Raises
        `InputError` on other data, a rank or a count that cannot be.
        """
        if work.num_items != self.num_items or (data is not None and data != self.data):
            raise InputError(
                f"the reader expects {work.num_items} items of {data!r}, this fleet prepares {self.num_items} of "
                f"{self.data!r}. Connect to the fleet of your data, or start one."
            )
        if not 0 <= rank < work.world_size:
            raise InputError(f"rank is {rank}; a world of {work.world_size} has ranks 0 to {work.world_size - 1}.")
        if taken is not None and not 0 <= taken <= work.num_batches(rank):
            raise InputError(f"rank {rank} cannot have taken {taken} of {work.num_batches(rank)} batches. Pass fewer.")
        self.leave(client)
        reader = self._passes.setdefault(work, [ReaderState() for _ in range(work.world_size)])[rank]
        if reader.client:
            self._where.pop(reader.client, None)
        reader.client, reader.waited_s, self._where[client] = client, 0.0, (work, rank)
        reader.taken = reader.taken if taken is None else taken
        self._rest(but=work)
        self._open(work, rank)
        self._changed = True
        self._save()
        return reader.taken

    def took(self, client: str, taken: int, waited_s: float = 0.0) -> None:
        """Note that the loop of `client` took its first `taken` batches. Raises `InputError` once it was put out."""
        if client not in self._where:
            raise InputError("another process reads this rank now. Give each rank one reader, or join again.")
        work, rank = self._where[client]
        reader = self._passes[work][rank]
        self.counts.waited_s += max(waited_s - reader.waited_s, 0.0)
        reader.waited_s = waited_s
        if taken > reader.taken:
            taken = min(taken, work.num_batches(rank))
            self.counts.taken += taken - reader.taken
            reader.taken, self._changed = taken, True
            self._open(work, rank)

    def lost(self, client: str, split: Split, generation: int) -> None:
        """Note that a reader cannot get a split where it was placed: it is prepared again."""
        if client in self._where and self._where[client] == (split.work, split.rank):
            holders = [lease for lease in self._leases.held(split) if lease.generation == generation]
            if self._leases.release(split, generation):
                self.counts.lost += 1
                self._end(holders)

    def leave(self, client: str) -> None:
        """Note that a reader is gone; what is prepared for it stays until another reads its rank, or a later pass."""
        where = self._where.pop(client, None)
        if where is not None:
            self._passes[where[0]][where[1]].client = ""

    def placements(self, client: str) -> list[SplitPlacement]:
        """Return where a reader finds its next splits, in their order; a straggler may be in two places."""
        if client not in self._where:
            return []
        work, rank = self._where[client]
        return [
            SplitPlacement(split, lease.generation, lease.holder, self._workers[lease.holder].address)
            for split in self._near(work, rank)
            for lease in self._leases.held(split)
            if lease.holder in self._workers
        ]

    def broken(self, client: str) -> str | None:
        """Return what a reader is to be told when workers keep ending over its next split, else None."""
        if client not in self._where:
            return None
        work, rank = self._where[client]
        for split in self._near(work, rank):
            if self._ended.get(split, 0) >= MAX_ENDED:
                items = [item for batch in range(split.first, split.end) for item in work.keys(batch, rank).items]
                return (
                    f"{MAX_ENDED} workers ended while they prepared batches {split.first} to {split.end - 1} of rank "
                    f"{rank} (items {items[:8]}...). Look for what ends them in their output, or remove those items."
                )
        return None

    # Time and account

    def tick(self) -> list[str]:
        """Forget workers that fell silent, save what changed; returns the silent ones. Call it a few times per second.

        A silent worker may come back: it registers again, with what it held.
        """
        silent = self._leases.silent()
        for name in silent:
            self.gone(name)
        if self._changed and self._clock() - self._saved_s >= SAVE_S:
            self._save()
        return silent

    def committed(self, work: FleetPass) -> int:
        """Return the position up to which all ranks of a pass have taken everything."""
        readers = self._passes.get(work)
        if readers is None:
            return work.start
        # In a short tail some ranks end a batch earlier: those hold nothing back.
        left = [reader.taken for rank, reader in enumerate(readers) if reader.taken < work.num_batches(rank)]
        return work.position(min(left)) if left else work.num_items

    @property
    def workers(self) -> dict[str, WorkerState]:
        """The workers that are registered, by name."""
        return dict(self._workers)

    @property
    def readers(self) -> list[ReaderState]:
        """The ranks that are being read."""
        return [reader for readers in self._passes.values() for reader in readers if reader.client]

    def statistics(self) -> dict[str, object]:
        """Return counts, workers and passes, as a status page would show them."""
        return {
            **asdict(self.counts),
            "term": self._leases.term,
            "readers": sorted(self._where),
            "workers": {name: {**w.report._asdict(), "draining": w.draining} for name, w in self._workers.items()},
            "passes": [
                {"epoch": work.epoch, "position": self.committed(work), "taken": [reader.taken for reader in readers]}
                for work, readers in self._passes.items()
            ],
        }

    def _kept(self, worker: str, split: Split, generation: int) -> bool:
        """Adopt a lease of an earlier term, or one that this very worker holds."""
        if any((lease.holder, lease.generation) == (worker, generation) for lease in self._leases.held(split)):
            return True
        return self._leases.adopt(split, worker, generation)

    def _client_of(self, split: Split) -> str:
        readers = self._passes.get(split.work)
        return readers[split.rank].client if readers else ""

    def _lead(self, split: Split, index: int, num_workers: int, farthest: float) -> int | None:
        """Return how many batches lie before a split, None when worker number `index` is not to have it."""
        work, rank = split.work, split.rank
        allowed = partners(rank, work.world_size, num_workers=num_workers, most=self._most)
        if not self._client_of(split) or index not in allowed:
            return None
        lead = split.first - self._passes[work][rank].taken
        return lead if lead <= farthest else None

    def _straggling(self, lease: Lease[Split]) -> int | None:
        """Return how soon the reader needs what a lease is late with, None where it is not late."""
        if (lease.key, lease.generation) in self._ready or not self._client_of(lease.key):
            return None
        return lease.key.first - self._passes[lease.key.work][lease.key.rank].taken

    def _near(self, work: FleetPass, rank: int) -> list[Split]:
        """Return the splits that a reader needs next, the window that may be out."""
        taken = self._passes[work][rank].taken
        return work.splits(rank, taken, split_batches=self.split_batches, most=self._window)

    def _open(self, work: FleetPass, rank: int) -> None:
        """Let the splits in the window of a reader wait, and forget all others of its rank."""
        near = set(self._near(work, rank)) if self._passes[work][rank].client else set()
        known = self._known.get((work, rank), set())
        if near == known:
            return
        self._end(self._leases.forget(known - near))
        self._leases.add(split for split in self._near(work, rank) if split in near)
        for split in known - near:
            self._ended.pop(split, None)
        self._known[work, rank] = near

    def _back(self, lost: Iterable[Lease[Split]]) -> None:
        """Count leases that ended with their worker."""
        for lease in lost:
            self.counts.lost += 1
            if (lease.key, lease.generation) not in self._ready:
                self._ended[lease.key] = self._ended.get(lease.key, 0) + 1
            self._ready.discard((lease.key, lease.generation))

    def _end(self, leases: Iterable[Lease[Split]]) -> None:
        """Tell the workers that these leases ended."""
        for lease in leases:
            self._ready.discard((lease.key, lease.generation))
            self._revoked.setdefault(lease.holder, []).append((lease.key, lease.generation))

    def _rest(self, but: FleetPass) -> None:
        """Take back what is prepared for passes that nobody reads any more, and forget all but a few of them."""
        idle = [w for w, readers in self._passes.items() if w != but and not any(reader.client for reader in readers)]
        for work in idle:
            for rank in range(work.world_size):
                self._open(work, rank)
        for work in idle[:-KEPT_PASSES]:
            del self._passes[work]
            for rank in range(work.world_size):
                self._known.pop((work, rank), None)

    def _save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        self._saved_s, self._changed = self._clock(), False
        if self._path is None:
            return
        passes = [
            {"work": asdict(work), "taken": [reader.taken for reader in readers]}
            for work, readers in self._passes.items()
        ]
        with whole_file(self._path) as draft:
            draft.write_bytes(msgspec.json.encode({"version": 1, "term": self._leases.term, "passes": passes}))

    def _load(self) -> int:
        """Read the checkpoint, if there is one; returns the term to begin."""
        if self._path is None or not self._path.exists():
            return 0
        try:
            state = msgspec.json.decode(self._path.read_bytes())
            for row in state["passes"]:
                self._passes[FleetPass(**row["work"])] = [ReaderState(taken) for taken in row["taken"]]
            return int(state["term"]) + 1
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise FormatError(
                f"{self._path} is no checkpoint of a master: {error!r}. Remove it: readers know where they are."
            ) from error
