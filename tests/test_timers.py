"""Timers: every outermost backward once, results untouched, no graph break; on a device late, and never by waiting."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headway
from headway.core.errors import InputError
from headway.runtime.calls import patches
from headway.runtime.host.device import emulate
from headway.runtime.recorder import timers
from headway.runtime.recorder.device_timers import MAX_PENDING, UNKNOWN, WORK, AllTimers, DeviceTimers
from headway.runtime.recorder.timers import BACKWARD, FORWARD
from headway.trace.events.trace import Trace
from headway.trace.rings.records import RecordRingReader
from tests.recorded import recording, rows, run_script
from tests.rings_made import built


class Device:
    """A device as CUDA shows it: events pass in the order of one queue, later than they are recorded.

    `clock_ns` is its own clock; asking for the time between events that have not passed is an error, and the answer
    is float32 milliseconds.
    """

    def __init__(self) -> None:
        self.clock_ns, self.live = 7_000_000, 0
        self.queue: deque[FakeEvent | int] = deque()

    def work(self, duration_ns: int) -> None:
        """Queue a kernel."""
        self.queue.append(duration_ns)

    def run(self, entries: int) -> None:
        """Let the device get through so many entries of its queue."""
        for _ in range(min(entries, len(self.queue))):
            entry = self.queue.popleft()
            if isinstance(entry, int):
                self.clock_ns += entry
            else:
                entry.passed_ns = self.clock_ns

    is_capturing = False

    def stream(self) -> Device:
        """Return its only stream."""
        return self

    def record(self, stream: Device | None = None) -> FakeEvent:
        """Return an event that was queued."""
        event = FakeEvent(self)
        self.queue.append(event)
        self.live += 1
        return event

    def release(self, event: FakeEvent) -> None:
        """Take one back."""
        self.live -= 1


class FakeEvent:
    """An event of `Device`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.passed_ns: int | None = None

    def query(self) -> bool:
        """Say whether it has passed."""
        return self.passed_ns is not None

    def elapsed_time(self, other: FakeEvent) -> float:
        """Return the milliseconds to `other`, as CUDA: float32."""
        if self.passed_ns is None or other.passed_ns is None:
            raise RuntimeError("device not ready")
        return float(np.float32((other.passed_ns - self.passed_ns) / 1e6))

    def synchronize(self) -> None:
        """Never to be called."""
        raise AssertionError("a timer must not wait for the device")


def device_timers(device: Device) -> tuple[DeviceTimers, list[tuple[int, ...]]]:
    """Return timers on `device` and the list that their records go to."""
    written: list[tuple[int, ...]] = []
    return DeviceTimers(lambda *r: written.append(r), device), written


segment_ns = st.integers(1_000, 50_000_000)


@given(steps=st.lists(st.tuples(segment_ns, segment_ns, segment_ns), min_size=1, max_size=12), lag=st.integers(0, 9))
def test_device_segments_are_what_the_device_worked_however_late_they_are_resolved(steps, lag):
    device = Device()
    timing, written = device_timers(device)
    for forward, backward, update in steps:
        timing.ready()
        device.work(forward)
        timing.turned()
        device.work(backward)
        timing.ended()
        device.work(update)
        timing.updated()
        device.run(lag)
    device.run(10_000)
    timing.finish()
    found = {code: [r[2] for r in written if r[0] == code] for code in (FORWARD, BACKWARD)}

    assert found[FORWARD] == pytest.approx([forward for forward, _, _ in steps], rel=1e-6, abs=1)
    assert found[BACKWARD] == pytest.approx([backward for _, backward, _ in steps], rel=1e-6, abs=1)
    assert device.live == 1  # the last one, which the next stretch is measured from


def test_microbatches_follow_each_other_and_a_backward_inside_another_is_part_of_it():
    device = Device()
    timing, written = device_timers(device)
    timing.ready()
    for _ in range(2):
        device.work(3_000_000)
        timing.turned()
        timing.turned()
        device.work(5_000_000)
        timing.ended()
        timing.ended()
    device.run(100)
    timing.finish()

    segments = [(r[0], r[2]) for r in written if r[0] not in (WORK, UNKNOWN)]
    assert segments == [(FORWARD, 3_000_000), (BACKWARD, 5_000_000)] * 2


def test_a_device_that_never_gets_through_costs_bounded_memory_and_is_counted():
    timing, written = device_timers(device := Device())
    for _ in range(MAX_PENDING + 10):
        timing.turned()
        timing.ended()
        timing.updated()

    assert timing.dropped == 10
    assert device.live == 3 * MAX_PENDING
    assert written == []


def test_a_device_that_refuses_an_event_ends_its_timing_and_not_the_job(tmp_path, capsys):
    class Broken(Device):
        def record(self, stream: Device | None = None) -> FakeEvent:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    undo = emulate(lambda tensor: broken, {("cuda", 0): (broken := Broken())})
    with recording(tmp_path) as session:
        every = AllTimers(session.probes)
        for _ in range(2):
            every.act(every.of(torch.ones(1)), DeviceTimers.turned)

        assert every.of(torch.ones(1)).broken
        assert "illegal memory access" in session.probes.tables["patches"]["segments on the device"]
    undo()
    assert capsys.readouterr().err.count("illegal memory access") == 1


def train(steps: int, microbatches: int = 1) -> list[float]:
    """Train a small model; returns the losses."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(microbatches):
            loss = model(torch.ones(2, 8)).square().sum()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_every_backward_is_recorded_once_and_the_losses_are_the_same(tmp_path):
    plain = train(4, 3)
    with recording(tmp_path) as session:
        recorded = train(4, 3)
        page = RecordRingReader(session.probes.recorder.path).page
    trace = built(tmp_path)

    assert recorded == plain
    assert int(trace.named("segment.backward").sum()) == 12
    assert trace.events["seq"][trace.named("segment.backward")].tolist() == [0, 1, 2] * 4
    assert (page.step, page.op) == (4, 0)
    assert page.loss == pytest.approx(plain[0])  # read at the first of every 64 updates
    assert (
        page.progress_ns
        == trace.events["start_ns"][trace.named("step")][-1] + (trace.events["duration_ns"][trace.named("step")][-1])
    )
    assert trace.meta["timers"] == {"clock": "host"}


def test_a_backward_that_raises_raises_and_the_next_one_is_recorded_also_by_name(tmp_path, capsys):
    with recording(tmp_path):
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(3).sum().backward()
        torch.autograd.backward(tensors=[torch.ones(3, requires_grad=True).sum()])
        torch.ones(3, requires_grad=True).sum().backward()

    assert len(rows(tmp_path)["segment.backward"]) == 2
    assert "not recorded" not in capsys.readouterr().err


def test_the_compiler_sees_the_graphs_and_breaks_that_it_sees_without_headway(tmp_path):
    def counts() -> tuple[int, int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = torch.nn.Linear(4, 4)

        @torch.compile(backend="eager")
        def step(x):
            model(x).square().sum().backward()
            return x + 1

        for _ in range(2):
            step(torch.ones(2, 4))
        counters = torch._dynamo.utils.counters
        return counters["stats"]["unique_graphs"], len(counters["graph_break"])

    plain = counts()
    with recording(tmp_path):
        recorded = counts()

    assert recorded == plain
    assert len(rows(tmp_path)["segment.backward"]) == 2


def test_switched_off_there_is_no_patch_no_page_and_no_segment(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_TIMERS", "off")
    original = torch.autograd.backward
    with recording(tmp_path) as session:
        assert torch.autograd.backward is original
        train(2)
        page = RecordRingReader(session.probes.recorder.path).page
    trace = built(tmp_path)

    assert (page.step, page.progress_ns) == (0, 0)
    assert not trace.named("segment.backward", "segment.forward").any()
    assert int(trace.named("step").sum()) == 2


def test_device_patches_need_a_device_and_the_timers():
    wanted = [name for name in patches.PATCHES if name.startswith("segment.") and name.endswith(".device")]

    assert wanted
    assert all(patches.PATCHES[name].needs == "device timers" for name in wanted)


def test_a_device_without_events_keeps_the_hosts_clock_and_says_so(tmp_path):
    with recording(tmp_path) as session:
        timers.look_at(torch.ones((), device="meta"), session.probes)

        assert session.probes.tables["timers"]["reason"].startswith("meta has no events")


def test_timers_of_the_script_nest_and_are_recorded_by_name(tmp_path):
    with recording(tmp_path) as session:
        outer = headway.timer("augment")
        outer.begin()
        with headway.timer("mix"), headway.timer("augment"):
            pass
        outer.end()
        assert session.probes.tables["regions"] == ["augment", "mix"]
    found = rows(tmp_path)["region"]

    assert [row["a"] for row in found] == [0, 1, 0]
    assert found[-1]["duration_ns"] >= found[0]["duration_ns"]


def test_an_unbalanced_timer_is_refused_with_its_name_and_step(tmp_path, capsys):
    with recording(tmp_path):
        train(2)
        timer = headway.timer("augment")
        with pytest.raises(InputError, match=r"timer 'augment' is ended in step 2 but was not begun.*Call begin\(\)"):
            timer.end()
        timer.begin()
        with pytest.raises(InputError, match=r"timer 'augment' was begun in step 2 and is begun again in step 2.*End"):
            timer.begin()

    assert "timer 'augment' was begun in step 2 and never ended" in capsys.readouterr().err


def test_a_timer_is_checked_and_otherwise_idle_without_a_recording():
    with headway.timer("augment") as timer:
        assert timer.name == "augment"
    with pytest.raises(InputError, match=r"not recorded but was not begun"):
        timer.end()


def test_a_timer_on_a_device_is_resolved_with_the_segments(tmp_path):
    undo = emulate(lambda tensor: device, {("cuda", 0): (device := Device())})
    with recording(tmp_path) as session:
        every = session.probes.device_timers = AllTimers(session.probes)
        every.of(torch.ones(1)).ready()
        with headway.timer("augment"):
            device.work(4_000_000)
        every.updated()
        device.run(10)
    undo()
    found = rows(tmp_path)["region"]

    assert [row["duration_ns"] for row in found] == [4_000_000]
    assert session.probes.tables["timers"]["given_up"] == 0


def test_a_script_that_is_not_edited_gets_forward_and_backward_of_every_step(tmp_path):
    run_script(
        """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, in DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=8):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        """,
        tmp_path,
    )
    from headway.runtime.run_folder.finalise import finalise

    (path,) = finalise(tmp_path / "run")
    trace = Trace.open(path)
    forward, backward = trace.named("segment.forward"), trace.named("segment.backward")

    assert trace.events["step"][forward].tolist() == trace.events["step"][backward].tolist() == list(range(8))
    ends = trace.events["start_ns"][forward] + trace.events["duration_ns"][forward]
    assert np.array_equal(ends, trace.events["start_ns"][backward])
    assert not list((tmp_path / "run" / "rings").iterdir())
