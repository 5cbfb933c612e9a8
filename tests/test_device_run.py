"""A training script that is not edited, on an emulated device, under `headway run`: its ledger and its predictions."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.device_truth import window_mixes, windows
from headway.ledger.answers.ledger import Ledger
from headway.sim.recorded.program import Program
from headway.trace.recording.runs import Run
from tests.recorded_device import recorded_loop

MIXES = {
    # forward, backward and copy ms, launches in the queue, load ms, read every; what bounds it
    "the host two steps ahead": (4, 8, 0, 24, 3, 0, "device"),
    "a read in each step": (8, 16, 0, 1000, 1, 1, "device"),
    "a pageable copy in each step": (8, 16, 1, 1000, 1, 0, "device"),
    "a slow loader": (1, 2, 0, 1000, 14, 0, "input"),
}


def run(folder: Path, mix: tuple[int, int, int, int, int, int, str]) -> tuple[Run, list[tuple[int, int]]]:
    forward, backward, copy, depth, load, read_every, _ = mix
    [truth] = recorded_loop(
        folder,
        {"forward_ms": forward, "backward_ms": backward, "update_ms": 1, "copy_ms": copy, "depth": depth},
        {"steps": 80, "load_ms": load, "read_every": read_every, "blocking": int(copy > 0)},
    )
    return Run.open(folder / "run"), truth.work


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_the_ledger_and_predictions_know_the_device_from_its_host(tmp_path, mix):
    recorded, work = run(tmp_path, mix)
    forward_ms, backward_ms = mix[:2]
    ledger, program = Ledger.of(recorded), Program.from_run(recorded)
    busy_ns = sum(end - start for start, end in work)
    loading = program.predict(["input.fetch=none"], interval=False, max_discrepancy=0.2).speedup

    assert sum(ledger.ledger_ns.values()) == ledger.wall_ns
    assert abs(ledger.ledger_ns["useful"] - busy_ns) <= 0.06 * ledger.step_wall_ns.sum()
    assert ledger.bound == mix[-1]
    assert ledger.basis["useful"] == "device events"
    if mix[3] < 1000:  # nothing is won by a faster loader where the device is never idle
        assert loading <= 1.03
        twice, most = (
            program.predict([f"accelerator={factor}x"], interval=False, max_discrepancy=0.2).speedup
            for factor in (2, 1000)
        )
        assert most > 1.03
        assert twice >= 0.85 * min(2, most)  # as far as the work of the host itself, which a busy one slows, lets it
    elif mix[-1] == "input":
        assert loading >= 1.5
        step_ms = 1e3 * program.measured_s
        assert loading <= 1.15 * step_ms / (forward_ms + backward_ms + 1)  # the device is the next limit
    elif mix[2]:  # the host waits in the copy until the device is done, and that is no time of the copy
        assert loading <= 1.1
        assert ledger.spans["input.transfer"].total_ns > 3 * ledger.sub_ns["input.transfer"]


@pytest.mark.slow
def test_a_copy_that_its_host_waits_for_waits_for_the_device_once_the_loader_is_faster(tmp_path):
    measured = []
    for load_ms in (14, 0):
        folder = tmp_path / f"load-{load_ms}"
        folder.mkdir()
        device = {"forward_ms": 1, "backward_ms": 8, "update_ms": 1}
        recorded_loop(folder, device, {"steps": 60, "load_ms": load_ms, "host_ms": 8, "blocking": 1})
        measured.append(Program.from_run(Run.open(folder / "run")))
    before, after = measured

    # While a batch is read the device gets done, so that no copy is seen to wait for it.
    predicted = before.predict(["input.fetch=none"], interval=False, max_discrepancy=0.2)
    assert predicted.step_s == pytest.approx(after.measured_s, rel=0.15)


@pytest.mark.slow
def test_a_deep_window_leaves_the_ledger_as_true_as_it_was():
    """Kernels as short as their launches; the step under the profiler takes 1.5 times as long."""
    [row] = windows([mix for mix in window_mixes() if mix.launches > 4])

    assert row["met"], row


@pytest.mark.slow
@pytest.mark.parametrize(("launches", "windows"), [(4, 1), (100, 0)])
def test_no_second_window_opens_where_steps_stay_slower_and_none_where_launches_bound_them(launches, windows, tmp_path):
    device = {
        "forward_ms": 0.3 + windows, "backward_ms": 0.6 + 3 * windows, "update_ms": 0.1 + windows, "launches": launches,
        "profiler": 0.5,
    }  # fmt: skip
    loop = {"steps": 250 if windows else 150, "load_ms": 4 * windows}
    recorded_loop(tmp_path, {**device, "stays": 1.0 * windows}, loop, words=("--windows", "1"))
    run = Run.open(tmp_path / "run")
    ledger, tables = Ledger.of(run), json.loads((run.path / "tables/r0.json").read_text())

    assert len(run.windows()) == windows
    if windows:
        opened = int(next(iter(tables["windows"])))
        assert "longer behind a window" in tables["windows_stopped"]
        assert np.flatnonzero(ledger.undisturbed).tolist() == list(range(opened))
        assert Program.from_run(run).recording.recorded_steps == opened
        assert "since the profiler was first used" in " ".join(ledger.notes)
