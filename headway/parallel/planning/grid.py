"""Degrees of data, tensor and pipeline parallelism for a transformer: closed forms first, the best by simulation.

Source: *Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM* (SC 2021; PTD-P). Legend, in the paper's letters: t, p, d ranks per
tensor, pipeline, data group; v stages per rank; b sequences of a microbatch,
B of a step, m = B / (d b) microbatches; l layers, h hidden, s sequence, V
vocabulary. The closed form of a step, with T the time of a microbatch on the
last rank (which has the output layer) and U on any other:

    m T + (p - 1) U / v + 2 (p v - 1) c + (m - p) max(0, L - T) + exposed x all_reduce(4 P / (t p), d)

c is a message of 2 b s h / t bytes. L is the time per microbatch that the
round trip allows: a rank has (v p + p - 1) / v microbatches in flight (p for
v = 1), one takes (p - 1) U + T + 2 (p v - 1) c, and a link carries v of them.
Matrix products run at the peak divided by (constant + per_hidden / h): two
constants, fitted to two published rows of A100s. A microbatch's size does not
change their rate here. Layers divide evenly over stages.

Without a flush (PipeDream-2BW, ICML 2021, section 3.2: pipelines of equal
width, v = 1, m >= p) nothing fills or drains, and the device holds the weights
twice, with |W| their bytes, |A| all activations of a microbatch, |I| the input
of a stage:

    schedule      step                        memory, kept             memory, computed again
    1f1b          as above                    |W| / p + p |A| / p      |W| / p + |A| / p + p |I|
    two_buffer    m T + exposed all-reduce    2 |W| / p + p |A| / p    2 |W| / p + |A| / p + p |I|

>>> from headway.cost.specs import shipped
>>> model = Transformer(24, 2304, 24, sequence=2048, vocabulary=51200)
>>> plan = plan_grid(model, 512, GridCluster.of("A100-SXM4-80GB", 32))
>>> plan.choice.tp, plan.choice.pp, plan.choice.dp
(1, 1, 32)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.cost.collectives import collective_seconds
from headway.cost.specs import DeviceSpec, LinkSpec, shipped
from headway.cost.transformer import RECOMPUTE, Sharding, Transformer, training_memory
from headway.sim.pipeline.lower import lower
from headway.sim.pipeline.orders import PipelineShape, interleaved, one_f_one_b
from headway.sim.pipeline.simulate import StageCosts, simulate, steady_shapes
from headway.sim.pipeline.weight_versions import two_buffer

SIMULATED_SHARE = 20
"""One of so many candidates is simulated: those with the least closed form."""

MOST_INTERLEAVE, MOST_MICROBATCH = 4, 16
"""Stages per rank and sequences per microbatch that are tried at most."""


SCHEDULES_OF_GRID = {"1f1b": one_f_one_b, "two_buffer": two_buffer}
"""What pipelines of a grid run: 1F1B (interleaved where a rank has several stages), or PipeDream-2BW."""

MOST_TRIED = 1_000_000
"""Devices, layers, sequences of a step."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How much longer matrix products take than at the peak: constant + per_hidden / hidden."""

    constant: float = 1.6345
    """Of very wide layers; fitted to the rows of 1.7 G and 145.6 G parameters."""

    per_hidden: float = 1252.5
    """What narrow layers add, times the hidden size; fitted to the same rows."""

    link_fraction: float = 2 / 3
    """Share of the inside link's rate that an all-reduce reaches: 200 of an A100's 300 GB/s."""

    exposed_fraction: float = 0.3
    """Share of the all-reduce of gradients that no computation hides."""


@dataclass(frozen=True, slots=True)
class GridCluster:
    """The devices of a job, and their links."""

    num_devices: int
    """n: all devices."""

    devices_per_host: int
    """Devices that the inside link connects."""

    device: DeviceSpec
    """Any of them."""

    inside: LinkSpec
    """Link between devices of a host."""

    between: LinkSpec
    """Link of one device towards other hosts."""

    dtype: str = "bf16"
    """Precision of matrix products."""

    efficiency: Efficiency = Efficiency()
    """The fitted constants."""

    def __post_init__(self) -> None:
        """Raise `InputError` on counts below 1."""
        if self.num_devices < 1 or self.devices_per_host < 1:
            raise InputError(f"{self.num_devices} devices, {self.devices_per_host} per host; give at least 1 of each.")

    @classmethod
    def of(
        cls, device: str, num_devices: int, *, devices_per_host: int = 8, link: str = "infiniband-hdr"
    ) -> GridCluster:
        """Return a cluster of a device from the shipped tables; raises `UnknownNameError` with the nearest names."""
        specs, found = shipped(), shipped().device(device)
        dtype = next((name for name in ("bf16", "fp16", "fp32") if name in found.flops_per_s), "bf16")
        return cls(num_devices, devices_per_host, found, specs.link(found.link), specs.link(link), dtype)

    def link(self, num_ranks: int, stride: int) -> LinkSpec:
        """Return the slowest link of a ring of ranks `stride` devices apart."""
        return self.inside if num_ranks * stride <= self.devices_per_host else self.between


@dataclass(frozen=True, slots=True)
class GridChoice:
    """One way to lay a model over the devices."""

    tp: int
    """t: ranks that share each layer."""

    pp: int
    """p: ranks of a pipeline."""

    dp: int
    """d: replicas."""

    interleave: int
    """v: stages per rank."""

    microbatch: int
    """b: sequences of a microbatch."""

    num_microbatches: int
    """m: microbatches of a replica's step."""

    recompute: str
    """What the backward computes again, one of `headway.cost.transformer.RECOMPUTE`."""


@dataclass(frozen=True, slots=True)
class GridPlan:
    """The choice with the least simulated step."""

    choice: GridChoice
    """The degrees."""

    step_s: float
    """Its step, simulated."""

    memory_bytes: float
    """The most that a device needs, by `headway.cost.transformer`."""

    num_candidates: int
    """Choices that fit the devices and their memory."""

    num_simulated: int
    """Of them, simulated."""

    without_pipeline_s: float | None
    """Closed form of the best choice with p = 1; None where none fits."""


def candidates(
    model: Transformer, batch: int, cluster: GridCluster, schedule: str = "1f1b"
) -> Iterator[tuple[GridChoice, float]]:
    """Yield every choice that divides evenly and fits the memory, with its bytes on the fullest device."""
    two = pick(SCHEDULES_OF_GRID, schedule, "schedule of a grid") is two_buffer
    n = cluster.num_devices
    for t, p in itertools.product(_divisors(cluster.devices_per_host), _divisors(model.layers)):
        if n % (t * p) or model.heads % t or batch % (n // (t * p)):
            continue
        d = n // (t * p)
        for b, v in itertools.product(_divisors(batch // d), range(1, MOST_INTERLEAVE + 1 if p > 1 else 2)):
            m = batch // (d * b)
            if b > MOST_MICROBATCH or model.layers % (p * v) or (v > 1 and m % p) or (two and (v > 1 or m < p)):
                continue
            for recompute in RECOMPUTE:
                sharding = Sharding(tp=t, pp=p, dp=d, stages_per_rank=v, recompute=recompute)
                needed = training_memory(
                    model, sharding, microbatch_size=b, num_microbatches=m, precision="mixed-fp32-gradients"
                )
                memory = needed.peak_bytes + (needed.parameters_bytes if two and p > 1 else 0.0)
                if memory <= cluster.device.memory_bytes:
                    yield GridChoice(t, p, d, v, b, m, recompute), memory


def stage_seconds(model: Transformer, choice: GridChoice, cluster: GridCluster) -> tuple[float, float, float, float]:
    """Return seconds of a microbatch: forward and backward of a stage's layers, forward of the output, a message.

    A layer's forward is 2 FLOPs per weight of its matrices and 4 s h of attention per token, and two all-reduces of
    2 b s h bytes; its backward is twice that in FLOPs, with two more. Full recomputation adds a forward, the selective
    one the attention's products.
    """
    tokens = choice.microbatch * model.sequence
    slow = cluster.efficiency.constant + cluster.efficiency.per_hidden / model.hidden
    per_flop = slow / cluster.device.peak(cluster.dtype) / choice.tp
    layers = model.layers / (choice.pp * choice.interleave)
    attention = 4 * model.sequence * model.hidden * tokens * per_flop
    compute = 2 * model.matrix_parameters * tokens * per_flop + attention
    rated = replace(cluster.inside, bytes_per_s=cluster.inside.bytes_per_s * cluster.efficiency.link_fraction)
    passed = 2.0 * tokens * model.hidden
    reduce = 2 * collective_seconds("all_reduce", passed, num_ranks=choice.tp, link=rated)
    again = {"none": 0.0, "selective": attention, "full": compute + reduce}[choice.recompute]
    output = 2 * model.vocabulary * model.hidden * tokens * per_flop
    link = cluster.link(choice.pp, cluster.num_devices // choice.pp)
    message = link.seconds(passed / choice.tp) if choice.pp > 1 else 0.0
    return layers * (compute + reduce), layers * (2 * compute + reduce + again), output, message


def reduce_seconds(model: Transformer, choice: GridChoice, cluster: GridCluster) -> float:
    """Return the exposed part of the all-reduce of 32-bit gradients over the replicas."""
    gradients = 4 * model.num_parameters / (choice.tp * choice.pp)
    link = cluster.link(choice.dp, choice.tp)
    whole = collective_seconds("all_reduce", gradients, num_ranks=choice.dp, link=link)
    return cluster.efficiency.exposed_fraction * whole


def closed_step_s(model: Transformer, choice: GridChoice, cluster: GridCluster, schedule: str = "1f1b") -> float:
    """Return the closed form of a step at the head of this module."""
    forward, backward, output, message = stage_seconds(model, choice, cluster)
    p, v, m = choice.pp, choice.interleave, choice.num_microbatches
    rank = v * (forward + backward)
    last = rank + 3 * output
    messages = 2 * (p * v - 1) * message
    if schedule == "two_buffer" and p > 1:
        return m * max(last, ((p - 1) * rank + last + messages) / p) + reduce_seconds(model, choice, cluster)
    in_flight = (v * p + p - 1) / v if v > 1 else p
    round_trip = max(((p - 1) * rank + last + messages) / in_flight, v * message)
    waiting = max(0, m - p) * max(0.0, round_trip - last)
    return m * last + (p - 1) * rank / v + messages + waiting + reduce_seconds(model, choice, cluster)


def simulated_step_s(model: Transformer, choice: GridChoice, cluster: GridCluster, schedule: str = "1f1b") -> float:
    """Return the step with its pipeline replayed: 1F1B, interleaved where a rank has several stages, or two_buffer."""
    forward, backward, output, message = stage_seconds(model, choice, cluster)
    shape = PipelineShape(choice.pp, choice.num_microbatches, choice.interleave)
    order = SCHEDULES_OF_GRID[schedule] if choice.interleave == 1 else interleaved
    costs = [np.full(shape.num_stages, round(seconds * 1e9), np.int64) for seconds in (forward, backward)]
    for cost, share in zip(costs, (1, 2), strict=True):
        cost[-1] += round(share * output * 1e9)
    nothing = np.zeros(shape.num_stages, np.int64)
    stage_costs = StageCosts(costs[0], costs[1], nothing, round(message * 1e9))
    shapes = steady_shapes(order, shape)
    ends = [simulate(lower(order(streamed)), stage_costs).makespan_ns for streamed in shapes]
    makespan_ns = ends[1] if shapes[0] == shapes[1] else ends[1] - ends[0]
    return makespan_ns / 1e9 + reduce_seconds(model, choice, cluster)


def plan_grid(model: Transformer, batch: int, cluster: GridCluster, schedule: str = "1f1b") -> GridPlan:
    """Return the choice with the least step for `batch` sequences: one in 20 candidates is simulated, at least one.

    `schedule` is an entry of `SCHEDULES_OF_GRID`. Raises `InputError` where no choice divides evenly and fits.
    """
    if batch < 1:
        raise InputError(f"the batch is {batch} sequences; give at least 1.")
    found = list(candidates(model, batch, cluster, schedule))
    if not found:
        raise InputError(
            f"no layout of {model.layers} layers and {batch} sequences over {cluster.num_devices} devices divides "
            f"evenly and fits {cluster.device.memory_bytes:g} bytes. Give more devices, or another batch."
        )
    closed = [closed_step_s(model, choice, cluster, schedule) for choice, _ in found]
    order = sorted(range(len(found)), key=lambda k: closed[k])
    chosen = order[: max(1, len(found) // SIMULATED_SHARE)]
    steps = {k: simulated_step_s(model, found[k][0], cluster, schedule) for k in chosen}
    best = min(chosen, key=lambda k: (steps[k], found[k][1]))
    alone = [closed[k] for k in order if found[k][0].pp == 1]
    alone_s = alone[0] if alone else None
    return GridPlan(found[best][0], steps[best], found[best][1], len(found), len(chosen), alone_s)


def _divisors(number: int) -> list[int]:
    """Return the divisors, smallest first; raises `InputError` where there are too many numbers to try."""
    if number > MOST_TRIED:
        raise InputError(f"{number:.3g} devices, layers or sequences are too many; give at most {MOST_TRIED:,}.")
    return [k for k in range(1, number + 1) if number % k == 0]
