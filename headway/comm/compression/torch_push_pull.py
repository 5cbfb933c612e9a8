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

What compression left out, by parameter: added to the next gradient, so that nothing is lost, only late.

A biased codec sends C(q) of q = gradient + residual, and q - D(C(q)) is the next residual (error feedback). Both who
sends and who answers keep one. Residuals are flat float32, keyed by the parameter's name: DDP lays its buckets out
anew after the first step, and a saved state has to fit the next process.

A step is taken back whole when a gradient turns out not to be finite, so new residuals are written beside the old ones
and take their place when the step is over.

>>> residuals = Residuals()
>>> new = residuals.fresh("weight", 2, torch.device("cpu"))
>>> _ = new.fill_(1.0)
>>> residuals.commit(); residuals.tensors["weight"].tolist()
[1.0, 1.0]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from headway.comm.compression.torch_codecs import Codec, random_places, spread
from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.cost.codecs import partitions, wire_bytes
from headway.runtime.quantize import is_finite

# What compression left out, by parameter: added to the next gradient, so that nothing is lost, only late.


class RankTensor(torch.Tensor):
    """A tensor that differs between ranks: code that saves plain tensors once for all ranks stores it for each."""


class Residuals:
    """Residuals of one side. Not thread-safe: the lane's thread alone works with them."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """Parameter -> [n] float32 of the last whole step."""
        self._next: dict[str, torch.Tensor] = {}
        self._written: set[str] = set()

    def fresh(self, name: str, n: int, device: torch.device) -> torch.Tensor:
        """Return the [n] tensor for the next residual of a parameter, the same one until the step ends."""
        if name not in self._written:
            spare = self._next.get(name)
            if spare is None or spare.numel() != n or spare.device != device:
                self._next[name] = torch.zeros(n, device=device)
            self._written.add(name)
        return self._next[name]

    def last(self, name: str, n: int, device: torch.device) -> torch.Tensor:
        """Return the [n] residual of the last step, zeros at first. Raises `InputError` where it has another size."""
        known = self.tensors.get(name)
        if known is None:
            known = self.tensors[name] = torch.zeros(n, device=device)
        if known.numel() != n:
            raise InputError(
                f"the residual of {name} has {known.numel()} numbers, its gradient {n}. Load the state of this model "
                "and this number of ranks, or begin without one."
            )
        if known.device != device:
            known = self.tensors[name] = known.to(device)
        return known

    def commit(self) -> None:
        """End a step: what was written becomes the residuals."""
        for name in self._written:
            old = self.tensors.get(name)
            self.tensors[name] = self._next.pop(name)
            if old is not None:
                self._next[name] = old
        self._written.clear()

    def roll_back(self) -> None:
        """End a step that does not count."""
        self._written.clear()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy of the residuals of the last step."""
        return {name: tensor.clone().as_subclass(RankTensor) for name, tensor in self.tensors.items()}

    def load(self, saved: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
        """Take saved residuals; `sizes` is parameter -> numbers. Raises `InputError` where they do not fit."""
        for name, tensor in saved.items():
            if name not in sizes:
                raise InputError(f"there is a residual of {name!r}, and the model has no such compressed parameter.")
            if tensor.numel() != sizes[name]:
                raise InputError(
                    f"the residual of {name} has {tensor.numel()} numbers; this rank of this model keeps "
                    f"{sizes[name]}. Load the state of the same model and number of ranks, or begin without residuals."
                )
        plain = {name: tensor.detach().as_subclass(torch.Tensor) for name, tensor in saved.items()}
        self.tensors = {name: tensor.clone().reshape(-1).float() for name, tensor in plain.items()}
        self._next.clear()
        self._written.clear()


FLAG = 1
"""Bytes in front of a rank's packets: 0, or one of these two."""

BROKEN, FAILED = 1, 2
"""Not everything is finite; the rank could not compress."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A stretch of one parameter's gradient that is encoded as one."""

    name: str
    """The parameter."""

    codec: Codec
    """How it travels."""

    start: int
    """First number of the stretch in the flat gradient."""

    stop: int
    """One past the last number."""

    owner: int
    """Rank that adds it up; 0 where all do."""

    own_start: int
    """Where it begins in the residual of its owner."""

    @property
    def size(self) -> int:
        """Bytes of its packet."""
        return wire_bytes(self.codec.name, self.stop - self.start)


@dataclass(slots=True)
class BucketLayout:
    """What becomes of the gradients of a bucket."""

    names: tuple[str, ...]
    """Parameters of the bucket, in its order."""

    partitions: list[list[Unit]] = field(default_factory=list)
    """Units that are sent together."""

    owned: dict[str, int] = field(default_factory=dict)
    """Parameter -> numbers of it that this rank owns."""

    shared: dict[str, Codec] = field(default_factory=dict)
    """Parameter -> codec, where only values travel."""

    raw: list[str] = field(default_factory=list)
    """Parameters that travel as they are."""


def cut(
    gradients: Sequence[tuple[str, int, Codec | None]], ranks: int, rank: int, *, min_bytes: int, two_way: bool
) -> BucketLayout:
    """Return the layout of a bucket of (parameter, numbers, codec). Raises `InputError` for a count above them."""
    layout = BucketLayout(tuple(name for name, _, _ in gradients))
    sent: list[tuple[str, int, Codec]] = []
    for name, n, codec in gradients:
        if codec is None or n * 4 < min_bytes or n == 0:
            layout.raw.append(name)
        elif codec.name.kind == "shared-randomk":
            layout.shared[name] = codec
        else:
            sent.append((name, n, codec))
    found = partitions([n for _, n, _ in sent], ranks if two_way else 1)
    begins: dict[tuple[int, int], int] = {}
    for stretches in found:
        layout.partitions.append([])
        for one in stretches:
            name, _, codec = sent[one.tensor]
            begin = begins.get((one.tensor, one.owner), 0)
            begins[one.tensor, one.owner] = begin + one.stop - one.start
            layout.partitions[-1].append(Unit(name, codec, one.start, one.stop, one.owner, begin))
    for units in layout.partitions:
        _widest(units)
    if two_way:
        layout.owned = {name: begins.get((tensor, rank), 0) for tensor, (name, _, _) in enumerate(sent)}
    return layout


def _widest(units: Sequence[Unit]) -> int:
    """Return the bytes of an owner's packets, at most: a row of a message is as long for all."""
    sizes: dict[int, int] = {}
    for unit in units:
        sizes[unit.owner] = sizes.get(unit.owner, 0) + unit.size
    return max(sizes.values())


def all_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Say whether no number is NaN or infinite."""
    return all(map(is_finite, gradients))


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
        self.failure: Exception | None = None
        """What kept a rank from compressing a bucket: set on all ranks at once, and `reduce` has changed nothing."""
        self._mean = torch.empty(0)
        self._messages: dict[tuple[str, tuple[tuple[str, int], ...]], torch.Tensor] = {}

    def reduce(
        self,
        layout: BucketLayout,
        gradients: dict[str, torch.Tensor],
        group: dist.ProcessGroup,
        buffer: torch.Tensor | None = None,
    ) -> None:
        """Replace `gradients` (parameter -> flat tensor) by their mean over the ranks; `buffer` holds all of them.

        Where a rank cannot encode, its packets say so, all ranks end up with a `failure`, and keep their gradients.
        """
        whole, finite = gradients, False
        try:
            whole = {name: g if g.dtype == torch.float32 else g.float() for name, g in gradients.items()}
            finite = all_finite(gradients.values() if buffer is None else [buffer])
            units = [unit for partition in layout.partitions for unit in partition]
            finite = finite and all(unit.codec.fits(whole[unit.name][unit.start : unit.stop]) for unit in units)
        except Exception as error:
            self.failure = error
        plain, plain_work = self._send_plain(layout, whole, finite, group)
        pushes = [self._push(units, whole, finite, group) for units in layout.partitions]
        if self.two_way:
            pulls = [
                self._answer(layout, units, *push, group) for units, push in zip(layout.partitions, pushes, strict=True)
            ]
        else:
            pulls = pushes
        words = [0 if finite else BROKEN]
        for packets, work in pulls:
            work.wait()
            words.append(int(packets[:, 0].max()))
        if plain is not None and plain_work is not None:
            plain_work.wait()
            words.append(FAILED if torch.isinf(plain[-1]) else 0 if torch.isfinite(plain[-1]) else BROKEN)
        finite = max(words) == 0
        if max(words) == FAILED:
            self.failure = self.failure or InputError("another rank could not compress. See what that one says.")
            return
        self.failure = None  # one that a vote of NaN has hidden from the others
        for units, (packets, _) in zip(layout.partitions, pulls, strict=True):
            self.decode(units, packets, whole)
        if plain is not None:
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

    def _seed(self, unit: Unit, rank: int) -> int:
        """Return the seed with which `rank` encodes a stretch in this step; an owner's answer has rank -1."""
        return derived_seed(self.steps, unit.name, unit.start, rank + 1) % 2**62

    def _push(
        self, units: list[Unit], gradients: dict[str, torch.Tensor], finite: bool, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, dist.Work]:
        """Encode a partition and send it to its owners, or to all; return what arrives, [ranks, bytes], and when."""
        packets = self._memory(units, "push", self.ranks if self.two_way else 1, gradients[units[0].name].device)
        try:
            if self.failure is None:
                self.encode(units, gradients, finite)
        except Exception as error:
            self.failure = error
        if self.failure is not None:
            packets.fill_(FAILED)
        arrived = self._memory(units, "in", self.ranks, packets.device)
        self.sent_bytes += packets.numel()
        if self.two_way:
            return arrived, dist.all_to_all_single(arrived, packets, group=group, async_op=True)
        return arrived, dist.all_gather(list(arrived.unbind()), packets[0], group=group, async_op=True)

    def _answer(
        self, layout: BucketLayout, units: list[Unit], arrived: torch.Tensor, work: dist.Work, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, dist.Work]:
        """As an owner: average the packets that arrive and send the result to all."""
        work.wait()
        answer = self._memory(units, "answer", 1, arrived.device)
        try:
            if self.failure is None and int(arrived[:, 0].max()) < FAILED:
                self.answer(layout, units, arrived)
            else:
                answer.fill_(FAILED)
        except Exception as error:
            self.failure = error
            answer.fill_(FAILED)
        gathered = self._memory(units, "pull", self.ranks, arrived.device)
        self.sent_bytes += answer.numel()
        return gathered, dist.all_gather(list(gathered.unbind()), answer[0], group=group, async_op=True)

    def encode(self, units: list[Unit], gradients: dict[str, torch.Tensor], finite: bool = True) -> torch.Tensor:
        """Return the packets of a partition, [owners, bytes]."""
        device = gradients[units[0].name].device
        owners = self.ranks if self.two_way else 1
        packets = self._memory(units, "push", owners, device)
        packets[:, 0] = 0 if finite else BROKEN
        at = [FLAG] * owners
        for unit in units:
            whole, seed = gradients[unit.name], self._seed(unit, self.rank)
            g = whole[unit.start : unit.stop]
            keeps = self.feedback and unit.codec.biased
            if keeps:
                q = self.sent.fresh(unit.name, whole.numel(), device)[unit.start : unit.stop]
                g = torch.add(g, self.sent.last(unit.name, whole.numel(), device)[unit.start : unit.stop], out=q)
            if not finite:
                g = torch.zeros_like(g)
            packet = unit.codec.take(g, seed) if keeps else unit.codec.encode(g, seed)
            packets[unit.owner, at[unit.owner] : at[unit.owner] + packet.numel()] = packet
            at[unit.owner] += packet.numel()
        return packets

    def answer(self, layout: BucketLayout, units: list[Unit], arrived: torch.Tensor) -> torch.Tensor:
        """Return the packets [1, bytes] of the mean of what arrived for this rank, [ranks, bytes]."""
        answer = self._memory(units, "answer", 1, arrived.device)
        finite = not bool(arrived[:, 0].any())
        answer[0, 0] = 0 if finite else BROKEN
        at = FLAG
        for unit in units:
            if unit.owner != self.rank:
                continue
            n, size = unit.stop - unit.start, unit.size
            keeps = self.feedback and unit.codec.biased
            if keeps:  # the sum begins with what was left out, in the memory of what will be
                own = slice(unit.own_start, unit.own_start + n)
                length = layout.owned[unit.name]
                mean = self.answered.fresh(unit.name, length, arrived.device)[own]
                mean.copy_(self.answered.last(unit.name, length, arrived.device)[own])
            else:
                if self._mean.numel() < n or self._mean.device != arrived.device:
                    self._mean = torch.empty(n, device=arrived.device)
                mean = self._mean[:n].zero_()
            self._add(unit, arrived[:, at : at + size], mean)
            if not finite:
                mean.zero_()
            seed = self._seed(unit, -1)
            answer[0, at : at + size] = unit.codec.take(mean, seed) if keeps else unit.codec.encode(mean, seed)
            at += size
        return answer

    def _memory(self, units: list[Unit], what: str, rows: int, device: torch.device) -> torch.Tensor:
        """Return [rows, bytes] for the packets of a partition: the same ones in each step, for mapping fresh memory
        costs more than many codecs."""
        key = what, tuple((unit.name, unit.start) for unit in units)
        found = self._messages.get(key)
        if found is None:
            found = torch.zeros(rows, FLAG + _widest(units), dtype=torch.uint8, device=device)
            self._messages[key] = found
        return found

    def _add(self, unit: Unit, rows: torch.Tensor, mean: torch.Tensor) -> None:
        """Add the mean of the ranks' packets, [ranks, bytes], in the order of ranks."""
        for packet in rows:
            unit.codec.add(mean, packet, 1.0 / self.ranks)

    def decode(self, units: list[Unit], packets: torch.Tensor, gradients: dict[str, torch.Tensor]) -> None:
        """Put what the packets say, [ranks, bytes], into the gradients."""
        at = [FLAG] * self.ranks
        for unit in units:
            g, begin = gradients[unit.name][unit.start : unit.stop], at[unit.owner]
            at[unit.owner] += unit.size
            if self.two_way:
                unit.codec.put(g, packets[unit.owner, begin : at[unit.owner]])
            else:
                self._add(unit, packets[:, begin : at[unit.owner]], g.zero_())

    def _send_plain(
        self, layout: BucketLayout, gradients: dict[str, torch.Tensor], finite: bool, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor | None, dist.Work | None]:
        """Send what is summed as it is, and a number behind it: NaN where not all is finite, infinite after a failure.

        With both it is NaN, on all ranks: a step that is skipped.
        """
        if not (layout.raw or layout.shared):
            return None, None
        try:
            plain = self._plain(layout, gradients, finite) if self.failure is None else None
        except Exception as error:
            self.failure, plain = error, None
        if plain is None:
            kept = sum(codec.name.kept(gradients[name].numel()) for name, codec in layout.shared.items())
            n = sum(gradients[name].numel() for name in layout.raw) + kept + 1
            plain = torch.full((n,), float("inf"), device=next(iter(gradients.values())).device)
        self.sent_bytes += plain.numel() * plain.element_size()
        return plain, dist.all_reduce(plain, group=group, async_op=True)

    def _plain(self, layout: BucketLayout, gradients: dict[str, torch.Tensor], finite: bool) -> torch.Tensor:
        """Return what is summed as it is: raw parameters, values at shared places, and the vote."""
        parts = [gradients[name] for name in layout.raw]
        for name, codec in layout.shared.items():
            g, places = gradients[name], self._places(name, codec, gradients[name])
            if self.feedback:
                q = torch.add(g, self.sent.last(name, g.numel(), g.device))
                self.sent.fresh(name, g.numel(), g.device).copy_(q).index_fill_(0, places, 0.0)
                g = q
            parts.append(g[places])
        vote = parts[0].new_full((1,), 0.0 if finite else float("nan"))
        return torch.cat([*parts, vote])

    def _take_plain(self, layout: BucketLayout, mean: torch.Tensor, gradients: dict[str, torch.Tensor]) -> None:
        at = 0
        for name in layout.raw:
            g = gradients[name]
            g.copy_(mean[at : at + g.numel()])
            at += g.numel()
        for name, codec in layout.shared.items():
            g, places = gradients[name], self._places(name, codec, gradients[name])
            spread(mean[at : at + places.numel()], places, g)
            at += places.numel()

    def _places(self, name: str, codec: Codec, g: torch.Tensor) -> torch.Tensor:
        """Return the places of this step that all ranks draw alike."""
        seed = derived_seed(self.steps, "shared", name) % 2**62
        return random_places(g.numel(), codec.name.kept(g.numel()), seed, g.device)
