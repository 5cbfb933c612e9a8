"""A queue as it was recorded: who asked for what, when each job started and ended, on which devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from headway.cluster.model import MOST_DEVICES, Cluster, Jobs, Values
from headway.core.errors import FormatError, InputError
from headway.core.files.bounds import MOST, number_of
from headway.core.tables import suggestion
from headway.cost.specs import shipped


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job of a log; times in seconds on one clock."""

    id: str
    """Unique name."""

    scale: int
    """Devices."""

    arrival_s: float
    """When it was submitted."""

    run_s: float
    """How long it ran."""

    start_s: float = math.nan
    """When it started; NaN = the log does not say."""

    device_type: str = ""
    """What it ran on; empty = the log does not say."""

    owner: str = ""
    """Who submitted it."""

    model: str = ""
    """What it was, for people."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedQueue:
    """The jobs of a log that ran, in order of arrival from second 0 on."""

    jobs: Jobs
    """[n] One step of a job is a second on what it ran on."""

    start_s: Values
    """[n] When each started; NaN = not known."""

    device_type: tuple[str, ...]
    """[n] What each ran on, or empty."""

    skipped: int = 0
    """Jobs of the log that never ran or asked for no devices."""

    in_steps: bool = False
    """A step of a job is one of its training: only runs say how long it takes."""

    @classmethod
    def of(
        cls, records: Iterable[JobRecord], source: object, skipped: int = 0, in_steps: bool = False
    ) -> RecordedQueue:
        """Sort records by arrival; raises `FormatError` when there are none, and on numbers that no log has."""
        rows = list(records)
        for row in rows:
            where = f"{source}: job {row.id!r}"
            number_of(row.scale, where, least=1, most=MOST_DEVICES)
            for value in (row.arrival_s, row.run_s, *([] if math.isnan(row.start_s) else [row.start_s])):
                number_of(value, where, least=-MOST)
        rows.sort(key=attrgetter("arrival_s"))
        if not rows:
            raise FormatError(f"{source} holds no job that ran on devices. Export finished jobs that asked for some.")
        first_s = rows[0].arrival_s
        jobs = Jobs(
            [row.id for row in rows], np.array([row.scale for row in rows]), np.array([row.run_s for row in rows]),
            np.array([row.arrival_s - first_s for row in rows]), [row.model for row in rows],
            [row.owner for row in rows],
        )  # fmt: skip
        start_s = np.array([row.start_s - first_s for row in rows])
        early = start_s < jobs.arrival_s - 1
        if early.any():
            raise FormatError(
                f"{source}: job {jobs.ids[int(early.argmax())]!r} starts before it is submitted. Remove it."
            )
        return cls(jobs, start_s, tuple(row.device_type for row in rows), skipped, in_steps)

    def rates(self, cluster: Cluster, speed: Mapping[str, float]) -> Values:
        """[n, W] Steps (seconds as recorded) per second on each type, by relative speeds of types.

        A job whose type is not known runs equally fast everywhere: nothing is
        gained by moving it. Raises `InputError` for a type without a speed,
        and for a queue in steps, whose rates only runs can say (`runs.queue_rates`).
        """
        if self.in_steps:
            raise InputError("the queue has num_steps; how long a step takes, runs say. Pass --runs NAME=FOLDER,...")
        if len(cluster.names) == 1 and not speed:
            return np.ones((len(self.jobs), 1))
        fast = np.array([relative_speed(name, speed) for name in cluster.names])
        own = {name: relative_speed(name, speed) for name in set(self.device_type) if name}
        base = np.array([own.get(name, math.nan) for name in self.device_type])
        return np.where(np.isnan(base)[:, None], 1.0, fast / base[:, None])


def relative_speed(name: str, given: Mapping[str, float]) -> float:
    """Relative speed of a device type: as given, or the makers' peak of 16-bit arithmetic."""
    if name in given:
        return given[name]
    specs = shipped().devices
    near = [device for key, device in specs.items() if key.lower().split("-")[0] == name.lower().split("-")[0]]
    peaks = [device.flops_per_s.get("fp16") or device.flops_per_s.get("bf16") for device in near]
    known = [peak for peak in peaks if peak]
    if not known:
        raise InputError(
            f"no speed of device type {name!r} is known. Pass --speed {name}=1.0,... "
            f"{suggestion({key.split('-')[0].lower() for key in specs}, name)}"
        )
    return min(known)
