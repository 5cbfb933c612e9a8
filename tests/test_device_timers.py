"""Device timers on an emulated accelerator, in real time: when the device worked, and never by waiting for it."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headway.runtime import device
from headway.runtime.device import emulate
from headway.runtime.device_timers import QUERIES, WORK, AllTimers, DeviceTimers
from tests.accelerator import Accelerator, now


def overlap_ns(found: list[tuple[int, int]], truth: list[tuple[int, int]]) -> int:
    """Return for how long both were under way."""
    return sum(max(0, min(a, b) - max(c, d)) for c, a in found for d, b in truth)


def step(timing: DeviceTimers, accelerator: Accelerator, *, load_s: float, work_ns: int, host_s: float) -> None:
    """Wait for a batch, launch forward, backward and update."""
    time.sleep(load_s)
    timing.ready()
    accelerator.launch(work_ns // 3)
    time.sleep(host_s)
    timing.turned()
    accelerator.launch(work_ns // 2)
    timing.ended()
    accelerator.launch(work_ns // 6)
    timing.updated()


@pytest.mark.parametrize(
    ("load_s", "work_ns", "host_s", "depth"),
    [(0.01, 6_000_000, 0.001, 1024), (0.001, 9_000_000, 0.001, 6), (0.001, 9_000_000, 0.001, 24)],
    ids=["input-bound", "device-bound, two steps ahead", "device-bound, eight steps ahead"],
)
def test_a_device_is_at_work_when_its_timeline_says_so(load_s, work_ns, host_s, depth):
    accelerator, written = Accelerator(depth=depth), []
    timing = DeviceTimers(lambda *r: written.append(r), accelerator)
    start = now()
    for _ in range(40):
        step(timing, accelerator, load_s=load_s, work_ns=work_ns, host_s=host_s)
    accelerator.synchronize()
    timing.finish()
    wall = accelerator.busy_until_ns - start
    found = [(r[1], r[1] + r[2]) for r in written if r[0] == WORK]
    truth = sum(end - begin for begin, end in accelerator.work)

    assert overlap_ns(found, accelerator.work) >= 0.98 * truth
    assert abs(sum(end - begin for begin, end in found) - truth) <= 0.03 * wall
    assert accelerator.made_events <= 64
    assert accelerator.queries <= QUERIES * 40 + 40


def test_the_clock_of_a_device_that_is_idle_now_and_then_is_known_to_a_millisecond():
    accelerator, written = Accelerator(), []
    timing = DeviceTimers(lambda *r: written.append(r), accelerator)
    for _ in range(10):
        step(timing, accelerator, load_s=0.004, work_ns=2_000_000, host_s=0.0)
    accelerator.synchronize()
    timing.finish()
    begun = np.array([r[1] for r in written if r[0] == WORK])
    truth = np.array([begin for begin, _ in accelerator.work])

    assert len(begun) >= 8
    assert np.abs(begun[:, None] - truth).min(axis=1).max() < 1_000_000


class Probes:
    """What `AllTimers` needs."""

    def __init__(self) -> None:
        self.tables, self.failures, self.written = {}, [], []

    def emit(self, *record: int) -> None:
        self.written.append(record)

    def failed(self, name: str, cause: BaseException) -> None:
        self.failures.append(cause)


def test_the_device_of_the_loss_is_timed_and_not_the_current_one_and_each_one_by_itself():
    devices = [Accelerator(index=0), Accelerator(index=3)]
    undo = emulate(lambda tensor: devices[int(tensor)], {})
    try:
        every = AllTimers(Probes())
        assert not every
        assert every.of(torch.tensor(1)) is every.of(torch.tensor(1))
        every.ready()
        assert [one.made_events for one in devices] == [0, 1]
        every.of(torch.tensor(0))
        every.ready()
        assert [one.made_events for one in devices] == [1, 2]
    finally:
        undo()


def test_nothing_is_recorded_while_a_graph_is_captured_and_all_goes_on_after_it():
    accelerator, probes = Accelerator(), Probes()
    undo = emulate(lambda tensor: accelerator, {})
    try:
        every = AllTimers(probes)
        timing = every.of(torch.ones(1))
        for capturing in (False, True, False):
            accelerator.capturing = capturing  # an event would be refused
            every.ready()
            every.act(timing, DeviceTimers.turned)
            accelerator.capturing = False
            accelerator.launch(1_000_000)
            accelerator.capturing = capturing
            every.act(timing, DeviceTimers.ended)
            every.updated()
        accelerator.synchronize()
        facts = every.facts()
    finally:
        undo()

    assert not probes.failures
    assert facts["given_up"] == 0
    assert sum(record[0] == WORK for record in probes.written) >= 2


def test_generators_are_those_of_the_devices_in_use_and_none_is_asked_while_a_graph_is_captured(monkeypatch):
    used = Accelerator(index=2)
    backend = SimpleNamespace(
        is_initialized=lambda: True, default_generators=tuple("abcd"), current_device=lambda: 1,
        is_current_stream_capturing=lambda: False,
    )  # fmt: skip
    monkeypatch.setattr(device, "_MODULES", {"cuda": "made_backend"})
    monkeypatch.setitem(sys.modules, "made_backend", backend)
    undo = device.emulate(lambda _: used, {("cuda", 2): used})
    try:
        assert device.generators() == ["b", "c"]
        used.capturing = True
        assert device.generators() == []
    finally:
        undo()
