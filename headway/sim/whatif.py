"""Edits: what a what-if changes in a recorded run, as people write it on the command line.

An edit is `target=value`. `none` and `instant` take a cause away, `2x` after a
cause multiplies its durations, after a resource (`bandwidth`, `storage`,
`accelerator`) it multiplies its speed. `EDITS` is the one list of targets.

>>> [str(parse_edit(text)) for text in ("workers=4", "comm=0.5x", "cache_fraction=0.25")]
['workers=4', 'comm=0.5x', 'cache_fraction=0.25']
>>> parse_edit("worker=4")
Traceback (most recent call last):
headway.core.errors.UnknownNameError: unknown edit 'worker'. Did you mean 'workers'? Choose one of: accelerator, \
bandwidth, bubble, bucket_mb, cache_cold, cache_fraction, cache_shards, checkpoint, comm, compress, \
compute_threads, cores, gc, host, host.gc, host.logging, input, input.fetch, input.prep, input.transfer, logging, \
op:GLOB, other, persistent, prefetch, schedule, script, stage:NUMBER, storage, straggler, threads, watched, workers.

The answer to a what-if: the step time that was measured, and the one after the edits. Float seconds.

>>> Prediction(0.02, 0.01, (1.9, 2.1), ("input=instant",)).speedup
2.0
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.cost.codecs import read_codec
from headway.sim.pipeline.schedules import SCHEDULES


@dataclass(frozen=True, slots=True)
class Edit:
    """One change. Build it with `parse_edit`, or directly: `Edit("workers", 4)`."""

    target: str
    """A name of `EDITS`, or 'op:' and a glob over the names of the recorded operations."""

    value: str | float
    """What it becomes: '2x', 'none', 4, 0.25, ..."""

    def __str__(self) -> str:
        """Return the edit as it is written: 'workers=4'."""
        value = self.value
        return f"{self.target}={int(value) if isinstance(value, float) and value.is_integer() else value}"


@dataclass(frozen=True, slots=True)
class WorkerEdit:
    """How many workers, and which loaders get them.

    >>> WorkerEdit.read("4"), WorkerEdit.read("2@0+3")
    (WorkerEdit(count=4, groups=None), WorkerEdit(count=2, groups=(0, 3)))
    """

    count: int
    """Workers per rank."""

    groups: tuple[int, ...] | None = None
    """Groups of the loaders whose number of workers, threads, batches in flight and persistence change; None = all."""

    def __bool__(self) -> bool:
        """Say whether there are any."""
        return self.count > 0

    @classmethod
    def read(cls, text: str) -> WorkerEdit:
        """Read 'COUNT' or 'COUNT@GROUP+GROUP'."""
        match = re.fullmatch(r"([0-9]+)(?:@([0-9]+(?:\+[0-9]+)*))?", text)
        if match is None:
            raise InputError(
                f"{text!r} is not a count. Write a whole number, at least 0; 4@0+2 gives 4 to loaders 0 and 2."
            )
        groups = None if match[2] is None else tuple(sorted({int(group) for group in match[2].split("+")}))
        return cls(_count(0)(match[1]), groups)


MOST_COUNTED = 2**20
"""The largest count of an edit: beyond it the replay's sums of nanoseconds would leave an int64."""


@dataclass(frozen=True, slots=True)
class ResolvedEdits:
    """Every edit resolved: what the replay has to change. The default changes nothing."""

    factors: tuple[tuple[str, float], ...] = ()
    """(glob over operation names, factor on their durations), all that match multiply."""

    straggler: float = 1.0
    """Factor on the excess of a slow rank over its peers; 0 = no straggler."""

    fetch: float = 1.0
    """Factor on the blocked part of each load."""

    prep: float = 1.0
    """Factor on the CPU part of each load (dataset and collate)."""

    transfer: float = 1.0
    """Factor on the hand-off of a finished batch and on copies to the device."""

    workers: WorkerEdit | None = None
    """Loader workers per rank, and the loaders that have them; None = as recorded."""

    threads: bool = False
    """Workers are threads of the rank: nothing is handed over between processes."""

    watched: bool = True
    """Whether a remedy of headway's makes them: it is tried first, and looks whether what was read has changed."""

    prefetch: int | None = None
    """Batches in flight per worker; None = as recorded."""

    persistent: bool | None = None
    """Whether workers outlive the epoch; None = as recorded."""

    cache_fraction: float = 0.0
    """Share of examples that are served by a cache, in [0, 1]."""

    cache_cold: int = 0
    """Epochs at the start that still miss, because they fill the cache."""

    cache_shards: int = 1
    """Parts into which ranks deal the examples anew each epoch: a rank's own cache has seen only some of the next."""

    bucket_mb: float | str | None = None
    """DDP bucket size in MiB (`bucket_cap_mb`); 'default' = DDP's own [1, 25, ...]; None = as recorded."""

    compress: str | None = None
    """Codec in which gradients travel, a name that `headway.cost.codecs.read_codec` reads; None = as recorded."""

    bandwidth: float = 1.0
    """Speed of the links against the recorded one."""

    cores: float | None = None
    """Usable cores of the host, with a quota a broken number; None = as recorded."""

    other: float | None = None
    """Cores of the host that other processes want; None = as recorded."""

    storage: float = 1.0
    """Speed of the storage against the recorded one."""

    storage_shared: bool | None = None
    """True: readers share one pipe. False: each reader gets the full speed. None: as the run shows."""

    accelerator: float = 1.0
    """Speed of compute against the recorded one."""

    compute_threads: int | None = None
    """Threads that share an operator on the host, where that is fewer than recorded; None = as recorded."""

    buffered_logging: bool = False
    """Log records are handed to a background thread."""

    gc_every: int | None = None
    """Garbage is collected every so many steps, on all ranks at once, and never in between."""

    schedule: str | None = None
    """Order of a pipeline's step, a name of `headway.sim.pipeline.schedules.SCHEDULES`; None = as recorded."""

    input_share: float = 0.5
    """Share of a backward recorded whole that makes the gradient of the stage's input; no edit changes it."""

    bubble: float = 1.0
    """0 = no stage of a pipeline waits for another."""

    stages: tuple[tuple[int, float, float], ...] = ()
    """(stage of a pipeline, factor on its forwards, on its backwards), all that match multiply."""

    def only(self, *names: str) -> ResolvedEdits:
        """Return these edits of the fields `names`, and no others."""
        return ResolvedEdits(**{name: getattr(self, name) for name in names})

    def reaches(self, group: int) -> bool:
        """Say whether edits of workers concern the loader of number `group`."""
        return self.workers is None or self.workers.groups is None or group in self.workers.groups

    def factor(self, name: str) -> float:
        """Return the factor on durations of the operation `name`."""
        return math.prod((factor for pattern, factor in self.factors if fnmatchcase(name, pattern)), start=1.0)


@dataclass(frozen=True, slots=True)
class EditRule:
    """One line of `EDITS`: how the value is read and what it changes."""

    read: Callable[[str], Any]
    """Text of the value -> value; raises `InputError` with the rule it breaks."""

    change: Callable[[ResolvedEdits, Any], ResolvedEdits]
    """Applies the value."""

    meaning: str
    """One line for `--help`."""


def parse_edit(text: str) -> Edit:
    """Return the edit that `text` says ('target=value'); `InputError` says what is wrong and what would be right."""
    target, equals, value = text.partition("=")
    target, value = target.strip(), value.strip()
    if not equals or not target or not value:
        raise InputError(f"{text!r} is not an edit. Write target=value, for example input=instant or workers=4.")
    _read(target, value)
    return Edit(target, value)


def scenario_of(edits: Iterable[Edit | str]) -> ResolvedEdits:
    """Resolve `edits`; a target given twice is refused, because the order would decide."""
    scenario, seen = ResolvedEdits(), set()
    for edit in edits:
        given = parse_edit(edit) if isinstance(edit, str) else edit
        if given.target in seen:
            raise InputError(f"{given.target!r} is edited twice. Give each target one value.")
        seen.add(given.target)
        rule = _rule(given.target)
        value = _read(given.target, str(given).partition("=")[2])
        if given.target.startswith("stage:"):
            scenario = replace(scenario, stages=(*scenario.stages, (int(given.target[6:]), value, value)))
        elif given.target.startswith("op:"):
            scenario = replace(scenario, factors=(*scenario.factors, (given.target[3:], value)))
        else:
            scenario = rule.change(scenario, value)
    return scenario


def _read(target: str, value: str) -> Any:
    rule = _rule(target)
    try:
        return rule.read(value)
    except InputError as error:
        raise InputError(f"{target}: {error}") from None


def _rule(target: str) -> EditRule:
    if target.startswith("op:"):
        if not target[3:]:
            raise InputError("'op:' names no operation. Write op:GLOB, for example op:checkpoint.*=0.5x.")
        return EDITS["op:GLOB"]
    if target.startswith("stage:"):
        if not re.fullmatch(r"[0-9]{1,6}", target[6:]):
            raise InputError(f"{target!r} names no stage. Write stage:NUMBER, for example stage:2=0.5x.")
        return EDITS["stage:NUMBER"]
    return pick(EDITS, target, "edit")


def _factor(text: str) -> float:
    if text in ("none", "instant"):
        return 0.0
    return _times(text, lowest=0.0, example="none, instant or 0.5x (half the duration)")


def _speed(text: str) -> float:
    return _times(text, lowest=1e-9, example="2x (twice as fast)")


def _times(text: str, *, lowest: float, example: str) -> float:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)x", text)
    number = float(match[1]) if match else -1.0
    if number < lowest or not math.isfinite(number):
        raise InputError(f"{text!r} is not a factor. Write {example}.")
    return number


def _count(lowest: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]+", text) or int(text) < lowest:
            raise InputError(f"{text!r} is not a count. Write a whole number, at least {lowest}.")
        if int(text) > MOST_COUNTED:
            raise InputError(f"{text!r} is too many. Write a whole number, at most {MOST_COUNTED:,}.")
        return int(text)

    return read


def _cores(lowest: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        number = _number(text)
        if not lowest <= number < math.inf:
            raise InputError(f"{text!r} is not a number of cores. Write a number, at least {lowest:g}.")
        return number

    return read


def _fraction(text: str) -> float:
    number = _number(text)
    if not 0 <= number <= 1:
        raise InputError(f"{text!r} is not a fraction. Write a number from 0 to 1.")
    return number


def _size_mb(text: str) -> float | str:
    number = _number(text)
    if text != "default" and not 0 < number < math.inf:
        raise InputError(f"{text!r} is not a bucket size. Write MiB as a positive number, for example 25, or default.")
    return text if text == "default" else number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise InputError(f"{text!r} is neither true nor false. Write true or false.")
    return text.lower() == "true"


def _storage(text: str) -> float | bool:
    if text in ("shared", "parallel"):
        return text == "shared"
    return _times(text, lowest=1e-9, example="2x (twice as fast), shared or parallel")


def _buffered(text: str) -> bool:
    if text != "buffered":
        raise InputError(f"{text!r} is not a way to log. Write logging=buffered, or host.logging=none.")
    return True


def _frozen(text: str) -> int:
    match = re.fullmatch(r"frozen:([0-9]+)", text)
    if match is None or int(match[1]) < 1:
        raise InputError(f"{text!r} is not a way to collect garbage. Write gc=frozen:N, to collect every N steps.")
    return int(match[1])


def _scales(*patterns: str) -> Callable[[ResolvedEdits, float], ResolvedEdits]:
    def change(scenario: ResolvedEdits, factor: float) -> ResolvedEdits:
        return replace(scenario, factors=(*scenario.factors, *((pattern, factor) for pattern in patterns)))

    return change


def _sets(field_name: str) -> Callable[[ResolvedEdits, Any], ResolvedEdits]:
    return lambda scenario, value: replace(scenario, **{field_name: value})


def _multiplies(*field_names: str) -> Callable[[ResolvedEdits, float], ResolvedEdits]:
    return lambda scenario, factor: replace(
        scenario, **{name: getattr(scenario, name) * factor for name in field_names}
    )


def _schedule(text: str) -> str:
    pick(SCHEDULES, text, "schedule")
    return text


def _codec(text: str) -> str:
    read_codec(text)
    return text


def _no_bubble(text: str) -> float:
    if text != "none":
        raise InputError(f"{text!r} is not a size of a bubble. Write bubble=none.")
    return 0.0


def _set_storage(scenario: ResolvedEdits, value: float | bool) -> ResolvedEdits:
    return replace(scenario, storage_shared=value) if isinstance(value, bool) else replace(scenario, storage=value)


EDITS: dict[str, EditRule] = {
    "straggler": EditRule(_factor, _sets("straggler"), "excess work of a rank over its peers"),
    "input": EditRule(_factor, _multiplies("fetch", "prep", "transfer"), "all of the input: fetch, prep, transfer"),
    "input.fetch": EditRule(_factor, _multiplies("fetch"), "blocked part of loading: storage, network, sleep"),
    "input.prep": EditRule(_factor, _multiplies("prep"), "CPU part of loading: dataset and collate"),
    "input.transfer": EditRule(_factor, _multiplies("transfer"), "hand-off from the worker, copy to the device"),
    "comm": EditRule(_factor, _scales("comm.*"), "collectives after the last rank has arrived"),
    "checkpoint": EditRule(_factor, _scales("checkpoint.*"), "saves, copies, fsync, renames, loads, waits"),
    "host": EditRule(_factor, _scales("host.*"), "collections, logging, compilation, the script's code, headway's"),
    "host.gc": EditRule(_factor, _scales("host.gc", "host.collect"), "garbage collection, called for or not"),
    "host.logging": EditRule(_factor, _scales("host.logging"), "handlers of the logging module"),
    "script": EditRule(_factor, _scales("host.script"), "the script's own code between an update and a forward"),
    "op:GLOB": EditRule(_factor, _scales(), "operations whose recorded name matches, for example op:optimizer.*=0.5x"),
    "workers": EditRule(WorkerEdit.read, _sets("workers"), "loader workers per rank; 4@0+2: of loaders 0 and 2 alone"),
    "threads": EditRule(_flag, _sets("threads"), "workers are threads, no processes: true or false"),
    "watched": EditRule(_flag, _sets("watched"), "false: the script's own workers, neither tried nor looked after"),
    "prefetch": EditRule(_count(1), _sets("prefetch"), "batches in flight per worker"),
    "persistent": EditRule(_flag, _sets("persistent"), "workers outlive the epoch: true or false"),
    "cache_fraction": EditRule(_fraction, _sets("cache_fraction"), "share of examples served without fetch and prep"),
    "cache_cold": EditRule(_count(0), _sets("cache_cold"), "first epochs, which fill the cache and miss"),
    "cache_shards": EditRule(_count(1), _sets("cache_shards"), "parts in which ranks deal examples anew each epoch"),
    "bucket_mb": EditRule(_size_mb, _sets("bucket_mb"), "DDP bucket size in MiB (its bucket_cap_mb), or default"),
    "compress": EditRule(_codec, _sets("compress"), "codec in which gradients travel, for example topk:0.01 or sign"),
    "bandwidth": EditRule(_speed, _sets("bandwidth"), "speed of the links"),
    "cores": EditRule(_cores(0.05), _sets("cores"), "usable cores of the host; 1.5 = a quota of one and a half"),
    "other": EditRule(_cores(0.0), _sets("other"), "cores that other processes want, for example 0.5"),
    "storage": EditRule(_storage, _set_storage, "speed of the storage; or shared | parallel: how it serves readers"),
    "accelerator": EditRule(_speed, _sets("accelerator"), "speed of compute"),
    "compute_threads": EditRule(_count(1), _sets("compute_threads"), "torch.set_num_threads, fewer than recorded"),
    "logging": EditRule(_buffered, _sets("buffered_logging"), "buffered: handlers run in a background thread"),
    "schedule": EditRule(_schedule, _sets("schedule"), f"order of a pipeline's step: {', '.join(SCHEDULES)}"),
    "bubble": EditRule(_no_bubble, _sets("bubble"), "none: no stage of a pipeline waits for another"),
    "stage:NUMBER": EditRule(_factor, _scales(), "computations of one stage of a pipeline, for example stage:2=0.5x"),
    "gc": EditRule(_frozen, _sets("gc_every"), "frozen:N: collect every N steps on all ranks at once"),
}
"""Target -> how its value is read and what it changes. Adding an edit is adding a line here."""


# The answer to a what-if: the step time that was measured, and the one after the edits. Float seconds.


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the edits would do to the mean time of a step."""

    base_step_s: float
    """Measured, without edits."""

    step_s: float
    """Predicted."""

    interval: tuple[float, float]
    """Range of the speedup: 90 % of block resamples of the steps, widened by what the replay itself misses."""

    edits: tuple[str, ...]
    """The edits, as written."""

    note: str = ""
    """What the model had to assume; '' when nothing."""

    @property
    def speedup(self) -> float:
        """Steps per second after / before."""
        return self.base_step_s / self.step_s if self.step_s else float("inf")

    def to_json(self) -> dict[str, object]:
        """Return the object of `headway whatif --json`."""
        return {
            "schema": "headway.whatif/1",
            "base_step_s": self.base_step_s,
            "step_s": self.step_s,
            "speedup": self.speedup,
            "interval": list(self.interval),
            "edits": list(self.edits),
            "note": self.note,
        }
