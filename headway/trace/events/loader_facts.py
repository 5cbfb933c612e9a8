"""What run.json says of loaders and remedies: its rows of `loaders` and `applied`, typed, and what they rule out.

A row of an older run lacks keys, which then have their defaults. A value of another type than the key has, as a
damaged file may hold, is left out and named in `damaged`: nothing is proposed for such a loader.

>>> facts = LoaderFacts.of({"dataset": "Pictures", "num_workers": 0, "sampler": "MySampler", "persistent": "?"})
>>> facts.num_workers, facts.draws, facts.damaged
(0, None, ('persistent',))
>>> unmovable(LoaderFacts(sampler="MySampler"))[:20], unmovable(LoaderFacts(sampler="RandomSampler"))
('MySampler: a sampler', '')

Rows of `applied` say which remedies were in force, and which the run had to do without.

>>> row = {"name": "host.gc", "facts": {"every_steps": 100}, "reason_not_applied": None}
>>> refused = {"name": "data.cache", "parameters": {"bytes": 9}, "reason_not_applied": "not pure"}
>>> rows = applied_rows([row, refused, "damaged"])
>>> active_settings(rows)
{'host.gc': {'every_steps': 100}}
>>> given_up(rows)
{'data.cache': GivenUp(parameters={'bytes': 9}, reason='not pure')}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from headway.core.files.safe_files import converted
from headway.core.units import format_seconds, plural
from headway.trace.events.vocabulary import READING_FAILED, UNREAD

SAFE_SAMPLERS = (
    "SequentialSampler", "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler", "DistributedSampler",
)  # fmt: skip
"""Samplers whose order depends on nothing that training changes: reading them ahead is safe."""

EPOCH_SAMPLERS = ("SeedableRandomSampler",)
"""Samplers of libraries (accelerate's) that count epochs as they are read: with workers, a checkpoint of the last
batches of an epoch may hold the next one's number. Headway therefore gives such a loader none; users may."""

UNSEEDED = {"device": "a device's generator", "own": "a generator of its own"}
"""Generators that torch does not seed in loader workers, in words: forked ones would all draw the same numbers."""

CHANGES = "the examples of its dataset change while training goes on: {}"
"""Why nothing of a loader may be read ahead, kept or shared; what was seen goes in."""

BETWEEN = "the examples of its dataset change between passes: {}"
"""Why nothing that outlives a pass may hold its examples; what was seen goes in."""

UNJUDGED = (
    "whether the examples of its dataset change between passes is not known: "
    "the job ended before headway had read its first examples again"
)
"""The same where nobody saw whether they do."""

OWN = "it is headway's own loader: pass {} where the script makes it"
"""Why the loaders of the data room itself are left alone."""

TRIAL_S, TRIAL_SHARE = 0.5, 0.01
"""A remedy may be tried while all trials of a rank before have taken less than so many seconds, and this share of the
time since the first one."""

CHECK_EVERY, CHECK_FIRST = 128, 4
"""Of the examples that a cache finds, one in so many is read anew and compared in the long run; about so many of the
first ones, and so many more each time that they have grown e-fold."""


def may_try(spent_s: float, since_s: float) -> bool:
    """Tell whether a rank may try another loader: trials took `spent_s`, and the first began `since_s` ago."""
    return spent_s < TRIAL_S + TRIAL_SHARE * since_s


LOOK_S, LOOK_SHARE = 0.01, 0.1
"""A look at what a dataset goes by may take so many seconds of CPU, or this share of a recorded step."""


def too_dear(look_s: float, step_s: float) -> str:
    """Say that a look of `look_s` before each batch costs more of a step than a remedy may win; '' where it may.

    >>> too_dear(0.02, 0.3), too_dear(0.3, 0.05)[-12:]
    ('', 'takes 300 ms')
    """
    if look_s <= max(LOOK_S, LOOK_SHARE * step_s):
        return ""
    return f"looking, before each batch, at what its dataset and their code reach takes {format_seconds(look_s)}"


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """What a remedy would say of a loader, asked in a forked child when its first iterator was made."""

    processes: str | None = None
    """Why worker processes may not make its batches, random draws aside; '' = they may, None = not asked."""

    threads: str | None = None
    """The same of threads."""

    cache: str | None = None
    """Why its examples may not be kept."""

    processes_s: float | None = None
    """Seconds that asking for processes took."""

    threads_s: float | None = None
    """Seconds that asking for threads took."""

    cache_s: float | None = None
    """Seconds that asking for a cache took."""

    look_s: float | None = None
    """CPU seconds of a look at all that its batches are made of, as remedies take before batches."""

    ended_ns: int | None = None
    """When the child had answered, by the clock of the rows: steps before it shared the cores with it."""


UNSEEN = "its iterator is not of a DataLoader's making: a library makes it itself, or it was made before the recording"
"""Why nothing is applied to a loader of which only batches were seen (one of fastai, for example)."""


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""A number of things: what is negative, or no double holds exactly, is damage."""


class LoaderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One loader of a run, as `headway.runtime.calls.probe_input.loader_facts` saw it. Sizes are bytes."""

    dataset: str = ""
    line: str | None = None
    """Where the script iterates it first: 'train.py:30'."""
    constructed: str = ""
    """Where the script constructs it, or calls the library that does: 'train.py:12'; '' where nobody saw that."""
    library: str = ""
    """The package that constructs it; '' = the script itself."""
    num_workers: Count | None = None
    """Workers per rank; None in a row that does not say."""
    prefetch_factor: Count | None = None
    persistent: bool = False
    """Whether its workers stay between passes, which those of a loader that the script makes anew for each do not."""
    pin_memory: bool = False
    batch_size: Count | None = None
    dataset_size: Count | None = None
    """Examples of the largest dataset that it was made for; None = unknown."""
    smallest_dataset: Count | None = None
    """The same of the smallest one."""
    datasets: Count = 1
    """Datasets that it was made for, one after the other."""
    loaders: Count = 1
    """Loaders that the script made in its place, one after the other: one that is made anew keeps no workers."""
    streams: bool = False
    """Whether its dataset is an IterableDataset."""
    repeats: bool | None = None
    """Whether several workers of a stream begin with the same batches; None = nobody looked."""
    sampler: str | None = None
    own: bool = False
    """Whether it is headway's own loader."""
    draws: tuple[str, ...] | None = None
    """Generators that reading examples draws from; None = nobody looked."""
    collate_draws: tuple[str, ...] | None = None
    changes: str | None = None
    """How its examples change while training goes on; '' = they do not, None = that is not known."""
    changes_between: str = ""
    """How its examples change between two passes, and not within one; '' = nobody saw that."""
    changes_unchecked: str = ""
    """Why that is not known."""
    worker_init_fn: str | None = None
    """module:name of it."""
    steered: str | None = None
    """How the training loop could change its order."""
    reason_untunable: str | None = None
    rehearsal: Rehearsal = Rehearsal()
    unfit_ahead: str = ""
    """Why nobody may read it ahead, as a remedy found while the run went on."""
    unfit: str = ""
    """Why nobody may keep its examples either, found likewise."""
    damaged: tuple[str, ...] = ()
    """Keys whose values were of another type."""

    @classmethod
    def of(cls, row: object) -> LoaderFacts:
        """Read a row of run.json."""
        if not isinstance(row, Mapping):
            return cls(damaged=("all",))
        facts, bad = converted(row, cls)
        return msgspec.structs.replace(facts, damaged=tuple(sorted(bad))) if bad else facts

    @property
    def place(self) -> str:
        """The line of the script to edit: where it is constructed, else where it is iterated; '' = not known."""
        return self.constructed or self.line or ""

    @property
    def drawn(self) -> tuple[str, ...]:
        """Generators that its examples or its collate function draw from, as far as anybody looked."""
        return tuple(sorted({*(self.draws or ()), *(self.collate_draws or ())}))


def facts_of(loaders: Mapping[str, LoaderFacts], group: int) -> LoaderFacts:
    """Return the facts of a loader: none where it has no row; of batches that no loader was seen for, just that."""
    return loaders.get(str(group), LoaderFacts(reason_untunable=UNSEEN if group < 0 else None))


def bound(facts: LoaderFacts) -> str:
    """Say why the batches of a loader may not be read ahead of training at all; '' if they may."""
    if facts.damaged:
        return f"what run.json says of it is damaged ({', '.join(facts.damaged)}): record it again"
    if facts.reason_untunable:
        return facts.reason_untunable
    if facts.changes:
        return CHANGES.format(facts.changes)
    if facts.unfit or facts.unfit_ahead:
        return facts.unfit or facts.unfit_ahead
    if facts.steered:
        return facts.steered
    if facts.sampler is not None and facts.sampler not in SAFE_SAMPLERS:
        return f"{facts.sampler}: a sampler of the script's own must not be read ahead"
    return ""


def unmovable(facts: LoaderFacts) -> str:
    """Say why the examples of a loader may not be made by (more) workers; '' if they may.

    Drawing from the generators that torch seeds in each worker is no hindrance, but needs the user's leave.
    """
    if facts.own:
        return OWN.format("num_workers")
    unseeded = [UNSEEDED[kind] for kind in facts.drawn if kind in UNSEEDED]
    if unseeded:
        return f"it draws from {' and '.join(unseeded)}: each worker would draw the same numbers"
    asked = facts.rehearsal.processes
    if asked is None and facts.worker_init_fn and not facts.num_workers:
        return bound(facts) or f"its worker_init_fn ({facts.worker_init_fn}) has never run, and would with workers"
    return bound(facts) or asked or ""


def unmovable_by_hand(facts: LoaderFacts) -> str:
    """Say why the user may not give a loader workers either; '' if they may, for all that headway has against it."""
    if facts.own:  # headway's own loader has a setting for them
        return ""
    if facts.sampler in EPOCH_SAMPLERS:
        gone = {"sampler": None, "steered": None, "worker_init_fn": None, "rehearsal": Rehearsal()}
        facts = msgspec.structs.replace(facts, **gone)
    return unmovable(facts)


def unthreadable(facts: LoaderFacts) -> str:
    """Say why threads may not make the examples of a loader; '' if they may."""
    if facts.own:
        return OWN.format('workers="threads"')
    if facts.drawn:
        return f"it draws random numbers ({', '.join(facts.drawn)}), and threads would share the generators"
    if facts.worker_init_fn and facts.num_workers != 0:
        return f"its worker_init_fn ({facts.worker_init_fn}) prepares a process, and threads have none of their own"
    return bound(facts) or facts.rehearsal.threads or ""


def renewed(facts: LoaderFacts) -> str:
    """Say why nothing that outlives a pass may hold the examples of a loader; '' if it may."""
    if facts.changes_between:
        return BETWEEN.format(facts.changes_between)
    return UNJUDGED if facts.changes is None and facts.changes_unchecked == UNREAD else ""


def unkept(facts: LoaderFacts) -> str:
    """Say why the examples of a loader cannot be kept; '' if they can."""
    if facts.datasets > 1:
        anew = plural(facts.datasets - 1, "time")
        return f"its dataset was made anew {anew}, and what is kept goes with it: make it once, before the loop"
    return OWN.format("cache_bytes") if facts.own else uncacheable(facts) or facts.rehearsal.cache or ""


def uncacheable(facts: LoaderFacts) -> str:
    """Say why a cache cannot hold the examples of a loader, whoever makes it; '' if it can."""
    if facts.damaged:
        return bound(facts)
    if facts.reason_untunable:
        return facts.reason_untunable
    if facts.changes:
        return CHANGES.format(facts.changes)
    if renewed(facts):
        return renewed(facts)
    if facts.unfit:
        return facts.unfit
    if facts.draws:
        drawn = ", ".join(facts.draws)
        return f"reading an example draws random numbers ({drawn}): a cache would freeze its random augmentation"
    return ""


def unshared(facts: LoaderFacts) -> str:
    """Say why a server may not make the examples of a loader; '' if it may."""
    if facts.own:
        return OWN.format('server="auto"')
    if renewed(facts):
        return renewed(facts)
    if facts.worker_init_fn:
        return f"its worker_init_fn ({facts.worker_init_fn}) prepares processes that a server has none of"
    return unmovable(facts)


def untried(facts: LoaderFacts) -> str:
    """Say why the trial of any remedy would refuse a loader, where nobody rehearsed it; '' if it may not."""
    asked = facts.rehearsal.processes, facts.rehearsal.threads, facts.rehearsal.cache
    failed = facts.changes_unchecked == READING_FAILED and asked == (None, None, None)
    return f"its trial would refuse it: {READING_FAILED}" if failed else ""


READING, DATASET = "reading", "dataset"
"""Values of `about` beside a reason: why a dataset's batches may not be read ahead; why they may not be kept either.

A reason without one is about the remedy itself, as it was given."""


NO_MODEL = "the script made no model that it could be applied to"
"""Why a run was without a remedy of distributed models."""


class LoaderDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What a remedy decided about a loader, when it was first read or later."""

    dataset: str | None = None
    """Name of the dataset's class."""
    line: str | None = None
    """The line of the script that constructs the loader, where the decision says it."""
    num_workers: int | None = None
    """Workers that it was given."""
    about: str | None = None
    """`READING` or `DATASET`."""
    reason_not_applied: str | None = None
    """Why the loader was left alone."""
    had_it: bool | None = None
    """Whether a loader that is left alone had the remedy before."""
    reason: str | None = None
    """Why the remedy was withdrawn from it."""


class AppliedRow(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one remedy of a plan."""

    name: str = ""
    applied: bool = False
    """Whether it was in effect at some time; only the ranks say so."""
    parameters: dict[str, Any] | None = None
    """What it was given; None in a row of an older run, and in that of the whole plan."""
    facts: dict[str, Any] | None = None
    """What it did; `loaders` and `withdrawn` among them are lists of decisions."""
    reason_not_applied: str | None = None
    withdrawn: str | None = None
    """Why it was taken away while the run went on."""
    predicted_speedup: float | None = None
    interval: tuple[float, float] | None = None
    """Range of that."""
    measured_speedup: float | None = None
    """Of the steps after the first ones, against the baseline; None where several remedies were applied."""
    measured_with_start: float | None = None
    """Of as many steps, the first included."""
    inconclusive: str | None = None
    """Why what was measured says nothing of the remedy: other load on the host explains it."""

    def decisions(self, key: str) -> list[LoaderDecision]:
        """Return the decisions in a list among the facts that can be read."""
        entries = (self.facts or {}).get(key)
        rows = entries if isinstance(entries, list) else []
        return [converted(entry, LoaderDecision)[0] for entry in rows if isinstance(entry, Mapping)]

    @property
    def unused(self) -> str:
        """Why a remedy of distributed models had nothing to act on; '' where it had, or is of another kind."""
        facts = self.facts or {}
        return NO_MODEL if facts.get("models") == 0 and not facts.get("had_it") else ""

    @property
    def why_without(self) -> str:
        """Why the run was without it in the end; '' where some loader had it to the last."""
        if reason := self.reason_not_applied or self.withdrawn:
            return reason
        if self.unused:
            return self.unused
        reasons = [entry.reason or "withdrawn" for entry in self.decisions("withdrawn")]
        if not reasons:
            last: dict[str | None, str | None] = {}
            for entry in self.decisions("loaders"):
                # A loader that never had it takes it from no other: one that evaluates often reads the same class.
                if entry.had_it or not entry.reason_not_applied or entry.dataset not in last:
                    last[entry.dataset] = entry.reason_not_applied
            reasons = [reason for reason in last.values() if reason] if all(last.values()) else []
        return "; ".join(dict.fromkeys(reasons))


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A remedy that a run refused, or had for a while."""

    parameters: Mapping[str, Any]
    """What it was given."""

    reason: str
    """Why the run was without it."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """What a remedy found of a dataset while a run went on."""

    remedy: str
    """Which remedy found it."""

    dataset: str
    """Name of the dataset's class."""

    about: str
    """`READING` or `DATASET`."""

    reason: str
    """What was found."""

    line: str | None = None
    """The line that constructs the loader that it was found with; None where that is not said."""


def applied_rows(rows: object) -> tuple[AppliedRow, ...]:
    """Return the row of each remedy: not that of the whole plan, nor one of an older run that says nothing of it."""
    listed = rows if isinstance(rows, list) else []
    found = [converted(row, AppliedRow)[0] for row in listed if isinstance(row, Mapping)]
    return tuple(row for row in found if row.name and (row.facts is not None or row.parameters is not None))


def active_settings(rows: Sequence[AppliedRow]) -> dict[str, dict[str, Any]]:
    """Return remedy -> its facts, for those that were applied and not withdrawn while the run went on."""
    return {row.name: row.facts or {} for row in rows if not row.why_without}


def given_up(rows: Sequence[AppliedRow]) -> dict[str, GivenUp]:
    """Return the remedies that the run refused or withdrew, with what they were given and why."""
    return {
        row.name: GivenUp((row.facts if row.parameters is None else row.parameters) or {}, reason)
        for row in rows
        if (reason := row.why_without)
    }


def unfit(rows: Sequence[AppliedRow]) -> list[Unfit]:
    """Return what remedies found of datasets, of the reasons that hold for other remedies too."""
    return [
        Unfit(row.name, str(entry.dataset), entry.about, reason, entry.line)
        for row in rows
        for entry in (*row.decisions("loaders"), *row.decisions("withdrawn"))
        if entry.about in (READING, DATASET) and (reason := entry.reason_not_applied or entry.reason)
    ]
