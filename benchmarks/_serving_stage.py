"""A serving plan run on the ranks of a process group: keys and values are kept, tokens chosen greedily.

Use it to prove a plan, not to serve: a stage per rank, weights drawn from a
seed and rounded to the grid of their bits (`headway.runtime.quantize`), then
multiplied in floating point. What passes between ranks is what the plan
counts: activations forward, chosen tokens back to the first rank.

    rank 0   0F 1F 2F 3F .. 0D 1D .. 0D 1D       F prefill, D one token of a decode micro-batch
    rank 1      0F 1F 2F 3F .. 0D 1D .. 0D       tokens return behind each: a D waits for its last one

Ranks of one process group, rank r having stage r; `headway.model.serving.times`
predicts how long it takes. A GPT's shape: learned positions, norms in front,
a tied head. Legend of shapes: B sequences, T tokens, H hidden.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.cost.transformer import Transformer
from headway.model.serving.costs import ServingLoad
from headway.model.serving.plan import ServeStage
from headway.runtime.quantize import decode, encode

GRIDS = {4: "int4", 8: "int8", 16: ""}
"""Bits that weights are rounded to here -> the number format; 16 bits are bfloat16."""

Layer = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedStage:
    """What one stage holds."""

    model: Transformer
    """The shape."""

    layers: tuple[Layer, ...]
    """Matrices and biases of its layers."""

    embedding: torch.Tensor
    """[V, H] Embedding and, of the last stage, head."""

    positions: torch.Tensor
    """[s, H]."""


def drawn_stage(model: Transformer, stage: ServeStage, seed: int, dtype: torch.dtype = torch.float32) -> QuantizedStage:
    """Return a stage's weights: each layer's depend on the seed and its number alone, not on the partition.

    Raises `InputError` on bits that are not rounded to here, and on another shape than a GPT's.
    """
    if model.gated or model.kv_heads != model.heads or not model.positions or not model.tied:
        raise InputError("only a GPT's shape is run here. Leave out gated, kv_heads, and positions or tied = false.")
    for bits in stage.bits:
        if bits not in GRIDS:
            raise InputError(f"weights of {bits} bits are not run here. Offer some of {', '.join(map(str, GRIDS))}.")
    h, ffn = model.hidden, model.ffn
    shapes = {"qkv": (3 * h, h), "out": (h, h), "up": (ffn, h), "down": (h, ffn)}
    layers = []
    for number, bits in zip(range(stage.first, stage.last + 1), stage.bits, strict=True):
        weights = {
            name: _rounded(_normal(shape, 1 / math.sqrt(shape[1]), seed, name, number), bits).to(dtype)
            for name, shape in shapes.items()
        }
        biases = {
            f"{name}_bias": _normal(shape[:1], 0.1, seed, f"{name}_bias", number).to(dtype)
            for name, shape in shapes.items()
        }
        layers.append(weights | biases)
    embedding = _normal((model.vocabulary, h), 1.0, seed, "embedding", 0).to(dtype)
    return QuantizedStage(model, tuple(layers), embedding, _normal((model.sequence, h), 0.3, seed, "pos", 0).to(dtype))


def _normal(shape: tuple[int, ...], std: float, seed: int, name: str, number: int) -> torch.Tensor:
    """Return normal numbers of a generator of their own."""
    generator = torch.Generator().manual_seed(derived_seed(seed, name, number) % 2**63)
    return torch.randn(shape, generator=generator) * std


def _rounded(weights: torch.Tensor, bits: int) -> torch.Tensor:
    """Return weights on the grid of `bits`."""
    return decode(encode(weights, GRIDS[bits])) if GRIDS[bits] else weights.bfloat16().float()


class PastTokens:
    """Keys and values of one decode micro-batch, of each layer of a stage."""

    def __init__(self, stage: QuantizedStage, batch: int, length: int) -> None:
        shape = (len(stage.layers), 2, batch, stage.model.heads, length, stage.model.hidden // stage.model.heads)
        self.values = torch.empty(shape, dtype=stage.embedding.dtype)
        """[layers, 2, B, heads, s + n, H / heads] Keys, then values."""

    def layer(self, index: int, first: int, last: int) -> torch.Tensor:
        """Return [2, B, heads, s + n, H / heads] of one layer, of sequences first..last - 1."""
        return self.values[index, :, first:last]


def layer_forward(model: Transformer, weights: Layer, x: torch.Tensor, past: torch.Tensor, start: int) -> torch.Tensor:
    """Return the stream [B, T, H] after a layer; keys and values of tokens start..start + T - 1 go into `past`."""
    tokens, shape = x.shape[1], (model.hidden,)
    qkv = F.linear(F.layer_norm(x, shape), weights["qkv"], weights["qkv_bias"])
    query, key, value = qkv.view(x.shape[0], tokens, 3, model.heads, -1).permute(2, 0, 3, 1, 4)
    past[0, :, :, start : start + tokens] = key
    past[1, :, :, start : start + tokens] = value
    # The first token attends to itself alone; a single one to all before it, which needs no mask.
    heads = F.scaled_dot_product_attention(
        query, past[0, :, :, : start + tokens], past[1, :, :, : start + tokens], is_causal=tokens > 1
    )
    x = x + F.linear(heads.transpose(1, 2).flatten(2), weights["out"], weights["out_bias"])
    hidden = F.gelu(F.linear(F.layer_norm(x, shape), weights["up"], weights["up_bias"]))
    return x + F.linear(hidden, weights["down"], weights["down_bias"])


def chosen(stage: QuantizedStage, x: torch.Tensor) -> torch.Tensor:
    """Return [B] the likeliest next token behind the last one of `x` [B, T, H]."""
    last = F.layer_norm(x[:, -1], (stage.model.hidden,))
    return F.linear(last, stage.embedding).argmax(-1)


@torch.no_grad()
def serve_on_ranks(
    stage: QuantizedStage, load: ServingLoad, sizes: tuple[int, int], prompts: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Run this rank's stage; return on rank 0 the generated tokens [B, n] and the seconds, on others what they saw.

    `prompts` [B, s] int64 is needed by the first rank only, `sizes` are those of prefill and decode micro-batches.
    Without a process group one stage does everything. Raises `InputError` where the batch does not divide.
    """
    prefill, size = sizes
    num_prefill, num_decode = load.microbatches(prefill, size)
    if size % prefill:
        raise InputError(f"decode micro-batches of {size} are not made of prefill ones of {prefill}. Choose a divisor.")
    ring = _StageRing(stage)
    past = [PastTokens(stage, size, load.prompt + load.new) for _ in range(num_decode)]
    tokens = torch.zeros(load.batch, load.new, dtype=torch.int64)
    ring.barrier()
    begin = time.perf_counter()
    for i in range(num_prefill):
        first = i * prefill
        owner, inner = past[first // size], first % size
        _stage_forward(ring, owner, (inner, inner + prefill), prompts[first : first + prefill], 0, load.prompt)
    for i in range(num_prefill):
        tokens[i * prefill : (i + 1) * prefill, 0] = ring.returned(prefill)
    for t in range(1, load.new):
        for k, owner in enumerate(past):
            rows = slice(k * size, (k + 1) * size)
            if t > 1:
                tokens[rows, t - 1] = ring.returned(size)
            _stage_forward(ring, owner, (0, size), tokens[rows, t - 1 : t], load.prompt + t - 1, 1)
    for k in range(num_decode if load.new > 1 else 0):
        tokens[k * size : (k + 1) * size, -1] = ring.returned(size)
    ring.finish()
    return tokens, time.perf_counter() - begin


class _StageRing:
    """Messages between the stages, in the order of the plan; without a process group a queue."""

    def __init__(self, stage: QuantizedStage) -> None:
        on = dist.is_available() and dist.is_initialized()
        self.stage, self.queue = stage, list[torch.Tensor]()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if on else (0, 1)
        self.is_last = self.rank == self.size - 1
        self._sent: list[tuple[dist.Work | None, torch.Tensor]] = []

    def barrier(self) -> None:
        """Begin together."""
        if self.size > 1:
            dist.barrier()

    def received(self, batch: int, length: int) -> torch.Tensor:
        """Return the stream from the stage before."""
        x = torch.empty(batch, length, self.stage.model.hidden, dtype=self.stage.embedding.dtype)
        dist.recv(x, self.rank - 1)
        return x

    def send(self, message: torch.Tensor, rank: int) -> None:
        """Send without waiting; `finish` does."""
        if self.size == 1:
            self.queue.append(message)
        else:
            self._sent.append((dist.isend(message, rank), message))

    def returned(self, batch: int) -> torch.Tensor:
        """Return the tokens that came back to the first rank; zeros on others, which do not need them."""
        if self.size == 1:
            return self.queue.pop(0)
        tokens = torch.zeros(batch, dtype=torch.int64)
        if self.rank == 0:
            dist.recv(tokens, self.size - 1)
        return tokens

    def finish(self) -> None:
        """Wait until everything is sent."""
        for work, _ in self._sent:
            if work is not None:
                work.wait()


def _stage_forward(
    ring: _StageRing, past: PastTokens, rows: tuple[int, int], tokens: torch.Tensor, start: int, length: int
) -> None:
    """Run one micro-batch through the stage: [B, T] tokens on the first, the stream of the stage before on others."""
    stage = ring.stage
    if ring.rank == 0:
        x = stage.embedding[tokens] + stage.positions[start : start + length]
    else:
        x = ring.received(rows[1] - rows[0], length)
    for index, weights in enumerate(stage.layers):
        x = layer_forward(stage.model, weights, x, past.layer(index, *rows), start)
    if ring.is_last:
        ring.send(chosen(stage, x), 0)
    else:
        ring.send(x, ring.rank + 1)


@torch.no_grad()
def measure_layers(
    model: Transformer, device: str, bits: Sequence[int], load: ServingLoad, *, repeats: int = 9
) -> list[dict[str, str | int | float]]:
    """Return measured rows for `headway.model.serving.costs.measured`: a layer in both phases, and the head.

    Batches are powers of two up to the load's; lengths the prompt and half of it, and what precedes the first, the
    middle and the last token. Medians of `repeats`.
    """
    rows: list[dict[str, str | int | float]] = []
    batches = [2**i for i in range(load.batch.bit_length()) if 2**i <= load.batch]
    for width in bits:
        stage = drawn_stage(model, ServeStage(device, 0, 0, (width,)), 0)
        for batch in batches:
            past = PastTokens(stage, batch, load.prompt + load.new)
            cases = [("prefill", length, 0, length) for length in {max(1, load.prompt // 2), load.prompt}]
            cases += [("decode", 1, start, start) for start in {load.prompt, load.past, load.prompt + load.new - 1}]
            for phase, length, start, count in cases:
                x = torch.randn(batch, length, model.hidden)
                seconds = _median_s(stage, x, past, start, repeats)
                rows.append(
                    {
                        "device": device,
                        "bits": width,
                        "phase": phase,
                        "batch": batch,
                        "tokens": count,
                        "seconds": seconds,
                    }
                )
    for batch in batches:
        x, times = torch.randn(batch, 1, model.hidden), []
        for _ in range(repeats):
            begin = time.perf_counter()
            chosen(stage, x)
            times.append(time.perf_counter() - begin)
        rows.append(
            {"device": device, "bits": 16, "phase": "head", "batch": batch, "tokens": 1,
             "seconds": statistics.median(times)}
        )  # fmt: skip
    return rows


def _median_s(stage: QuantizedStage, x: torch.Tensor, past: PastTokens, start: int, repeats: int) -> float:
    """Return the median seconds of the stage's one layer."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        layer_forward(stage.model, stage.layers[0], x, past.layer(0, 0, x.shape[0]), start)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
