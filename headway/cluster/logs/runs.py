"""Rates that recordings measured: steps per second of a script on the devices that it ran on.

Runs of one kind (name and number of devices) on one device type count with
their median. What was not measured is filled in from what was: where other
kinds ran on both types, by `fit_rates`; otherwise by the relative speeds of
the two types, the caller's or the makers' peaks. Each rate says which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from headway.cluster.estimate import fit_rates
from headway.cluster.logs.record import RecordedQueue, relative_speed
from headway.cluster.model import Cluster, Values
from headway.core.errors import InputError
from headway.core.tables import suggestion
from headway.ledger.answers.compare import steps_per_s
from headway.ledger.answers.ledger import Ledger
from headway.trace.recording.runs import Run

MEASURED, FITTED, BY_SPEED = "measured", "fitted to other jobs", "by relative speed"
"""Where a rate is from."""


@dataclass(frozen=True, slots=True)
class RunRate:
    """What one run says."""

    model: str
    """Name of the job, as a queue has it."""

    scale: int
    """Devices that it ran on together."""

    device_type: str
    """Their type, as a cluster names it: a100."""

    steps_per_s: float
    """Of the whole job, start-up left out."""


def device_name(reported: str) -> str:
    """Return a device type as clusters and price lists name it.

    >>> device_name("NVIDIA A100-SXM4-80GB"), device_name("Tesla V100-SXM2-16GB"), device_name("cpu")
    ('a100', 'v100', 'cpu')
    """
    words = reported.lower().replace("tesla", " ").replace("nvidia", " ").replace("-", " ").split()
    return words[0] if words else reported


def run_rate(run: Run, name: str = "") -> RunRate:
    """Return what a run measured; without a name it is that of its script. Raises `InputError` without a step."""
    ledger, script = Ledger.of(run), run.facts.script
    rate = steps_per_s(ledger)
    if not rate > 0:
        raise InputError(f"{run.path} has no step: its speed is unknown. Record a run that trains.")
    own = next((Path(word).stem for word in script if word.endswith(".py")), script[0] if script else run.path.name)
    return RunRate(name or own, ledger.devices, device_name(run.facts.device_type), rate)


@dataclass(frozen=True, slots=True, eq=False)
class RunRates:
    """Rates of kinds of jobs on `W` device types."""

    names: tuple[str, ...]
    """[W] Device types."""

    kinds: tuple[tuple[str, int], ...]
    """[k] Name and number of devices."""

    rates: Values
    """[k, W] Steps per second of the whole job."""

    source: tuple[tuple[str, ...], ...]
    """[k, W] `MEASURED`, `FITTED` or `BY_SPEED`."""

    @classmethod
    def of(cls, found: Iterable[RunRate], names: Sequence[str], speed: Mapping[str, float]) -> RunRates:
        """Put runs together; raises `InputError` where a type was measured by no run and has no known speed."""
        cells: dict[tuple[str, int], dict[str, list[float]]] = {}
        for run in found:
            cells.setdefault((run.model, run.scale), {}).setdefault(run.device_type, []).append(run.steps_per_s)
        # Types that only runs have seen tie kinds together, too.
        types = (*names, *sorted({kind for row in cells.values() for kind in row} - set(names)))
        samples = np.array([[median(row.get(name, [math.nan])) for name in types] for row in cells.values()])
        rates, source = _completed(samples, types, speed)
        width = len(names)
        return cls(tuple(names), tuple(cells), rates[:, :width], tuple(row[:width] for row in source))

    def row(self, model: str, scale: int) -> Values | None:
        """[W] Rates of a job: those of its kind, else of the same name with the nearest number of devices; or None."""
        near = [k for k, kind in enumerate(self.kinds) if kind[0] == model]
        return self.rates[min(near, key=lambda k: abs(math.log(self.kinds[k][1] / scale)))] if near else None

    def exact(self, model: str, scale: int) -> Values:
        """[W] Rates of a job of a kind that was measured; raises `InputError` for another."""
        if (model, scale) not in self.kinds:
            known = [f"{name} on {size}" for name, size in self.kinds]
            raise InputError(
                f"no run measured {model!r} on {scale} devices. {suggestion(known, f'{model} on {scale}')} "
                f"Name a run of it: --runs {model}=FOLDER."
            )
        return np.asarray(self.rates[self.kinds.index((model, scale))])

    def rows(self) -> list[dict[str, object]]:
        """Return a row per kind and type, as commands print them."""
        return [
            {"model": model, "scale": scale, "device_type": name, "steps_per_s": float(rate), "source": source}
            for (model, scale), rates, sources in zip(self.kinds, self.rates, self.source, strict=True)
            for name, rate, source in zip(self.names, rates, sources, strict=True)
        ]


def queue_rates(
    queue: RecordedQueue, cluster: Cluster, speed: Mapping[str, float], runs: Sequence[RunRate]
) -> tuple[Values, RunRates]:  # fmt: skip
    """Return the rates [n, W] of a queue, where runs measured some of its jobs, and the rates that were used.

    Jobs of a recorded queue have seconds for steps: a job goes as many times as
    fast on a type as its kind does there, over the type that it ran on. Of a
    queue in steps each kind has to be measured. Jobs that no run has the name
    of follow the speeds of the types. Raises `InputError`.
    """
    width, lone = len(cluster.names), cluster.names[0] if len(cluster.names) == 1 else ""
    types = (*cluster.names, *sorted({name for name in queue.device_type if name} - set(cluster.names)))
    kinds = list(zip(queue.jobs.model, queue.jobs.scale.tolist(), strict=True))
    measured = RunRates.of(runs, types, speed)
    shown = RunRates(
        cluster.names, measured.kinds, measured.rates[:, :width], tuple(row[:width] for row in measured.source)
    )  # fmt: skip
    if queue.in_steps:
        return np.array([shown.exact(*kind) for kind in kinds]), shown
    rates = np.ones((len(kinds), width))
    for m, (kind, here) in enumerate(zip(kinds, queue.device_type, strict=True)):
        row, own = measured.row(*kind), here or lone
        if own and row is not None:
            rates[m] = row[:width] / row[types.index(own)]
        elif own and own != lone:
            rates[m] = [relative_speed(name, speed) / relative_speed(own, speed) for name in cluster.names]
    return rates, shown


def _completed(
    samples: Values, types: Sequence[str], speed: Mapping[str, float]
) -> tuple[Values, list[tuple[str, ...]]]:  # fmt: skip
    """Fill in rates [k, T] that are NaN, and say where each is from.

    Kinds that share types, directly or through others, are fitted together: nothing ties the others to them.

                 v100  p100  k80
        a      [  8     4     . ]     b on p100 is fitted: a ran on v100, where b did, and on p100
        b      [  2     .     . ]
        c      [  .     .     1 ]     c on v100, and a on k80, follow the speeds of the types
    """
    known, rates = ~np.isnan(samples), samples.copy()
    source = np.where(known, MEASURED, FITTED).astype(object)
    open_ = np.ones(len(samples), np.bool_)
    while open_.any():
        rows = np.arange(len(samples)) == int(open_.argmax())
        while True:
            columns = known[rows].any(axis=0)
            tied = known[:, columns].any(axis=1)
            if (tied == rows).all():
                break
            rows = tied
        rates[np.ix_(rows, columns)] = fit_rates(samples[np.ix_(rows, columns)])[0]
        first = int(columns.argmax())
        for j in np.flatnonzero(~columns).tolist():
            ratio = relative_speed(types[j], speed) / relative_speed(types[first], speed)
            rates[rows, j], source[rows, j] = rates[rows, first] * ratio, BY_SPEED
        open_ &= ~rows
    return rates, [tuple(map(str, row)) for row in source]
