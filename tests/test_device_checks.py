"""Checks of this host's device: what cannot be asked says why, what falls is said, and nothing is left behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import on_device
from headway.runtime.host import device
from headway.runtime.in_rank import device_checks
from headway.verbs.demo import doctor
from tests.paths import ROOT, python_path


def test_without_a_device_every_check_says_why_it_was_not_asked(monkeypatch, capsys):
    monkeypatch.setattr(device, "host_has_devices", lambda: False)

    before, after = doctor(json=True), doctor(device=True, json=True)
    rows = [json.loads(line)["findings"] for line in capsys.readouterr().out.splitlines()]
    added = rows[1][len(rows[0]) :]

    assert before == after
    assert [row["name"] for row in added] == [title for title, _ in device_checks.CHECKS.values()]
    assert {(row["value"], row["ok"]) for row in added} == {("not asked: the kernel knows no device", None)}


@pytest.mark.slow
def test_a_driver_that_torch_does_not_see_is_found_out_and_the_rest_not_asked(monkeypatch):
    monkeypatch.setenv(device.PRETEND, "device")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(device_checks, "CHECKS", {name: device_checks.CHECKS[name] for name in ("device", "lock")})

    seen, lock = device_checks.check(60)

    assert seen.ok is False
    assert "CUDA_VISIBLE_DEVICES" in seen.fix
    assert (lock.ok, lock.value) == (None, "not asked: torch sees no device")


def test_a_check_that_never_answers_is_ended_with_all_that_it_started():
    source = "import os, time; os.fork(); os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"
    child = device_checks.start_child([sys.executable, "-c", source], os.environ)
    assert child.stdout is not None
    pids = [int(child.stdout.readline()) for _ in range(2)]

    assert device_checks.answer_of(child, 0.2) == (None, "no answer within 0 s")
    assert all(ended(pid) for pid in pids)


def ended(pid: int) -> bool:
    """Whether a process is gone within a few seconds."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("holds", [False, True])
def test_a_thread_counts_on_while_a_mark_waits_unless_its_event_keeps_the_lock(holds):
    source = (
        "from benchmarks._pretend_device import stand_in; from tests import accelerator\n"
        f"accelerator.CudaEvent.HOLDS_LOCK = {holds}; stand_in()\n"
        "from headway.runtime.in_rank import device_checks; print(device_checks.lock().ok)"
    )
    env = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == str(not holds)


def test_the_page_on_devices_has_a_row_for_each_check():
    rows = (ROOT / "docs" / "devices.md").read_text().split("## Seen on a device")[1].split("\n## ")[0].splitlines()
    named = [line.split("`")[1] for line in rows if line.startswith("| `")]

    assert named == list(on_device.CHECKS)
