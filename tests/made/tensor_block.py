"""A GPT block with grouped queries behind an embedding, on the ranks of a replica, and its training on unlike replicas.

Used by tests/test_ntp_ranks.py and benchmarks/ntp_parity.py. Float64 throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from headway.parallel.availability import ShardMap, TensorSplit, attention_units, split_together
from headway.parallel.torch_reshard import GradientReshard, ReplicaGroups, take_units


@dataclass(frozen=True)
class BlockShape:
    """Sizes of the model."""

    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    length: int = 5

    @property
    def width(self) -> int:
        """Elements of the stream."""
        return self.heads * self.head_size

    def weights(self) -> dict[str, Tensor]:
        """Return seeded weights of the whole model."""
        generator = torch.Generator().manual_seed(0)
        d, kv = self.width, self.kv_heads * self.head_size
        shapes = {
            "embedding": (self.vocabulary, d), "norm_1": (d,), "query": (d, d), "key": (kv, d), "value": (kv, d),
            "query_bias": (d,), "output": (d, d), "output_bias": (d,), "norm_2": (d,), "up": (self.ffn, d),
            "up_bias": (self.ffn,), "down": (d, self.ffn), "down_bias": (d,),
        }  # fmt: skip
        return {
            name: torch.randn(shape, generator=generator, dtype=torch.float64) / 3 for name, shape in shapes.items()
        }

    def splits(self, tp: int, reduced: int) -> dict[str, TensorSplit]:
        """Return how its tensors are split over a whole and a reduced group."""
        d, kv = self.width, self.kv_heads * self.head_size
        attention = ShardMap.build(attention_units(self.heads, self.kv_heads), tp, reduced)
        columns, rows = ShardMap.build(self.ffn, tp, reduced), ShardMap.build(self.vocabulary, tp, reduced)
        heads = {"query": (0, d), "query_bias": (0, d), "key": (0, kv), "value": (0, kv), "output": (1, d)}
        ffn = {"up": (0, self.ffn), "up_bias": (0, self.ffn), "down": (1, self.ffn)}
        return {
            **split_together(attention, heads),
            **split_together(columns, ffn),
            **split_together(rows, {"embedding": (0, self.vocabulary)}),
        }


class Copied(torch.autograd.Function):
    """The same stream on all ranks of a replica; gradients are summed over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Summed(torch.autograd.Function):
    """The sum over the ranks of a replica; each gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def forward(w: dict[str, Tensor], ids: Tensor, shape: BlockShape, vocabulary: Sequence[int], group: Any) -> Tensor:
    """Return the stream [batch, length, width] behind the block; `vocabulary` has this rank's rows."""
    where = torch.full((shape.vocabulary,), -1)
    where[list(vocabulary)] = torch.arange(len(vocabulary))
    row = where[ids]
    known = F.embedding(row.clamp(min=0), w["embedding"]) if len(vocabulary) else w["embedding"].sum().expand(1)
    x = Summed.apply(torch.where((row >= 0)[..., None], known, 0.0).expand(*ids.shape, shape.width), group)
    y = Copied.apply(F.layer_norm(x, (shape.width,), w["norm_1"]), group)
    q = F.linear(y, w["query"], w["query_bias"])
    q, k, v = (t.unflatten(-1, (-1, shape.head_size)).transpose(1, 2) for t in (q, y @ w["key"].T, y @ w["value"].T))
    k, v = (t.repeat_interleave(shape.heads // shape.kv_heads, 1) for t in (k, v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + Summed.apply(attended @ w["output"].T, group) + w["output_bias"]
    y = Copied.apply(F.layer_norm(x, (shape.width,), w["norm_2"]), group)
    hidden = F.gelu(F.linear(y, w["up"], w["up_bias"]))
    return x + Summed.apply(hidden @ w["down"].T, group) + w["down_bias"]


def train(degrees: Sequence[int], shape: BlockShape, examples: int, steps: int) -> dict[str, Tensor]:
    """Train on replicas of these tensor-parallel degrees; returns a rank's whole weights after `steps` of Adam."""
    groups = ReplicaGroups.create(degrees)
    splits = shape.splits(max(degrees), min(degrees))
    units = {name: groups.units(split.shards) for name, split in splits.items()}
    w = {
        name: (take_units(tensor, splits[name], units[name]) if name in splits else tensor).requires_grad_()
        for name, tensor in shape.weights().items()
    }
    reshard = GradientReshard(w, splits, groups)
    optimizer = torch.optim.Adam(w.values(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    shares = batch_shares(examples, degrees)
    begin = sum(shares[: groups.replica])
    for _ in range(steps):
        ids = torch.randint(shape.vocabulary, (examples, shape.length), generator=generator)
        targets = torch.randn(examples, shape.length, shape.width, generator=generator, dtype=torch.float64)
        mine = slice(begin, begin + shares[groups.replica])
        stream = forward(w, ids[mine], shape, units["embedding"], groups.tp)
        optimizer.zero_grad()
        ((stream - targets[mine]).square().sum() / targets.numel()).backward()
        reshard.sum_gradients()
        optimizer.step()
    return {name: whole(tensor.detach(), splits.get(name), groups) for name, tensor in w.items()}


def batch_shares(examples: int, degrees: Sequence[int]) -> list[int]:
    """[replicas] Split a batch in proportion to the replicas' tensor-parallel degrees, by largest remainders."""
    shares = [examples * degree // sum(degrees) for degree in degrees]
    by_remainder = sorted(range(len(degrees)), key=lambda replica: -(examples * degrees[replica] % sum(degrees)))
    for replica in by_remainder[: examples - sum(shares)]:
        shares[replica] += 1
    return shares


def join_units(pieces: Sequence[Tensor], split: TensorSplit, layout: Sequence[Sequence[int]]) -> Tensor:
    """Return the whole tensor of which rank r has the units `layout[r]`: the inverse of `take_units` on every rank."""
    joined = torch.cat(list(pieces), split.dim)
    size = split.unit_size
    elements = torch.tensor([unit * size + at for units in layout for unit in units for at in range(size)])
    return joined.index_select(split.dim, elements.argsort())


def whole(tensor: Tensor, split: TensorSplit | None, groups: ReplicaGroups) -> Tensor:
    """Return the whole tensor from the ranks of a replica."""
    if split is None:
        return tensor
    degree = groups.degrees[groups.replica]
    pieces: list[Any] = [None] * degree
    dist.all_gather_object(pieces, tensor, group=groups.tp)
    layout = split.shards.comp if degree == len(split.shards.comp) else split.shards.sync
    return join_units(pieces, split, layout)
