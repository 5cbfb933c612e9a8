"""Does a worker_init_fn that never ran do more than seed? Run in a forked child, as the first worker would run it.

One that only seeds (transformers' `seed_worker`) changes no example of a dataset that draws nothing, so it may run in
the workers of a loader that was made without any.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import DataLoader

from headway.data.runtime.guard.purity import SEEDED
from headway.data.runtime.guard.surroundings import surroundings
from headway.data.runtime.guard.trial import positions, pretend_worker
from headway.data.runtime.guard.trial_child import in_child
from headway.runtime.script.draws import drawn, fingerprints, own_generators


def beside_seeding(loader: DataLoader[Any]) -> str | None:
    """Say what the loader's `worker_init_fn` changes beside the generators that torch seeds in workers, or None."""

    def started() -> tuple[str | None, int]:
        pretend_worker(loader)
        assert loader.worker_init_fn is not None
        own = own_generators(loader.dataset, loader.collate_fn, loader.worker_init_fn)
        generators, before = fingerprints(own), _state(loader)
        loader.worker_init_fn(0)
        moved = sorted({*drawn(generators, fingerprints(own))} - SEEDED)
        changed = [*moved, *(name for name, value in _state(loader).items() if value != before[name])]
        return (f"it changes more than seeds ({', '.join(changed)})" if changed else None), 0

    return in_child(started)[0]


def _state(loader: DataLoader[Any]) -> dict[str, object]:
    """Return what the examples of a worker may depend on, beside generators: name in words -> something comparable."""
    return {
        "the dataset": surroundings(loader.dataset),
        "the collate function": surroundings(loader.collate_fn),
        "environment variables": dict(os.environ),
        "the working folder": os.getcwd(),
        "torch's defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()),
        "open files": positions(),
    }
