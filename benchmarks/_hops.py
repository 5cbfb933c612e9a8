"""Collectives down to the wire: every chunk that a ring, a tree or parameter servers send, as SEND and RECV.

Equal ranks advance in step, so one lane of each kind of link tells the whole (`Network.stages`). `expand` is its slow,
obvious twin, to check a closed form or a choice. A
transfer is known by its identity (group, seq, round, chunk, src, dst). It occupies one lane, the busier of its two
ends, for latency + bytes / rate; the RECV overlaps its SEND and has only what it takes beyond it as its own time. One
collective of p ranks is a virtual In and Out per rank and its hops between. Times are int64 ns, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.units import NS_PER_S
from headway.cost.specs import LinkSpec

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class HopStage:
    """One lane of the symmetric view: what the busiest link of that kind does for one part of a bucket."""

    job_ns: Ints
    """[...] Time of one job, for each size asked for."""

    jobs: int
    """Jobs per part, one after the other."""


@dataclass(frozen=True, slots=True)
class Network:
    """How gradients are summed over equal ranks."""

    algorithm: str
    """One of `PATTERNS`."""

    num_ranks: int
    """Workers, p."""

    link: LinkSpec
    """What each hop crosses (pushes only, when `pull_link` is given)."""

    num_servers: int = 0
    """Parameter servers; 0 for rings and trees."""

    pull_link: LinkSpec | None = None
    """What pulls from parameter servers cross; None = `link`."""

    recv_ns: int = 0
    """Own time of each RECV after its SEND has ended: adding and copying what arrived."""

    def hop_ns(self, num_bytes: ArrayLike, *, pull: bool = False) -> Ints:
        """Return the time that a lane is occupied by one hop of `num_bytes` (any shape; ns, rounded)."""
        link = (self.pull_link or self.link) if pull else self.link
        seconds = link.latency_s + np.asarray(num_bytes, np.float64) / link.bytes_per_s
        return np.asarray(np.rint(seconds * NS_PER_S).astype(np.int64))

    def stages(self, part_bytes: ArrayLike) -> tuple[HopStage, ...]:
        """Return the lanes that one part of a bucket passes one after the other, seen by symmetry.

        Equal ranks advance in step, so one lane of each kind tells the whole.
        Exact for rings, for parameter servers and for trees of 2^d - 1 ranks;
        an upper bound for other trees. None for one rank without servers.
        """
        size = np.asarray(part_bytes, np.int64)
        if self.algorithm == "parameter_server":
            chunk = _ceil(size, self.num_servers)
            busy, jobs = (self.num_ranks, 1) if self.num_servers <= self.num_ranks else (1, self.num_servers)
            return tuple(HopStage(busy * self.hop_ns(chunk, pull=pull), jobs) for pull in (False, True))
        if self.num_ranks == 1:
            return ()
        if self.algorithm == "ring":
            rounds = 2 * (self.num_ranks - 1)
            hop = self.hop_ns(_ceil(size, self.num_ranks))
            return (HopStage(rounds * hop + (rounds - 1) * self.recv_ns, 1),)
        children = min(2, self.num_ranks - 1)
        depth = self.num_ranks.bit_length() - 1
        return (HopStage(children * self.hop_ns(size), 1),) * (2 * depth)

    def sync_ns(self, num_bytes: ArrayLike, parts: ArrayLike = 1) -> Ints:
        """Return t_sync: the time to sum `num_bytes` in `parts` equal parts over idle links (any shapes).

        Parts pass the stages as a pipeline: the sum of the stages, and all
        but one job on the slowest.
        """
        size, cuts = np.asarray(num_bytes, np.int64), np.asarray(parts, np.int64)
        stages = self.stages(_ceil(size, cuts))
        if not stages:
            return np.zeros(np.broadcast(size, cuts).shape, np.int64)
        first = np.sum([stage.job_ns + self.recv_ns for stage in stages], axis=0)
        slowest = np.max([stage.job_ns for stage in stages], axis=0)
        return np.asarray(first + (cuts * stages[0].jobs - 1) * slowest)


def _ceil(count: ArrayLike, parts: ArrayLike) -> Ints:
    """Return the size of each of `parts` equal parts, rounded up."""
    return np.asarray((np.asarray(count, np.int64) + np.asarray(parts, np.int64) - 1) // np.asarray(parts, np.int64))


IDENTITY: tuple[str, ...] = ("group", "seq", "round", "chunk", "src", "dst")
"""What a SEND and its RECV have in common, and no other transfer has."""


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """One collective of one algorithm: m hops in an order in which every lane may run them."""

    round: Ints
    """[m] Round of the algorithm."""

    chunk: Ints
    """[m] Which of the `num_chunks` equal parts of the buffer is sent."""

    src: Ints
    """[m] Sending rank; parameter servers follow the workers."""

    dst: Ints
    """[m] Receiving rank."""

    lane: Ints
    """[m] Lane that the hop occupies, from 0."""

    after: tuple[Ints, Ints]
    """([e], [e]) The second hop sends on what the first one brought."""

    enters: tuple[Ints, Ints]
    """([e], [e]) (rank, hop): the hop needs that rank's own data."""

    leaves: tuple[Ints, Ints]
    """([e], [e]) (hop, rank): the collective ends on that rank only after the hop."""

    num_chunks: int
    """Equal parts of the buffer; sizes are rounded up, as padded buffers are."""


class PatternFn(Protocol):
    """An algorithm. Write a function of this shape and list it in `PATTERNS` (its stages: `Network.stages`)."""

    def __call__(self, num_ranks: int, num_servers: int) -> Pattern:
        """Return the hops of one collective."""
        ...


def ring(num_ranks: int, num_servers: int = 0) -> Pattern:
    """Pass each of p chunks round the ring twice: p - 1 rounds that reduce, p - 1 that gather."""
    del num_servers
    rounds = 2 * (num_ranks - 1)
    number, src = (part.reshape(-1) for part in np.mgrid[0:rounds, 0:num_ranks].astype(np.int64))
    hop = np.arange(number.size)
    dst = (src + 1) % num_ranks
    later = hop[number > 0]
    before = (number[later] - 1) * num_ranks + (src[later] - 1) % num_ranks
    first, last = hop[number == 0], hop[number == rounds - 1]
    return Pattern(
        round=number,
        chunk=(src - number) % num_ranks,
        src=src,
        dst=dst,
        lane=src,
        after=(before, later),
        # Rounds of one rank run in order, so its own data must be there for the first one, and the last one ends it.
        enters=(src[first], first),
        leaves=(last, dst[last]),
        num_chunks=num_ranks,
    )


def tree(num_ranks: int, num_servers: int = 0) -> Pattern:
    """Reduce up a binary tree (rank r hangs below (r - 1) // 2), then pass the sum down again.

    Siblings share the adapter of their parent: its receiving side on the way up, its sending side on the way down.
    """
    del num_servers
    child = np.arange(1, num_ranks, dtype=np.int64)
    parent = (child - 1) // 2
    depth = np.floor(np.log2(child + 1)).astype(np.int64)
    height = int(depth.max(initial=0))
    up = np.argsort(-depth, kind="stable")
    edges = child.size
    up_of, down_of = np.full(num_ranks, -1, np.int64), np.full(num_ranks, -1, np.int64)
    up_of[child[up]] = np.arange(edges)
    down_of[child] = edges + np.arange(edges)
    inner = child[parent > 0]
    root = child[parent == 0]
    after = [
        (up_of[inner], up_of[(inner - 1) // 2]),  # a parent sends up what its children sent it
        (np.repeat(up_of[root], root.size), np.tile(down_of[root], root.size)),  # the root sends down the whole sum
        (down_of[(inner - 1) // 2], down_of[inner]),
    ]
    return Pattern(
        round=np.concatenate([height - depth[up], height - 1 + depth]),
        chunk=np.zeros(2 * edges, np.int64),
        src=np.concatenate([child[up], parent]),
        dst=np.concatenate([parent[up], child]),
        lane=np.concatenate([parent[up], num_ranks + parent]),
        after=(np.concatenate([a for a, _ in after]), np.concatenate([b for _, b in after])),
        enters=(
            np.concatenate([child[up], np.zeros(root.size, np.int64)]),
            np.concatenate([np.arange(edges), down_of[root]]),
        ),
        leaves=(np.concatenate([down_of[child], up_of[root]]), np.concatenate([child, np.zeros(root.size, np.int64)])),
        num_chunks=1,
    )


def parameter_server(num_ranks: int, num_servers: int = 0) -> Pattern:
    """Push a chunk to each of s servers, which add up what all workers sent, and pull the sums back.

    The side with fewer adapters is the busier one: the servers' when there
    are at most as many of them as workers, else the workers'.
    """
    if num_servers < 1:
        raise InputError(f"num_servers is {num_servers}; parameter servers need at least 1.")
    chunk, worker = (part.reshape(-1) for part in np.mgrid[0:num_servers, 0:num_ranks].astype(np.int64))
    m = chunk.size
    server = num_ranks + chunk
    at_servers = num_servers <= num_ranks
    lane, other = (chunk, num_servers) if at_servers else (worker, num_ranks)
    everyone = np.arange(m).reshape(num_servers, num_ranks)
    pushes = np.repeat(everyone, num_ranks, axis=1).reshape(-1)  # [server][worker pushing][worker pulling]
    pulls = m + np.tile(everyone, (1, num_ranks)).reshape(-1)
    hop = np.arange(m)
    return Pattern(
        round=np.repeat(np.array([0, 1], np.int64), m),
        chunk=np.tile(chunk, 2),
        src=np.concatenate([worker, server]),
        dst=np.concatenate([server, worker]),
        lane=np.concatenate([lane, other + lane]),
        after=(pushes, pulls),
        enters=(worker, hop),
        leaves=(m + hop, worker),
        num_chunks=num_servers,
    )


PATTERNS: dict[str, PatternFn] = {"ring": ring, "tree": tree, "parameter_server": parameter_server}
"""Algorithm of an all-reduce -> its hops."""


@dataclass(frozen=True, slots=True, eq=False)
class Hops:
    """Transfers of a sequence of collectives: m of them, in an order in which every lane may run them."""

    group: Ints
    """[m] Process group."""

    seq: Ints
    """[m] Number of the collective in its group; the parts of a bucket are collectives of their own."""

    round: Ints
    """[m] Round of the algorithm."""

    chunk: Ints
    """[m] Chunk of the buffer."""

    src: Ints
    """[m] Sending rank."""

    dst: Ints
    """[m] Receiving rank."""

    bytes: Ints
    """[m] Size."""

    send_ns: Ints
    """[m] Time for which the SEND occupies its lane."""

    recv_ns: Ints
    """[m] Own time of the RECV: from the end of the SEND (or its own posting, if later) to its end."""

    lane: Ints
    """[m] Lane of the SEND, from 0."""

    after: tuple[Ints, Ints]
    """([e], [e]) The second hop's SEND waits for the first one's RECV."""

    enters: tuple[Ints, Ints, Ints]
    """([e], [e], [e]) (bucket, rank, hop): the SEND waits for the rank's In."""

    leaves: tuple[Ints, Ints, Ints]
    """([e], [e], [e]) (hop, bucket, rank): the rank's Out waits for the RECV."""

    def identity(self) -> dict[str, Ints]:
        """Return the columns of `IDENTITY`."""
        return {name: getattr(self, name) for name in IDENTITY}


def expand(num_bytes: Sequence[int] | Ints, parts: Sequence[int] | Ints, network: Network, *, group: int = 0) -> Hops:
    """Expand the sums of some buckets, each cut into `parts` equal parts, in the order in which they are launched.

    `num_bytes`, `parts` [b]. Raises `InputError` on sizes < 0 or parts < 1.
    """
    sizes, cuts = np.asarray(num_bytes, np.int64), np.asarray(parts, np.int64)
    if sizes.shape != cuts.shape or sizes.ndim != 1 or int(sizes.min(initial=0)) < 0 or int(cuts.min(initial=1)) < 1:
        raise InputError(
            "buckets need one size >= 0 and one number of parts >= 1 each; pass two lists of equal length."
        )
    one = PATTERNS[network.algorithm](network.num_ranks, network.num_servers)
    # Each part of each bucket is one copy of the pattern, which has m hops: hop i of copy c is number c m + i. `tiled`
    # repeats what is equal in all copies, `shifted` turns numbers of hops in the pattern into those of each copy.
    bucket = np.repeat(np.arange(sizes.size), cuts)
    copies, m = bucket.size, one.src.size
    part_bytes = -(-sizes // cuts)  # rounded up, as are chunks
    chunk_bytes = -(-part_bytes // one.num_chunks)[bucket]
    pull = (one.src >= network.num_ranks) if network.num_servers else np.zeros(m, bool)
    # [copies, 2] As a push and as a pull, which is what a parameter server sends.
    hop_ns = np.stack([network.hop_ns(chunk_bytes, pull=way) for way in (False, True)], axis=1)
    shift = np.arange(copies, dtype=np.int64) * m

    def tiled(values: Ints) -> Ints:
        return np.tile(values, copies)

    def shifted(values: Ints) -> Ints:
        return (values[None, :] + shift[:, None]).reshape(-1)

    return Hops(
        group=np.full(copies * m, group, np.int64),
        seq=np.repeat(np.arange(copies, dtype=np.int64), m),
        round=tiled(one.round),
        chunk=tiled(one.chunk),
        src=tiled(one.src),
        dst=tiled(one.dst),
        bytes=np.repeat(chunk_bytes, m),
        send_ns=np.where(pull[None, :], hop_ns[:, 1:], hop_ns[:, :1]).reshape(-1),
        recv_ns=np.full(copies * m, network.recv_ns, np.int64),
        lane=tiled(one.lane),
        after=(shifted(one.after[0]), shifted(one.after[1])),
        enters=(np.repeat(bucket, one.enters[0].size), tiled(one.enters[0]), shifted(one.enters[1])),
        leaves=(shifted(one.leaves[0]), np.repeat(bucket, one.leaves[1].size), tiled(one.leaves[1])),
    )
