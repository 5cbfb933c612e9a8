"""The shape of a transformer language model: how many parameters it has.

Defaults are a GPT: learned positions, biases, layer norm, a feed-forward
layer of four times the hidden size, input and output embeddings tied. The
switches make a Llama.

>>> Transformer(12, 768, 12, sequence=1024, vocabulary=50257).num_parameters
124439808
>>> Transformer(32, 4096, 32, sequence=4096, vocabulary=32000, ffn=11008, gated=True,
...             biases=False, positions=False, tied=False).num_parameters
6738415616

Model FLOPs of a transformer, and what share of the hardware they use.

A GPT does 72 L h^2 (1 + s/(6h) + V/(12 L h)) operations per trained token,
forward and backward: six per weight of every matrix, the output layer
included (6 V h), and 12 L s h for the two products of attention, which is
counted in full, not halved for the causal mask. With every layer recomputed
the hardware does the 96 L h^2 (1 + s/(6h) + V/(16 L h)) of Narayanan et al.
(arXiv 2104.04473, eq. 3).

Papers that take 3/4 of that equation for the model FLOPs count the output
layer as 4.5 V h (`OUTPUT_LAYER["megatron"]`), for example MegaScale (arXiv
2402.15627): 0.1 % less for a model of 175 G parameters, 6.8 % less for GPT-2.

>>> model = Transformer(96, 12288, 96, sequence=2048, vocabulary=64000)
>>> round(flops_per_token(model) / 1e12, 3)
1.077
>>> round(mfu(6144 / 8.57 * 2048 / 12288 * flops_per_token(model, "megatron"), 312e12), 3)
0.412

Bytes that training a transformer needs on the fullest device: weights, gradients, optimizer state, activations.

Activations follow Korthikanti et al. (arXiv 2205.05198): per layer and
micro-batch, s b h (34 + 5 a s / h) bytes in 16-bit precision for a GPT layer, split by tensor
(and sequence) parallelism and lowered by recomputation. Pipelines are 1F1B:
the first stage keeps as many micro-batches as there are stages. It is a lower
bound: fragmentation, communication buffers and the framework come on top.

>>> model = Transformer(96, 12288, 96, sequence=2048, vocabulary=51200)
>>> memory = training_memory(model, Sharding(tp=8, pp=8, sequence_parallel=True, recompute="selective"))
>>> round(memory.parameters_bytes / 2**30, 1), round(memory.activations_bytes / 2**30, 1)
(5.2, 9.8)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.core.errors import InputError
from headway.core.tables import pick, suggestion


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder-only transformer."""

    layers: int
    """L, number of layers."""

    hidden: int
    """h, hidden size."""

    heads: int
    """a, number of attention heads."""

    sequence: int
    """s, tokens per sequence."""

    vocabulary: int
    """V, vocabulary size (padded, if it is padded in the job)."""

    ffn: int = 0
    """Width of the feed-forward layer; 0 = 4 h."""

    kv_heads: int = 0
    """Heads of keys and values (grouped-query attention); 0 = as many as `heads`."""

    gated: bool = False
    """Whether the feed-forward layer has a third matrix (SwiGLU)."""

    biases: bool = True
    """Whether linear layers and norms have biases."""

    positions: bool = True
    """Whether positions are learned parameters."""

    tied: bool = True
    """Whether the output layer is the input embedding."""

    def __post_init__(self) -> None:
        """Check the sizes and fill in the defaults; raises `InputError`."""
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give a whole number >= 1.")
        object.__setattr__(self, "ffn", self.ffn or 4 * self.hidden)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        if self.ffn < 1 or self.kv_heads < 1:
            raise InputError(f"ffn is {self.ffn}, kv_heads {self.kv_heads}; give 0 for the default or a number >= 1.")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise InputError(
                f"hidden {self.hidden} / heads {self.heads} / kv_heads {self.kv_heads} do not divide. "
                "Make hidden a multiple of heads and heads a multiple of kv_heads."
            )

    @property
    def matrix_parameters(self) -> int:
        """Weights of the matrices of one layer: 12 h^2 in a GPT."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.hidden * self.kv_heads // self.heads
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: 12 h^2 + 13 h in a GPT."""
        norms = 2 * self.hidden * (2 if self.biases else 1)
        keys = self.hidden * self.kv_heads // self.heads
        biases = 2 * self.hidden + 2 * keys + (2 if self.gated else 1) * self.ffn + self.hidden
        return self.matrix_parameters + norms + (biases if self.biases else 0)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding and of positions."""
        return (self.vocabulary + (self.sequence if self.positions else 0)) * self.hidden

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        final = self.hidden * (2 if self.biases else 1)
        output = 0 if self.tied else self.vocabulary * self.hidden
        return self.layers * self.layer_parameters + self.embedding_parameters + final + output


# Model FLOPs of a transformer, and what share of the hardware they use.

RECOMPUTE: tuple[str, ...] = ("none", "selective", "full")
"""What the backward pass computes again: nothing, the attention core (Korthikanti et al.), every layer."""


OUTPUT_LAYER: dict[str, float] = {"exact": 6.0, "megatron": 4.5}
"""Convention -> FLOPs per weight of the output layer: those it executes, or 3/4 of those in Megatron-LM's equation."""


def flops_per_token(model: Transformer, convention: str = "exact") -> float:
    """Return the model FLOPs of one trained token, forward and backward, nothing computed twice.

    `convention` is one of `OUTPUT_LAYER`; pass "megatron" to compare with
    published rows that count so. Raises `UnknownNameError`.
    """
    output_layer = pick(OUTPUT_LAYER, convention, "FLOP convention") * model.vocabulary * model.hidden
    return _layer_flops(model) + output_layer


def _layer_flops(model: Transformer) -> float:
    """Return the model FLOPs of one trained token in the layers, the output layer left out."""
    return 6.0 * model.layers * model.matrix_parameters + 12.0 * model.layers * model.sequence * model.hidden


def hardware_flops_per_token(model: Transformer, recompute: str = "none") -> float:
    """Return the FLOPs that the hardware executes per trained token; `recompute` is one of `RECOMPUTE`.

    `selective` runs the two products of the attention core once more, 4 L s h
    (arXiv 2205.05198 books three times that); `full` runs the forward pass of
    every layer once more, but not the output layer. Raises `UnknownNameError`.
    """
    again = {
        "none": 0.0,
        "selective": 4.0 * model.layers * model.sequence * model.hidden,
        "full": _layer_flops(model) / 3,
    }
    return flops_per_token(model) + pick(again, recompute, "recompute")


def mfu(flops_per_s: float, peak_flops_per_s: float | None) -> float | None:
    """Return model FLOPs done per second over the peak, 0..1, per device (HFU when given hardware FLOPs).

    None when there is no one peak: precisions are mixed, or the device is not
    listed. Raises `InputError` on negative or non-finite rates.
    """
    if not (math.isfinite(flops_per_s) and flops_per_s >= 0):
        raise InputError(f"flops_per_s is {flops_per_s}; pass a finite rate >= 0.")
    if peak_flops_per_s is None:
        return None
    if not (math.isfinite(peak_flops_per_s) and peak_flops_per_s > 0):
        raise InputError(f"the peak is {peak_flops_per_s} FLOP/s; pass a finite rate > 0, or None if unknown.")
    return flops_per_s / peak_flops_per_s


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per parameter."""

    parameter_bytes: float
    """The weights that compute uses."""

    gradient_bytes: float
    """Their gradients."""

    optimizer_bytes: float
    """Master weights and moments."""


PRECISIONS: dict[str, Precision] = {
    "mixed": Precision(2, 2, 12),
    "mixed-fp32-gradients": Precision(2, 4, 12),
    "fp32": Precision(4, 4, 8),
    "fp32-momentum": Precision(4, 4, 4),
}
"""Name -> bytes per parameter: Adam with 16-bit weights (Rajbhandari et al., arXiv 1910.02054), in float32, and SGD."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model lies on the devices."""

    tp: int = 1
    """Tensor-parallel degree."""

    pp: int = 1
    """Pipeline stages."""

    dp: int = 1
    """Replicas; matters to memory when `zero_stage` > 0."""

    stages_per_rank: int = 1
    """Stages on each rank, > 1 when interleaved."""

    sequence_parallel: bool = False
    """Whether norms and dropouts are split over tensor-parallel ranks as well."""

    recompute: str = "none"
    """One of `headway.cost.transformer.RECOMPUTE`."""

    zero_stage: int = 0
    """What replicas share out: 1 optimizer state, 2 gradients as well, 3 parameters as well (FSDP)."""

    def __post_init__(self) -> None:
        """Check the degrees; raises `InputError`."""
        for name in ("tp", "pp", "dp", "stages_per_rank"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give a whole number >= 1.")
        if self.recompute not in RECOMPUTE:
            raise InputError(f"unknown recompute {self.recompute!r}. {suggestion(RECOMPUTE, self.recompute)}")
        if self.zero_stage not in (0, 1, 2, 3):
            raise InputError(f"zero_stage is {self.zero_stage}; choose 0, 1, 2 or 3.")


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on the fullest device (the first stage)."""

    parameters_bytes: float
    """Weights."""

    gradients_bytes: float
    """Gradients."""

    optimizer_bytes: float
    """Master weights and moments."""

    activations_bytes: float
    """Activations of all micro-batches in flight, at their most."""

    @property
    def peak_bytes(self) -> float:
        """All of it: reached in the last forward pass before the first backward pass."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes


def training_memory(
    model: Transformer,
    sharding: Sharding,
    *,
    microbatch_size: int = 1,
    num_microbatches: int | None = None,
    precision: str = "mixed",
) -> MemoryEstimate:
    """Return the bytes on the fullest device; `num_microbatches` None means at least as many as stages.

    Raises `InputError` when layers do not divide into stages or a size is
    below 1, `UnknownNameError` on an unknown precision.
    """
    size = pick(PRECISIONS, precision, "precision")
    if microbatch_size < 1 or (num_microbatches is not None and num_microbatches < 1):
        raise InputError(f"microbatch_size {microbatch_size}, num_microbatches {num_microbatches}: give numbers >= 1.")
    stages = sharding.pp * sharding.stages_per_rank
    if model.layers % stages:
        raise InputError(f"{model.layers} layers do not divide into {stages} stages. Choose pp so that they do.")
    embedding = model.embedding_parameters + (0 if model.tied or sharding.pp > 1 else model.vocabulary * model.hidden)
    held = (model.layers / sharding.pp * model.layer_parameters + embedding) / sharding.tp
    shares = [sharding.dp if sharding.zero_stage >= stage else 1 for stage in (3, 2, 1)]
    in_flight = _layers_in_flight(model.layers, sharding, num_microbatches)
    return MemoryEstimate(
        parameters_bytes=held * size.parameter_bytes / shares[0],
        gradients_bytes=held * size.gradient_bytes / shares[1],
        optimizer_bytes=held * size.optimizer_bytes / shares[2],
        activations_bytes=in_flight * layer_activation_bytes(model, sharding, microbatch_size)
        + _recomputed(model, sharding, microbatch_size),
    )


def layer_activation_bytes(model: Transformer, sharding: Sharding, microbatch_size: int) -> float:
    """Return what one layer keeps of one micro-batch until its backward pass (16-bit activations, 1-byte masks).

    Table 2 of arXiv 2205.05198, for a GPT layer.
    """
    s, b, h, a, t = model.sequence, microbatch_size, model.hidden, model.heads, sharding.tp
    if sharding.recompute == "full":
        return 2.0 * s * b * h / (t if sharding.sequence_parallel else 1)
    attention = 0.0 if sharding.recompute == "selective" else 5 * a * s / h
    whole, split = (0, 34) if sharding.sequence_parallel else (10, 24)
    return s * b * h * (whole + (split + attention) / t)


def _layers_in_flight(layers: int, sharding: Sharding, num_microbatches: int | None) -> float:
    """Return how many layers' activations the first rank holds at once under (interleaved) 1F1B.

    L for pp stages of L / pp layers each, times 1 + (pp - 1) / (pp m) when
    interleaved m-fold (arXiv 2205.05198, section 4.2.3).
    """
    p, m = sharding.pp, sharding.stages_per_rank
    most = p * (1 + (p - 1) / (p * m)) if m > 1 else p
    return layers / p * (most if num_microbatches is None else min(most, num_microbatches))


def _recomputed(model: Transformer, sharding: Sharding, microbatch_size: int) -> float:
    """Return the activations that exist only while one layer is computed again."""
    if sharding.recompute == "none":
        return 0.0
    kept = layer_activation_bytes(model, sharding, microbatch_size)
    whole = Sharding(tp=sharding.tp, sequence_parallel=sharding.sequence_parallel)
    return layer_activation_bytes(model, whole, microbatch_size) - kept
