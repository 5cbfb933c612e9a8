"""Gradients summed over replicas whose tensor-parallel groups differ in size: two all-to-alls around an all-reduce.

In a whole replica the extra ranks send the gradients of their units to the core ranks, those sum with the ranks of the
same number in the other replicas, and send the sums back:

    replica of 3 ranks      all-to-all         all-reduce              all-to-all
      rank 0  [0 1 2]    <- 6             [0 1 2 6]  <-> rank 0    6 ->
      rank 1  [3 4 5]    <- 7             [3 4 5 7]  <-> rank 1    7 ->
      rank 2  [6 7]         6 7 ->                                 <- 6 7

What every rank of a group holds alike (norms, biases behind a sum over ranks) is in the all-reduce of the core ranks,
and an extra rank gets it from one of them. Afterwards each rank steps its own optimizer; one that treats elements
alone, as SGD and Adam do, then takes the steps of training without tensor parallelism.

Use it after the last backward of a step, before the optimizer:

    groups = ReplicaGroups.create([4, 3])
    reshard = GradientReshard(dict(model.named_parameters()), splits, groups)
    loss.backward()             # of this replica's examples, divided by the number of examples of all replicas
    reshard.sum_gradients()
    optimizer.step()

Source: arXiv 2504.06095, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.parallel.availability import ShardMap, TensorSplit


@dataclass(frozen=True, slots=True)
class ReplicaGroups:
    """The process groups of one rank of a job whose replicas have tensor-parallel groups of two sizes."""

    degrees: tuple[int, ...]
    """[replicas] Ranks of each replica; ranks of the job are numbered replica by replica."""

    replica: int
    """The replica of this rank."""

    index: int
    """The number of this rank in its replica."""

    tp: dist.ProcessGroup
    """The ranks of the replica."""

    dp: dist.ProcessGroup | None
    """The ranks of the same number in all replicas; None for an extra rank, which sums with nobody."""

    @classmethod
    def create(cls, degrees: Sequence[int]) -> ReplicaGroups:
        """Make the groups; every rank of the job calls this, with the same degrees.

        Raises `InputError` where the degrees are not the world size in sum, or are of more than two sizes.
        """
        size, rank = dist.get_world_size(), dist.get_rank()
        if not degrees or min(degrees) < 1 or sum(degrees) != size:
            raise InputError(
                f"replicas of {list(degrees)} ranks are {sum(degrees)} ranks, and the job has {size}. "
                "Give the ranks of each replica, at least one."
            )
        if len(set(degrees)) > 2:
            raise InputError(
                f"replicas of {sorted(set(degrees))} ranks have more than two sizes. "
                "Use one reduced degree, the smallest, for all replicas that lost devices."
            )
        starts = [sum(degrees[:replica]) for replica in range(len(degrees))]
        replica = max(number for number, start in enumerate(starts) if start <= rank)
        index = rank - starts[replica]
        # Every rank takes part in making every group, in the same order.
        tp = [dist.new_group(list(range(s, s + degree))) for s, degree in zip(starts, degrees, strict=True)]
        dp = [dist.new_group([start + core for start in starts]) for core in range(min(degrees))]
        return cls(tuple(degrees), replica, index, tp[replica], dp[index] if index < len(dp) else None)

    def units(self, shards: ShardMap) -> tuple[int, ...]:
        """Return the units that this rank computes with; raises `InputError` for a map of other degrees."""
        if (len(shards.comp), len(shards.sync)) != (max(self.degrees), min(self.degrees)):
            raise InputError(
                f"the map is for {len(shards.comp)} and {len(shards.sync)} ranks, the replicas have "
                f"{list(self.degrees)}. Use ShardMap.build(units, {max(self.degrees)}, {min(self.degrees)})."
            )
        layout = shards.comp if self.degrees[self.replica] == len(shards.comp) else shards.sync
        return layout[self.index]


def take_units(tensor: Tensor, split: TensorSplit, units: Sequence[int]) -> Tensor:
    """Return the part of a whole tensor that has these units, in their order; a copy."""
    return tensor.index_select(split.dim, _elements(units, split, tensor.device))


def _elements(units: Sequence[int], split: TensorSplit, device: torch.device) -> Tensor:
    """[units * unit_size] Return the indices of units' elements along the split dimension."""
    first = torch.tensor(units, dtype=torch.long, device=device) * split.unit_size
    return (first[:, None] + torch.arange(split.unit_size, device=device)).reshape(-1)


class GradientReshard:
    """Sums the gradients of one rank's parameters over all replicas."""

    def __init__(
        self, parameters: Mapping[str, Tensor], splits: Mapping[str, TensorSplit], groups: ReplicaGroups
    ) -> None:
        """Take a rank's parameters by name, in the same order on all ranks, and the splits of those that are split.

        Each split parameter has this rank's units (`ReplicaGroups.units`, `take_units`); the others are whole and
        alike on all ranks. Raises `InputError` where a shape contradicts its split.
        """
        for name, split in splits.items():
            pick(parameters, name, "parameter that is split")
            length = len(groups.units(split.shards)) * split.unit_size
            if parameters[name].shape[split.dim] != length:
                raise InputError(
                    f"{name} has {parameters[name].shape[split.dim]} elements along dimension {split.dim}; rank "
                    f"{groups.index} of replica {groups.replica} has units of {length}. Use take_units to cut it."
                )
        self._groups = groups
        self._buckets = [
            _Bucket({name: p for name, p in parameters.items() if p.dtype is dtype and p.requires_grad}, splits, groups)
            for dtype in dict.fromkeys(p.dtype for p in parameters.values() if p.requires_grad)
        ]

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Replace each gradient by its sum over replicas; a parameter without one counts as zero.

        Every rank of the job calls this, once per step.
        """
        for bucket in self._buckets:
            bucket.sum_gradients()


class _Bucket:
    """Parameters of one type, whose gradients travel in the same buffers."""

    def __init__(
        self, parameters: Mapping[str, Tensor], splits: Mapping[str, TensorSplit], groups: ReplicaGroups
    ) -> None:
        self._groups = groups
        self._num_core = min(groups.degrees)
        self._num_ranks = groups.degrees[groups.replica]
        self._alike = [parameter for name, parameter in parameters.items() if name not in splits]
        # Parameters of one map are the columns of one matrix, a row per unit: what moves is then a row.
        by_map: dict[ShardMap, list[tuple[Tensor, TensorSplit]]] = {}
        for name, parameter in parameters.items():
            if name in splits:
                by_map.setdefault(splits[name].shards, []).append((parameter, splits[name]))
        self._pairs = list(by_map.values())
        self._widths = [sum(_unit_numel(*pair) for pair in pairs) for pairs in self._pairs]
        self._num_units = [len(groups.units(shards)) for shards in by_map]
        self._empty = next(iter(parameters.values())).new_empty(0)
        # [maps][ranks] Rows that move between this rank and each other rank of its replica.
        self._rows = [
            [torch.tensor(rows, dtype=torch.long, device=self._empty.device) for rows in self._moving(shards)]
            for shards in by_map
        ]

    def sum_gradients(self) -> None:
        """Move, sum, move back."""
        # [maps] Matrices of [units, elements of one unit].
        tables = [torch.cat([_rows(*pair) for pair in pairs], 1) for pairs in self._pairs]
        alike = torch.cat([self._empty, *(_gradient(parameter).reshape(-1) for parameter in self._alike)])
        core, is_whole = self._groups.index < self._num_core, self._num_ranks > self._num_core
        if is_whole:
            arrived = self._exchange([] if core else tables)
            if core:
                tables = [torch.cat(both) for both in zip(tables, arrived, strict=True)]
        if core:
            flat = torch.cat([alike, *(table.reshape(-1) for table in tables)])
            dist.all_reduce(flat, group=self._groups.dp)
            alike, *sums = torch.split(flat, [alike.numel(), *(table.numel() for table in tables)])
            tables = [total.view_as(table) for total, table in zip(sums, tables, strict=True)]
        if is_whole:
            moved = [table[units:] for table, units in zip(tables, self._num_units, strict=True)]
            arrived = self._exchange(moved if core else [])
            tables = [table[:units] for table, units in zip(tables, self._num_units, strict=True)] if core else arrived
            alike = self._exchange_alike(alike) if self._alike else alike
        self._write(tables, alike)

    def _moving(self, shards: ShardMap) -> list[list[int]]:
        """[ranks] Return the rows that move between this rank and each other, in the order of the moves.

        An extra rank counts the rows of its units, a core rank those of the units that are moved to it. Both lists are
        in the order of the moves, so that rows travel without their numbers.
        """
        rows: list[list[int]] = [[] for _ in range(self._num_ranks)]
        if self._num_ranks == self._num_core:
            return rows
        index = self._groups.index
        outgoing = [move.target for move in shards.moves if move.source == index]
        incoming = [move.source for move in shards.moves if move.target == index]
        for row, peer in enumerate(outgoing if index >= self._num_core else incoming):
            rows[peer].append(row)
        return rows

    def _exchange(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Move rows between extra and core ranks of a whole replica: those of `tables` [maps], or none and receive.

        Returns the rows that arrived, by map; none where rows were sent. For each peer the buffer has the rows of the
        first map, of the second, and so on.
        """
        nothing, ranks = [0] * self._num_ranks, range(self._num_ranks)
        sizes = [sum(len(rows[peer]) * w for rows, w in zip(self._rows, self._widths, strict=True)) for peer in ranks]
        if tables:
            pieces = [
                table[rows[peer]].reshape(-1) for peer in ranks for table, rows in zip(tables, self._rows, strict=True)
            ]
            sent = torch.cat([self._empty, *pieces])
            dist.all_to_all_single(self._empty.clone(), sent, nothing, sizes, group=self._groups.tp)
            return []
        buffer = self._empty.new_empty(sum(sizes))
        dist.all_to_all_single(buffer, self._empty, sizes, nothing, group=self._groups.tp)
        filled = [
            buffer.new_empty(sum(map(len, rows)), width) for rows, width in zip(self._rows, self._widths, strict=True)
        ]
        begin = 0
        for peer in ranks:
            for table, rows, width in zip(filled, self._rows, self._widths, strict=True):
                end = begin + len(rows[peer]) * width
                table[rows[peer]] = buffer[begin:end].view(-1, width)
                begin = end
        return filled

    def _exchange_alike(self, alike: Tensor) -> Tensor:
        """Give the sums of what all ranks hold alike to the extra ranks, each from one core rank, in turn."""
        index, ranks = self._groups.index, range(self._num_ranks)
        giver = {extra: extra % self._num_core for extra in range(self._num_core, self._num_ranks)}
        sends = [alike.numel() * (giver.get(peer) == index) for peer in ranks]
        takes = [alike.numel() * (giver.get(index) == peer) for peer in ranks]
        arrived = alike.new_empty(sum(takes))
        dist.all_to_all_single(arrived, alike.repeat(sum(map(bool, sends))), takes, sends, group=self._groups.tp)
        return arrived if index in giver else alike

    def _write(self, tables: Sequence[Tensor], alike: Tensor) -> None:
        """Write sums into the gradients."""
        for table, pairs in zip(tables, self._pairs, strict=True):
            columns = torch.split(table, [_unit_numel(*pair) for pair in pairs], 1)
            for (parameter, split), column in zip(pairs, columns, strict=True):
                front = _gradient(parameter).movedim(split.dim, 0)
                front.copy_(column.reshape(front.shape))
        sums = torch.split(alike, [parameter.numel() for parameter in self._alike]) if self._alike else ()
        for parameter, total in zip(self._alike, sums, strict=True):
            _gradient(parameter).copy_(total.view_as(parameter))


def _gradient(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient; zeros where the step did not use it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _unit_numel(parameter: Tensor, split: TensorSplit) -> int:
    """Return the elements of one unit of a parameter."""
    return split.unit_size * math.prod(size for dim, size in enumerate(parameter.shape) if dim != split.dim)


def _rows(parameter: Tensor, split: TensorSplit) -> Tensor:
    """[units, elements of one] Return a parameter's gradient with a row per unit."""
    width = _unit_numel(parameter, split)
    return _gradient(parameter).movedim(split.dim, 0).reshape(-1, width)
