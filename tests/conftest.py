"""Shared set-up of the test suite: one hypothesis profile, warmed kernels, no surprises from the environment."""

import compileall
import gc
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.paths import ROOT
from tests.quick_start import sitecustomize as quick_start  # before anything imports torch

gc.disable()  # until all tests are collected: what that makes stays to the end
os.environ.setdefault("OMP_NUM_THREADS", "1")
QUICK_START = str(Path(quick_start.__file__).parent)
OTHERS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", QUICK_START)]
os.environ["PYTHONPATH"] = os.pathsep.join([QUICK_START, *OTHERS])

settings.register_profile("headway", derandomize=True, deadline=None, print_blob=False)
settings.register_profile("short", settings.get_profile("headway"), max_examples=50)
settings.register_profile("fast", settings.get_profile("headway"), max_examples=20)

LONGEST = [
    "jobs", "breakers", "windows", "bootstrap", "fault_warm", "save_and_leave", "standby", "measure", "probes_comm",
    "snapshot_races", "remedy", "resume_places", "device_forks", "fault_drill", "left_behind", "fleet", "hang_watch",
    "fault_incidents", "recorded_pipeline", "world", "failing_remedies", "batch_verification", "draws_planned",
    "switch", "launch_ends", "watch", "prometheus", "compress", "resume_check", "launch", "pretend", "elastic",
    "report_browser", "checkpoint_switch", "ring_folders", "checkpoint_kills", "engine_ranks", "device_run",
    "checkpoint_life", "full_disk", "call_flops", "rereading", "fused_optimizer", "workers", "verbs", "try",
]  # fmt: skip
"""Test files that take longest, and so begin first: a run on several processes does not wait for one at its end."""

STARTS = re.compile(r"\bsubprocess\b|tests\.launching|run_script|tests\.spawn|multiprocessing|os\.fork|DataLoader")
"""What stands in files whose tests start processes, or loaders that do."""


def pytest_addoption(parser):
    """Add the option of quick checks."""
    parser.addoption("--fast", action="store_true", help="leave out what starts processes or takes long")


def pytest_configure(config):
    """Take fewer examples with --fast, and half where slow tests are left out; compile headway once where Python keeps
    nothing of what it compiles.
    """
    if sys.dont_write_bytecode and not hasattr(config, "workerinput"):
        compileall.compile_dir(ROOT / "headway", quiet=2, workers=2)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    shorter = "short" if config.getoption("markexpr") == "not slow" else "headway"
    settings.load_profile("fast" if config.getoption("fast") else shorter)


def pytest_ignore_collect(collection_path, config):
    """Leave out the longest files and all that start processes with --fast, before they are imported."""
    name = collection_path.stem
    if config.getoption("fast") and name.startswith("test_") and collection_path.suffix == ".py":
        return name.removeprefix("test_") in LONGEST or bool(STARTS.search(collection_path.read_text())) or None
    return None


def pytest_collection_modifyitems(config, items):
    """Put the tests of the longest files first, or leave the long ones out."""
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    if config.getoption("fast"):
        dropped = {item for item in items if item.get_closest_marker("slow")}
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]


def pytest_collection_finish():
    """Collect garbage from here on, and look for it among what the tests make: a collection takes 0.3 s less so."""
    gc.freeze()
    gc.enable()


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


@pytest.fixture(scope="module")
def browser():
    """Start one headless Chromium for the tests of a file."""
    engine_of = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (headway[dev])")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium on PATH (Debian: apt-get install chromium)")
    with engine_of.sync_playwright() as engine:
        running = engine.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()
