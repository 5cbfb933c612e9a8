"""When a serving pipeline is done: the closed form, and the Dag that proves it.

Stages and the links between them are resources, each serving one micro-batch
at a time, in order. The prefill is a flow shop of m_p equal micro-batches;
behind it n - 1 decode rounds circulate m_d micro-batches, a token of one
returning to the first stage before its next round:

    stage 0 --link 1--> stage 1 --link 2--> stage 2 --link 0--> stage 0
    resources in order: stage 0, link 1, stage 1, link 2, stage 2, link 0

With sums P, D over resources of a micro-batch's time and largest ones p, d:

    prefill = P + (m_p - 1) p
    decode  = D + (m_d - 1) d + (n - 2) max(D, m_d d)          (0 for n = 1)

A round lasts as long as one token takes to come back, or as the busiest
resource takes for all micro-batches. Both are linear in P, D, p, d and the
round, so an integer program can minimise them (LLM-PQ, algorithm 1, whose
decode term is corrected: it vanishes for one micro-batch).

>>> times = RoundTimes((5, 1, 4, 1), (3, 1, 2, 1), num_prefill=3, num_decode=2, rounds=4)
>>> times.makespan_ns, times.replayed_ns()
(52, 52)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.units import seconds_to_ns
from headway.cost.transformer import Transformer
from headway.model.serving.costs import (
    LayerSeconds,
    ServingLoad,
    ServingRow,
    ends_bytes,
    layer_bytes,
    link_between,
    temporary_bytes,
)
from headway.sim.graph.dag import Dag, replay

MOST_ROWS = 5
"""Rows of a cluster, whose orders are all tried: 325 of five rows."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """What each resource takes for one micro-batch, in the order in which a micro-batch meets them."""

    prefill_ns: tuple[int, ...]
    """[resources] Of a prefill micro-batch."""

    decode_ns: tuple[int, ...]
    """[resources] Of a decode micro-batch, for one token of each of its sequences."""

    num_prefill: int
    """m_p."""

    num_decode: int
    """m_d."""

    rounds: int
    """n - 1: decode rounds."""

    @property
    def makespan_ns(self) -> int:
        """From the first prefill to the return of the last token (module docstring)."""
        total, longest = sum(self.decode_ns), max(self.decode_ns)
        decode_ns = total + (self.num_decode - 1) * longest
        decode_ns += (self.rounds - 1) * max(total, self.num_decode * longest)
        prefill_ns = sum(self.prefill_ns) + (self.num_prefill - 1) * max(self.prefill_ns)
        return prefill_ns + (decode_ns if self.rounds else 0)

    def replayed_ns(self) -> int:
        """Return the same by replaying every micro-batch on every resource, in integer nanoseconds.

        Operation (micro-batch i, resource r) has the index i R + r. A micro-batch goes from resource to resource;
        the lanes keep the order; the decode begins when all of the prefill is back, and a round of a micro-batch
        behind its last one:

            prefill   0F 1F ... (m_p of them)        decode, round 0   0D 1D   round 1   0D 1D ...
        """
        num_resources, decoded = len(self.prefill_ns), self.num_decode * self.rounds
        jobs = np.arange(self.num_prefill + decoded)
        ops = np.arange(jobs.size * num_resources).reshape(jobs.size, num_resources)
        along = (ops[:, :-1].ravel(), ops[:, 1:].ravel())
        first, again = ops[self.num_prefill :], ops[self.num_prefill + self.num_decode :]
        src = [along[0], np.full(decoded, ops[self.num_prefill - 1, -1]), first[: again.shape[0], -1]]
        dst = [along[1], first[:, 0], again[:, 0]]
        lane = np.tile(np.arange(num_resources), jobs.size)
        dag = Dag.from_edges(ops.size, np.concatenate(src), np.concatenate(dst), lane=lane)
        durations = np.concatenate(
            [np.tile(self.prefill_ns, self.num_prefill), np.tile(self.decode_ns, decoded)]
        ).astype(np.int64)
        return int(replay(dag, durations).makespan_ns)


@dataclass(frozen=True, slots=True, eq=False)
class PipelineCosts:
    """An order of devices with micro-batch sizes, and what each device would take for a layer.

    A row's devices follow each other. The first stage and the last are always used; of each row in between at least
    one device is, and the others are optional, so that what a further device does not help is left out.
    """

    rows: tuple[int, ...]
    """[stages] Row of the cluster that the device is of."""

    optional: NDArray[np.bool_]
    """[stages] Whether the stage may have no layers."""

    prefill_microbatch: int
    """xi: sequences."""

    decode_microbatch: int
    """eta: sequences."""

    num_microbatches: tuple[int, int]
    """m_p and m_d."""

    rounds: int
    """n - 1."""

    prefill_ns: Ints
    """[stages, bits] One layer, for a prefill micro-batch."""

    decode_ns: Ints
    """[stages, bits] One layer, for a decode micro-batch."""

    head_ns: tuple[int, int]
    """The output layer on the last stage, in both phases."""

    link_ns: Ints
    """[2, stages] Message into each stage, in both phases; into stage 0 the tokens return."""

    layer_bytes: Floats
    """[bits] Memory of one layer."""

    room_bytes: Floats
    """[stages] Memory for layers on each device."""

    def times(self, counts: Ints) -> RoundTimes:
        """Return the times of `counts` [stages, bits] layers; stages without any are skipped, with their links."""
        used = np.flatnonzero(counts.sum(1))
        prefill, decode = ((table * counts).sum(1) for table in (self.prefill_ns, self.decode_ns))
        prefill[-1] += self.head_ns[0]
        decode[-1] += self.head_ns[1]
        ring = [*used[1:], 0]
        lists: list[tuple[int, ...]] = []
        for stages, links in ((prefill, self.link_ns[0]), (decode, self.link_ns[1])):
            pairs = np.stack([stages[used], links[ring]], 1).ravel()
            lists.append(tuple(pairs.tolist() if used.size > 1 else stages[used].tolist()))
        return RoundTimes(lists[0], lists[1], *self.num_microbatches, self.rounds)


def orders(rows: Sequence[ServingRow]) -> Iterator[tuple[tuple[int, ...], NDArray[np.bool_]]]:
    """Yield the row of each stage, and which stages are optional, for every order of every choice of rows.

    >>> from headway.cost.specs import shipped
    >>> t4, link = shipped().device("T4"), shipped().link("ethernet-10g")
    >>> [order for order, _ in orders([ServingRow(t4, 2, link, link), ServingRow(t4, 1, link, link)])]
    [(0,), (0, 0), (1,), (0, 0, 1), (1, 0, 0)]
    """
    if len(rows) > MOST_ROWS:
        raise InputError(f"the cluster has {len(rows)} rows; merge rows of one device, {MOST_ROWS} are the limit.")
    for size in range(1, len(rows) + 1):
        for order in itertools.permutations(range(len(rows)), size):
            if size == 1:
                yield order, np.zeros(1, np.bool_)
            stages = tuple(row for row in order for _ in range(rows[row].count))
            optional = np.array([stages[j] in stages[:j] for j in range(len(stages))], np.bool_)
            if size > 1:  # of the last row the last device is the one that is always used: it has the head
                optional[stages.index(order[-1]) :] = True
            optional[-1] = False
            if len(stages) > 1:
                yield stages, optional


def pipelines(
    model: Transformer, rows: Sequence[ServingRow], load: ServingLoad, bits: Sequence[int], seconds: LayerSeconds
) -> Iterator[PipelineCosts]:
    """Yield every order of devices with every pair of micro-batch sizes: eta divides the batch, xi divides eta."""
    sizes = [
        (prefill, decode)
        for decode in _divisors(load.batch)
        for prefill in _divisors(decode)
        if load.new > 1 or decode == prefill
    ]
    embedding, output, both = ends_bytes(model)
    bytes_of = np.array([layer_bytes(model, load, width) for width in bits])
    for prefill, decode in sizes:
        layers = {
            phase: [[seconds_to_ns(seconds(row.device, width, phase, size, tokens)) for width in bits] for row in rows]
            for phase, size, tokens in (("prefill", prefill, load.prompt), ("decode", decode, load.past))
        }
        spare = np.array([row.usable_bytes for row in rows]) - temporary_bytes(model, load, prefill, decode)
        for stages, optional in orders(rows):
            room = spare[list(stages)]
            room[0] -= embedding if len(stages) > 1 else both
            room[-1] -= output if len(stages) > 1 else 0.0
            last = rows[stages[-1]].device
            head = tuple(seconds_to_ns(seconds(last, 16, "head", size, 1)) for size in (prefill, decode))
            yield PipelineCosts(
                stages, optional, prefill, decode, load.microbatches(prefill, decode), load.new - 1,
                _times(layers["prefill"])[list(stages)], _times(layers["decode"])[list(stages)],
                (head[0], head[1]), _links(model, rows, stages, load.prompt, (prefill, decode)), bytes_of, room,
            )  # fmt: skip


def _times(rows_ns: list[list[int]]) -> Ints:
    """Return [rows, widths] nanoseconds of a layer. Raises `InputError` where they do not fit."""
    try:
        return np.array(rows_ns, np.int64)
    except OverflowError:
        raise InputError("a layer would take more than 292 years. Give fewer tokens, or a smaller model.") from None


def _links(
    model: Transformer, rows: Sequence[ServingRow], stages: tuple[int, ...], prompt: int, sizes: tuple[int, int]
) -> Ints:
    """Return [2, stages] the message into each stage; within the last row the link from outside is the last stage's.

    16-bit activations of each token, forward; 4 bytes for each sequence, back. A row's devices are alike, so that
    which of them the link from the row before enters does not change the times: here always the one that is used
    for certain.
    """
    links = np.zeros((2, len(stages)), np.int64)
    for j in range(len(stages) if len(stages) > 1 else 0):
        sender, receiver = rows[stages[j - 1]], rows[stages[j]]
        link = link_between(sender, receiver)
        for phase, tokens in enumerate((sizes[0] * prompt, sizes[1])):
            num_bytes = 2 * model.hidden * tokens if j else 4 * sizes[phase]
            links[phase, j] = seconds_to_ns(link.seconds(num_bytes))
    enters = stages.index(stages[-1])
    if 0 < enters < len(stages) - 1:
        links[:, [enters, -1]] = links[:, [-1, enters]]
    return links


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
