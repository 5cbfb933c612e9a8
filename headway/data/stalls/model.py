"""Where an input pipeline loses accelerator time, and what would win it back: DS-Analyzer from one ordinary run.

DS-Analyzer (VLDB 2021) times three runs: synthetic data (T1), everything
cached (T3), everything read (T2); prep stall = T3 - T1, fetch stall = T2 - T3.
`attribute` gets the same differences from one recorded run by replaying it
with fetch = 0 and with fetch = prep = 0; `from_phases` computes them from a
measurement. Predictions come from the replay too: it knows about bounded
queues and uneven batches, which the published closed form, speed =
min(F(x), P(cores), G), does not. Times are float seconds per step.

>>> report = from_phases([1.0] * 9, [1.5] * 9, [2.5] * 9)
>>> report.compute_s, report.prep_s, report.fetch_s, report.bottleneck
(1.0, 0.5, 1.0, 'fetch')
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headway.core.errors import InputError
from headway.sim.recorded.program import Program
from headway.sim.whatif import Prediction
from headway.trace.events.loader_facts import LoaderFacts

WARMUP_STEPS = 5
"""Steps of each measured phase that do not count."""

STALL_FRACTION = 0.05
"""A pipeline whose fetch and prep stall for less of the step is not the bottleneck."""

TRANSFER_FRACTION = 0.25
"""Handing batches over always costs something; it is the bottleneck from this share of the step on."""

NOISE = 0.01
"""Phases may come out in the wrong order by this share of the step; more is flagged."""

FIX_WORKERS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of workers that are tried as a fix."""

FIX_CACHE = (0.25, 0.5, 0.75, 1.0)
"""Cache fractions that are tried as a fix."""


@dataclass(frozen=True, slots=True)
class StallReport:
    """Time of a step, split: compute + fetch + prep + transfer = the step."""

    compute_s: float
    """Step with an input that is always there (everything else of the step included)."""

    fetch_s: float
    """Stall that reading costs: storage, network."""

    prep_s: float
    """Stall that preprocessing costs."""

    transfer_s: float
    """Stall that handing batches over and copying them costs."""

    steps_per_epoch: float
    """Steps of one pass over the data; 0 = not known."""

    bottleneck: str
    """'fetch', 'prep', 'transfer' or 'compute'."""

    fix: tuple[tuple[str, float], ...] = ()
    """(edit, seconds per step won), best first."""

    flags: tuple[str, ...] = ()
    """What does not fit together: phases in the wrong order."""

    note: str = ""
    """What the replay had to assume."""

    @property
    def step_s(self) -> float:
        """Return the whole step."""
        return self.compute_s + self.fetch_s + self.prep_s + self.transfer_s

    @property
    def fractions(self) -> dict[str, float]:
        """Return each part's share of the step; they sum to 1."""
        parts = {name: getattr(self, f"{name}_s") for name in ("compute", "fetch", "prep", "transfer")}
        return {name: value / self.step_s for name, value in parts.items()}

    def per_epoch(self) -> dict[str, float]:
        """Return seconds per epoch of each part, empty when the length of an epoch is not known."""
        if not self.steps_per_epoch:
            return {}
        return {name: share * self.step_s * self.steps_per_epoch for name, share in self.fractions.items()}

    def to_json(self) -> dict[str, object]:
        """Return the object of `headway data stalls --json`."""
        return {
            "schema": "headway.stalls/1", "step_s": self.step_s, "compute_s": self.compute_s, "fetch_s": self.fetch_s,
            "prep_s": self.prep_s, "transfer_s": self.transfer_s, "fractions": self.fractions,
            "per_epoch_s": self.per_epoch(), "bottleneck": self.bottleneck, "fix": [list(pair) for pair in self.fix],
            "flags": list(self.flags), "note": self.note,
        }  # fmt: skip


def attribute(program: Program, edits: Sequence[str] = (), *, fixes: bool = True) -> StallReport:
    """Split the step of a recorded run by replay, and predict what each knob would win.

    With `edits` the report is of the run as they would have it. Raises
    `InputError` when the run read no data or an edit is wrong,
    `BarMissedError` when the replay does not match the run.
    """
    _check_loads(program)
    base = program.predict(edits)
    phases = (["input.fetch=none"], ["input.fetch=none", "input.prep=none"], ["input=none"])
    step_s = [base.step_s, *(program.predict([*edits, *phase], interval=False).step_s for phase in phases)]
    fix = _fixes(program, edits, base) if fixes else ()
    return _report(step_s, _steps_per_epoch(program), fix=fix, note=base.note)


def from_phases(
    ingest_s: Sequence[float], cached_s: Sequence[float], cold_s: Sequence[float], *, warmup: int = WARMUP_STEPS
) -> StallReport:
    """Split a step from measured phases: step times with synthetic data (T1), cached data (T3) and cold data (T2).

    The first `warmup` steps of each phase are dropped. Raises `InputError` on
    a phase that is shorter than that, or that took no time.
    """
    means = []
    for name, phase in (("ingest", ingest_s), ("cached", cached_s), ("cold", cold_s)):
        times = np.asarray(phase, np.float64)
        if times.size <= warmup:
            raise InputError(
                f"the {name} phase has {times.size} steps, of which {warmup} are warm-up. Measure more steps."
            )
        if not np.isfinite(times).all() or not times[warmup:].sum() > 0:
            raise InputError(f"the {name} phase took no time, or its times are not finite. Measure it again.")
        means.append(float(times[warmup:].mean()))
    ingest, cached, cold = means
    return _report([cold, cached, ingest, ingest], 0.0)


def what_if(
    program: Program,
    *,
    cache_fraction: float | None = None,
    workers: int | None = None,
    cores: int | None = None,
    storage: float | None = None,
    accelerator: float | None = None,
    shared_storage: bool | None = None,
) -> Prediction:
    """Predict the step with another cache (fraction), workers, cores, or storage / accelerator x times as fast.

    `shared_storage` overrides what the run shows: True = all readers share one pipe. Raises `InputError` on a value
    that its knob cannot take, and as `Program.predict` does.
    """
    if storage is not None and not storage > 0:
        raise InputError(f"storage is {storage}; give how many times as fast it is, above 0.")
    edits = [] if cache_fraction is None else [f"cache_fraction={cache_fraction}"]
    edits += [] if workers is None else [f"workers={workers}"]
    edits += [] if cores is None else [f"cores={cores}"]
    edits += [] if accelerator is None else [f"accelerator={accelerator}x"]
    if storage is not None and shared_storage is not None and storage != 1:
        # One edit per target: faster storage is the same as a shorter blocked part.
        edits.append(f"input.fetch={1 / storage}x")
    elif storage is not None:
        edits.append(f"storage={storage}x")
    if shared_storage is not None:
        edits.append(f"storage={'shared' if shared_storage else 'parallel'}")
    return program.predict(edits)


def _check_loads(program: Program) -> None:
    loads = sum(batches.seq.size for batches in program.recording.batches)
    if not loads or not any(batches.part_ns.any() for batches in program.recording.batches):
        raise InputError("the run has no recorded load of a DataLoader. Record a run that reads its data through one.")
    for batches, model in zip(program.recording.batches, program.models, strict=True):
        for group, size in zip(batches.group, model.batch_size, strict=True):
            length = program.facts.loaders.get(str(int(group)), LoaderFacts()).dataset_size
            if length is not None and length < size:
                raise InputError(
                    f"the dataset of loader {group} has {length} examples, fewer than one batch of {size}. "
                    "Use a smaller batch."
                )


def _steps_per_epoch(program: Program) -> float:
    """Return the mean number of steps per completed pass, 0 when none was completed."""
    batches = program.recording.batches[0]
    passes = np.bincount(batches.iterator, minlength=batches.group.size)
    followed = [bool((batches.group[index + 1 :] == group).any()) for index, group in enumerate(batches.group)]
    done = (batches.end_segment >= 0) | np.array(followed, dtype=bool)
    per_step = batches.seq.size / max(1, program.recording.num_steps)
    return float(passes[done].mean() / per_step) if done.any() and per_step else 0.0


def _report(
    step_s: Sequence[float], steps_per_epoch: float, *, fix: tuple[tuple[str, float], ...] = (), note: str = ""
) -> StallReport:
    """Build the report from step times: all, without fetch, without prep either, without transfer either.

    Times in the wrong order by more than noise are flagged, and never become a negative stall.
    """
    flags = []
    names = ("cold data", "cached data", "no fetch and no prep", "no input at all")
    ordered = [step_s[0]]
    for before, after, name, other in zip(step_s, step_s[1:], names[1:], names, strict=False):
        if after > before * (1 + NOISE):
            flags.append(f"the step with {name} took longer than with {other} ({after:.4g} s against {before:.4g} s)")
        ordered.append(min(after, ordered[-1]))
    fetch, prep, transfer = (before - after for before, after in pairwise(ordered))
    # Fetch or prep if they matter, else transfer if it does, else compute.
    bottleneck = "transfer" if transfer > TRANSFER_FRACTION * ordered[0] else "compute"
    if fetch + prep > STALL_FRACTION * ordered[0]:
        bottleneck = "fetch" if fetch >= prep else "prep"
    return StallReport(ordered[3], fetch, prep, transfer, steps_per_epoch, bottleneck, fix, tuple(flags), note)


def _fixes(program: Program, edits: Sequence[str], base: Prediction) -> tuple[tuple[str, float], ...]:
    """Return the smallest setting of each knob that comes within 1 % of the knob's best, with what it wins."""
    knobs = (
        [f"workers={count}" for count in FIX_WORKERS],
        [f"cache_fraction={fraction:g}" for fraction in FIX_CACHE],
        [f"cores={2 * program.cores}"],
        ["storage=2x"],
    )
    taken = {edit.partition("=")[0] for edit in edits}
    fixes = []
    for settings in knobs:
        if settings[0].partition("=")[0] in taken:
            continue
        step_s = {edit: program.predict([*edits, edit], interval=False).step_s for edit in settings}
        edit = next(edit for edit in settings if step_s[edit] <= 1.01 * min(step_s.values()))
        gain_s = base.step_s - step_s[edit]
        if gain_s > NOISE * base.step_s:
            fixes.append((edit, gain_s))
    return tuple(sorted(fixes, key=lambda pair: -pair[1]))
