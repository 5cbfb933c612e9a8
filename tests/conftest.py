"""Shared set-up of the test suite: one hypothesis profile, warmed kernels, no surprises from the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.quick_start import sitecustomize as quick_start  # before anything imports torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
QUICK_START = str(Path(quick_start.__file__).parent)
OTHERS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", QUICK_START)]
os.environ["PYTHONPATH"] = os.pathsep.join([QUICK_START, *OTHERS])

settings.register_profile("headway", derandomize=True, deadline=None, print_blob=False)
settings.load_profile("headway")

LONGEST = [
    "jobs", "world", "breakers", "engine_ranks", "checkpoint_life", "full_disk", "save_and_leave", "bootstrap",
    "fault_drill", "fault_incidents",
    "windows", "served_kills", "probes_comm", "left_behind", "elastic", "ring_folders",
    "remedy", "resume_places", "draws_planned", "launch_attempts", "launch_ends", "fleet", "pretend",
    "hang_watch", "resume_check", "snapshot_races", "failing_remedies", "cli", "switch", "prometheus",
]  # fmt: skip
"""Test files that take longest, and so begin first: a run on several processes does not wait for one at its end."""


def pytest_collection_modifyitems(items):
    """Put the tests of the longest files first."""
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(autouse=True)
def _torch_as_it_was():
    """Take an emulated accelerator out from under torch."""
    yield
    if (emulation := sys.modules.get("tests.accelerator")) is not None:
        emulation.leave_torch()


@pytest.fixture
def whole_start(monkeypatch):
    """Start processes as users do: what sitecustomize changes before a script shows in what is known of its start."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(OTHERS))
