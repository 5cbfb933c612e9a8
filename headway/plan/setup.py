"""What a plan has to respect: the job, the host it ran on, and the limits.

Use `Setup.from_facts(run.facts)`; everything in it can be overridden. Memory is
bytes per host, cores are usable cores per host, counts are per rank unless a
name says otherwise.

>>> setup = Setup.from_facts({"world_size": 4, "nproc": 2, "cores": 8, "device_type": "cpu"}, memory_bytes=10**9)
>>> setup.limits.memory_per_rank_bytes(setup), setup.limits.max_workers
(400000000, 16)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from headway.core.errors import InputError
from headway.core.units import NS_PER_S
from headway.trace.events.loader_facts import GivenUp, LoaderFacts
from headway.trace.events.trace import Trace
from headway.trace.recording.gaps import without_pauses
from headway.trace.recording.run_facts import RunFacts

MEMORY_FRACTION = 0.8
"""Share of the available memory that remedies may use together."""

LEAST_WORKERS = 8
"""Workers per rank that are tried even on a host with few cores: loads that sleep need no core."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What the plan may use."""

    memory_bytes: int
    """Memory per host that is free for caches and workers."""

    max_workers: int
    """Loader workers per rank, at most."""

    allow: tuple[str, ...] = ()
    """What the user has granted, entries of `headway.core.files.planfile.ALLOWANCES`: none of them implies another."""

    steps: int | None = None
    """Steps of the job that is planned for; None = as many as were recorded."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.steps is not None and self.steps < 1:
            raise InputError(f"the job to plan for has {self.steps} steps; give a number from 1 upwards.")
        if self.memory_bytes < 0 or self.max_workers < 0:
            raise InputError(
                f"limits are {self.memory_bytes} bytes and {self.max_workers} workers; pass numbers from 0 upwards."
            )

    def memory_per_rank_bytes(self, setup: Setup) -> int:
        """Return what one rank's remedies may use."""
        return int(MEMORY_FRACTION * self.memory_bytes) // setup.ranks_per_host


@dataclass(frozen=True, slots=True)
class Setup:
    """The job and its hardware."""

    world_size: int
    """Ranks of the job."""

    ranks_per_host: int
    """Ranks that share one host's cores and memory."""

    cores: int
    """Usable cores per host."""

    device_type: str
    """'cpu' or the name of the accelerator."""

    limits: PlanLimits
    """What the plan may use."""

    loaders: Mapping[str, LoaderFacts] = field(default_factory=dict)
    """Loader -> its facts in run.json, as remedies in force left them."""

    in_force: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Remedy that the run had applied -> its parameters there."""

    given_up: Mapping[str, GivenUp] = field(default_factory=dict)
    """Remedy that the run refused or withdrew -> its parameters there, and why."""

    def __post_init__(self) -> None:
        """Check the counts."""
        for name in ("world_size", "ranks_per_host", "cores"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1.")

    @property
    def accelerated(self) -> bool:
        """Say whether the job computes on an accelerator."""
        return self.device_type != "cpu"

    @classmethod
    def from_facts(
        cls,
        facts: RunFacts | Mapping[str, Any],
        *,
        memory_bytes: int | None = None,
        max_workers: int | None = None,
        allow: tuple[str, ...] = (),
        steps: int | None = None,
    ) -> Setup:
        """Build it from run.json; what is left out is taken from the run, memory from this host as it is now."""
        facts = RunFacts.of(facts)
        cores, world_size = facts.cores or 1, facts.world_size or 1
        free = memory_bytes if memory_bytes is not None else facts.memory_available_bytes
        # A merged run counts the processes of all its hosts; the fullest host is what limits.
        per_host = -(-(facts.nproc or world_size) // max(1, len(facts.hosts)))
        return cls(
            world_size=world_size,
            ranks_per_host=min(world_size, per_host),
            cores=cores,
            device_type=facts.device_type,
            limits=PlanLimits(
                memory_bytes=int(psutil.virtual_memory().available) if free is None else free,
                max_workers=max(LEAST_WORKERS, 2 * cores) if max_workers is None else max_workers,
                allow=allow,
                steps=steps,
            ),
            loaders=facts.effective_loaders,
            in_force=facts.in_force,
            given_up=facts.given_up,
        )


# The pace of a recorded run: what a step takes in the middle of it, one-time costs of its loaders spread over all.
#
# Remedies are held against it while they run (`data.runtime.following.withdrawal`): by the same formula, over 50 steps.

CHUNK = 10
"""Steps whose mean is one value; their median passes over rare long steps."""


def step_seconds(ranks: Iterable[Trace]) -> float | None:
    """Return the pace of the first of `ranks`, a trace each, that has enough steps; None when none has. Seconds."""
    return next((pace for trace in ranks if (pace := _pace(without_pauses(trace))) is not None), None)


def _pace(trace: Trace) -> float | None:
    """Return the median of the mean times of `CHUNK` optimizer steps, None where there are too few.

    Time in `iter(loader)` is left out of the median and spread over all steps: it comes seldom, and counts all the
    same.
    """
    events, steps = trace.events, trace.named("optimizer.step")
    ends = np.sort((events["start_ns"] + events["duration_ns"])[steps])
    made = trace.named("input.iter")
    begun, taken = events["start_ns"][made], events["duration_ns"][made]
    bounds = ends[::CHUNK]
    if len(bounds) < 2:
        return None
    inside = (begun >= bounds[0]) & (begun < bounds[-1])
    making = np.zeros(len(bounds) - 1)
    np.add.at(making, np.searchsorted(bounds, begun[inside], side="right") - 1, taken[inside])
    step_ns = np.median(np.diff(bounds) - making) + making.mean()
    return max(float(step_ns) / CHUNK, 1.0) / NS_PER_S
