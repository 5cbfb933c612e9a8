"""Bytes that training a transformer needs on the fullest device: weights, gradients, optimizer state, activations.

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

from dataclasses import dataclass

from headway.core.errors import InputError
from headway.core.tables import pick, suggestion
from headway.cost.transformer import RECOMPUTE, Transformer


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
