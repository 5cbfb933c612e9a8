"""Runs an option of the tree (`headway.comm.compression.options`) with torch.distributed: one interpreter for all 4341.

    groups = host_groups(ranks_per_host=8)      # every rank, once
    total = execute("inside.reduce_scatter gpu.encode between.all_gather gpu.decode inside.all_gather",
                    gradient, groups, codec_of("topk:0.01"))

A tensor is padded and cut into one block per rank. Between actions a rank has raw blocks or packets of them:

    raw [blocks, numbers] float32      packets [blocks, senders, bytes] uint8

and a codec always works on one block, so packets can be dealt out without decoding them. Where data is at roots only,
the other ranks wait. Sums of packets are taken in the order of ranks and replicas draw the same random numbers, so all
ranks end with the same bits. Call it from one thread, in one order on all ranks (`headway.runtime.lane`).
The devices of an option say where codecs were priced; here they run where the tensor is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from headway.comm.compression.options import PAIRS, WHOLE, OptionStep, steps
from headway.comm.compression.torch_codecs import Codec
from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.runtime.lane import GATHERED, SCATTERED, separate_group


@dataclass(frozen=True, slots=True, eq=False)
class HostGroups:
    """The process groups of a rank. Hosts have equally many ranks, numbered one host after the other."""

    ranks_per_host: int
    """k."""

    hosts: int
    """H."""

    groups: dict[str, dist.ProcessGroup]
    """`flat`: all ranks; `inside`: those of this host; `between`: those of this number on all hosts."""

    def close(self) -> None:
        """Give the groups up."""
        for group in list(self.groups.values()):
            dist.destroy_process_group(group)
        self.groups.clear()


def host_groups(ranks_per_host: int) -> HostGroups:
    """Make the groups; every rank calls it. Raises `InputError` on uneven hosts, and as `separate_group`."""
    world_size = dist.get_world_size()
    if ranks_per_host < 1 or world_size % ranks_per_host:
        raise InputError(f"{world_size} ranks do not make hosts of {ranks_per_host}; pass a divisor of {world_size}.")
    host, number = divmod(dist.get_rank(), ranks_per_host)
    members = {
        "flat": range(world_size),
        "inside": range(host * ranks_per_host, (host + 1) * ranks_per_host),
        "between": range(number, world_size, ranks_per_host),
    }
    groups = {place: separate_group(f"headway-{place}", ranks=list(ranks)) for place, ranks in members.items()}
    return HostGroups(ranks_per_host, world_size // ranks_per_host, groups)


def execute(
    option: str, x: torch.Tensor, groups: HostGroups, codec: Codec | None = None, *, seed: int = 0
) -> torch.Tensor:
    """Return the sum of `x` over all ranks, float32 of its shape, by way of `option`; the same bits on every rank.

    `codec` is needed where the option encodes; `seed` is the same on all ranks, another one in each call. Raises
    `UnknownNameError` with the nearest option, `InputError` without a codec.
    """
    path = steps(option, groups.ranks_per_host, groups.hosts)
    if codec is None and any(step.verb == "encode" for step in path):
        raise InputError(f"the option {option!r} encodes; pass a codec, or choose an option without one.")
    num_blocks = groups.ranks_per_host * groups.hosts
    length = -(-x.numel() // num_blocks)
    if not length:
        return x.detach().to(torch.float32).clone()
    raw = torch.zeros(num_blocks, length, device=x.device)
    raw.view(-1)[: x.numel()] = x.detach().reshape(-1)
    return _OptionRun(groups, codec, seed, raw).through(path).view(-1)[: x.numel()].view_as(x)


class _OptionRun:
    """What a rank has while it goes through an option."""

    def __init__(self, groups: HostGroups, codec: Codec | None, seed: int, data: torch.Tensor) -> None:
        """Begin with the raw blocks [blocks, numbers] of this rank."""
        self.groups, self.codec, self.seed = groups.groups, codec, seed
        self.data, self.blocks, self.length = data, range(len(data)), data.shape[1]
        self.number = {place: dist.get_rank(group) for place, group in self.groups.items()}
        # Who has the same numbers must draw the same: once they went between hosts, one rank on each host has them.
        self.source, self.encoding = dist.get_rank(), 0
        self.before: dict[str, range] = {}

    def through(self, path: list[OptionStep]) -> torch.Tensor:
        """Take all steps and return the raw blocks."""
        for index, step in enumerate(path):
            if step.verb == "encode":
                self.encoding = index
            waits = [
                place for place in step.at_roots if self.number[place] and not (step.second and place == step.place)
            ]
            if waits:
                continue
            if step.verb == "encode":
                packets = [self._encoded(block, row) for block, row in zip(self.blocks, self.data, strict=True)]
                self.data = torch.stack(packets)[:, None]
            elif step.verb == "decode":
                self.data = torch.stack(
                    [self._sum(block, own) for block, own in zip(self.blocks, self.data, strict=True)]
                )
            elif step.second:
                self._second(step, self.groups[step.place])
            else:
                self._first(step, self.groups[step.place])
            if step.place == "between" and (step.second or step.verb in WHOLE.values()):
                self.source = self.number["inside"]
        return self.data

    def _encoded(self, block: int, numbers: torch.Tensor) -> torch.Tensor:
        assert self.codec is not None
        return self.codec.encode(numbers, self._seed(block))

    def _sum(self, block: int, packets: torch.Tensor) -> torch.Tensor:
        """Return the sum [numbers] of the packets [senders, bytes] of a block, added in the order of senders."""
        assert self.codec is not None
        total = torch.zeros(self.length, device=packets.device)
        for packet in packets:
            self.codec.add(total, packet, 1.0, self._seed(block))
        return total

    def _seed(self, block: int) -> int:
        """Return the seed of a block's packet; where places are shared it is the same on all ranks."""
        shared = self.codec is not None and self.codec.name.kind == "shared-randomk"
        return derived_seed(self.seed, self.encoding, block, -1 if shared else self.source) % 2**63

    def _first(self, step: OptionStep, group: dist.ProcessGroup) -> None:
        """Do whole communication, or the first step of a divided one."""
        own, ranks = self.data.contiguous(), group.size()
        root = dist.get_global_rank(group, 0)
        is_root = self.number[step.place] == 0
        if step.verb in PAIRS:
            self.before[step.place] = self.blocks
        if step.verb == "all_reduce":
            dist.all_reduce(own, group=group)
            self.data = own
        elif step.verb == "reduce":
            dist.reduce(own, root, group=group)
            self.data = own
        elif step.verb == "reduce_scatter":
            self.data = own.new_empty(len(own) // ranks, self.length)
            SCATTERED(self.data, own, group=group)
        elif step.verb == "gather":
            parts = [torch.empty_like(own) for _ in range(ranks)] if is_root else None
            dist.gather(own, parts, root, group=group)
            self.data = torch.cat(parts, dim=1) if parts else own
        else:  # all_gather or all_to_all: [ranks, blocks, senders, bytes] of all, or of own blocks
            found = own.new_empty(ranks * len(own) if step.verb == "all_gather" else len(own), *own.shape[1:])
            if step.verb == "all_gather":
                GATHERED(found, own, group=group)
            else:
                dist.all_to_all_single(found, own, group=group)
            of_ranks = found.view(ranks, -1, *own.shape[1:])
            self.data = of_ranks.transpose(0, 1).reshape(of_ranks.shape[1], -1, own.shape[2])
        if PAIRS.get(step.verb) == "all_gather":
            part = len(self.blocks) // ranks
            begin = self.number[step.place] * part
            self.blocks = self.blocks[begin : begin + part]

    def _second(self, step: OptionStep, group: dist.ProcessGroup) -> None:
        """Bring the parts together again, or what the root has to all."""
        self.blocks = self.before.pop(step.place)
        own = self.data.contiguous()
        if step.verb == "all_gather":
            self.data = own.new_empty(len(self.blocks), *own.shape[1:])
            GATHERED(self.data, own, group=group)
            return
        if self.number[step.place]:  # What waiting ranks have is stale; they need room for what the root has.
            width = self._packet_bytes() if step.packed else self.length
            shape = (len(self.blocks), step.packets, width) if step.packed else (len(self.blocks), width)
            own = torch.empty(shape, dtype=torch.uint8 if step.packed else torch.float32, device=own.device)
        dist.broadcast(own, dist.get_global_rank(group, 0), group=group)
        self.data = own

    def _packet_bytes(self) -> int:
        """Return the bytes of a block's packet, of any codec: `headway.cost.codecs` knows those with a name only."""
        assert self.codec is not None
        return self.codec.encode(torch.zeros(self.length, device=self.data.device), 0).numel()
