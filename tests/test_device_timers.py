"""Device timers on an emulated accelerator, in real time: when the device worked, and never by waiting for it."""

import threading
import time

import numpy as np
import pytest
import torch

from headway.runtime.host import device
from headway.runtime.host.device import emulate
from headway.runtime.recorder.device_timers import QUERIES, UNKNOWN, WORK, AllTimers, DeviceTimers
from tests.accelerator import Accelerator, CudaEvent, Stream, now


class VirtualClock:
    """Time that passes by a microsecond at each look, and while somebody sleeps: no load of the host disturbs it."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000

    def now(self) -> int:
        """Return the time, ns."""
        self.ns += 1_000
        return self.ns

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.ns += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch):
    """Have the device and its timers go by a virtual clock."""
    made = VirtualClock()
    monkeypatch.setattr("headway.runtime.recorder.device_timers.now", made.now)
    monkeypatch.setattr("tests.accelerator.now", made.now)
    monkeypatch.setattr("tests.accelerator.time", made)
    return made


class Timed:
    """An emulated device with its timers, and what they wrote."""

    def __init__(self, depth: int = 1024) -> None:
        self.accelerator, self.written = Accelerator(depth=depth), []
        self.timing = DeviceTimers(lambda *record: self.written.append(record), self.accelerator.device)

    def finish(self, *, wait: bool = True) -> tuple[int, int, int]:
        """End the timing, of an idle device where it waits; return known work, unknown work and the truth, ns."""
        if wait:
            self.accelerator.synchronize()
        self.timing.finish()
        work, unknown = (sum(r[2] for r in self.written if r[0] == code) for code in (WORK, UNKNOWN))
        return work, unknown, sum(end - begin for begin, end in self.accelerator.work)

    def found(self) -> list[tuple[int, int]]:
        """Return when the device was said to be at work."""
        return [(r[1], r[1] + r[2]) for r in self.written if r[0] == WORK]


def overlap_ns(found: list[tuple[int, int]], truth: list[tuple[int, int]]) -> int:
    """Return for how long both were under way."""
    return sum(max(0, min(a, b) - max(c, d)) for c, a in found for d, b in truth)


def step(
    clock: VirtualClock, timing: DeviceTimers, accelerator: Accelerator, *, load_s: float, work_ns: int, host_s: float
) -> None:
    """Wait for a batch, launch forward, backward and update."""
    clock.sleep(load_s)
    timing.ready()
    accelerator.launch(work_ns // 3)
    clock.sleep(host_s)
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
def test_a_device_is_at_work_when_its_timeline_says_so(clock, load_s, work_ns, host_s, depth):
    timed, start = Timed(depth), clock.now()
    accelerator = timed.accelerator
    for _ in range(40):
        step(clock, timed.timing, accelerator, load_s=load_s, work_ns=work_ns, host_s=host_s)
    work, _, truth = timed.finish()

    assert overlap_ns(timed.found(), accelerator.work) >= 0.98 * truth
    assert abs(work - truth) <= 0.03 * (accelerator.busy_until_ns - start)
    assert accelerator.made_events <= 64
    # An answer of `elapsed_time` asks both of its events.
    assert accelerator.queries <= 2 * accelerator.recorded_events + QUERIES * 40 + 40


def test_the_clock_of_a_device_that_is_idle_now_and_then_is_known_to_a_millisecond(clock):
    timed = Timed()
    for _ in range(10):
        step(clock, timed.timing, timed.accelerator, load_s=0.004, work_ns=2_000_000, host_s=0.0)
    timed.finish()
    begun, truth = (np.array([begin for begin, _ in spans]) for spans in (timed.found(), timed.accelerator.work))

    assert len(begun) >= 8
    assert np.abs(begun[:, None] - truth).min(axis=1).max() < 1_000_000


def test_while_a_host_reduces_gradients_its_device_is_not_at_work_though_a_copy_back_is_under_way_at_the_end(clock):
    timed, record = Timed(), (-1, 0, 0)
    accelerator, timing = timed.accelerator, timed.timing
    for _ in range(40):
        clock.sleep(0.001)
        timing.ready()
        accelerator.launch(2_000_000)
        timing.turned()
        accelerator.launch(4_000_000)
        timing.reducing()
        accelerator.synchronize()
        clock.sleep(0.03)
        accelerator.launch(2_000_000)
        timing.reduced(record)
        timing.ended()
        accelerator.launch(3_000_000)
        timing.updated()
    work, _, truth = timed.finish()

    assert overlap_ns(timed.found(), accelerator.work) >= 0.9 * truth
    assert work <= 1.1 * truth
    assert timed.written.count(record) == 40


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
    undo = emulate(lambda tensor: devices[int(tensor)].device, {})
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
    undo = emulate(lambda tensor: accelerator.device, {})
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
    for name, value in {
        "is_initialized": lambda: True, "default_generators": tuple("abcd"), "current_device": lambda: 1,
        "is_current_stream_capturing": lambda: False,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    undo = device.emulate(lambda _: used.device, {("cuda", 2): used.device})
    try:
        assert device.generators() == ["b", "c"]
        used.capturing = True
        assert device.generators() == []
    finally:
        undo()


def test_a_loader_that_is_asked_under_a_stream_of_its_own_changes_nothing(clock):
    timed = Timed(24)
    accelerator, timing, side = timed.accelerator, timed.timing, Stream(timed.accelerator)
    for _ in range(40):
        with accelerator.within(side):
            side.launch(15_000_000)  # copies that take longer than the step: the stream falls behind
            clock.sleep(0.001)
            timing.ready()
        step_on(timing, accelerator, work_ns=9_000_000)
    work, _, truth = timed.finish()

    assert timing.dropped == 0
    assert abs(work / truth - 1) <= 0.05


def test_a_step_that_is_replayed_is_work_of_the_device_though_it_was_warmed_up_in_another_stream(clock):
    timed = Timed(24)
    accelerator, timing, side = timed.accelerator, timed.timing, Stream(timed.accelerator)
    with accelerator.within(side):  # after torch's notes on CUDA graphs
        step_on(timing, accelerator, work_ns=9_000_000)
    for _ in range(40):
        clock.sleep(0.002)
        timing.ready()
        timing.replaying()
        accelerator.launch(9_000_000)
        timing.updated()
        accelerator.synchronize()  # `.item()`
    work, *_ = timed.finish(wait=False)

    assert abs(work / (41 * 9_000_000) - 1) <= 0.05


def step_on(timing: DeviceTimers, accelerator: Accelerator, *, work_ns: int) -> None:
    """Launch forward, backward and update in the default stream."""
    accelerator.launch(work_ns // 3)
    timing.computed()
    timing.turned()
    accelerator.launch(work_ns // 2)
    timing.ended()
    accelerator.launch(work_ns // 6)
    timing.updated()


def test_what_the_host_does_before_it_launches_a_loss_is_no_work_for_certain(clock):
    timed = Timed()
    accelerator, timing = timed.accelerator, timed.timing
    for _ in range(20):
        timing.ready()
        accelerator.launch(1_000_000)
        timing.computed()
        clock.sleep(0.008)
        accelerator.launch(1_000_000)  # the loss: the event behind it passes late
        timing.turned()
        accelerator.launch(1_000_000)
        timing.ended()
        timing.updated()
        accelerator.synchronize()
    work, unknown, truth = timed.finish(wait=False)

    assert work <= 1.2 * truth
    assert unknown >= 19 * 6_000_000


def test_a_device_that_keeps_up_with_the_launches_of_its_host_is_not_said_to_be_at_work(clock):
    timed = Timed()
    accelerator, timing = timed.accelerator, timed.timing

    def launch_slowly() -> None:
        for _ in range(20):
            accelerator.launch(20_000)
            clock.sleep(0.0001)

    for _ in range(20):
        timing.ready()
        launch_slowly()
        timing.computed()
        timing.turned()
        launch_slowly()
        timing.ended()
        launch_slowly()
        timing.updated()
    work, unknown, truth = timed.finish(wait=False)

    assert work <= 0.05 * truth  # at most what the last launch of a part left to do
    assert work + unknown >= truth


@pytest.mark.parametrize("learns", [True, False], ids=["fetched ahead of a backward", "models without a backward"])
def test_a_wait_for_a_batch_between_a_model_and_a_backward_is_no_work(clock, learns):
    timed = Timed()
    accelerator, timing = timed.accelerator, timed.timing
    for _ in range(20):
        timing.ready()
        for _ in range(1 if learns else 3):
            accelerator.launch(1_000_000)
            timing.computed()
            clock.sleep(0.005)  # the loader
            timing.ready()
        timing.turned()
        accelerator.launch(2_000_000)
        timing.ended()
        timing.updated()
        clock.sleep(0.004)
    work, unknown, truth = timed.finish(wait=False)

    assert abs(work + unknown - truth) <= 0.15 * truth


def test_two_of_the_events_are_left_out_while_the_host_is_far_ahead(clock):
    timed = Timed(1000)
    accelerator, timing = timed.accelerator, timed.timing
    for _ in range(30):
        timing.ready()
        step_on(timing, accelerator, work_ns=30_000_000)
        clock.sleep(0.02)
    before = accelerator.recorded_events
    for _ in range(10):
        timing.ready()
        step_on(timing, accelerator, work_ns=30_000_000)

    assert accelerator.recorded_events - before == 30


def test_a_stretch_that_cannot_be_read_is_given_up_alone(clock, monkeypatch):
    timed = Timed()
    accelerator, timing = timed.accelerator, timed.timing
    fails = [3]

    def refuse(event, other):
        if fails[0]:
            fails[0] -= 1
            raise RuntimeError("an unexpected event status")
        return elapsed(event, other)

    for k in range(12):
        if k == 4:
            elapsed = CudaEvent.elapsed_time
            monkeypatch.setattr(CudaEvent, "elapsed_time", refuse)
        timing.ready()
        step_on(timing, accelerator, work_ns=1_000_000)
        accelerator.synchronize()
    timed.finish()

    assert timing.dropped == 3
    assert len(timed.found()) >= 8


@pytest.mark.parametrize("holds_lock", [False, True], ids=["torch.cuda.Event", "torch.Event"])
def test_other_threads_go_on_while_an_event_waits_for_its_place_in_the_queue(holds_lock):
    accelerator, moments, over = Accelerator(depth=1), [now()], threading.Event()
    if holds_lock:
        accelerator.device._own = None  # as on other kinds of device: the test sees the difference

    def note() -> None:
        while not over.is_set():
            moments.append(now())
            time.sleep(0.001)

    thread = threading.Thread(target=note)
    thread.start()
    try:
        accelerator.launch(400_000_000)
        accelerator.device.record()
    finally:
        over.set()
        thread.join()

    assert (max(np.diff(moments)) >= 300_000_000) == holds_lock
