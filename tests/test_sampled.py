"""Runs on devices: profiler windows extrapolated to the steps between them."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.ledger.answers.causes import find_causes
from headway.ledger.answers.ledger import Ledger
from headway.ledger.buckets import BUCKETS
from headway.report.terminal import render_why
from headway.trace.events.trace import Trace, concat
from tests.runs_made import MS, Made, RunMaker


@dataclass(frozen=True)
class Device(Made):
    """A made run on a device, with profiler windows."""

    files: tuple[Path, ...] = ()

    def windows(self) -> list[Path]:
        return list(self.files)


def on_device(made: Made, files: tuple[Path, ...]) -> Device:
    meta = {**made.meta, "device_type": "NVIDIA H200"}
    return Device(made.trace, meta, made.truth, made.truth_ns, made.sub_truth_ns, files=files)


def steps_of(made: Made, rank: int) -> list[tuple[int, int]]:
    rows = made.trace.select(ranks=[rank])
    rows = rows.where(rows.named("step"))
    return list(zip(rows.events["start_ns"].tolist(), rows.events["duration_ns"].tolist(), strict=True))


def write_window(
    made: Made, folder: Path, rank: int, number: int, step: int, spans: list[tuple[str, str, int, int]]
) -> Path:
    """Write Kineto JSON of one step: spans are (category, name, start after the step's begin, duration) in ns."""
    begin, duration = steps_of(made, rank)[step]
    realtime = begin - made.meta["start_ns"] + made.meta["realtime_ns"]
    rows = [("user_annotation", f"ProfilerStep#{step}", 0, duration), *spans]
    events = [
        {"ph": "X", "cat": category, "name": name, "pid": 0 if category in DEVICE else 99,
         "tid": 7 if category in DEVICE else 99, "ts": start / 1000, "dur": length / 1000}
        for category, name, start, length in rows
    ]  # fmt: skip
    path = folder / f"r{rank}-w{number}.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": realtime, "traceEvents": events}))
    return path


DEVICE = ("kernel", "gpu_memcpy")


def busy(share: float, duration: int) -> list[tuple[str, str, int, int]]:
    """A device that computes for a share of the step, from its begin."""
    return [("kernel", "gemm", 0, round(share * duration))]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=3, unique=True), st.sampled_from([0.25, 0.5, 1.0]))
@settings(max_examples=20)
def test_time_is_conserved_and_a_device_that_is_busy_a_share_of_each_window_is_so_throughout(
    tmp_path_factory, chosen, share
):
    folder = tmp_path_factory.mktemp("windows")
    made = RunMaker(ranks=1, steps=21, transfer_ns=0, iter_ns=0, gc_ns=0).make()
    files = tuple(
        write_window(made, folder, 0, n, step, busy(share, steps_of(made, 0)[step][1])) for n, step in enumerate(chosen)
    )

    ledger = Ledger.of(on_device(made, files))

    assert sum(ledger.ledger_ns.values()) == ledger.wall_ns
    in_steps = sum(duration for _, duration in steps_of(made, 0))
    assert ledger.ledger_ns["useful"] == pytest.approx(share * in_steps, rel=0.01)
    assert ledger.sub_ns.get("host.launch", 0) == pytest.approx((1 - share) * in_steps, rel=0.01, abs=10)
    assert ledger.basis["useful"].startswith(f"sampled ({len(chosen)} windows, ")


def test_an_input_wait_during_which_the_device_computes_is_useful(tmp_path):
    """The device computes over the first half of every wait for input: half of the input time is not lost."""
    made = RunMaker(
        ranks=1, steps=10, fetch_ns=8 * MS, transfer_ns=0, iter_ns=0, compute_ns=2 * MS, optimizer_ns=0
    ).make()
    file = write_window(made, tmp_path, 0, 0, 5, [("kernel", "gemm", 0, 4 * MS), ("kernel", "gemm", 8 * MS, 2 * MS)])

    ledger = Ledger.of(on_device(made, (file,)))

    assert ledger.ledger_ns["input"] == 10 * 4 * MS
    assert ledger.sub_ns["input.fetch"] == 10 * 4 * MS
    assert ledger.ledger_ns["useful"] == 10 * 6 * MS


def test_a_window_is_placed_by_its_own_pair_of_clocks(tmp_path):
    """The realtime clock was set back by an hour during the run; the window's own pair knows."""
    maker = RunMaker(ranks=1, steps=10, fetch_ns=8 * MS, transfer_ns=0, iter_ns=0, compute_ns=2 * MS, optimizer_ns=0)
    made = maker.make()
    (tmp_path / "windows").mkdir()
    (tmp_path / "tables").mkdir()
    spans = [("kernel", "gemm", 0, 4 * MS), ("kernel", "gemm", 8 * MS, 2 * MS)]
    file = write_window(made, tmp_path / "windows", 0, 0, 5, spans)
    text = json.loads(file.read_text())
    text["baseTimeNanoseconds"] -= 3600 * 10**9
    file.write_text(json.dumps(text))
    begin = steps_of(made, 0)[5][0]
    clocks = {"clock_ns": begin, "realtime_ns": text["baseTimeNanoseconds"]}
    (tmp_path / "tables" / "r0.json").write_text(json.dumps({"windows": {"0": clocks}}))

    ledger = Ledger.of(on_device(made, (file,)))

    assert ledger.ledger_ns["input"] == 10 * 4 * MS


def test_kernels_copies_and_gaps_are_told_apart(tmp_path):
    made = RunMaker(ranks=1, steps=4, compute_ns=10 * MS, optimizer_ns=0, transfer_ns=0, iter_ns=0).make()
    spans = [("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, MS), ("kernel", "gemm", MS, 5 * MS),
             ("kernel", "ncclDevKernel_AllReduce", 5 * MS, 3 * MS)]  # fmt: skip
    file = write_window(made, tmp_path, 0, 0, 2, spans)

    ledger = Ledger.of(on_device(made, (file,)))

    assert ledger.sub_ns["useful.compute"] == 4 * 5 * MS
    assert ledger.sub_ns["comm.exposed"] == 4 * 2 * MS
    assert ledger.sub_ns["input.transfer"] == 4 * MS
    assert ledger.sub_ns["host.launch"] == 4 * 2 * MS
    assert "host.launch" in {cause.cause for cause in find_causes(ledger)}


def test_a_rank_without_a_window_takes_the_shares_of_the_others(tmp_path):
    made = RunMaker(ranks=2, steps=6, comm_ns=0, transfer_ns=0, iter_ns=0).make()
    file = write_window(made, tmp_path, 0, 0, 3, busy(0.5, steps_of(made, 0)[3][1]))

    ledger = Ledger.of(on_device(made, (file,)))

    assert ledger.by_rank_ns[0] == ledger.by_rank_ns[1]
    assert sum(ledger.ledger_ns.values()) == 2 * ledger.wall_ns


def test_without_windows_the_ledger_is_the_hosts_and_says_so():
    made = RunMaker(ranks=1, steps=5).make()

    ledger = Ledger.of(on_device(made, ()))

    assert ledger.ledger_ns == {bucket: made.truth_ns.get(bucket, 0) for bucket in BUCKETS}
    assert ledger.basis["useful"] == "remainder"
    assert any("device work is not seen" in note for note in ledger.notes)


def test_a_cpu_run_ignores_its_windows(tmp_path):
    made = RunMaker(ranks=1, steps=5).make()
    file = write_window(made, tmp_path, 0, 0, 2, busy(0.5, steps_of(made, 0)[2][1]))
    run: Any = replace(on_device(made, (file,)), meta=made.meta)

    assert Ledger.of(run).ledger_ns == {bucket: made.truth_ns.get(bucket, 0) for bucket in BUCKETS}


def test_a_window_outside_every_step_is_not_used(tmp_path):
    made = RunMaker(ranks=1, steps=5).make()
    file = write_window(made, tmp_path, 0, 0, 2, [])
    text = json.loads(file.read_text())
    text["baseTimeNanoseconds"] += 10**12
    file.write_text(json.dumps(text))

    ledger = Ledger.of(on_device(made, (file,)))

    assert ledger.basis["useful"] == "remainder"


def test_a_process_with_several_devices_is_said_to_count_as_one():
    made = RunMaker(ranks=2, steps=4).make()
    facts = {
        rank: {**row, "timers": {"devices": ["cuda:0", "cuda:1"][: rank + 1]}} for rank, row in made.trace.ranks.items()
    }

    notes = Ledger.of(replace(made.trace, ranks=facts)).notes

    assert "rank 1 computes on several devices and counts as one: at work while any of them is" in notes


def rows_of_device(made: Made, name: str, start: int, duration: int) -> Trace:
    """Return a row of the device in each step, from `start` after its begin."""
    begins = [begin for begin, _ in steps_of(made, 0)]
    columns = {"rank": [0] * len(begins), "name": [0] * len(begins), "start_ns": [begin + start for begin in begins],
               "duration_ns": [duration] * len(begins)}  # fmt: skip
    return Trace.from_columns(columns, names=[name], ranks=made.trace.ranks)


def test_what_events_do_not_tell_of_a_device_is_unknown_until_a_window_shows_it(tmp_path):
    """Of 8 ms that the device may have worked in each step, kernels take a quarter; 2 ms of others are sure."""
    made = RunMaker(ranks=1, steps=12, fetch_ns=0, transfer_ns=0, iter_ns=0, compute_ns=10 * MS, optimizer_ns=0).make()
    timed = [rows_of_device(made, "device.unknown", 0, 8 * MS), rows_of_device(made, "device.work", 8 * MS, 2 * MS)]
    made = replace(made, trace=concat([made.trace, *timed]))
    kernels = [("kernel", "gemm", 0, 2 * MS), ("kernel", "gemm", 8 * MS, 2 * MS)]
    file = write_window(made, tmp_path, 0, 0, 5, kernels)

    by_events, by_window = Ledger.of(on_device(made, ())), Ledger.of(on_device(made, (file,)))

    assert by_events.ledger_ns["useful"] == 12 * 2 * MS
    assert by_events.sub_ns["unknown.device"] == 12 * 8 * MS
    assert by_events.bound == "unknown"
    assert by_window.sub_ns["useful.compute"] == 12 * 4 * MS
    assert by_window.sub_ns["host.launch"] == 12 * 6 * MS
    assert by_window.bound == "host"


@pytest.mark.parametrize(("kernel_ns", "gaps_ns"), [(9 * MS, MS), (10 * MS, 0), (7 * MS, 0)])
def test_pauses_between_kernels_are_launch_gaps_where_a_window_shows_nearly_all_of_a_step(tmp_path, kernel_ns, gaps_ns):
    """By events the device is at work all the time; a step that shows much less than that stands for no other."""
    made = RunMaker(ranks=1, steps=12, fetch_ns=0, transfer_ns=0, iter_ns=0, compute_ns=10 * MS, optimizer_ns=0).make()
    made = replace(made, trace=concat([made.trace, rows_of_device(made, "device.work", 0, 10 * MS)]))
    # The file goes on behind the step: its last row is no kernel, and no step more is seen.
    spans = [("kernel", "gemm", 0, kernel_ns), ("user_annotation", "behind", 12 * MS, 5 * MS)]
    ledger = Ledger.of(on_device(made, (write_window(made, tmp_path, 0, 0, 5, spans),)))

    assert ledger.sub_ns.get("host.launch", 0) == 12 * gaps_ns
    assert ledger.sub_ns["useful.compute"] == 12 * (10 * MS - gaps_ns)
    assert ledger.kernels.num_steps == 1
    assert ledger.kernels.ns == {"gemm": kernel_ns}


def test_before_its_first_event_nobody_knows_what_a_device_does():
    made = RunMaker(ranks=1, steps=3, fetch_ns=0, transfer_ns=0, iter_ns=0, compute_ns=10 * MS, optimizer_ns=0).make()
    work = rows_of_device(made, "device.work", 0, 10 * MS)
    made = replace(made, trace=concat([made.trace, work.where(work.events["start_ns"] > steps_of(made, 0)[0][0])]))

    ledger = Ledger.of(on_device(made, ()))

    assert ledger.sub_ns["unknown.device"] == 10 * MS
    assert ledger.ledger_ns["useful"] == 20 * MS


def test_a_window_splits_the_time_at_work_and_leaves_what_events_say_of_the_rest(tmp_path):
    """The step under the profiler shows fewer kernels than events say, and a copy that the host waited for."""
    maker = RunMaker(ranks=1, steps=12, fetch_ns=4 * MS, transfer_ns=2 * MS, iter_ns=0, compute_ns=6 * MS)
    made = replace(maker, optimizer_ns=0).make()
    made = replace(made, trace=concat([made.trace, rows_of_device(made, "device.work", 6 * MS, 6 * MS)]))
    kernels = [("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 4 * MS, 2 * MS), ("kernel", "gemm", 6 * MS, 3 * MS),
               ("kernel", "ncclDevKernel_AllReduce", 9 * MS, MS)]  # fmt: skip
    file = write_window(made, tmp_path, 0, 0, 5, kernels)

    by_events, by_window = Ledger.of(on_device(made, ())), Ledger.of(on_device(made, (file,)))

    split = {"useful.compute": 12 * 6 * MS * 3 // 4, "comm.exposed": 12 * 6 * MS // 4}
    assert by_events.ledger_ns["useful"] == 12 * 6 * MS
    assert {sub: by_window.sub_ns[sub] for sub in split} == split
    others = [sub for sub in by_events.sub_ns if not sub.startswith("useful")]
    assert "input.fetch" in others
    assert [by_window.sub_ns.get(sub) for sub in others] == [by_events.sub_ns[sub] for sub in others]


def test_a_goodput_that_events_do_not_tell_is_unknown():
    made = RunMaker(ranks=1, steps=12, fetch_ns=0, transfer_ns=0, iter_ns=0, compute_ns=10 * MS, optimizer_ns=0).make()
    made = replace(made, trace=concat([made.trace, rows_of_device(made, "device.unknown", 0, 8 * MS)]))

    ledger = Ledger.of(on_device(made, ()))

    assert ledger.to_json()["goodput"] is None
    assert "goodput unknown" in render_why(ledger.to_json())
