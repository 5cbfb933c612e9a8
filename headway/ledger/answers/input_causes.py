"""Causes of waiting for input, one loader at a time: training's and evaluation's are not each other's.

Each rule returns one cause per loader that training waited for. What other
ranks waited because of input is split over the loaders like the waits
themselves. Seconds are device-seconds.

What a user can do about a loader that training waits for: one row per cause and state of the loader.

The first row of a cause whose condition holds gives the fix in words and the edit of the script, as a line to copy.

>>> hint_of("input.fetch", LoaderState(workers=0, cores=8)).fix(LoaderState(workers=0, cores=8))[:24]
'read in worker processes'
>>> state = LoaderState(workers=10, cores=2)
>>> hint_of("input.transfer", state).edit(state)
'DataLoader(..., num_workers=2, persistent_workers=True)'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headway.core.units import NS_PER_S, format_seconds, plural
from headway.ledger.answers.ledger import (
    TRY,
    Ledger,
    also_waited,
    blamed_s,
    booked_s,
    count_words,
    counted,
    lines_in_words,
    mean_of,
    share_of,
    span_of,
)
from headway.ledger.buckets import BUCKETS
from headway.ledger.cause import Cause, SampledLine, in_library
from headway.trace.events.loader_facts import EPOCH_SAMPLERS, LoaderFacts, facts_of, renewed, unmovable_by_hand

LEAST_SAMPLES = 8
"""Samples below which no line is named: the next one could turn the shares over."""


@dataclass(frozen=True, slots=True)
class LoaderState:
    """What decides between the hints for one loader."""

    workers: int | None = 0
    """Its workers per rank, None when that is not known."""

    cores: int = 0
    """Cores of a rank, 0 = not known."""

    refusal: str = ""
    """Why workers may not make its batches; '' = they may."""

    is_stream: bool = False
    """Whether its dataset is an IterableDataset, of which one worker reads all, and several all of it each."""

    is_served: bool = False
    """Whether a data server makes its batches."""

    on_host: bool = True
    """Whether the job computes on the host alone."""

    is_persistent: bool = False
    """Whether its workers are kept between epochs."""

    is_renewed: bool = False
    """Whether its data change between epochs: workers that are kept would not know."""

    pins: bool = False
    """Whether its batches are pinned."""

    is_once: bool = False
    """Whether it belongs to an evaluation that the run made once: workers cannot be kept for another."""

    is_small: bool = False
    """Whether its batches are of kilobytes."""

    threads: int = 0
    """Threads that a rank computes with, 0 = not known."""

    waits_for_cores: bool = False
    """Whether the batches that were awaited waited for a core most of the time."""

    load_s: float = 0.0
    """Mean time of a load; 0 = not known."""

    hand_over_s: float = 0.0
    """What handing over a batch, and starting and ending the workers for it, takes on average."""

    computes: bool = True
    """Whether its loads compute, or want a core, for longer than they wait for storage, network or sleep."""

    is_heavy: bool = False
    """Whether its loads take all cores longer than the rest of a step takes: workers cannot hide them."""

    is_abandoned: bool = False
    """Whether most of its passes end behind their first batch."""

    line: str = ""
    """Which line most of its loads were seen at, '' where none stands out."""

    @property
    def is_full(self) -> bool:
        """Whether its workers have all cores, or could not get one."""
        return self.waits_for_cores or bool(self.cores and self.workers and self.workers >= self.cores)

    @property
    def is_short(self) -> bool:
        """Whether its workers take longer to hand a batch over than the training process would to load it."""
        return self.on_host and bool(self.workers) and 0 < self.load_s < SHORT * self.hand_over_s

    @property
    def is_brief(self) -> bool:
        """Whether it has no workers and makes a batch sooner than one would hand it over, in about a millisecond."""
        return self.on_host and self.workers == 0 and not self.is_served and 0 < self.load_s <= 0.001

    @property
    def draws(self) -> bool:
        """Whether its sampler takes long: of a loader that hands over, pins and copies nothing the rest of a call."""
        return self.on_host and self.workers == 0 and not (self.pins or self.is_served) and self.hand_over_s > DRAWS_S

    @property
    def is_shared(self) -> bool:
        """Whether workers would take turns with threads that compute, which wait for each other in each operator."""
        return self.on_host and 1 < self.cores <= self.threads

    @property
    def words(self) -> dict[str, str]:
        """What a hint may name."""
        workers = self.workers or 0
        more = 2 * workers or max(1, min(4, self.cores or 4))
        return {
            "workers": str(self.workers or "now"), "twice": str(2 * (self.workers or 2)), "more": str(more),
            "cores": plural(self.cores, "core") if self.cores else "few cores", "each": str(self.cores),
            "half": str(self.cores // 2), "spared": str(self.cores - 1), "threads": str(self.cores - self.cores // 2),
            "refusal": self.refusal, "TRY": TRY, "load": format_seconds(self.load_s),
            "hand_over": format_seconds(self.hand_over_s), "line": self.line or "its loads",
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hint:
    """One row: for a cause, in a state of the loader."""

    cause: str
    """Name of the cause."""

    when: str
    """The state in words."""

    holds: Callable[[LoaderState], bool]
    """Whether a loader is in it."""

    say: str
    """The fix, with the words of `LoaderState.words` in braces."""

    script: str = ""
    """The edit, likewise; '' where there is none of one line."""

    def fix(self, state: LoaderState) -> str:
        """Return the fix for a loader."""
        return self.say.format(**state.words)

    def edit(self, state: LoaderState) -> str:
        """Return the line to copy, '' without one."""
        line = self.script.format(**state.words)
        return line.replace(", persistent_workers=True", "") if state.is_renewed else line


def _always(_: LoaderState) -> bool:
    return True


MORE_AT_SERVER = "more threads or a cache in the data server: DataServer(threads=..., cache_bytes=...)"
MORE = "DataLoader(..., num_workers={more}, persistent_workers=True)"
TWICE = "DataLoader(..., num_workers={twice}, persistent_workers=True)"  # what waits for storage needs no core
KEEP = "DataLoader(..., persistent_workers=True)"
ONE = "DataLoader(..., num_workers=1)"
FEWER = "DataLoader(..., num_workers={each}, persistent_workers=True)"

STREAM = " in one worker process; several would each yield all of it, unless it asks get_worker_info()"

INSIDE = "load in the training process: a batch loads in {load}, its workers cost {hand_over} for each batch"
NONE = "DataLoader(..., num_workers=0)"

SHORT_LOADS = "larger batches: one loads in {load}, and workers take longer to hand it over"
UNHIDDEN = "workers cannot hide all of it"
CHEAPER = "make {line} cheaper: open, build and parse once what all examples share, or keep what it makes; on "
SINGLE = "make one iterator before the loop: next(iter(loader)) begins a pass for one batch"
ONCE = "batches = iter(loader)"

HINTS: tuple[Hint, ...] = (
    Hint("input.fetch", "a data server makes its batches", lambda s: s.is_served, MORE_AT_SERVER),
    Hint("input.fetch", "its loads are shorter than a hand-over", lambda s: s.is_brief, SHORT_LOADS),
    Hint("input.fetch", "it is a stream without a worker", lambda s: s.is_stream and s.workers == 0 and not s.is_served,
         "read the stream" + STREAM, ONE),
    Hint("input.fetch", "workers are refused", lambda s: bool(s.refusal),
         "make the load itself faster: workers are refused ({refusal})"),
    Hint("input.fetch", "it has no workers", lambda s: s.workers == 0,
         "read in worker processes: DataLoader(num_workers={twice}){TRY}workers={twice}, or --set cache_fraction=1",
         TWICE),
    Hint("input.fetch", "its workers are not known", lambda s: s.workers is None,
         "more workers than {workers}, or a cache{TRY}workers={twice}, or --set cache_fraction=1"),
    Hint("input.fetch", "it has workers", _always,
         "more workers than {workers}, or a cache{TRY}workers={twice}, or --set cache_fraction=1", TWICE),
    Hint("input.prep", "a data server makes its batches", lambda s: s.is_served, MORE_AT_SERVER),
    Hint("input.prep", "its loads are shorter than a hand-over", lambda s: s.is_brief, SHORT_LOADS),
    Hint("input.prep", "it has no workers, and its loads take more than all cores have",
         lambda s: s.workers == 0 and s.is_heavy and (s.is_stream or not s.refusal),
         CHEAPER + "{cores} " + UNHIDDEN),
    Hint("input.prep", "it is a stream without a worker, and the threads that compute have all cores",
         lambda s: s.is_stream and s.workers == 0 and not s.is_served and s.is_shared,
         "prepare it" + STREAM + ", and compute on one thread less: sums are rounded in another order",
         "torch.set_num_threads({spared}); " + ONE),
    Hint("input.prep", "it is a stream without a worker", lambda s: s.is_stream and s.workers == 0 and not s.is_served,
         "prepare it" + STREAM, ONE),
    Hint("input.prep", "workers are refused", lambda s: bool(s.refusal),
         "make the transforms themselves faster: workers are refused ({refusal})"),
    Hint("input.prep", "it has no workers, and the threads that compute have all cores",
         lambda s: s.workers == 0 and s.is_shared,
         "prepare in worker processes, and compute on fewer threads so that those have cores: num_workers={half} and "
         "torch.set_num_threads({threads}), by which sums are rounded in another order",
         "torch.set_num_threads({threads}); DataLoader(..., num_workers={half}, persistent_workers=True)"),
    Hint("input.prep", "it has no workers", lambda s: s.workers == 0,
         "prepare in worker processes: DataLoader(num_workers={more}){TRY}workers={more}", MORE),
    Hint("input.prep", "no core is free", lambda s: s.is_full,
         "the host's cores are busy: make the transforms cheaper or cache their result"),
    Hint("input.prep", "its workers are not known", lambda s: s.workers is None,
         "more workers than {workers}{TRY}workers={twice}"),
    Hint("input.prep", "it has workers, and cores are free", _always,
         "more workers than {workers}{TRY}workers={twice}", MORE),
    Hint("input.start", "its passes end behind their first batch", lambda s: s.is_abandoned, SINGLE, ONCE),
    Hint("input.start", "iterators without workers are made often", lambda s: not s.workers,
         "keep one iterator instead of making a loader for every few batches"),
    Hint("input.start", "its loads are shorter than what its workers cost", lambda s: s.is_short, INSIDE, NONE),
    Hint("input.start", "its workers are kept and start slowly", lambda s: s.is_persistent,
         "its workers are kept between epochs already: fewer of them start sooner"),
    Hint("input.start", "its workers start in each epoch, as its data change between them", lambda s: s.is_renewed,
         "its data change between epochs, and its workers have to start anew: fewer of them start sooner"),
    Hint("input.start", "it is a stream, and its workers start in each epoch", lambda s: s.is_stream,
         "persistent_workers=True only where the loop sets nothing on its dataset between passes (set_epoch): workers "
         "that are kept would not know, and yield what they did before"),
    Hint("input.start", "its workers start in each epoch", _always,
         "keep the workers between epochs: one loader for all of them, and persistent_workers=True{TRY}persistent=true",
         KEEP),
    Hint("input.transfer", "its sampler draws all for one batch", lambda s: s.draws and s.is_abandoned, SINGLE, ONCE),
    Hint("input.transfer", "its sampler draws", lambda s: s.draws,
         "draw fewer indices, or in larger pieces: its sampler draws in the training process, with workers too "
         "(num_samples=: no more than a pass uses)"),
    Hint("input.transfer", "it has no workers", lambda s: s.on_host and s.workers == 0 and not s.is_served,
         "larger batches: calls of next(loader) take this beside their loads, whatever the size"),
    Hint("input.transfer", "its loads are shorter than their hand-over", lambda s: s.is_short, INSIDE, NONE),
    Hint("input.transfer", "its workers are more than twice the cores",  # fewer may wait for storage, not for a core
         lambda s: s.on_host and s.computes and 0 < 2 * s.cores < (s.workers or 0),
         "fewer workers: {workers} of them take turns on {cores}", FEWER),
    Hint("input.transfer", "batches are small", lambda s: s.is_small,
         "larger batches: handing one over between processes costs about a millisecond, whatever its size"),
    Hint("input.transfer", "batches are large", lambda s: s.on_host,
         "hand over less: smaller dtypes, fewer and larger tensors per batch"),
    Hint("input.transfer", "batches are copied to a device from pageable memory", lambda s: not s.pins,
         "hand over less: smaller dtypes, pin_memory=True and non_blocking copies on a device",
         "DataLoader(..., pin_memory=True); batch.to(device, non_blocking=True)"),
    Hint("input.transfer", "batches are pinned", _always,
         "hand over less: smaller dtypes, and non_blocking copies on a device"),
    Hint("eval", "its only evaluation's loader has no workers", lambda s: s.is_once and not s.workers,
         "give the loader of the evaluation workers", "DataLoader(..., num_workers=2)"),
    Hint("eval", "its evaluation's loader has no workers", lambda s: not s.workers,
         "give the loader of the evaluation workers, and keep them between evaluations",
         "DataLoader(..., num_workers=2, persistent_workers=True)"),
    Hint("eval", "its evaluation's workers start each time", lambda s: not s.is_persistent and not s.is_once,
         "keep the workers of its loader between evaluations: one loader for all, and persistent_workers=True",
         "DataLoader(..., num_workers={workers}, persistent_workers=True)"),
    Hint("eval", "its evaluation's workers are kept, or start once", _always,
         "more workers than {workers} for its loader, or fewer examples"),
)  # fmt: skip
"""Cause and state of the loader -> what to do. Adding a hint is adding a row."""


def hint_of(cause: str, state: LoaderState) -> Hint:
    """Return the hint of a cause for a loader; each cause of `HINTS` has a last row that always holds."""
    return next(row for row in HINTS if row.cause == cause and row.holds(state))


FETCH = ("input.fetch", "input.unsplit")
PREP = ("input.prep", "input.cpu_wait")
TRANSFER = ("input.transfer",)
START = ("input.start", "input.open")

SHORT = 0.5
"""Of what its workers cost a batch, what a load may take that is better made in the training process."""

DRAWS_S = 0.005
"""Seconds of a call beside its load, on average, from which on a sampler is named: a busy host takes half."""

SMALL_BYTES = 1 << 16
"""Batches of fewer bytes cost their hand-over, not their copy."""


@dataclass(frozen=True, slots=True)
class LoaderWaits:
    """What training waited for one loader, or for all of them where they cannot be told apart."""

    facts: LoaderFacts
    """What run.json says of it."""

    group: int
    """Its number in run.json."""

    where: str
    """The loader in words: where the script makes it, its dataset, its workers."""

    calls: int
    """Calls of next(loader) by training."""

    sub_s: Mapping[str, float]
    """Sub-line of `input` -> device-seconds."""

    def seconds(self, *subs: str) -> float:
        """Return device-seconds of some sub-lines."""
        return sum(self.sub_s.get(sub, 0.0) for sub in subs)

    @property
    def called(self) -> str:
        """The calls in words."""
        return counted(self.calls, "call")

    @property
    def workers(self) -> int | None:
        """Its workers per rank, None when that is not known."""
        return self.facts.num_workers

    @property
    def refusal(self) -> str:
        """Why workers may not make its batches, '' where the script may give it some."""
        return unmovable_by_hand(self.facts)


def loaders_of(ledger: Ledger) -> list[LoaderWaits]:
    """Return the loaders of a run with what training waited for each; a single entry where waits name no loader."""
    known = ledger.facts.effective_loaders
    waits = {
        loader: {sub: ns / NS_PER_S for sub, ns in amounts.items() if sub.startswith("input.")}
        for loader, amounts in ledger.loader_ns.items()
    }
    waits = {loader: amounts for loader, amounts in waits.items() if amounts}
    if len(waits) < 2 or any(str(loader) not in known for loader in waits):
        only = next(iter(waits), 0)
        unseen = facts_of(known, only) if only < 0 and not known and ledger.facts.is_recorded else LoaderFacts()
        facts = known.get(str(only)) or next(iter(known.values()), unseen)
        sub_s = {sub: ns / NS_PER_S for sub, ns in ledger.sub_ns.items() if sub.startswith("input.")}
        where = where_of(facts) if len(waits) == 1 else "; ".join(dict.fromkeys(map(where_of, known.values())))
        # Calls by training where they were counted; a trace of another source tells calls of any kind only.
        calls = sum(ledger.loader_calls.values()) or span_of(ledger, "input.next").count
        return [LoaderWaits(facts, only, where or "loader", calls, sub_s)]
    return [
        LoaderWaits(known[str(loader)], loader, where_of(known[str(loader)]), ledger.loader_calls.get(loader, 0), sub_s)
        for loader, sub_s in waits.items()
    ]


def where_of(facts: LoaderFacts) -> str:
    """Name a loader: where the script makes it, its dataset, its workers.

    >>> where_of(LoaderFacts(line="train.py:30", constructed="train.py:12", dataset="Blocks", num_workers=1))
    'train.py:12, Blocks, 1 worker per rank'
    """
    workers = [] if facts.num_workers is None else [f"{plural(facts.num_workers, 'worker')} per rank"]
    return ", ".join([*([facts.place] if facts.place else []), facts.dataset or "loader", *workers])


def _waited_s(ledger: Ledger, own_s: float, *subs: str) -> float:
    """Return what other ranks waited for these sub-lines of one loader, which took `own_s` of them."""
    every = booked_s(ledger, *subs)
    return blamed_s(ledger, "input", share_of(ledger, "input", *subs)) * (own_s / every if every else 0.0)


def input_fetch(ledger: Ledger) -> list[Cause]:
    """Awaited batches that were blocked on storage, network or sleep; unsplit waits count here and say so."""
    return [_fetch_of(ledger, loader) for loader in loaders_of(ledger)]


def _fetch_of(ledger: Ledger, loader: LoaderWaits) -> Cause:
    own, blind = loader.seconds(*FETCH), loader.seconds("input.unsplit")
    waited = _waited_s(ledger, own, *FETCH)
    evidence = f"{loader.called} of next(loader) waited {mean_of(own, loader.calls)} while their batch was read"
    if blind > own / 2:
        evidence += " (their loads were not recorded, so this may be preparation as well)"
    evidence += "".join(f"; {line}" for line in count_words(ledger.facts.input))
    if loader.seconds(*FETCH) > loader.seconds(*PREP):
        evidence += seen_in_loads(ledger, loader.group)
    return _cause("input.fetch", loader, own + waited, evidence + also_waited(waited), state_of(ledger, loader))


def state_of(ledger: Ledger, loader: LoaderWaits) -> LoaderState:
    """Return what decides between the hints for a loader."""
    facts, loads, passes = ledger.facts, span_of(ledger, "input.load"), span_of(ledger, "input.iter").count
    lines = [row for row in ledger.load_lines if row.loader == loader.group] or [SampledLine("", "", 0)]
    rest_s = float(ledger.step_ns.sum() - ledger.step_ns[BUCKETS.index("input")].sum()) / NS_PER_S
    costs_s = loader.seconds(*TRANSFER, *START)
    ranks_per_host = max(Counter(ledger.hosts.values()).values(), default=ledger.devices)
    cores = max(1, facts.cores // ranks_per_host) if facts.cores else 0
    return LoaderState(
        workers=loader.workers,
        cores=cores,
        refusal=loader.refusal,
        is_served="server" in ledger.facts.input,  # the loaders have no workers of their own then
        is_stream=loader.facts.streams,
        on_host=facts.device_type == "cpu",
        is_persistent=loader.facts.persistent,
        is_renewed=bool(renewed(loader.facts)),
        pins=loader.facts.pin_memory,
        is_small=0 < loads.total_bytes < SMALL_BYTES * loads.count,
        threads=max(facts.threads.values(), default=0),
        waits_for_cores=loader.seconds("input.cpu_wait") > loader.seconds(*PREP) / 2,
        load_s=loads.total_ns / NS_PER_S / loads.count if loads.count else 0.0,
        hand_over_s=costs_s / loader.calls if loader.calls else 0.0,
        computes=loads.total_ns > 2 * span_of(ledger, "input.fetch").total_ns,
        is_heavy=0 < cores * rest_s < loader.seconds(*PREP),
        # A pass that is read up to its end has one call more. Passes are not counted by loader.
        is_abandoned=len(facts.effective_loaders) == 1 and 0 < 2 * loader.calls < 3 * passes,
        line=lines[0].words if 2 * lines[0].count >= max(LEAST_SAMPLES, sum(row.count for row in lines)) else "",
    )


def _cause(name: str, loader: LoaderWaits, lost_s: float, evidence: str, state: LoaderState) -> Cause:
    hint = hint_of(name, state)
    fix, facts = hint.fix(state), loader.facts
    if facts.sampler in EPOCH_SAMPLERS:  # a replay gives it no workers either
        fix = fix.partition(TRY)[0]
    fix, edit = in_library(fix, facts.library), hint.edit(state)
    return Cause(name, loader.where, lost_s, evidence, fix, script=edit, line=facts.place, library=facts.library)


def input_prep(ledger: Ledger) -> list[Cause]:
    """Awaited batches that were being computed, or whose worker had no core."""
    return [_prep_of(ledger, loader) for loader in loaders_of(ledger)]


def _prep_of(ledger: Ledger, loader: LoaderWaits) -> Cause:
    own, queue = loader.seconds(*PREP), loader.seconds("input.cpu_wait")
    waited = _waited_s(ledger, own, *PREP)
    each = mean_of(own, loader.calls)
    evidence = f"{loader.called} of next(loader) waited {each} while their batch was prepared"
    if queue > 0:
        evidence += f", {format_seconds(queue / max(loader.calls, 1))} of it waiting for a CPU core"
    if loader.seconds(*PREP) >= loader.seconds(*FETCH):
        evidence += seen_in_loads(ledger, loader.group)
    return _cause("input.prep", loader, own + waited, evidence + also_waited(waited), state_of(ledger, loader))


def seen_in_loads(ledger: Ledger, group: int) -> str:
    """Return '; seen in its loads: Resize.forward at train.py:9 61 % of 84 samples'; '' where few were seen."""
    lines = tuple(row for row in ledger.load_lines if row.loader == group)
    count = sum(row.count for row in lines)
    words = f"; seen in its loads: {', '.join(lines_in_words(lines))} of {plural(count, 'sample')}"
    return words if sum(row.count for row in lines if row.line) >= LEAST_SAMPLES else ""


def input_transfer(ledger: Ledger) -> list[Cause]:
    """Hand-off of finished batches, and creation of iterators."""
    return [_transfer_of(ledger, loader) for loader in loaders_of(ledger)]


def _transfer_of(ledger: Ledger, loader: LoaderWaits) -> Cause:
    booked = loader.seconds(*TRANSFER)
    waited = _waited_s(ledger, booked, *TRANSFER)
    passes, state = span_of(ledger, "input.iter").count, state_of(ledger, loader)
    copies = span_of(ledger, "kernel.copy")
    evidence = f"the hand-off in {loader.called} of next(loader) took {mean_of(booked, loader.calls)}"
    if state.draws:
        evidence = f"{loader.called} of next(loader) took {mean_of(booked, loader.calls)} beside their loads: then "
        evidence += f"{loader.facts.sampler or 'its sampler'} draws, {mean_of(booked, passes)} pass"
    if copies.count:
        evidence = f"{copies.count:,} copies; for {format_seconds(booked)} they kept the device from computing"
    return _cause("input.transfer", loader, booked + waited, evidence + also_waited(waited), state)


def input_start(ledger: Ledger) -> list[Cause]:
    """Starting and ending iterators and their workers, and what new workers open in their first load."""
    loaders = loaders_of(ledger)
    if span_of(ledger, "input.iter").count <= len(loaders):  # once for each: nothing is started again
        return []
    return [_start_of(ledger, loader) for loader in loaders]


def _start_of(ledger: Ledger, loader: LoaderWaits) -> Cause:
    booked, opening = loader.seconds(*START), loader.seconds("input.open")
    waited = _waited_s(ledger, booked, *START)
    passes = span_of(ledger, "input.iter").count
    evidence = f"starting and ending {counted(passes, 'iterator')} took {format_seconds(booked - opening)} in all"
    state = state_of(ledger, loader)
    evidence += "; most of them gave one batch: next(iter(loader)) in each step" if state.is_abandoned else ""
    if opening > 0:
        evidence += f"; training waited {format_seconds(opening)} for what new workers open in their first load"
    return _cause("input.start", loader, booked + waited, evidence + also_waited(waited), state)
