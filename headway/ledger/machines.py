"""How fast each machine computes: mean forward and backward time, normalised for work, and the machines that stand out.

Use it on operation traces (`forward-compute`, `backward-compute`) and on
recorded runs (`segment.forward`, `segment.backward`; waits for other ranks
inside them are taken out, step 0 is left out). Only times of one rank are
compared with each other, so clocks need not agree. Ranks do unlike work (an embedding here, a loss
there), so a time is set against the median of the ranks that do the same:
same stage of the model, same pass; where rows say their FLOPs, against the
median time per FLOP. Times in seconds, slowdowns as time / expected time.

The view is the heat map of MegaScale (arXiv 2402.15627, section 5.1), where
about 0.5 % of the machines stood out.

>>> rows = {"rank": [0, 1, 2, 3, 4], "duration_ns": [10, 11, 10, 30, 9], "step": [0] * 5, "name": [0] * 5}
>>> times = machine_times(Trace.from_columns(rows, names=["segment.forward"]))
>>> [(found.machine, round(found.slowdown, 2)) for found in times.outliers]
[('rank 3', 3.0)]

What creating process groups cost a job: seconds of start-up and how many groups.

Where `new_group` ends in a barrier of all ranks at the store (torch before
2023, and with TORCH_DIST_INIT_BARRIER=1), a job whose groups grow with its
ranks does O(n^2) store operations; MegaScale (arXiv 2402.15627, section 3.5)
spent 1,047 s on that at 2,048 GPUs. `headway bench group_creation` counts them.

>>> rows = {"rank": [0, 1, 0, 1], "duration_ns": [5, 7, 10**9, 9], "group": [0, 0, 1, -1], "name": [0] * 4}
>>> creation(Trace.from_columns(rows, names=["comm.init"]))
Creation(groups=2, calls=2, seconds=1.000000005)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.units import NS_PER_S
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace

PASSES: dict[str, tuple[str, ...]] = {
    "forward": ("forward-compute", "segment.forward"),
    "backward": ("backward-compute", "segment.backward"),
}
"""Pass -> the names of its rows."""

WAITS: tuple[str, ...] = ("comm.wait", "comm.collective", "comm.send", "comm.recv")
"""Rows of a recorded run that lie inside its passes and are no compute: a rank waits there for others."""

LEAST_MACHINES = 4
"""Machines from which on one can stand out: of fewer, nobody can say which is the odd one."""

LEAST_SLOWDOWN, ROBUST_SIGMAS = 1.03, 5.0
"""A machine stands out when it is 3 % slower than expected and beyond 5 robust standard deviations of all machines."""

MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

BASES: dict[str, str] = {
    "flops": "time per FLOP against the median of all ranks",
    "peers": "against the median of the ranks with the same stage",
    "all": "against the median of all ranks: no two have the same stage, so unlike work is not told from slowness",
}
"""How the expected time was obtained -> what that means."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Outlier:
    """A machine that computes slower than others at the same work."""

    machine: str
    """Host name, or the rank or worker where hosts are not known."""

    ranks: tuple[int, ...]
    """Its ranks."""

    slowdown: float
    """Its time / the expected time."""

    sigmas: float
    """Robust standard deviations above the median machine."""

    lost_s: float
    """Seconds that its slowest rank computed longer than expected: what the job waited for it, at most."""


@dataclass(frozen=True, slots=True)
class MachineTimes:
    """Compute times of R ranks on M machines; build it with `machine_times`."""

    ranks: NDArray[np.int64]
    """[R] Rank numbers, ascending."""

    mean_s: Array
    """[R, 2] Mean duration of a forward and of a backward; NaN where a rank has none."""

    slowdown: Array
    """[R, 2] Time / expected time of the same work."""

    own_s: Array
    """[R] All forward and backward time."""

    expected_s: Array
    """[R] What a median rank would have taken for it."""

    machines: tuple[str, ...]
    """[M] Names, in order of their first rank."""

    machine_of: NDArray[np.int64]
    """[R] Index into `machines`."""

    basis: str
    """One of `BASES`."""

    @property
    def machine_slowdown(self) -> Array:
        """[M] Time of all ranks of a machine / their expected time."""
        own = np.bincount(self.machine_of, self.own_s, len(self.machines))
        return np.asarray(own / np.bincount(self.machine_of, self.expected_s, len(self.machines)))

    @property
    def outliers(self) -> tuple[Outlier, ...]:
        """Machines that stand out, slowest first; none of fewer than `LEAST_MACHINES`."""
        slowdown = self.machine_slowdown
        if len(slowdown) < LEAST_MACHINES:
            return ()
        logs = np.log(slowdown)
        middle = float(np.median(logs))
        sigma = max(MAD_TO_SIGMA * float(np.median(np.abs(logs - middle))), 1e-9)
        sigmas = (logs - middle) / sigma
        odd = np.flatnonzero((slowdown >= LEAST_SLOWDOWN) & (sigmas > ROBUST_SIGMAS))
        return tuple(self._outlier(int(m), float(sigmas[m])) for m in odd[np.argsort(-slowdown[odd])])

    def _outlier(self, machine: int, sigmas: float) -> Outlier:
        mine = np.flatnonzero(self.machine_of == machine)
        lost_s = float((self.own_s[mine] - self.expected_s[mine]).max())
        return Outlier(
            self.machines[machine],
            tuple(self.ranks[mine].tolist()),
            float(self.machine_slowdown[machine]),
            sigmas,
            lost_s,
        )

    def to_json(self) -> dict[str, object]:
        """Return the `machines` entry of `headway.why/2`."""
        return {
            "machines": len(self.machines),
            "basis": self.basis,
            "slowdown": dict(zip(self.machines, self.machine_slowdown.tolist(), strict=True)),
            "mean_forward_s": float(np.nanmean(self.mean_s[:, 0])) if np.isfinite(self.mean_s[:, 0]).any() else None,
            "mean_backward_s": float(np.nanmean(self.mean_s[:, 1])) if np.isfinite(self.mean_s[:, 1]).any() else None,
            "outliers": [asdict(found) | {"ranks": list(found.ranks)} for found in self.outliers],
        }


COLUMNS = ("rank", "name", "lane", "step", "stage", "layer", "start_ns", "duration_ns", "flops")
"""Columns that are read of a trace."""


def machine_times(
    source: Trace | Parts, *, ranks_per_host: int | None = None, work: Mapping[int, float] | None = None
) -> MachineTimes | None:
    """Return the compute times of every rank, None where no forward and no backward was recorded.

    A trace in files is read a rank at a time. Hosts come from `source.ranks`;
    where it names none, `ranks_per_host` consecutive ranks share one, else
    each rank stands for itself, as it does when all share one. `work` gives
    the work of a rank (tokens, examples) where ranks of one stage were given
    unlike shares. Raises `InputError` on work that is not above 0 or misses a
    rank.
    """
    sums = _sums(source)
    if not len(sums.rank):
        return None
    ranks, rank = np.unique(sums.rank, return_inverse=True)
    share = _work(ranks, work)[rank]
    expected_s, basis = _expected(sums, rank, source.ranks, share)
    place = rank * 2 + sums.is_backward
    shape = (len(ranks), 2)
    number, own, wanted = (
        np.bincount(place, weights, 2 * len(ranks)).reshape(shape)
        for weights in (sums.number, sums.duration_s, expected_s * share)
    )
    with np.errstate(invalid="ignore", divide="ignore"):  # a rank without a pass has 0 / 0, which is NaN: nothing seen
        mean_s, slowdown = own / number, own / wanted
    machines, machine_of = _machines(source.ranks, ranks, ranks_per_host)
    return MachineTimes(ranks, mean_s, slowdown, own.sum(1), wanted.sum(1), machines, machine_of, basis)


@dataclass(frozen=True, slots=True)
class _Sums:
    """The passes of equal kind on one rank, added up: [k] each."""

    rank: NDArray[np.int64]
    is_backward: NDArray[np.int64]
    stage: NDArray[np.int64]
    layer: NDArray[np.int64]
    number: Array
    duration_s: Array
    flops: Array
    """NaN where some of them say none."""


def _sums(source: Trace | Parts) -> _Sums:
    """Add up the passes of every rank."""
    if isinstance(source, Trace):
        return _sums_of(source)
    ranks = [rank for rank in source.numbers if rank >= 0]
    # A trace of which no row names its rank has nothing to add up: the columns are then those of its tables, empty.
    found = [_sums_of(source.read({"rank": (rank, rank + 1)}, COLUMNS)) for rank in ranks] or [_sums_of(source.tables)]
    return _Sums(*(np.concatenate([getattr(each, f.name) for each in found]) for f in fields(_Sums)))


def _sums_of(trace: Trace) -> _Sums:
    """Add up the passes of a trace in memory."""
    names = [name for both in PASSES.values() for name in both]
    rows = trace.where(trace.named(*names) & (trace.events["rank"] >= 0))
    if (rows.events["step"] > 0).any():  # what a recorded run did up to step 0: lazy imports and cold caches come once
        rows = rows.where((rows.events["step"] > 0) | ~rows.named("segment.forward", "segment.backward"))
    rows = _without_waits(rows, trace.where(trace.named(*WAITS)))
    events = rows.events
    kinds = [events["rank"], rows.named(*PASSES["backward"]), events["stage"], events["layer"]]
    kind, place = np.unique(np.stack([column.astype(np.int64) for column in kinds]), axis=1, return_inverse=True)
    place, size = place.reshape(-1), kind.shape[1]
    flops = np.where(events["flops"] > 0, events["flops"], np.nan)
    number, seconds, work = (
        np.bincount(place, weights, size).astype(np.float64)
        for weights in (None, events["duration_ns"] / NS_PER_S, flops)
    )
    return _Sums(kind[0], kind[1], kind[2], kind[3], number, seconds, work)


def _without_waits(rows: Trace, waits: Trace) -> Trace:
    """Return the passes with the time taken out for which their own thread waited for other ranks."""
    events, inner = rows.events, waits.events
    duration_ns = events["duration_ns"].copy()
    for rank in np.unique(inner["rank"]).tolist():
        of_rank = (inner["rank"] == rank) & (
            inner["lane"] == waits.lanes.index("main") if "main" in waits.lanes else True
        )
        begin, end = inner["start_ns"][of_rank], (inner["start_ns"] + inner["duration_ns"])[of_rank]
        mine = np.flatnonzero(events["rank"] == rank)
        mine = mine[np.argsort(events["start_ns"][mine], kind="stable")]
        starts, ends = events["start_ns"][mine], (events["start_ns"] + events["duration_ns"])[mine]
        # A wait is taken out of the pass that began last before it, if that one was still open, and up to its end.
        place = np.searchsorted(starts, begin, side="right") - 1
        inside = (place >= 0) & (begin < ends[np.maximum(place, 0)]) if len(mine) else np.zeros(len(begin), dtype=bool)
        lost = np.minimum(end[inside], ends[place[inside]]) - begin[inside]
        np.subtract.at(duration_ns, mine[place[inside]], lost)
    return replace(rows, events={**events, "duration_ns": duration_ns}).where(duration_ns > 0)


def _work(ranks: NDArray[np.int64], work: Mapping[int, float] | None) -> Array:
    """Return [R] the work of each rank over the mean."""
    if work is None:
        return np.ones(len(ranks))
    missing = [rank for rank in ranks.tolist() if not work.get(rank, 0.0) > 0]
    if missing:
        raise InputError(
            f"rank {missing[0]} has work {work.get(missing[0])}; give every rank of the trace a number above 0."
        )
    amounts = np.array([work[rank] for rank in ranks.tolist()], dtype=np.float64)
    return np.asarray(amounts / amounts.mean())


def _expected(
    sums: _Sums, rank: NDArray[Any], known: Mapping[int, Mapping[str, Any]], share: Array
) -> tuple[Array, str]:
    """Return [k] what a median rank takes for these passes, per share of work, and how that was obtained."""
    duration_s = sums.duration_s / share
    if np.isfinite(sums.flops).all():
        return _median_rate(rank, sums.is_backward, duration_s, sums.flops), "flops"
    pipeline = np.array([int(known.get(number, {}).get("pp", -1)) for number in np.unique(sums.rank).tolist()])[rank]
    kinds = np.stack([sums.is_backward, sums.stage, sums.layer, pipeline])
    kind = np.unique(kinds, axis=1, return_inverse=True)[1].reshape(-1)
    # One rank alone in its kind is its own measure: then only all ranks together can be one.
    if np.bincount(kind).max() < 2:
        return _median_rate(rank, sums.is_backward, duration_s, sums.number), "all"
    return _median_rate(rank, kind, duration_s, sums.number), "peers"


def _median_rate(rank: NDArray[Any], kind: NDArray[Any], duration_s: Array, amount: Array) -> Array:
    """Return [n] amount x the median over ranks of (time / amount) of each row's kind."""
    pairs, place = np.unique(np.stack([kind, rank]), axis=1, return_inverse=True)
    place = place.reshape(-1)
    rate = np.bincount(place, duration_s) / np.bincount(place, amount)
    order = np.lexsort((rate, pairs[0]))
    first = np.flatnonzero(np.diff(pairs[0][order], prepend=-1))
    number = np.diff(np.append(first, len(order)))
    middle = (rate[order][first + (number - 1) // 2] + rate[order][first + number // 2]) / 2
    return np.asarray(middle[np.searchsorted(pairs[0][order][first], kind)] * amount)


def _machines(
    known: Mapping[int, Mapping[str, Any]], ranks: NDArray[np.int64], ranks_per_host: int | None
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the machines' names, and [R] which one each rank is on."""
    hosts = [str(known.get(rank, {}).get("host") or "") for rank in ranks.tolist()]
    if not all(hosts) and ranks_per_host is not None:
        if ranks_per_host < 1:
            raise InputError(f"ranks_per_host is {ranks_per_host}; give a whole number of at least 1.")
        hosts = [f"host {rank // ranks_per_host}" for rank in ranks.tolist()]
    if not all(hosts) or len(set(hosts)) == 1:
        hosts = [_worker_name(known.get(rank, {}), rank) for rank in ranks.tolist()]
    names = tuple(dict.fromkeys(hosts))
    place = {name: index for index, name in enumerate(names)}
    return names, np.array([place[host] for host in hosts], dtype=np.int64)


def _worker_name(known: Mapping[str, Any], rank: int) -> str:
    """Return the name of a rank that stands for itself."""
    return f"dp {known['dp']} pp {known['pp']}" if "dp" in known and "pp" in known else f"rank {rank}"


@dataclass(frozen=True, slots=True)
class Creation:
    """The creation of all process groups of a run."""

    groups: int
    """Groups that some rank is in."""

    calls: int
    """Calls of the rank with most of them: a rank also takes part for groups that it is not in."""

    seconds: float
    """What they took on the rank where they took longest."""

    def to_json(self) -> dict[str, object]:
        """Return the `group_creation` entry of `headway.why/2`."""
        return asdict(self)


def creation(source: Trace | Parts) -> Creation | None:
    """Return what the `comm.init` rows of a recorded run tell, None when it created no group.

    A trace in files is read a rank at a time.
    """
    parts = Parts.of(source)
    if "comm.init" not in parts.tables.names:
        return None
    groups: set[int] = set()
    calls, longest_ns = 0, 0
    for rank in parts.numbers:
        part = parts.read({"rank": (rank, rank + 1)}, ("rank", "name", "duration_ns", "group"))
        events = part.where(part.named("comm.init")).events
        groups |= set(events["group"][events["group"] >= 0].tolist())
        calls = max(calls, len(events["rank"]))
        longest_ns = max(longest_ns, int(events["duration_ns"].sum()))
    return Creation(len(groups), calls, longest_ns / NS_PER_S) if calls else None
