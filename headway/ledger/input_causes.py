"""Causes of waiting for input, one loader at a time: training's and evaluation's are not each other's.

Each rule returns one cause per loader that training waited for. What other
ranks waited because of input is split over the loaders like the waits
themselves. Seconds are device-seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from headway.core.units import NS_PER_S, format_seconds, plural
from headway.ledger.cause import Cause
from headway.ledger.evidence import TRY, also_waited, blamed_s, booked_s, mean_of, share_of, span_of
from headway.ledger.input_counts import count_words
from headway.ledger.ledger import Ledger
from headway.trace.loader_facts import LoaderFacts, facts_of, loaders_in, unmovable

MORE_AT_SERVER = "more threads or a cache in the data server: DataServer(threads=..., cache_bytes=...)"

FETCH = ("input.fetch", "input.unsplit")
PREP = ("input.prep", "input.cpu_wait")
TRANSFER = ("input.transfer", "input.start")


@dataclass(frozen=True, slots=True)
class LoaderWaits:
    """What training waited for one loader, or for all of them where they cannot be told apart."""

    facts: LoaderFacts
    """What run.json says of it."""

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
    def workers(self) -> int | None:
        """Its workers per rank, None when that is not known."""
        return self.facts.num_workers

    @property
    def refusal(self) -> str:
        """Why workers may not make its batches, '' where they may; headway's own loader has a setting for them."""
        return "" if self.facts.own else unmovable(self.facts)


def loaders_of(ledger: Ledger) -> list[LoaderWaits]:
    """Return the loaders of a run with what training waited for each; a single entry where waits name no loader."""
    known = loaders_in(ledger.meta)
    waits = {
        loader: {sub: ns / NS_PER_S for sub, ns in amounts.items() if sub.startswith("input.")}
        for loader, amounts in ledger.loader_ns.items()
    }
    waits = {loader: amounts for loader, amounts in waits.items() if amounts}
    if len(waits) < 2 or any(str(loader) not in known for loader in waits):
        only = next(iter(waits), 0)
        unseen = facts_of(known, only) if only < 0 and not known and "loaders" in ledger.meta else LoaderFacts()
        facts = known.get(str(only)) or next(iter(known.values()), unseen)
        sub_s = {sub: ns / NS_PER_S for sub, ns in ledger.sub_ns.items() if sub.startswith("input.")}
        where = where_of(facts) if len(waits) == 1 else "; ".join(dict.fromkeys(map(where_of, known.values())))
        # Calls by training where they were counted; a trace of another source tells calls of any kind only.
        calls = sum(ledger.loader_calls.values()) or span_of(ledger, "input.next").count
        return [LoaderWaits(facts, where or "loader", calls, sub_s)]
    return [
        LoaderWaits(known[str(loader)], where_of(known[str(loader)]), ledger.loader_calls.get(loader, 0), sub_s)
        for loader, sub_s in waits.items()
    ]


def where_of(facts: LoaderFacts) -> str:
    """Name a loader: where the script makes it, its dataset, its workers.

    >>> where_of(LoaderFacts(line="train.py:30", dataset="Blocks", num_workers=1))
    'train.py:30, Blocks, 1 worker per rank'
    """
    workers = [] if facts.num_workers is None else [f"{plural(facts.num_workers, 'worker')} per rank"]
    return ", ".join([*([facts.line] if facts.line else []), facts.dataset or "loader", *workers])


def _waited_s(ledger: Ledger, own_s: float, *subs: str) -> float:
    """Return what other ranks waited for these sub-lines of one loader, which took `own_s` of them."""
    every = booked_s(ledger, *subs)
    return blamed_s(ledger, "input", share_of(ledger, "input", *subs)) * (own_s / every if every else 0.0)


def _is_served(ledger: Ledger) -> bool:
    """Whether a data server made the batches: the loaders have no workers of their own then."""
    return "server" in (ledger.meta.get("input") or {})


def _ranks_per_host(ledger: Ledger) -> int:
    """Return the ranks of the fullest host; all of them where hosts are not known."""
    return max(Counter(ledger.hosts.values()).values(), default=ledger.devices)


def input_fetch(ledger: Ledger) -> list[Cause]:
    """Awaited batches that were blocked on storage, network or sleep; unsplit waits count here and say so."""
    return [_fetch_of(ledger, loader) for loader in loaders_of(ledger)]


def _fetch_of(ledger: Ledger, loader: LoaderWaits) -> Cause:
    own, blind, workers = loader.seconds(*FETCH), loader.seconds("input.unsplit"), loader.workers
    waited = _waited_s(ledger, own, *FETCH)
    evidence = f"{loader.calls:,} calls of next(loader) waited {mean_of(own, loader.calls)} while their batch was read"
    if blind > own / 2:
        evidence += " (their loads were not recorded, so this may be preparation as well)"
    evidence += "".join(f"; {line}" for line in count_words(ledger.meta.get("input") or {}))
    if _is_served(ledger):
        fix = MORE_AT_SERVER
    elif reason := loader.refusal:
        fix = f"make the load itself faster: workers are refused ({reason})"
    elif workers == 0:
        fix = "read in worker processes: DataLoader(num_workers=4); try --set workers=4, or --set cache_fraction=1"
    else:
        tried = f"{TRY}workers={2 * (workers or 2)}, or --set cache_fraction=1"
        fix = f"more workers than {workers or 'now'}, or a cache{tried}"
    return _cause(
        "input.fetch", loader, own + waited, evidence + also_waited(waited), fix, _more_workers(ledger, loader)
    )


def _cores_each(ledger: Ledger) -> int:
    """Return the cores of a rank, 0 = not known."""
    return max(1, int(ledger.meta["cores"]) // _ranks_per_host(ledger)) if ledger.meta.get("cores") else 0


def _more_workers(ledger: Ledger, loader: LoaderWaits) -> str:
    """Return the loader with twice its workers, or with as many as a rank has cores, up to four, where it has none."""
    if _is_served(ledger) or loader.refusal or loader.workers is None:
        return ""
    each = _cores_each(ledger) or 4
    return f"DataLoader(..., num_workers={2 * loader.workers or max(1, min(4, each))}, persistent_workers=True)"


def _cause(name: str, loader: LoaderWaits, lost_s: float, evidence: str, fix: str, script: str) -> Cause:
    return Cause(name, loader.where, lost_s, evidence, fix, script=script, line=loader.facts.line or "")


def input_prep(ledger: Ledger) -> list[Cause]:
    """Awaited batches that were being computed, or whose worker had no core."""
    return [_prep_of(ledger, loader) for loader in loaders_of(ledger)]


def _prep_of(ledger: Ledger, loader: LoaderWaits) -> Cause:
    own, queue, workers = loader.seconds(*PREP), loader.seconds("input.cpu_wait"), loader.workers
    waited = _waited_s(ledger, own, *PREP)
    each = mean_of(own, loader.calls)
    evidence = f"{loader.calls:,} calls of next(loader) waited {each} while their batch was prepared"
    if queue > 0:
        evidence += f", {format_seconds(queue)} of it waiting for a CPU core"
    cores, busy = ledger.meta.get("cores"), False
    if _is_served(ledger):
        fix = MORE_AT_SERVER
    elif reason := loader.refusal:
        fix = f"make the transforms themselves faster: workers are refused ({reason})"
    elif workers == 0:
        fix = "prepare in worker processes: DataLoader(num_workers=2); try --set workers=2"
    elif queue > own / 2 or (cores and workers and workers * _ranks_per_host(ledger) >= int(cores)):
        fix = f"the host's {cores or 'few'} cores are busy: make the transforms cheaper or cache their result"
        busy = True
    else:
        fix = f"more workers than {workers if workers is not None else 'now'}{TRY}workers={2 * (workers or 1)}"
    script = "" if busy else _more_workers(ledger, loader)
    return _cause("input.prep", loader, own + waited, evidence + also_waited(waited), fix, script)


def input_transfer(ledger: Ledger) -> list[Cause]:
    """Hand-off of finished batches, and creation of iterators."""
    return [_transfer_of(ledger, loader) for loader in loaders_of(ledger)]


def _transfer_of(ledger: Ledger, loader: LoaderWaits) -> Cause:
    hand, start = loader.seconds("input.transfer"), loader.seconds("input.start")
    waited = _waited_s(ledger, hand + start, *TRANSFER)
    copies = span_of(ledger, "kernel.copy")
    evidence = f"the hand-off in {loader.calls:,} calls of next(loader) took {mean_of(hand, loader.calls)}"
    if copies.count:
        evidence = f"{copies.count:,} copies; for {format_seconds(hand)} they kept the device from computing"
    if start > 0:
        evidence += f"; starting and ending its iterators took {format_seconds(start)} in all"
    on_host, script = str(ledger.meta.get("device_type", "cpu")) == "cpu", ""
    if start > hand and loader.workers == 0:
        fix = "keep one iterator instead of making a loader for every few batches"
    elif start > hand and loader.facts.persistent:
        fix = "its workers are kept between epochs already: fewer of them start sooner"
    elif start > hand:
        fix = "keep the workers between epochs: one loader for all of them, and persistent_workers=True"
        fix += f"{TRY}persistent=true"
    elif loader.workers == 0 and on_host and not loader.refusal:
        # Without workers nothing is handed over: what is left behind the examples is the collate function.
        fix = f"collate in worker processes{TRY}workers=2"
        script = _more_workers(ledger, loader)
    elif loader.workers == 0 and on_host:
        fix = f"make the collate function faster: workers are refused ({loader.refusal})"
    elif on_host and (most := _cores_each(ledger)) and (loader.workers or 0) > most:
        fix = f"fewer workers: {loader.workers} of them take turns on {plural(most, 'core')}"
        script = f"DataLoader(..., num_workers={most}, persistent_workers=True)"
    elif on_host:
        fix = "hand over less: smaller dtypes, fewer and larger tensors per batch"
    else:
        fix = "hand over less: smaller dtypes, pin_memory=True and non_blocking copies on a device"
    if start > hand and loader.workers and not loader.facts.persistent:
        script = "DataLoader(..., persistent_workers=True)"
    elif start <= hand and not on_host and not loader.facts.pin_memory:
        script = "DataLoader(..., pin_memory=True)  # and batch.to(device, non_blocking=True)"
    return _cause("input.transfer", loader, hand + start + waited, evidence + also_waited(waited), fix, script)
