"""A compressed mean of gradients over ranks, partition by partition, both ways (push-pull).

Of a tensor of n numbers each rank owns a share of n / W. A rank encodes the shares of all owners and sends each its
packet; an owner decodes and adds them in the order of ranks, encodes the mean and sends it to all, who decode the same
packets, so that all ranks end with the same bits:

    rank r    q = g + e;  packets C(q) -> owners;  e = q - D(C(q))
    owner     s = mean of D(packets) + e';  p = C(s) -> all;  e' = s - D(p)
    rank r    gradient = D(p)

While one partition travels the next one is encoded: all are sent before the first is waited for. A packet begins with
a byte that says whether its sender met NaN or infinity anywhere in the bucket; if one did, every rank's bucket becomes
NaN, as with a plain sum. Tensors that are too small travel in one plain all-reduce, and so do the values of codecs
whose places are the same on all ranks.

Source: Zhong et al., "Compressed communication for distributed training: adaptive methods and system", 2021 (two-way
compression with residuals on both sides, partitions of 4 MB).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from headway.comm.runtime.codecs.sparse import random_places, spread
from headway.comm.runtime.codecs.table import Codec
from headway.comm.runtime.residuals import Residuals
from headway.core.rng import derived_seed
from headway.cost.codecs import wire_bytes
from headway.sim.ddp.ddp_compress import PARTITION_BYTES

FLAG = 1
"""Bytes in front of a rank's packets: 1 = not everything is finite."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A stretch of one parameter's gradient that is encoded as one, in a share per owner."""

    name: str
    """The parameter."""

    codec: Codec
    """How it travels."""

    start: int
    """First number of the stretch in the flat gradient."""

    cuts: tuple[int, ...]
    """[owners + 1] Where each owner's share begins in the flat gradient; shares at the end may be empty."""

    own_start: int
    """Where this rank's share begins in its residual as an owner."""

    own_length: int
    """Numbers of the parameter that this rank owns."""

    @property
    def stop(self) -> int:
        """One past the last number."""
        stop: int = self.cuts[-1]
        return stop

    def sizes(self) -> list[int]:
        """Return [owners] the bytes of each share's packet."""
        return [
            wire_bytes(self.codec.name, stop - start) for start, stop in zip(self.cuts, self.cuts[1:], strict=False)
        ]


@dataclass(slots=True)
class Layout:
    """What becomes of the gradients of a bucket."""

    names: tuple[str, ...]
    """Parameters of the bucket, in its order."""

    partitions: list[list[Unit]] = field(default_factory=list)
    """Units that are sent together."""

    shared: dict[str, Codec] = field(default_factory=dict)
    """Parameter -> codec, where only values travel."""

    raw: list[str] = field(default_factory=list)
    """Parameters that travel as they are."""


def cut(
    gradients: Sequence[tuple[str, int, Codec | None]], ranks: int, rank: int, *, min_bytes: int, two_way: bool
) -> Layout:
    """Return the layout of a bucket of (parameter, numbers, codec); a rank's owned shares are in order of its units."""
    layout = Layout(tuple(name for name, _, _ in gradients))
    most, filled, owners = PARTITION_BYTES // 4, PARTITION_BYTES // 4, ranks if two_way else 1
    for name, n, codec in gradients:
        if codec is None or n * 4 < min_bytes or n == 0:
            layout.raw.append(name)
        elif codec.name.kind == "shared-randomk":
            layout.shared[name] = codec
        else:
            stretches = [_shares(start, min(most, n - start), owners) for start in range(0, n, most)]
            own = [cuts[rank + 1] - cuts[rank] if two_way else 0 for cuts in stretches]
            for number, cuts in enumerate(stretches):
                count = cuts[-1] - cuts[0]
                if filled + count > most:
                    layout.partitions.append([])
                    filled = 0
                layout.partitions[-1].append(Unit(name, codec, cuts[0], cuts, sum(own[:number]), sum(own)))
                filled += count
    return layout


def _shares(start: int, count: int, owners: int) -> tuple[int, ...]:
    """Return where the share of each owner begins, and the end."""
    step = -(-count // owners)
    return tuple(start + min(count, step * owner) for owner in range(owners + 1))


def _widest(units: Sequence[Unit]) -> int:
    """Return the bytes of an owner's packets, at most: a row of a message is as long for all."""
    owners = range(len(units[0].cuts) - 1)
    return max(sum(unit.sizes()[owner] for unit in units) for owner in owners)


class PushPull:
    """The mean of a bucket's gradients over the ranks of a group. One thread, always the same, calls it."""

    def __init__(self, ranks: int, rank: int, *, feedback: bool, two_way: bool) -> None:
        self.ranks, self.rank, self.feedback, self.two_way = ranks, rank, feedback, two_way
        self.sent, self.answered = Residuals(), Residuals()
        """Residuals of this rank as a sender, and as an owner."""
        self.steps = 0
        """Steps that ended, also those that did not count."""
        self.sent_bytes = 0
        self.finite = True
        """Whether everything was finite in the step so far."""

    def reduce(self, layout: Layout, gradients: dict[str, torch.Tensor], group: dist.ProcessGroup) -> None:
        """Replace `gradients` (parameter -> flat tensor) by their mean over the ranks."""
        # A sum is NaN or infinite where any number is: one pass. Where it is, the numbers may still be finite.
        finite = all(bool(torch.isfinite(g.sum())) or bool(torch.isfinite(g).all()) for g in gradients.values())
        whole = {name: g if g.dtype == torch.float32 else g.float() for name, g in gradients.items()}
        plain, plain_work = self._send_plain(layout, whole, finite, group)
        pushes = [self._push(units, whole, finite, group) for units in layout.partitions]
        if self.two_way:
            pulls = [self._answer(units, *push, group) for units, push in zip(layout.partitions, pushes, strict=True)]
        else:
            pulls = pushes
        for units, (packets, work) in zip(layout.partitions, pulls, strict=True):
            work.wait()
            finite = finite and not bool(packets[:, 0].any())
            self._decode(units, packets, whole)
        if plain is not None and plain_work is not None:
            plain_work.wait()
            finite = finite and bool(torch.isfinite(plain[-1]))
            self._take_plain(layout, plain / self.ranks, whole)
        for name, g in gradients.items():
            if not finite:
                g.fill_(float("nan"))
            elif whole[name] is not g:
                g.copy_(whole[name])
        self.finite = self.finite and finite

    def end_step(self) -> bool:
        """Take over the residuals of the step, or none of them where it was not finite; says whether it counts."""
        counts, self.finite = self.finite, True
        for residuals in (self.sent, self.answered):
            if counts:
                residuals.commit()
            else:
                residuals.roll_back()
        self.steps += 1
        return counts

    def _seed(self, unit: Unit, owner: int, rank: int) -> int:
        """Return the seed with which `rank` encodes an owner's share in this step; an owner's answer has rank -1."""
        return derived_seed(self.steps, unit.name, unit.start, owner, rank + 1) % 2**62

    def _push(
        self, units: list[Unit], gradients: dict[str, torch.Tensor], finite: bool, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, dist.Work]:
        """Encode a partition and send it to its owners, or to all; return what arrives, [ranks, bytes], and when."""
        owners = self.ranks if self.two_way else 1
        device = gradients[units[0].name].device
        packets = torch.zeros(owners, FLAG + _widest(units), dtype=torch.uint8, device=device)
        packets[:, 0] = not finite
        at = [FLAG] * owners
        for unit in units:
            g = gradients[unit.name][unit.start : unit.stop]
            keeps = self.feedback and unit.codec.biased
            if keeps:
                whole = gradients[unit.name]
                q = self.sent.fresh(unit.name, whole.numel(), device)[unit.start : unit.stop]
                torch.add(g, self.sent.last(unit.name, whole.numel(), device)[unit.start : unit.stop], out=q)
                g = q
            if not finite:
                g = torch.zeros_like(g)
            for owner, (low, high) in enumerate(zip(unit.cuts, unit.cuts[1:], strict=False)):
                share = g[low - unit.start : high - unit.start]  # a view: the residual is left in it
                if not share.numel():
                    continue
                seed = self._seed(unit, owner, self.rank)
                packet = unit.codec.encode(share, seed)
                packets[owner, at[owner] : at[owner] + packet.numel()] = packet
                at[owner] += packet.numel()
                if keeps:
                    unit.codec.add(share, packet, -1.0, seed)
        arrived = torch.empty(self.ranks, packets.shape[1], dtype=torch.uint8, device=device)
        self.sent_bytes += packets.numel()
        if self.two_way:
            return arrived, dist.all_to_all_single(arrived, packets, group=group, async_op=True)
        return arrived, dist.all_gather(list(arrived.unbind()), packets[0], group=group, async_op=True)

    def _answer(
        self, units: list[Unit], arrived: torch.Tensor, work: dist.Work, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, dist.Work]:
        """As an owner: average the packets that arrived and send the result to all."""
        work.wait()
        answer = torch.zeros(1, FLAG + _widest(units), dtype=torch.uint8, device=arrived.device)
        finite = not bool(arrived[:, 0].any())
        answer[0, 0] = not finite
        at = FLAG
        for unit in units:
            low, high = unit.cuts[self.rank : self.rank + 2]
            size = wire_bytes(unit.codec.name, high - low)
            if not size:
                continue
            mean = self._summed(unit, arrived[:, at : at + size], high - low)
            if not finite:
                mean.zero_()
            keeps = self.feedback and unit.codec.biased
            if keeps:
                own = slice(unit.own_start, unit.own_start + high - low)
                mean += self.answered.last(unit.name, unit.own_length, mean.device)[own]
            seed = self._seed(unit, self.rank, -1)
            packet = unit.codec.encode(mean, seed)
            if keeps:
                unit.codec.add(mean, packet, -1.0, seed)
                self.answered.fresh(unit.name, unit.own_length, mean.device)[own] = mean
            answer[0, at : at + size] = packet
            at += size
        gathered = torch.empty(self.ranks, answer.shape[1], dtype=torch.uint8, device=arrived.device)
        self.sent_bytes += answer.numel()
        return gathered, dist.all_gather(list(gathered.unbind()), answer[0], group=group, async_op=True)

    def _summed(self, unit: Unit, rows: torch.Tensor, n: int) -> torch.Tensor:
        """Return the mean of the ranks' packets, [ranks, bytes], added in the order of ranks."""
        mean = torch.zeros(n, device=rows.device)
        for packet in rows:
            unit.codec.add(mean, packet, 1.0 / self.ranks)
        return mean

    def _decode(self, units: list[Unit], packets: torch.Tensor, gradients: dict[str, torch.Tensor]) -> None:
        """Put what the packets say, [ranks, bytes], into the gradients."""
        at = [FLAG] * self.ranks
        for unit in units:
            sizes, g = unit.sizes(), gradients[unit.name]
            if not self.two_way:
                rows = packets[:, at[0] : at[0] + sizes[0]]
                g[unit.start : unit.stop] = self._summed(unit, rows, unit.stop - unit.start)
                at[0] += sizes[0]
                continue
            for owner, size in enumerate(sizes):
                low, high = unit.cuts[owner : owner + 2]
                if size:
                    g[low:high] = unit.codec.decode(packets[owner, at[owner] : at[owner] + size], high - low)
                    at[owner] += size

    def _send_plain(
        self, layout: Layout, gradients: dict[str, torch.Tensor], finite: bool, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor | None, dist.Work | None]:
        """Send what is summed as it is, and a number behind it that is NaN where not everything is finite."""
        if not (layout.raw or layout.shared):
            return None, None
        parts = [gradients[name] for name in layout.raw]
        for name, codec in layout.shared.items():
            g, places = gradients[name], self._places(name, codec, gradients[name])
            if self.feedback:
                q = torch.add(g, self.sent.last(name, g.numel(), g.device))
                self.sent.fresh(name, g.numel(), g.device).copy_(q).index_fill_(0, places, 0.0)
                g = q
            parts.append(g[places])
        vote = parts[0].new_full((1,), 0.0 if finite else float("nan"))
        plain = torch.cat([*parts, vote])
        self.sent_bytes += plain.numel() * plain.element_size()
        return plain, dist.all_reduce(plain, group=group, async_op=True)

    def _take_plain(self, layout: Layout, mean: torch.Tensor, gradients: dict[str, torch.Tensor]) -> None:
        at = 0
        for name in layout.raw:
            g = gradients[name]
            g.copy_(mean[at : at + g.numel()])
            at += g.numel()
        for name, codec in layout.shared.items():
            g, places = gradients[name], self._places(name, codec, gradients[name])
            g.copy_(spread(mean[at : at + places.numel()], places, g.numel()))
            at += places.numel()

    def _places(self, name: str, codec: Codec, g: torch.Tensor) -> torch.Tensor:
        """Return the places of this step that all ranks draw alike."""
        seed = derived_seed(self.steps, "shared", name) % 2**62
        return random_places(g.numel(), codec.name.kept(g.numel()), seed, g.device)
