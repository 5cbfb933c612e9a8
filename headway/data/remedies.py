"""The remedies of the input: workers, threads, a cache, a server; and what measures and checks loaders inside ranks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from headway.core.remedies import Count, Flag, Names, Parameters, Positive, RemedyRecord, Size


class WorkersParameters(Parameters, frozen=True):
    """Parameters of `data.workers`, in the words of torch's DataLoader."""

    num_workers: Size = 2
    prefetch_factor: Size = 2
    """Batches under way per worker."""
    persistent_workers: Flag = True
    pin_memory: Flag = False
    max_workers: Size | None = None
    """Most workers that the tuner may come to; None: as `num_workers`."""


class ThreadsParameters(Parameters, frozen=True):
    """Parameters of `data.threads`."""

    num_workers: Size = 2
    """Threads."""
    prefetch_factor: Size = 2
    """Batches under way per thread."""
    blocked_datasets: Names = field(default_factory=list)
    """Classes whose loads were recorded to block: whether threads would wait for the lock is not tried again."""


class CacheParameters(Parameters, frozen=True):
    """Parameters of `data.cache`."""

    bytes: Size
    """Budget of a rank, shared by its datasets."""


class ServerParameters(Parameters, frozen=True):
    """Parameters of `data.server`."""

    cache_bytes: Count = 0
    """Memory of the server for examples."""
    idle_s: Positive = 60.0
    """Seconds without a reader until the server ends."""


class ResumeParameters(Parameters, frozen=True):
    """Parameters of `check.resume`."""

    batches: Size = 12
    """Global batches that are compared."""


Batches = Annotated[dict[str, Count], Meta(description="a map from groups of loaders to batches")]


class PhaseParameters(Parameters, frozen=True):
    """Parameters of a phase of `headway data stalls`."""

    steps: Size
    warmup: Count
    """First steps, which do not count."""
    batches: Batches = field(default_factory=dict)
    """Of `measure.warm`: group of a loader -> batches to fill."""
    epoch_batches: Batches = field(default_factory=dict)
    """Of `measure.synthetic`: group of a loader -> batches of a pass."""


FETCHING = ("input.fetch", "input.prep")

REMEDIES = (
    RemedyRecord("data.workers", WorkersParameters, "headway.data.workers.apply:workers", FETCHING),
    RemedyRecord(
        "data.threads", ThreadsParameters, "headway.data.workers.torch_threads:threads",
        (*FETCHING, "input.transfer"),
        allow="data.threads", changes="threads share the dataset's objects with the loop",
    ),
    RemedyRecord("data.cache", CacheParameters, "headway.data.cached.apply:cache", FETCHING),
    RemedyRecord(
        "data.server", ServerParameters, "headway.data.service.apply:server", FETCHING,
        allow="result-equivalent", changes="it changes the order of the examples",
    ),
)  # fmt: skip
"""What a plan may hold of this room."""

MEASUREMENTS = (
    RemedyRecord("measure.cold", PhaseParameters, "headway.data.stalls.torch_measurements:cold"),
    RemedyRecord("measure.warm", PhaseParameters, "headway.data.stalls.torch_measurements:warm"),
    RemedyRecord("measure.synthetic", PhaseParameters, "headway.data.stalls.torch_measurements:synthetic"),
)
"""Phases of `headway data stalls -- SCRIPT`, in order."""

CHECKS = (RemedyRecord("check.resume", ResumeParameters, "headway.data.loader.resume_check:resume"),)
"""What `headway data verify-resume` makes inside a rank."""
