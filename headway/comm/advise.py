"""What the communication room would change: DDP's buckets and flags, the order of all-gathers, and faster links.

All start from exposed communication, the part that backward does not hide,
or from what DDP itself does around it. Bucket sizes, the copies out of buckets
and the search for unused parameters are replayed on the run's deep windows;
where these cannot tell, a remedy is refused with the reason, or offered for a
live try without a promise. Times are seconds.

>>> setup = Setup.from_facts({"world_size": 1}, memory_bytes=0)
>>> [row.reason for row in propose(None, None, setup)]  # one rank: the program is not even asked
['no collective over ranks was recorded']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from headway.comm import EXACT_RANKS
from headway.comm.compression.advise import propose_compression
from headway.comm.overlap.advise import matmuls_of, propose_overlap
from headway.comm.skew.advise import propose_loose
from headway.core.errors import BarMissedError, InputError
from headway.core.units import NS_PER_S, format_bytes, format_fraction, format_seconds
from headway.ledger.answers.ledger import Ledger
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.ddp.ddp_thread import COPIED
from headway.sim.ddp.ddp_window import models_of
from headway.sim.recorded.program import Program
from headway.trace.events.vocabulary import COLLECTIVES
from headway.trace.rings.rank_tables import DdpModel

TRY_MB = 25
"""Size in MiB to try where none can be predicted: all buckets of 25, where DDP's default makes the first one 1."""

SIZES_MB = (1, 2, 5, 10, 25, 50, 100)
"""Sizes in MiB that are replayed."""

FRESH_S_PER_BYTE = 1e-9
"""What memory that the system hands out anew costs a CPU at most: 4 us for a page of 4 KiB. Without views a step that
frees its gradients takes that much again; seen on a virtual host: 0.65 ns per byte. Windows do not tell it apart."""

SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"
"""Operation of a deep window: DDP looks for parameters that the step does not use."""

GATHERS, SCATTERS = (
    tuple(code for code, name in enumerate(COLLECTIVES) if name.startswith(way) and not name.endswith("_object"))
    for way in ("all_gather_", "reduce_scatter_")
)
"""Values of `corr`: collectives of tensors that sharded training calls; not those of objects."""

COLUMNS = ("rank", "name", "start_ns", "duration_ns", "corr")
"""What is read of each rank to tell whether the job is sharded."""

DEFAULT_BUCKET_BYTES, MANY_BUCKETS = 25 << 20, 8
"""Torch's own limit of a bucket; buckets of a smaller one from which on they are many."""

LEAST_GATHERS = 2
"""All-gathers per step from which on a job counts as sharded by modules: one has no next module."""


def propose(ledger: object, program: Program, setup: Setup) -> Iterator[Proposal | Refusal]:
    """Yield what each remedy for communication would win, or why it is refused or has to be tried."""
    if setup.world_size < 2 or not (program.recording.meetings or program.talks_by_device):
        yield Refusal("comm.bucket", "comm", "no collective over ranks was recorded")
        return
    try:
        bound = program.predict(["comm=instant"]).speedup
    except (InputError, BarMissedError) as cause:
        if not program.talks_by_device:
            raise
        yield _by_share(ledger, program, str(cause))
        return
    gathers_s, matmuls = _gathers_s(program, bound), matmuls_of(program)
    if matmuls is not None:
        yield propose_overlap(program, setup, matmuls)
    if matmuls is not None and matmuls.ranks == setup.world_size:
        yield Refusal("comm.order", "comm", "the run gathers rows for matmuls, not parameters: no order hides them")
    elif gathers_s is not None:
        yield _order(program, gathers_s)
    else:
        yield _gradient_view(program, setup)
        yield _static_graph(program)
    if bound < MIN_SPEEDUP:
        share = format_fraction(1 - 1 / bound)
        reason = f"exposed communication costs {share} of a step: no bucket size can win more"
        yield Refusal("comm.bucket", "comm", reason)
        yield Refusal("comm.compress", "comm", reason.replace("bucket size", "codec"))
        return
    if gathers_s is not None:
        yield Refusal("comm.bucket", "comm", "the run shards its parameters module by module: it has no buckets")
        yield Refusal("comm.compress", "comm", "the run shards its parameters module by module: only DDP's are sent so")
    else:
        yield _bucket(program, bound)
        yield (compressed := propose_compression(program, setup))
        yield propose_loose(program, setup, _models(program), compressed)
    yield _links(program, bound)


def _by_share(ledger: object, program: Program, reason: str) -> Proposal | Refusal:
    """Return what buckets could win at most, from the share of time in which devices only communicated."""
    exposed = ledger.fraction("comm.exposed") if isinstance(ledger, Ledger) else 0.0
    bound = 1 / max(1 - exposed, 0.1)
    if bound < MIN_SPEEDUP:
        return Refusal("comm.bucket", "comm", f"no window shows devices that only communicate; {reason}")
    return _to_try(program, bound, reason)


def _gradient_view(program: Program, setup: Setup) -> Proposal | Refusal:
    """Return what it wins that no gradient is copied out of its bucket, from the deep windows."""
    name = "comm.gradient_view"
    try:
        deep = program.windows()
        if deep.models and all(model.gradient_as_bucket_view for model in deep.models):
            return Refusal(name, "comm", "the run's gradients live inside the buckets already")
        if not deep.matches(COPIED):
            return Refusal(name, "comm", "no deep window shows a copy out of a bucket")
        edit = f"op:{COPIED}=none"
        found = program.predict([edit])
    except (InputError, BarMissedError) as cause:
        return Refusal(name, "comm", f"what the copies cost is not known: {cause}")
    if found.speedup < MIN_SPEEDUP:
        return Refusal(name, "comm", f"copies out of buckets cost little: {found.speedup:.3f}x without them")
    fresh_s = 0.0 if setup.accelerated else FRESH_S_PER_BYTE * sum(sum(model.parameter_bytes) for model in deep.models)
    fastest_s = found.base_step_s / found.interval[1]
    most = found.base_step_s / max(fastest_s - fresh_s, fastest_s / 2)  # Half a step is not all memory.
    return Proposal(
        name=name,
        room="comm",
        edits=(edit,),
        predicted_speedup=found.speedup,
        interval=(found.interval[0], most),
        applies=True,
        cost="none: it saves one copy of the gradients",
        risk="a script that keeps gradients over steps sees later ones; one that calls detach_() on them fails",
        allow="result-equivalent",
        reason="Gradients that live inside the buckets are not copied out of them. On a CPU it may win more: they take "
        f"no fresh memory at each step. {found.note}",
    )


def _static_graph(program: Program) -> Proposal | Refusal:
    """Return what it wins that DDP does not search for unused parameters, where it says that it need not."""
    name = "comm.static_graph"
    searching = [model for model in _models(program) if model.find_unused_parameters]
    if not searching:
        return Refusal(name, "comm", "no deep window noted a DDP that searches for unused parameters")
    if any(model.static_graph for model in searching):
        return Refusal(name, "comm", "the run's DDP has a static graph already")
    if not all(model.can_set_static_graph for model in searching):
        return Refusal(name, "comm", "DDP saw steps that use other parameters than the step before: no static graph")
    offer = Proposal(
        name=name,
        room="comm",
        edits=(),
        predicted_speedup=1.0,
        interval=(1.0, 1.0),
        applies=True,
        risk="the script has to use the same parameters at every step, also later",
        allow="result-equivalent",
    )
    try:
        deep = program.windows()
        if not deep.matches(SEARCH):
            raise InputError("no deep window shows the search.")
        edit = f"op:{SEARCH}=none"
        found = program.predict([edit])
    except (InputError, BarMissedError) as cause:
        return replace(offer, reason=f"What the search for unused parameters costs is not known; try it live: {cause}")
    if found.speedup < MIN_SPEEDUP:
        return Refusal(name, "comm", f"the search for unused parameters costs little: {found.speedup:.3f}x without it")
    reason = f"Every step used the same parameters, so DDP need not search for unused ones. {found.note}"
    return replace(offer, edits=(edit,), predicted_speedup=found.speedup, interval=found.interval, reason=reason)


def settings_in_vain(program: Program) -> tuple[str, str, str] | None:
    """Return (what the run shows, what to do, the line) of a DDP whose arguments cost and win nothing; None without.

    What that wins is not predicted: windows show the search, not the operator per parameter that goes with it.
    """
    models = _models(program)
    if any(row.find_unused_parameters and not row.static_graph for row in models) and all(
        row.can_set_static_graph and row.unused_bytes == 0 for row in models if row.find_unused_parameters
    ):
        shows = "DDP searched for unused parameters in each step, and there were none"
        fix = "find_unused_parameters=False: no search, no operator per parameter and no all-reduce for it in each step"
        return shows, fix, "DistributedDataParallel(..., find_unused_parameters=False)"
    small = [row for row in models if not row.default and row.bucket_bytes < DEFAULT_BUCKET_BYTES]
    buckets = max((sum(row.parameter_bytes) / max(row.bucket_bytes, 1) for row in small), default=0.0)
    if buckets < MANY_BUCKETS:
        return None
    shows = f"buckets of {format_bytes(min(row.bucket_bytes for row in small))} make about {buckets:.0f} all-reduces "
    shows += "of a backward, or one per parameter"
    fix = "larger buckets: bucket_cap_mb=25 is torch's default"
    return shows, fix, "DistributedDataParallel(..., bucket_cap_mb=25)"


def _models(program: Program) -> Sequence[DdpModel]:
    """Return what the run noted of its DistributedDataParallel models, also when its windows cannot be replayed."""
    try:
        return program.windows().models
    except InputError:
        return () if program.run is None else models_of(program.run)


def _order(program: Program, gathers_s: float) -> Proposal | Refusal:
    """Offer to gather the next module ahead: how much of a gather its neighbour's compute hides was not recorded."""
    speedup = program.measured_s / max(program.measured_s - gathers_s, 1e-9)
    if speedup < MIN_SPEEDUP:
        share = format_fraction(gathers_s / program.measured_s)
        return Refusal("comm.order", "comm", f"waits for all-gathers cost {share} of a step: no order can win more")
    return Proposal(
        name="comm.order",
        room="comm",
        edits=(),
        predicted_speedup=1.0,
        interval=(1 / speedup, speedup),
        applies=True,
        parameters={"ahead": 1},
        cost="the parameters of one more module at a time, whole",
        risk="on busy cores a collective beside compute may slow both",
        reason=f"FSDP2 waits {format_seconds(gathers_s)} of a step for all-gathers that could run while the module "
        f"before computes. How much of it that hides is not recorded: at most {speedup:.3f}x. Try it live.",
    )


def _gathers_s(program: Program, bound: float) -> float | None:
    """Return the seconds per step that the slowest rank waits for all-gathers; None unless the job is sharded.

    Sharded training gathers parameters and scatters gradients at every step; its all-gathers count as waited for where
    the training thread was held up, which always-on records show on the CPU only. Of devices `bound`, the speed-up
    without all communication, says how much that can be at most.
    """
    if program.run is None:
        return None
    steps, slowest = program.recording.recorded_steps, 0.0
    for lane in program.recording.lanes:
        rows = program.run.parts.read({"rank": (lane.rank, lane.rank + 1)}, COLUMNS)
        called = rows.named("comm.collective") & (rows.events["start_ns"] >= lane.step_end_ns[0])
        corr = rows.events["corr"]
        gathers = called & np.isin(corr, GATHERS)
        if min(int(gathers.sum()) / LEAST_GATHERS, int((called & np.isin(corr, SCATTERS)).sum())) < steps:
            return None
        slowest = max(slowest, float(rows.events["duration_ns"][gathers].sum()) / NS_PER_S / steps)
    return program.measured_s * (1 - 1 / bound) if program.talks_by_device else slowest


def _bucket(program: Program, bound: float) -> Proposal | Refusal:
    """Return the size that is predicted best, a refusal when none is worth it, a live try where none can be told."""
    try:
        found = {size: program.predict([f"bucket_mb={size}"]) for size in SIZES_MB}
    except (InputError, BarMissedError) as cause:
        return _to_try(program, bound, str(cause))
    size = min(found, key=lambda tried: found[tried].step_s)
    best = found[size]
    if best.speedup < MIN_SPEEDUP:
        reason = f"of {', '.join(map(str, SIZES_MB))} MiB, {size} is predicted best: {best.speedup:.3f}x"
        return Refusal("comm.bucket", "comm", reason)
    return Proposal(
        name="comm.bucket",
        room="comm",
        edits=(f"bucket_mb={size}",),
        predicted_speedup=best.speedup,
        interval=best.interval,
        applies=True,
        parameters={"bucket_mb": size},
        cost="one more copy of the largest bucket",
        risk="more than two ranks add gradients in another order",
        allow=_grant(program),
        reason=f"Buckets of {size} MiB overlap backward best. {best.note}",
    )


def _to_try(program: Program, bound: float, reason: str) -> Proposal:
    """Return the offer without a promise."""
    return Proposal(
        name="comm.bucket",
        room="comm",
        edits=(),
        predicted_speedup=1.0,
        interval=(1 / bound, bound),
        applies=True,
        parameters={"bucket_mb": TRY_MB},
        allow=_grant(program),
        cost="one more copy of the largest bucket",
        risk="larger buckets start later, smaller ones cost more wake-ups: either may be slower",
        reason=f"At most {bound:.3f}x, at worst a loss: {reason}",
    )


def _grant(program: Program) -> str | None:
    """Return what lets buckets change: the sum of two numbers is the same in any order, that of more is not."""
    return "result-equivalent" if len(program.recording.lanes) > EXACT_RANKS else None


def _links(program: Program, bound: float) -> Proposal:
    """Return what links of twice the bandwidth would win.

    Without deep windows only the exposed part is known: then the truth lies between no gain and no communication.
    """
    faster = program.predict(["bandwidth=2x"])
    interval = faster.interval
    if not program.replays_links:
        interval = (min(1.0, interval[0]), max(interval[1], bound))
    return Proposal(
        name="comm.links",
        room="comm",
        edits=("bandwidth=2x",),
        predicted_speedup=faster.speedup,
        interval=interval,
        applies=False,
        cost="links of twice the bandwidth",
        reason=faster.note,
    )
