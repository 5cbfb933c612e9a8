"""What the data room would change: loader workers, threads or a server in their place, a cache of examples.

Every proposal is a replay of the recorded run: the number of workers is
searched, not guessed, because loads that sleep gain from more workers than
there are cores and loads that compute do not. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from headway.core.files.safe_files import read_json
from headway.core.units import NS_PER_S, format_bytes, format_fraction, plural
from headway.data.worker_search import CLOSE, beside_pools, by_hand, computing_share, fewest, for_loaders, groups_of
from headway.ledger.answers.ledger import Ledger
from headway.ledger.runs.recorded import evaluation_loaders
from headway.plan.proposal import MIN_SPEEDUP, Gain, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.recorded.program import Program
from headway.sim.whatif import WorkerEdit
from headway.trace.events.loader_facts import (
    LoaderFacts,
    facts_of,
    renewed,
    too_dear,
    unkept,
    unmovable,
    unshared,
    unthreadable,
    untried,
)
from headway.trace.recording.run_facts import RunFacts
from headway.trace.recording.runs import Run

WORKER_BYTES = 64 * 2**20
"""Memory of a forked worker beside what it shares with its rank."""

SLOT_BYTES = 256
"""Bookkeeping per cached example: its slot, and how its tensors are described."""

HEADROOM = 1.25
"""Memory asked for a cache / what its examples need on average: sizes vary, and pages are taken only when filled."""

NO_DRAW = "loaders with random examples are not changed"
"""Risk of workers for a loader of which no draw is known: in the rank, a probe of its examples decides."""

THREADS_WIN = 1.2
"""Threads are proposed where they beat worker processes by this factor: a trial may still refuse them in the rank."""

THREADS_CPU = 0.25
"""Loads that compute for more of their time are left to processes: no record tells whether threads would wait for the
interpreter's lock."""

THREAD_BYTES = 8 * 2**20
"""Memory of a thread beside the batches that it makes."""

COMPUTES = "its loads compute for {} of their time: threads might wait for each other"
"""Why threads leave a loader to processes."""

FIRST_S = 0.25
"""Seconds that a remedy of loaders costs beside its trial before it is in full effect: processes start, the first
batches are looked at closely. Small scripts on two cores took 0.2 to 0.3 s more than trial and replayed steps."""

KEPT = 1.25
"""Steps may take so many times the shortest where the script's own workers are kept alone, and no more are started."""

LOOK_BEFORE_BATCHES = ("data.workers", "data.cache")
"""Remedies that look, before batches, whether the script has changed what they are made of."""


def propose(ledger: Ledger | None, program: Program, setup: Setup) -> Iterator[Proposal | Refusal]:
    """Yield proposals for the loaders that the steps used, or the reason why there is none."""
    evaluation = evaluation_loaders(ledger) if ledger is not None else set()
    groups = groups_of(program)
    if not groups:
        yield Refusal("data.workers", "data", "no DataLoader was used during the recorded steps")
        return
    facts = {group: facts_of(setup.loaders, group) for group in groups}
    remedies = (
        ("data.workers", workers, unmovable), ("data.threads", threads, unthreadable), ("data.cache", cache, unkept),
        ("data.server", server, unshared),
    )  # fmt: skip
    # Nobody misses a remedy where no loader was seen, or where steps without any input would be as fast.
    seen = any(group >= 0 for group in groups)
    unsafe = seen and program.predict(("input=none",), interval=False).speedup >= MIN_SPEEDUP
    for name, remedy, unfit in remedies:
        unsuited = {group: reason for group, fact in facts.items() if (reason := unfit(fact))}
        dear = {group: reason for group, fact in facts.items() if (reason := _dear(name, fact, program.measured_s))}
        untold = {group: reason for group, fact in facts.items() if (reason := untried(fact))}
        reasons = {**dear, **untold, **unsuited}
        fit = {group: fact for group, fact in facts.items() if group not in reasons}
        none = Refusal(name, "data", _why(reasons, facts), unsafe=unsafe and bool(unsuited))
        found = remedy(program, setup, fit) if fit else none
        if isinstance(found, Proposal):
            found = replace(found, evaluation_share=_evaluation_share(program, found, evaluation))
        left = {**reasons, **(found.left_alone if isinstance(found, Proposal) else {})}
        # With one loader that is left alone beside another, the proposal says which ones it is about.
        reason = found.reason
        if fit and left:
            reason = f"{reason.rstrip('.')}. Left alone: {_why(left, facts)}.".removeprefix(". ")
        yield replace(found, left_alone={**left, **found.left_alone}, reason=reason)


def _why(reasons: Mapping[int, str], facts: Mapping[int, LoaderFacts]) -> str:
    return "; ".join(f"{named(group, facts[group])}: {reason}" for group, reason in reasons.items())


def _dear(name: str, fact: LoaderFacts, step_s: float) -> str:
    """Say that a remedy that looks before batches would be refused for what a look costs, as it was rehearsed."""
    look_s = fact.rehearsal.look_s
    return too_dear(look_s, step_s) if name in LOOK_BEFORE_BATCHES and look_s is not None else ""


def _evaluation_share(program: Program, row: Proposal, evaluation: set[int]) -> float:
    """Return which part of the time that workers or threads win is won in evaluations: by a replay without those."""
    rest = [group for group in row.loaders if group not in evaluation]
    given = [edit for edit in row.edits if edit.startswith("workers=")]
    if not given or len(rest) == len(row.loaders) or row.predicted_speedup <= 1:
        return 0.0
    if not rest:
        return 1.0
    number = WorkerEdit.read(given[0].partition("=")[2]).count
    edits = (for_loaders(number, program, rest), *(edit for edit in row.edits if edit not in given))
    training = program.predict(edits, interval=False)
    won_s = training.base_step_s * (1 - 1 / row.predicted_speedup)
    return min(max(1 - (training.base_step_s - training.step_s) / won_s, 0.0), 1.0)


def named(group: int, fact: LoaderFacts) -> str:
    """Return how a loader is called in a sentence.

    >>> named(1, LoaderFacts(dataset="Pictures"))
    'loader 1 (Pictures)'
    """
    if group < 0:
        return "a loader that was not seen"
    return f"loader {group} ({fact.dataset})" if fact.dataset else f"loader {group}"


def drawing(facts: Mapping[int, LoaderFacts]) -> str:
    """Name the loaders whose examples are drawn, '' when there are none (or it is not known)."""
    found = []
    for group, fact in facts.items():
        found += [f"{named(group, fact)} draws random numbers ({', '.join(fact.drawn)})"] if fact.drawn else []
    return ", ".join(found)


def workers(program: Program, setup: Setup, facts: Mapping[int, LoaderFacts]) -> Proposal | Refusal:
    """Search workers, prefetch and persistence by replay; propose the smallest setting close to the best."""
    recorded = max(int(batches.workers.max(initial=0)) for batches in program.recording.batches)
    epochs = _epochs(program, facts)
    # Persistence is only worth an edit where one loader's iterators are created again, and then it costs nothing.
    kept = all(fact.loaders == 1 and not renewed(fact) for fact in facts.values())
    keep = ("persistent=true",) if kept and epochs > 1 and not all(fact.persistent for fact in facts.values()) else ()
    count = fewest(program, setup, facts, *keep)
    if not count:
        return Refusal("data.workers", "data", "the limits allow no worker")
    # Nobody asks for fewer workers than the script has where those win nothing: the edit is the other one.
    had = {fact.num_workers for fact in facts.values()}
    keeps = bool(keep) and had == {recorded}
    same = keeps and count < recorded
    if keeps and 0 < recorded < count:  # the cheapest edit that wins most: more of them have to start, and to be tried
        more = program.predict((for_loaders(count, program, facts), *keep), interval=False)
        same = program.predict(keep, interval=False).step_s <= KEPT * more.step_s
    edits: tuple[str, ...] = keep if same else (for_loaders(count, program, facts), *keep)
    count = recorded if same else count
    prefetch = max(fact.prefetch_factor or 2 for fact in facts.values())
    deeper = (*edits, f"prefetch={2 * prefetch}")
    if program.predict(deeper, interval=False).step_s * CLOSE < program.predict(edits, interval=False).step_s:
        edits, prefetch = deeper, 2 * prefetch
    prediction = program.predict(edits)
    batch_bytes = _batch_bytes(program)
    memory = count * (WORKER_BYTES + prefetch * batch_bytes)
    kind = "kept between passes" if same else f"instead of {recorded}"
    busiest = f"{plural(count, 'worker')} per rank {kind}"
    draws, pools = drawing(facts), "" if recorded else beside_pools(program, count)
    start_s = _trial_s(program, facts, "workers", 1 if same else 3 if any(had) else 2)
    watched = Gain(prediction.speedup, prediction.interval)
    gain_by_hand, line = None, ""
    if not (recorded or draws):
        gain_by_hand, line = by_hand(
            program, setup, facts, edits=edits, keep=keep, count=count, watched=watched, start_s=start_s
        )
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
            "persistent_workers": bool(keep) or all(fact.persistent for fact in facts.values()),
            "pin_memory": setup.accelerated,
        },
        loaders=tuple(facts),
        cost=f"{plural(count * setup.ranks_per_host, 'worker')} per host, about {format_bytes(memory)} per rank",
        risk=(f"{draws}, and workers would draw other ones, so augmentation differs" if draws else NO_DRAW) + pools,
        reason=" ".join(part for part in (f"{busiest}, for {_names(facts)}.", prediction.note) if part),
        memory_bytes=memory,
        start_s=start_s,
        by_hand=gain_by_hand,
        by_hand_script=line,
        allow="result-equivalent" if draws else None,
        conflicts=("data.threads", "data.server"),
    )


def threads(program: Program, setup: Setup, facts: Mapping[int, LoaderFacts]) -> Proposal | Refusal:
    """Search the number of threads by replay; propose them where worker processes, whose hand-off they save, lose."""
    computing = {group: computing_share(program, group) for group in facts}
    blocked = {group: fact for group, fact in facts.items() if computing[group] <= THREADS_CPU}
    left = {group: COMPUTES.format(format_fraction(computing[group], 0)) for group in facts if group not in blocked}
    if not blocked:
        return Refusal("data.threads", "data", _why(left, facts), left_alone=left)
    count = fewest(program, setup, blocked, "threads=true")
    if not count:
        return Refusal("data.threads", "data", "the limits allow no worker")
    edits = (for_loaders(count, program, blocked), "threads=true")
    prediction = program.predict(edits)
    processes = workers(program, setup, facts)
    if isinstance(processes, Proposal) and prediction.speedup < THREADS_WIN * processes.predicted_speedup:
        reason = (
            f"{prediction.speedup:.2f}x against {processes.predicted_speedup:.2f}x by worker processes: "
            f"less than {THREADS_WIN:g} times as much"
        )
        return Refusal("data.threads", "data", reason)
    prefetch = max(fact.prefetch_factor or 2 for fact in blocked.values())
    memory = count * (THREAD_BYTES + prefetch * _batch_bytes(program))
    return Proposal(
        name="data.threads",
        room="data",
        edits=edits,
        predicted_speedup=prediction.speedup,
        interval=prediction.interval,
        applies=True,
        parameters={
            "num_workers": count,
            "prefetch_factor": prefetch,
            "blocked_datasets": sorted({fact.dataset for fact in blocked.values()} - {facts[g].dataset for g in left}),
        },
        loaders=tuple(blocked),
        left_alone=left,
        cost=f"{count} threads per rank, about {format_bytes(memory)}",
        risk="threads beside the loop read the dataset, and share its objects; Python code runs in one at a time",
        reason=f"{count} threads per rank, for {_names(blocked)}, and no hand-off between processes. "
        f"{prediction.note}".strip(),
        memory_bytes=memory,
        start_s=_trial_s(program, blocked, "threads"),
        allow="data.threads",
        conflicts=("data.workers", "data.cache"),  # the cache stands before torch's fetchers, and threads have none
    )


def cache(program: Program, setup: Setup, facts: Mapping[int, LoaderFacts]) -> Proposal | Refusal:
    """Propose to keep as many decoded examples as the memory allows, if the run reads them more than once."""
    if _epochs(program, facts) < 2:
        return Refusal("data.cache", "data", "the run passes over its data once: a cache pays from the second pass on")
    sizes = [_example_bytes(program, group, fact) for group, fact in facts.items()]
    counts = [fact.dataset_size or 0 for fact in facts.values()]
    if not all(sizes) or not all(counts):
        return Refusal("data.cache", "data", "the size of the dataset or of its examples is not known")
    dealt = any(fact.sampler == "DistributedSampler" for fact in facts.values()) and setup.world_size > 1
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
        loaders=tuple(facts),
        cost=f"{format_bytes(budget)} of memory per rank, for {format_fraction(fraction, 0)} of the examples",
        risk="applied only where reading an example twice in a test process gives equal results without side effects",
        reason=f"For {_names(facts)}. {note}{prediction.note}".strip(),
        memory_bytes=budget,
        start_s=_trial_s(program, facts, "cache"),
        conflicts=("data.threads", "data.server"),
    )


def server(program: Program, setup: Setup, facts: Mapping[int, LoaderFacts]) -> Proposal | Refusal:
    """Propose a data server where other jobs of the host read the same data while this one ran: each example once."""
    beside = 0 if program.run is None else neighbours(program.run, facts)
    if not beside:
        return Refusal("data.server", "data", "no other recorded job of this host read the same data while it ran")
    share = f"{1 / (1 + beside):.3g}x"
    edits = (f"input.fetch={share}", f"input.prep={share}")
    prediction = program.predict(edits)
    return Proposal(
        name="data.server",
        room="data",
        edits=edits,
        predicted_speedup=prediction.speedup,
        interval=prediction.interval,
        applies=True,
        parameters={},
        loaders=tuple(facts),
        cost="one server process for all jobs of the host",
        risk="the examples come in another random order, with other random draws",
        reason=f"{beside} other jobs read the data of {_names(facts)} at the same time. Apply it to all of them. "
        f"{prediction.note}".strip(),
        allow="result-equivalent",
        conflicts=("data.workers", "data.threads", "data.cache"),
    )


def _trial_s(program: Program, facts: Mapping[int, LoaderFacts], remedy: str, children: int = 2) -> float:
    """Return the seconds that trying a remedy takes at the start: once for loaders with the same facts.

    As the recording timed it, else as long as is usual. It timed processes with two `children`, which read whether
    others may make the batches; a loader with workers of its own has another, which reads whether they may stay.
    """
    model = program.models[0]
    took_ns = {"workers": model.trial_ns, "threads": model.thread_trial_ns, "cache": model.cache_trial_ns}[remedy]
    tried, _ = model.trials(np.isin(model.batches.group, list(facts)))
    trial_s = float(took_ns[tried].sum()) / NS_PER_S * children / 2
    return trial_s + FIRST_S if trial_s else 0.0


def neighbours(run: Run, facts: Mapping[int, LoaderFacts]) -> int:
    """Count the runs beside `run`, on its host and at its time, that read a dataset of the same name and size."""
    ours = {(fact.dataset, fact.dataset_size) for fact in facts.values() if fact.dataset_size}
    begin, end = _realtime(run.facts)
    count = 0
    for file in run.path.resolve().parent.glob("*/run.json"):
        try:
            other = RunFacts.of(read_json(file))
            first, last = _realtime(other)
            theirs = {(fact.dataset, fact.dataset_size) for fact in other.effective_loaders.values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # not a run of ours, or one that is being written
        same = other.host == run.facts.host and other.run_id != run.facts.run_id
        count += same and first < end and begin < last and bool(ours & theirs)
    return count


def _realtime(facts: RunFacts) -> tuple[int, int]:
    """Return begin and end of a run on the realtime clock: without an end it goes on, without a clock it never was."""
    if facts.realtime_ns is None:
        return 0, 0
    return facts.realtime_ns, facts.end_ns + facts.realtime_shift_ns if facts.end_ns else 1 << 62


def _names(facts: Mapping[int, LoaderFacts]) -> str:
    """Return the loaders by name."""
    return ", ".join(named(group, fact) for group, fact in facts.items())


def _epochs(program: Program, facts: Mapping[int, LoaderFacts]) -> int:
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


def _example_bytes(program: Program, group: int, fact: LoaderFacts) -> float:
    """Return the mean size of an example as it comes out of the dataset, 0 when it is not known."""
    size = fact.batch_size or 0
    found = [
        batches.bytes[batches.group[batches.iterator] == group]
        for batches in program.recording.batches
        if batches.seq.size
    ]
    sizes = np.concatenate(found) if found else np.zeros(0)
    sizes = sizes[sizes > 0]
    return float(np.median(sizes)) / size if size and sizes.size else 0.0
