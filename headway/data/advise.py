"""What the data room would change: loader workers, and a cache of decoded examples.

Every proposal is a replay of the recorded run: the number of workers is
searched, not guessed, because loads that sleep gain from more workers than
there are cores and loads that compute do not. Sizes are bytes.

>>> worker_counts(most=8)
[1, 2, 3, 4, 6, 8]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from headway.core.units import format_bytes
from headway.plan.proposal import Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.loader_model import untunable
from headway.sim.program import Program

WORKER_BYTES = 64 * 2**20
"""Memory of a forked worker beside what it shares with its rank."""

SLOT_BYTES = 256
"""Bookkeeping per cached example: its slot, and how its tensors are described."""

HEADROOM = 1.25
"""Memory asked for a cache / what its examples need on average: sizes vary, and pages are taken only when filled."""

CLOSE = 1.01
"""Of settings within 1 % of the best, the smallest is taken."""


def propose(ledger: object, program: Program, setup: Setup) -> Iterator[Proposal | Refusal]:
    """Yield proposals for the loaders that the steps used, or the reason why there is none."""
    del ledger
    groups = sorted({int(group) for batches in program.recording.batches for group in batches.group})
    if not groups:
        yield Refusal("data.workers", "data", "no DataLoader was used during the recorded steps")
        return
    facts = {group: setup.loaders.get(str(group), {}) for group in groups}
    tunable = {group: fact for group, fact in facts.items() if not untunable(fact)}
    indexed = {group: fact for group, fact in facts.items() if not fact.get("reason_untunable")}
    why = "; ".join(f"loader {group}: {untunable(fact)}" for group, fact in facts.items() if untunable(fact))
    yield workers(program, setup, tunable) if tunable else Refusal("data.workers", "data", why)
    yield cache(program, setup, indexed) if indexed else Refusal("data.cache", "data", why)


def worker_counts(most: int) -> list[int]:
    """Return the numbers of workers that are tried: dense where one more matters."""
    return [count for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if count <= most]


def workers(program: Program, setup: Setup, facts: Mapping[int, Mapping[str, Any]]) -> Proposal | Refusal:
    """Search workers, prefetch and persistence by replay; propose the smallest setting close to the best."""
    recorded = max(int(batches.workers.max(initial=0)) for batches in program.recording.batches)
    epochs = _epochs(program, facts)
    # Persistence is only worth an edit where iterators are created again, and then it costs nothing.
    keep = ("persistent=true",) if epochs > 1 and not all(fact.get("persistent") for fact in facts.values()) else ()
    counts = worker_counts(setup.limits.max_workers)
    if not counts:
        return Refusal("data.workers", "data", "the limits allow no worker")
    tried = {count: program.predict((f"workers={count}", *keep), interval=False).step_s for count in counts}
    count = next(count for count in counts if tried[count] <= CLOSE * min(tried.values()))
    edits: tuple[str, ...] = (f"workers={count}", *keep)
    prefetch = max(int(fact.get("prefetch_factor") or 2) for fact in facts.values())
    deeper = (*edits, f"prefetch={2 * prefetch}")
    if program.predict(deeper, interval=False).step_s * CLOSE < tried[count]:
        edits, prefetch = deeper, 2 * prefetch
    prediction = program.predict(edits)
    batch_bytes = _batch_bytes(program)
    memory = count * (WORKER_BYTES + prefetch * batch_bytes)
    busiest = f"{count} workers per rank instead of {recorded}"
    return Proposal(
        name="data.workers",
        room="data",
        edits=edits,
        predicted_speedup=prediction.speedup,
        interval=prediction.interval,
        applies=True,
        parameters={
            "num_workers": count,
            "prefetch_factor": prefetch,
            "persistent_workers": bool(keep) or all(bool(fact.get("persistent")) for fact in facts.values()),
            "pin_memory": setup.accelerated,
        },
        cost=f"{count * setup.ranks_per_host} processes per host, about {format_bytes(memory)} per rank",
        risk="a dataset that draws random numbers draws others: such loaders are left alone",
        reason=" ".join(part for part in (busiest + ".", prediction.note) if part),
        memory_bytes=memory,
    )


def cache(program: Program, setup: Setup, facts: Mapping[int, Mapping[str, Any]]) -> Proposal | Refusal:
    """Propose to keep as many decoded examples as the memory allows, if the run reads them more than once."""
    if _epochs(program, facts) < 2:
        return Refusal("data.cache", "data", "the run passes over its data once: a cache pays from the second pass on")
    sizes = [_example_bytes(program, group, fact) for group, fact in facts.items()]
    counts = [int(fact.get("dataset_size") or 0) for fact in facts.values()]
    if not all(sizes) or not all(counts):
        return Refusal("data.cache", "data", "the size of the dataset or of its examples is not known")
    dealt = any(fact.get("sampler") == "DistributedSampler" for fact in facts.values()) and setup.world_size > 1
    whole = sum(int(HEADROOM * (size + SLOT_BYTES) * count) for size, count in zip(sizes, counts, strict=True))
    budget = min(whole, setup.limits.memory_per_rank_bytes(setup))
    fraction = round(budget / whole, 3)
    if fraction <= 0:
        return Refusal("data.cache", "data", f"the examples need {format_bytes(whole)}, no memory is free for them")
    shards = (f"cache_shards={setup.world_size}",) if dealt else ()
    edits = (f"cache_fraction={fraction:g}", "cache_cold=1", *shards)
    prediction = program.predict(edits)
    note = "The first pass fills the cache. " + (
        f"Each rank is dealt other examples each epoch, so it meets its own again with odds 1 in {setup.world_size}. "
        if dealt
        else ""
    )
    return Proposal(
        name="data.cache",
        room="data",
        edits=edits,
        predicted_speedup=prediction.speedup,
        interval=prediction.interval,
        applies=True,
        parameters={"bytes": budget},
        cost=f"{format_bytes(budget)} of memory per rank, for {fraction:.0%} of the examples",
        risk="applied only if a probe finds the dataset pure: equal examples when read twice, no random draw",
        reason=note + prediction.note,
        memory_bytes=budget,
    )


def _epochs(program: Program, facts: Mapping[int, Mapping[str, Any]]) -> int:
    """Return the passes over the most read of these loaders."""
    epochs = [
        int(epoch)
        for batches in program.recording.batches
        for group, epoch in zip(batches.group, batches.epoch, strict=True)
        if int(group) in facts
    ]
    return max(epochs, default=0) + 1


def _batch_bytes(program: Program) -> int:
    """Return the size of the largest batch."""
    return max((int(batches.bytes.max(initial=0)) for batches in program.recording.batches), default=0)


def _example_bytes(program: Program, group: int, fact: Mapping[str, Any]) -> float:
    """Return the mean size of an example as it comes out of the dataset, 0 when it is not known."""
    size = int(fact.get("batch_size") or 0)
    found = [
        batches.bytes[batches.group[batches.iterator] == group]
        for batches in program.recording.batches
        if batches.seq.size
    ]
    sizes = np.concatenate(found) if found else np.zeros(0)
    sizes = sizes[sizes > 0]
    return float(np.median(sizes)) / size if size and sizes.size else 0.0
