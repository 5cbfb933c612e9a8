"""The training thread of one rank as segments, and which recorded name owns an instant that several cover.

The innermost cause owns it: gc > checkpoint > logging and data that headway
reads again > input > comm and waits for a device > compile > the rest of
headway's own work > optimizer > code of the script between steps > the rest,
which is compute.

>>> LABELS[LABEL["compute"]], PRIORITY["host.gc"] > PRIORITY["checkpoint.save"] > PRIORITY["input.next"]
('compute', True)

What a rank's device does beside its training thread: the second resource of a replay.

The rows 'device.work' of a recording say when the device was at work without a pause, and how far the host was ahead
when the work had been launched. In a replay the device takes up work when the host has launched the beginning of it and
it has done what came before, and is done no sooner than the host has launched the end:

    host     |-- load --|-- launch k --|-- load --|-- launch k+1 --|
                        |              `------.
    device   ...........|------ work k -------|---- work k+1 ---- ...

    end[k] = max(max(end[k-1], launched[k]) + work[k], launched to its end[k])

The host waits where it was seen to wait (rows 'host.sync'), and where its launches fill the queue: a device that is
never idle while the host is no further ahead than it ever was holds the host up, whose own time is then what the steps
took in which it got ahead. A host that was never held up gets a few steps ahead, and no further. Times are int64 ns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.units import NS_PER_US
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import BLOCKING

PRIORITY: dict[str, int] = {
    "compute": 0,
    "host.script": 1,
    "optimizer.step": 2,
    "host.recording": 3,
    "host.import": 5, "host.compile": 5,
    "host.sync": 6, "comm.init": 6, "comm.wait": 6, "comm.collective": 6, "comm.send": 6, "comm.recv": 6,
    "input.transfer": 7, "input.iter": 7, "input.next": 7,
    "host.logging": 8, "host.rereading": 8,
    "checkpoint.load": 9, "checkpoint.save": 9, "checkpoint.sync": 9, "checkpoint.rename": 9,
    "checkpoint.snapshot": 9, "checkpoint.wait": 9, "checkpoint.restore": 9,
    "host.gc": 10, "host.collect": 10,
}  # fmt: skip
"""Names of what the training thread does -> who owns an instant that several cover; the largest wins.

'host.rereading' are the forks among 'host.recording' that read data again: to see whether that gives the same, or to
compare a remedy's batch with the script's own.
'host.collect' are the collections among 'host.gc' that the script called for: no edit of the collector puts them off.
"""

LABELS: tuple[str, ...] = tuple(PRIORITY)
"""Values of `Lane.label`, by index."""

LABEL: dict[str, int] = {name: index for index, name in enumerate(LABELS)}
"""Name -> value of `Lane.label`."""

COMPUTE = np.isin(LABELS, ["compute", "optimizer.step"])
"""[LABELS] What the accelerator does."""

ON_THREAD = COMPUTE | np.isin(LABELS, ["host.script", "host.recording", "host.rereading"])
"""[LABELS] What the training thread runs itself; one share of it, for compute and script alike, is on a core.

Headway's own work keeps its recorded duration in a replay: the run that is predicted is recorded as well. That of
'host.rereading', which is done once, is left out of what was measured, and of every replay.
"""

GARBAGE = np.isin(LABELS, ["host.gc", "host.collect"])
"""[LABELS] Collections, which are CPU time of the training thread."""


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """The training thread of one rank as `m` segments in the order of time, without gaps."""

    rank: int
    """Which rank."""

    label: NDArray[np.int64]
    """[m] Index into `LABELS`."""

    step: NDArray[np.int64]
    """[m] Step it belongs to; segments are cut where a step ends."""

    start_ns: NDArray[np.int64]
    """[m] Start."""

    duration_ns: NDArray[np.int64]
    """[m] Duration, >= 0."""

    row: NDArray[np.int64]
    """[m] Row of the rank's trace that owns it, -1 for compute. The last segment of a row ends that row."""

    step_end_ns: NDArray[np.int64]
    """[k + 1] Start of step 0, then the end of each step."""

    def once_ns(self, first_step: int) -> int:
        """Return how much of the steps from `first_step` on is work of headway's own that is done once in a run."""
        return int(self.duration_ns[(self.label == LABEL["host.rereading"]) & (self.step >= first_step)].sum())

    def compute_ns(self) -> NDArray[np.int64]:
        """Return [k] how long each step computes."""
        total, computing = np.zeros(self.step_end_ns.size - 1, np.int64), COMPUTE[self.label]
        np.add.at(total, self.step[computing], self.duration_ns[computing])
        return total

    def last_segment(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the last segment that each of `rows` owns, -1 for none."""
        owned = np.flatnonzero(self.row >= 0)
        found = np.full(int(max(self.row.max(initial=-1), rows.max(initial=-1))) + 1, -1, np.int64)
        found[self.row[owned]] = owned  # of equal indices the last assignment stays
        return found[rows]


CHAINED_NS = 50 * NS_PER_US
"""Work that begins this soon after what came before follows it without a pause."""

AHEAD_FRACTION = 0.1
"""A host that is ahead of its device by more of a step's work, and without a pause of the device, is held up by it."""

LEAST_WAIT_NS = 500 * NS_PER_US
"""Shorter waits are not looked for."""

AFTER_WAIT = 0.2
"""A segment that goes on after the device is done for more of the wait than this need not have waited."""

AHEAD_STEPS = 8
"""A host that was never held up gets so many steps ahead of its device in a replay, and no further: how many launches
its queue holds is not known, and in the long run the device's pace is the same whatever it holds."""

FEW = 2
"""Steps in which the host got ahead that say what it takes by itself."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWork:
    """The work of one rank's devices, in order, [w] stretches without a pause."""

    duration_ns: NDArray[np.int64]
    """[w] How long the device was at work."""

    after_segment: NDArray[np.int64]
    """[w] Segment of the training thread at whose end the beginning of it was launched; -1 = none came before."""

    launched_segment: NDArray[np.int64]
    """[w] Segment at whose end all of it was launched."""

    ahead_ns: NDArray[np.int64]
    """[w] How far the host was ahead of its end then; 0 where the host was not held up."""

    freed_segment: NDArray[np.int64]
    """[w] Segment of the training thread that cannot begin before the stretch is done; -1 = none. Where the host was
    held up, `ahead_ns` says that; else it is the first one `AHEAD_STEPS` later."""

    own: NDArray[np.float64]
    """[k] Share of the training thread's compute in each step that is its own, and no wait for the queue."""

    waits: NDArray[np.int64]
    """[s] Segments in which the training thread waited for all that it had launched."""

    after_wait_ns: NDArray[np.int64]
    """[s] What it did in each of them when the wait was over."""

    @classmethod
    def of(cls, rows: Trace, lane: Lane, busy: float) -> DeviceWork | None:
        """Return the work that the steps of `lane` launched; None for a rank whose device was not seen.

        `busy` is the share of compute during which the training thread occupied a core, NaN where that is not known: it
        stands in where no step shows what the thread takes by itself.
        """
        events = rows.events
        low, high = int(lane.step_end_ns[0]), int(lane.step_end_ns[-1])
        end = events["start_ns"] + events["duration_ns"]
        launched = end - events["seq"]
        found = np.flatnonzero(rows.named("device.work") & (launched > low) & (launched <= high))
        if not found.size:
            return None
        found = found[np.argsort(events["start_ns"][found], kind="stable")]
        start, end, launched = events["start_ns"][found], end[found], launched[found]
        step = np.searchsorted(lane.step_end_ns, launched, side="left") - 1
        launched_segment = np.searchsorted(lane.start_ns, launched, side="left") - 1
        paused = np.concatenate([[True], start[1:] - end[:-1] > CHAINED_NS])
        # A device without work takes it up at once; else it began to be launched with the next compute of the host.
        at_once = _nearest(lane.start_ns, start) - 1
        compute = np.flatnonzero(COMPUTE[lane.label])
        behind = np.searchsorted(compute, np.concatenate([[-1], launched_segment[:-1]]), side="right")
        queued = np.append(compute, lane.label.size)[behind] - 1
        waits, after_wait = _waits(rows, lane, start, end, launched)
        ahead, own = _held_up(lane, step, end - start, end - launched, paused, busy, waits)
        freed = np.full(found.size, -1, np.int64)
        if not ahead.any():
            first = np.searchsorted(lane.step, step + AHEAD_STEPS)
            last = np.append(step[1:] != step[:-1], True) & (first < lane.step.size)
            freed[last] = first[last]
        return cls(
            duration_ns=end - start,
            after_segment=np.minimum(np.where(paused, at_once, queued), launched_segment),
            launched_segment=launched_segment,
            ahead_ns=ahead,
            freed_segment=freed,
            own=own,
            waits=waits,
            after_wait_ns=after_wait,
        )


def _waits(
    rows: Trace, lane: Lane, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], launched_ns: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return [s] the segments in which the training thread waited for its device, and what it did after each wait.

    Rows tell of some waits (`host.sync`). Another one shows where the device gets done: a segment of the script's or of
    compute that ends just after all that was launched before it is done, and not at any other time, was a wait for it.

        host      |- update -|------ item() ------|-- next batch
        device    ----------------- work --------|

    So is a copy to the device during which that gets done: from pageable memory it begins then, and the host waits.
    A copy that blocks its host waits in a replay where the device has not got so far, though it had in the recording.
    """
    holder = np.searchsorted(lane.start_ns, end_ns, side="right") - 1
    began, ended = lane.start_ns[holder], lane.start_ns[holder] + lane.duration_ns[holder]
    left, waited = ended - end_ns, end_ns - np.maximum(began, launched_ns)
    # Nothing more was launched meanwhile: else the device would have gone on with it at once.
    last = np.append((launched_ns[1:] > end_ns[:-1]) & (start_ns[1:] > end_ns[:-1]), True)
    quiet = np.isin(lane.label[holder], [LABEL["host.script"], LABEL["compute"]]) & (left <= AFTER_WAIT * waited)
    copies = lane.label[holder] == LABEL["input.transfer"]
    found = last & (quiet | copies) & (left >= 0) & (waited > LEAST_WAIT_NS)
    known = np.flatnonzero(lane.label == LABEL["host.sync"])
    copied = np.flatnonzero(lane.label == LABEL["input.transfer"])
    blocking = copied[rows.events["corr"][lane.row[copied]] == BLOCKING]
    segments, first = np.unique(np.concatenate([known, holder[found], blocking]), return_index=True)
    after = [np.zeros(known.size, np.int64), left[found], lane.duration_ns[blocking]]
    return segments, np.concatenate(after)[first]


def _nearest(sorted_ns: NDArray[np.int64], moment_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [n] the index of the nearest of `sorted_ns`: the two clocks agree to some microseconds only."""
    above = np.clip(np.searchsorted(sorted_ns, moment_ns), 1, sorted_ns.size - 1)
    below = moment_ns - sorted_ns[above - 1] < sorted_ns[above] - moment_ns
    return above - below


def _held_up(
    lane: Lane,
    step: NDArray[np.int64],
    work_ns: NDArray[np.int64],
    ahead_ns: NDArray[np.int64],
    paused: NDArray[np.bool_],
    busy: float,
    waits: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return [w] how far ahead a host that is held up may get, and [k] the share of its compute that is its own."""
    num_steps = len(lane.step_end_ns) - 1
    compute, waited = lane.compute_ns(), np.zeros(num_steps, bool)
    waited[lane.step[waits]] = True
    work, pauses, ahead = np.zeros(num_steps), np.zeros(num_steps, bool), np.zeros(num_steps)
    np.add.at(work, step, work_ns)
    pauses[step[paused]] = True
    ahead[step] = ahead_ns  # the last stretch of a step
    free = pauses | waited | (ahead <= AHEAD_FRACTION * work) | (work == 0)
    gained = np.diff(ahead, prepend=0.0) > AHEAD_FRACTION * work
    own = np.ones(num_steps)
    held = ~free & ~gained
    later = np.arange(num_steps) > 0  # the first step also prepares what all of them use
    by_itself = compute[later & (work > 0) & (free | gained)]
    if held.any():
        if by_itself.size >= FEW:
            # Some of them were held up for a part of the step already.
            own[held] = np.minimum(1.0, np.quantile(by_itself, 0.25) / np.maximum(compute[held], 1))
        elif np.isfinite(busy):
            own[held] = busy
    return np.where(held[step], ahead_ns, 0), own
