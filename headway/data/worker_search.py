"""How many workers: searched by replay; and what they win as a line of the script, without headway's looks.

>>> worker_counts(most=8)
[1, 2, 3, 4, 6, 8]
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from headway.core.units import NS_PER_S
from headway.plan.proposal import Gain
from headway.plan.setup import Setup
from headway.sim.graph.intervals import CONTENDED_FRACTION
from headway.sim.recorded.program import Program
from headway.sim.recorded.recording import steps_beside
from headway.sim.recorded.segment_times import BESIDE_LOADS, USUALLY_BESIDE
from headway.sim.recorded.unroll import pool_threads, standstill
from headway.sim.whatif import scenario_of
from headway.trace.events.loader_facts import LoaderFacts

TRIAL_COUNTS = 0.02
"""Share of the recorded steps' time from which on the trial of a remedy is weighed against the script's own workers."""

BUSY = 1.645 * 0.05
"""Half the range of log(won / predicted) by which what workers by hand win beside a busy process is less certain: two
scripts of `headway bench small_scripts` won .92 and 1.11 times what was predicted, with 1.08 for the range."""

CLOSE = 1.01
"""Of settings within 1 % of the best, the smallest is taken."""


def groups_of(program: Program) -> list[int]:
    """Return the loaders that the replayed steps used."""
    return sorted({int(group) for batches in program.recording.batches for group in batches.group})


def for_loaders(count: int, program: Program, groups: Iterable[int]) -> str:
    """Return the edit that gives `count` workers to `groups`, which are named where they are not all.

    Batches of an iterator that nobody saw being made are of loader -1, which no edit can name.
    """
    some, every = ([group for group in sorted(these) if group >= 0] for these in (groups, groups_of(program)))
    return f"workers={count}" if some == every else f"workers={count}@{'+'.join(map(str, some))}"


def worker_counts(most: int) -> list[int]:
    """Return the numbers of workers that are tried: dense where one more matters."""
    return [count for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if count <= most]


def by_hand(
    program: Program, setup: Setup, facts: Mapping[int, LoaderFacts], *,
    edits: tuple[str, ...], keep: tuple[str, ...], count: int, watched: Gain, start_s: float,
) -> tuple[Gain | None, str]:  # fmt: skip
    """Return what `count` workers of the script's own win, and their line where it names threads too.

    For where `watched` ones, by the same `edits`, may not, or their trial (`start_s`) counts; else None.
    """
    if watched.clear and start_s < TRIAL_COUNTS * program.measured_s * program.recording.recorded_steps:
        return None, ""
    gains = [(_unwatched(program, edits, count), "")]
    if beside_pools(program, count) and program.pool.has_cores(_left_by(program, count)):
        gains += _on_fewer_threads(program, setup, facts, keep)
    return max(gains, key=lambda row: (row[0].clear, row[0].predicted_speedup))


def _unwatched(program: Program, edits: tuple[str, ...], count: int) -> Gain:
    """Return what `count` workers of the script's own win by `edits`.

    Of the whole job as it was recorded: they are forked, and begin to load, once, which takes half as long or twice.
    Of steps that mostly lay beside headway's own children some of the recorded time is theirs, and another load on the
    host is never the same again.
    """
    job_s, costs = program.measured_s * program.recording.recorded_steps, program.costs
    loads_ns = sum(float(batches.part_ns.sum()) for batches in program.recording.batches)
    load_ns = loads_ns / max(1, sum(len(batches.part_ns) for batches in program.recording.batches))
    once_s = (count * (costs.fork_ns + costs.stop_ns) + costs.first_ns + load_ns) / NS_PER_S
    prediction = program.predict((*edits, "watched=false"))
    gain, low, high = (
        job_s / (job_s / speedup + factor * once_s)
        for speedup, factor in zip((prediction.speedup, *prediction.interval), (1, 2, 0.5), strict=True)
    )
    if 2 * steps_beside(program.recording, program.facts.asked_until_ns) > program.recording.num_steps:
        gain, low = gain / USUALLY_BESIDE, low / BESIDE_LOADS
    if program.contention(scenario_of(edits)).taken_fraction >= CONTENDED_FRACTION:
        wider = (math.exp(-math.hypot(math.log(gain / low), BUSY)), math.exp(math.hypot(math.log(high / gain), BUSY)))
        low, high = gain * wider[0], gain * wider[1]
    return Gain(gain, (low, high))


def _on_fewer_threads(
    program: Program, setup: Setup, facts: Mapping[int, LoaderFacts], keep: tuple[str, ...]
) -> list[tuple[Gain, str]]:
    """Return what workers win where torch computes on the cores that they leave, and the line of the script.

    Nothing where fewer threads win as much without workers.
    """
    count = fewest(program, setup, facts, *keep, shares_cores=True)
    threads = _left_by(program, count)
    fewer = f"compute_threads={threads}"
    gain = _unwatched(program, (for_loaders(count, program, facts), *keep, fewer), count)
    kept = ", persistent_workers=True" if keep else ""
    line = f"torch.set_num_threads({threads}); DataLoader(..., num_workers={count}{kept})"
    alone = program.predict([fewer], interval=False).speedup
    return [(gain, line)] if gain.predicted_speedup > CLOSE * alone else []


def _left_by(program: Program, count: int) -> int:
    """Return how many threads have a core each beside others and `count` workers; at least 1."""
    return max(1, program.pool.free_cores - count)


def beside_pools(program: Program, count: int) -> str:
    """Return what to do where torch's threads and `count` workers want more cores than there are; '' = nothing."""
    # Those that spin between operators count as well, and more of them than there are cores.
    threads = pool_threads(float(program.pool.pool_cores.max()))
    if not standstill(threads, count, program.cores):
        return ""
    fewer = f"torch.set_num_threads({_left_by(program, count)})"
    return f"; torch's {max(threads, program.pool.threads)} threads want the same cores: {fewer} leaves them to workers"


def useful_workers(computing: float, cores: int) -> int:
    """Return how many workers `cores` keep busy, whose loads compute for a share `computing` of their time; at least 1.

    More of them take turns on the cores, which costs and wins nothing, though a replay may see gains of some percent.

    >>> [useful_workers(share, cores=2) for share in (0.95, 0.33, 0.01)]
    [2, 6, 200]
    """
    return max(cores, int(cores / max(computing, 0.001)), 1)


def fewest(program: Program, setup: Setup, groups: Collection[int], *edits: str, shares_cores: bool = False) -> int:
    """Return the fewest workers that come close to the best, with `edits` besides; 0 if none is allowed.

    `shares_cores`: torch computes on the cores that they leave.
    """
    computing = min(computing_share(program, group) for group in groups)
    counts = worker_counts(
        min(setup.limits.max_workers, useful_workers(computing, setup.cores // setup.ranks_per_host))
    )
    tried = {}
    for count in counts:
        given = (for_loaders(count, program, groups), *edits)
        given += (f"compute_threads={_left_by(program, count)}",) if shares_cores else ()
        tried[count] = program.predict(given, interval=False).step_s
    return next((count for count in counts if tried[count] <= CLOSE * min(tried.values())), 0)


def computing_share(program: Program, group: int) -> float:
    """Return the share of their time for which the loads of a loader compute, time without a core left out."""
    parts = np.zeros(4)
    for batches in program.recording.batches:
        parts += batches.part_ns[batches.group[batches.iterator] == group].sum(axis=0)
    return float(parts[2:].sum() / max(parts.sum() - parts[1], 1))
