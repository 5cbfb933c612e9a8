"""Operation traces of made-up Megatron-like jobs whose lost time is known.

Use it to test an analysis: `generate` plays a pipeline schedule (1F1B, or
interleaved when `vpp` > 1) with data-parallel collectives, overlapped or not,
with lognormal noise, and with injected faults. The seconds a fault costs are
the difference of two plays, with and without it. A play walks the schedule
itself, in integer nanoseconds, and shares nothing with the replay of a Dag:
the truth does not come from what it is meant to test.

>>> job = SyntheticJob(dp=2, pp=2, num_microbatches=4, num_steps=2, noise=0.0)
>>> made = generate(job, seed=1, faults=[SyntheticFault("worker", 1.5, dp=1, stage=0)])
>>> len(made.trace), made.slowdown > 1.1, list(made.lost_device_s)
(184, True, ['straggler.worker'])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks._synthetic_play import Durations, Ints, Play, Row, SyntheticJob
from headway.core.tables import pick
from headway.core.units import NS_PER_S
from headway.trace.events.trace import Trace
from headway.trace.readers.straggler import Sizes, operations

__all__ = [
    "FAULTS",
    "Generated",
    "SyntheticFault",
    "SyntheticJob",
    "calibrated",
    "durations",
    "generate",
    "play",
    "scenario",
]


@dataclass(frozen=True, slots=True)
class SyntheticFault:
    """One injected cause of lost time."""

    kind: str
    """An entry of `FAULTS`."""

    strength: float
    """Meaning depends on the kind; more is worse."""

    dp: int = 0
    """DP rank of a slow worker or link."""

    stage: int = 0
    """Pipeline rank of a slow worker; the rank a slow link starts at; the rank of slow collectives."""


def _worker(job: SyntheticJob, draw: Durations, fault: SyntheticFault, _: np.random.Generator) -> None:
    """One worker computes `strength` times slower."""
    for compute in (draw.forward, draw.backward):
        _scale(compute[:, fault.dp, fault.stage :: job.pp], fault.strength)


def _last_stage(_job: SyntheticJob, draw: Durations, fault: SyntheticFault, _: np.random.Generator) -> None:
    """The last stage of the model computes `strength` times slower."""
    for compute in (draw.forward, draw.backward):
        _scale(compute[:, :, -1], fault.strength)


def _sequence(_job: SyntheticJob, draw: Durations, fault: SyntheticFault, rng: np.random.Generator) -> None:
    """Micro-batches differ in work, lognormally around 1, by a coefficient of variation of `strength`."""
    steps, dp, _, microbatches = draw.forward.shape
    sigma = np.sqrt(np.log1p(fault.strength**2))
    work = np.exp(rng.standard_normal((steps, dp, 1, microbatches)) * sigma)
    work /= work.mean()  # The same work in all, spread unevenly.
    for compute in (draw.forward, draw.backward):
        _scale(compute, work)


def _gc(job: SyntheticJob, draw: Durations, fault: SyntheticFault, rng: np.random.Generator) -> None:
    """In a quarter of its steps a worker pauses in one forward, for `strength` mean forwards."""
    steps, dp, _, microbatches = draw.forward.shape
    pauses = rng.random((steps, dp, job.pp)) < 0.25
    layer = rng.integers(job.vpp, size=pauses.shape)
    microbatch = rng.integers(microbatches, size=pauses.shape)
    step, replica, rank = np.nonzero(pauses)
    where = (step, replica, layer[pauses] * job.pp + rank, microbatch[pauses])
    draw.forward[where] += round(fault.strength * job.forward_s * NS_PER_S)


def _link(job: SyntheticJob, draw: Durations, fault: SyntheticFault, _: np.random.Generator) -> None:
    """The link between two pipeline ranks of one replica is `strength` times slower, both ways."""
    _scale(draw.forward_transfer[:, fault.dp, fault.stage :: job.pp], fault.strength)
    _scale(draw.backward_transfer[:, fault.dp, (fault.stage + 1) % job.pp :: job.pp], fault.strength)


def _collective(job: SyntheticJob, draw: Durations, fault: SyntheticFault, rng: np.random.Generator) -> None:
    """In a third of the steps the collectives of one pipeline rank are `strength` times slower."""
    steps = rng.permutation(job.num_steps)[: max(1, job.num_steps // 3)]
    for collective in (draw.gather, draw.reduction):
        _scale_at(collective, steps, fault.stage, job.pp, fault.strength)


def _scale(values: Ints, factor: float | NDArray[np.float64]) -> None:
    values[...] = np.rint(values * factor).astype(np.int64)


def _scale_at(values: Ints, steps: Ints, stage: int, stride: int, factor: float) -> None:
    for step in steps.tolist():
        _scale(values[step, :, stage::stride], factor)


FAULTS: dict[str, tuple[str, Callable[[SyntheticJob, Durations, SyntheticFault, np.random.Generator], None]]] = {
    "worker": ("straggler.worker", _worker),
    "last_stage": ("straggler.last_stage", _last_stage),
    "sequence": ("straggler.sequence", _sequence),
    "link": ("comm.exposed", _link),
    "collective": ("comm.exposed", _collective),
    "gc": ("host.gc", _gc),
}
"""Kind of fault -> (cause that an analysis should name, what it does to the durations).

Faults act in this order, whatever order they are given in: a pause is not stretched by a slow worker.
"""


@dataclass(frozen=True, slots=True)
class Generated:
    """A made-up trace and the truth about it."""

    job: SyntheticJob
    """What was played."""

    faults: tuple[SyntheticFault, ...]
    """What was wrong with it."""

    trace: Trace = field(repr=False)
    """Its operations."""

    step_ns: Ints
    """[S] Time of each step."""

    lost_device_s: Mapping[str, float]
    """Cause -> device-seconds that the job would win without that fault alone."""

    slowdown: float
    """Time of all steps / their time without any fault."""


def generate(job: SyntheticJob, *, seed: int, faults: Sequence[SyntheticFault] = ()) -> Generated:
    """Play `job` with `faults`; equal arguments give equal traces.

    Raises `UnknownNameError` on an unknown kind of fault.
    """
    rows: list[Row] = []
    step_ns = play(job, durations(job, seed, faults), rows)
    lost = {}
    for fault in faults:
        others = [other for other in faults if other is not fault]
        without_ns = play(job, durations(job, seed, others))
        lost[FAULTS[fault.kind][0]] = float((step_ns - without_ns).sum() / NS_PER_S * job.devices)
    healthy_ns = play(job, durations(job, seed, ()))
    trace = _as_trace(job, rows, step_ns)
    return Generated(job, tuple(faults), trace, step_ns, lost, float(step_ns.sum() / healthy_ns.sum()))


def durations(job: SyntheticJob, seed: int, faults: Sequence[SyntheticFault]) -> Durations:
    """Draw the durations of a job; a fault changes nothing but what it is about.

    Raises `UnknownNameError` on an unknown kind of fault.
    """
    steps, dp, stages, microbatches = job.num_steps, job.dp, job.num_stages, job.num_microbatches
    block = (steps, dp, stages, microbatches)

    def draw(stream: int, seconds: float, shape: tuple[int, ...]) -> Ints:
        rng = np.random.default_rng([seed, stream])
        noisy = seconds * np.exp(rng.standard_normal(shape) * job.noise - job.noise**2 / 2)
        return np.rint(noisy * NS_PER_S).astype(np.int64)

    closing = {
        "layernorm-grads-all-reduce": draw(5, job.collective_s / 10, (steps, dp, job.pp)),
        "embedding-grads-all-reduce": draw(6, job.collective_s / 2, (steps, dp, job.pp)),
        "separate-grads-all-reduce": draw(7, job.collective_s / 10, (steps, 1, job.pp)),
        "optimizer-clip-main-grad": draw(8, job.collective_s / 10, (steps, 1, 1)),
        "optimizer": draw(9, job.forward_s / 10, (steps, dp, job.pp)),
    }
    late = np.random.default_rng([seed, 10]).exponential(1.0, (*block, 2)) * job.launch_s
    result = Durations(
        draw(0, job.forward_s, block), draw(1, 2 * job.forward_s, block),
        draw(2, job.transfer_s, block), draw(3, job.transfer_s, block),
        draw(4, job.collective_s, (steps, 1, stages)), draw(11, 2 * job.collective_s, (steps, 1, stages)),
        closing, np.rint(late * NS_PER_S).astype(np.int64),
    )  # fmt: skip
    for fault in faults:
        pick(FAULTS, fault.kind, "fault")
    for number, (kind, (_, inject)) in enumerate(FAULTS.items()):
        for fault in (fault for fault in faults if fault.kind == kind):
            inject(job, result, fault, np.random.default_rng([seed, 100 + number]))
    return result


def play(job: SyntheticJob, draw: Durations, rows: list[Row] | None = None) -> Ints:
    """Walk the schedule; return the time [S] of each step in ns and append its operations to `rows`."""
    return Play(job, draw).run([] if rows is None else rows)


def _as_trace(job: SyntheticJob, rows: Sequence[Row], step_ns: Ints) -> Trace:
    """Put the steps one behind the other and the rows into columns."""
    steps, dp = job.num_steps, job.dp
    begin = np.concatenate(([0], np.cumsum(step_ns)[:-1]))[None, :, None]
    shape = (len(rows), steps, dp)

    def column(values: Sequence[int]) -> Ints:
        return np.broadcast_to(np.array(values, dtype=np.int64)[:, None, None], shape).ravel()

    start = np.stack([row.start for row in rows])
    end = np.stack([row.end for row in rows])
    rank = np.array([row.rank for row in rows])[:, None, None] * dp + np.arange(dp)[None, None, :]
    return operations(
        {
            "rank": np.broadcast_to(rank, shape).ravel(),
            "step": np.broadcast_to(np.arange(steps)[None, :, None], shape).ravel(),
            "microbatch": column([row.microbatch for row in rows]),
            "stage": column([row.stage for row in rows]),
            "layer": column([row.layer for row in rows]),
            "seq": column([row.seq for row in rows]),
            "start_ns": (start + begin).ravel(),
            "duration_ns": (end - start).ravel(),
        },
        optypes=np.repeat([row.optype for row in rows], steps * dp).tolist(),
        coordinates={p * dp + d: (d, p) for p in range(job.pp) for d in range(dp)},
        sizes=Sizes(dp_size=dp, pp_size=job.pp, vpp_size=job.vpp, trial_name="synthetic"),
    )


def scenario(seed: int) -> tuple[SyntheticJob, tuple[SyntheticFault, ...]]:
    """Draw a job and 0 (a fifth of the seeds), 1 or 2 (a third) faults.

    The job is 1.1 to 2 times slower than without them, and at least 1.08
    times slower than without any one of them: no fault hides another.
    """
    rng = np.random.default_rng([seed, 1000])
    count = 0 if seed % 5 == 4 else 2 if seed % 3 == 0 else 1
    for _ in range(40):
        job = _draw_job(rng)
        faults = _draw_faults(job, seed, count, rng)
        total = float(play(job, durations(job, seed, faults)).sum())
        without = [tuple(other for other in faults if other is not fault) for fault in faults]
        if all(total >= 1.08 * float(play(job, durations(job, seed, rest)).sum()) for rest in without):
            return job, faults
    raise AssertionError(f"40 draws gave no job whose {count} faults all matter")


def _draw_job(rng: np.random.Generator) -> SyntheticJob:
    pp = int(rng.choice([2, 4]))
    return SyntheticJob(
        dp=int(rng.choice([4, 8])),
        pp=pp,
        vpp=int(rng.choice([1, 1, 2])),
        num_microbatches=int(rng.choice([8, 16])),
        num_steps=8,
        overlap_dp=bool(rng.random() < 0.5),
        blocking=bool(rng.random() < 0.3),
        noise=float(rng.uniform(0.005, 0.03)),
    )


def _draw_faults(job: SyntheticJob, seed: int, count: int, rng: np.random.Generator) -> tuple[SyntheticFault, ...]:
    """Draw faults of `count` different causes, each as strong as makes the job so many times slower."""
    causes = [str(cause) for cause in rng.permutation(sorted({cause for cause, _ in FAULTS.values()}))]
    faults: tuple[SyntheticFault, ...] = ()
    for cause in causes[:count]:
        kind = str(rng.choice([kind for kind, (name, _) in FAULTS.items() if name == cause]))
        factor = float(np.exp(rng.uniform(np.log(1.12), np.log(1.9 if count == 1 else 1.35))))
        fault = SyntheticFault(kind, 1.0, dp=int(rng.integers(job.dp)), stage=int(rng.integers(job.pp - 1)))
        faults = (*faults, calibrated(job, seed, fault, faults, factor))
    return faults


def calibrated(
    job: SyntheticJob, seed: int, fault: SyntheticFault, others: Sequence[SyntheticFault], factor: float
) -> SyntheticFault:
    """Return `fault` with the strength at which it makes the job, with `others`, `factor` times slower.

    Strength stays within what is seen in the field: a spread of work of at most 0.6, pauses of at least 3 forwards.
    """
    without = float(play(job, durations(job, seed, others)).sum())
    low, high = {"sequence": (0.05, 0.6), "gc": (3.0, 60.0)}.get(fault.kind, (1.0, 400.0))
    for _ in range(14):
        middle = float(np.sqrt(low * high))
        made = replace(fault, strength=middle)
        if float(play(job, durations(job, seed, [*others, made])).sum()) / without < factor:
            low = middle
        else:
            high = middle
    return replace(fault, strength=float(np.sqrt(low * high)))
