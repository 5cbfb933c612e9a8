"""The computing stream of one rank's device in a deep window, read as `ddp_thread` reads a training thread.

What the host does takes effect when the stream has done what was launched before. So a gradient is ready, and a
collective may begin, where the stream gets to what the host did then:

    host     | grad | call | grad |  ...               launches, and is far ahead
    stream   ....[ kernels of grad ]C[ kernels of grad ]..W[ copies ]
    NCCL                            [    all-reduce       ]

C = the call in the stream's order; W = the stream waits for the collective. Times are int64 ns.

>>> stream = Stream(np.array([10, 20]), np.array([100, 150]), np.array([140, 190]))
>>> stream.at(np.array([5, 15, 25, 300])).tolist()
[5, 140, 190, 300]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.sim.ddp.ddp_window import CALL, Ints
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import MOVING
from headway.trace.profiler.kineto_names import OP

MARKS = ("DistributedDataParallel.forward",)
"""Operations of the host whose moment counts, whatever they launch."""


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """The `k` kernels and copies of a device that are no communication, as the host launched them."""

    launched_ns: Ints
    """[k] When the host launched each, in order."""

    start_ns: Ints
    """[k] When each began."""

    reach_ns: Ints
    """[k] When all up to each were done."""

    def at(self, moment_ns: Ints) -> Ints:
        """Return [n] when the stream gets to what the host did at each moment."""
        before = np.searchsorted(self.launched_ns, moment_ns)
        done = np.concatenate([[np.iinfo(np.int64).min], self.reach_ns])[before]
        return np.asarray(np.maximum(moment_ns, done))


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWindow:
    """What `ddp_thread` asks of a window in which a device computes."""

    host: Trace
    """Rows of the threads that launched, on the host's clock."""

    main: Trace
    """Kernels, and the operations that launched them, on the lane 'main', when the stream ran them."""

    stream: Stream
    """Puts moments of `host` on the clock of `main`."""

    calls: Ints
    """[c] Rows of the whole window that put a collective into a queue, in order."""

    ran: Ints
    """[c] Row of the kernel that ran each; -1 where it is not in the window."""

    @classmethod
    def of(cls, trace: Trace) -> DeviceWindow | None:
        """Read one rank's window; None where no row stands on a device, or none says who launched it."""
        events = trace.events
        device = np.array(["stream " in lane for lane in trace.lanes] + [False])[events["lane"]]
        launches = np.flatnonzero(~device & (events["corr"] >= 0) & (events["corr"] < OP))
        launched = np.flatnonzero(device & (events["corr"] >= 0) & (events["corr"] < OP))
        if not launches.size or not launched.size:
            return None
        # Join on the correlation: `by` is the host row that launched each device row; `known` drops device rows whose
        # launch is not in the window (the clip only keeps the look-up inside the array).
        launches = launches[np.argsort(events["corr"][launches], kind="stable")]
        corr = events["corr"][launches]
        at = np.minimum(np.searchsorted(corr, events["corr"][launched]), corr.size - 1)
        known = corr[at] == events["corr"][launched]
        launched, by = launched[known], launches[at[known]]
        order = np.argsort(events["start_ns"][by], kind="stable")
        launched, launched_ns = launched[order], events["start_ns"][by[order]]
        moves = np.isin(events["kind"][launched], MOVING)
        own = launched[~moves]
        end = events["start_ns"][own] + events["duration_ns"][own]
        stream = Stream(launched_ns[~moves], events["start_ns"][own], np.maximum.accumulate(end))
        hosts = np.isin(events["lane"], np.unique(events["lane"][launches])) & ~device
        calls = _calls(trace, hosts)
        ran = _first_inside(launched_ns[moves], launched[moves], trace, calls)
        return cls(trace.where(hosts), _main(trace, hosts, own, stream), stream, calls, ran)


def rows_of(trace: Trace) -> Trace:
    """Return one rank's window, the rows of its lane 'main' when its device ran them where it has one."""
    device = DeviceWindow.of(trace)
    return trace if device is None else device.main


def _calls(trace: Trace, hosts: NDArray[np.bool_]) -> Ints:
    """Return the rows that put a collective into a queue, in order."""
    called = np.array([name.startswith(CALL) for name in trace.names] + [False])[trace.events["name"]]
    calls = np.flatnonzero(called & hosts)
    return np.asarray(calls[np.argsort(trace.events["start_ns"][calls], kind="stable")])


def _first_inside(launched_ns: Ints, rows: Ints, trace: Trace, calls: Ints) -> Ints:
    """Return [c] the first of `rows` that was launched inside each call, -1 for none."""
    start = trace.events["start_ns"][calls]
    at = np.searchsorted(launched_ns, start)
    inside = np.append(launched_ns, np.iinfo(np.int64).max)[at] < start + trace.events["duration_ns"][calls]
    return np.where(inside, np.append(rows, -1)[at], -1)


def _main(trace: Trace, hosts: NDArray[np.bool_], own: Ints, stream: Stream) -> Trace:
    """Return kernels and operations as rows of one lane, when the stream ran them."""
    events = trace.events
    rows = np.flatnonzero(hosts)
    begin, end = events["start_ns"][rows], events["start_ns"][rows] + events["duration_ns"][rows]
    # A host row launched kernels first .. last - 1 of the stream. On `main` it reaches from the start of the first of
    # them to when the stream had done the last. A mark that launched none is an instant, when the stream got to it.
    first, last = np.searchsorted(stream.launched_ns, [begin, end])
    marks = np.array([name in MARKS for name in trace.names] + [False])[events["name"][rows]]
    kept = (last > first) | marks
    rows, first, last = rows[kept], first[kept], last[kept]
    reached = stream.at(begin[kept])
    works = last > first
    start = np.where(works, np.append(stream.start_ns, 0)[first], reached)
    until = np.where(works, stream.reach_ns[np.maximum(last, 1) - 1], reached)
    picked = np.concatenate([rows, own])
    moments = np.concatenate([start, events["start_ns"][own]])
    ends = np.concatenate([until, events["start_ns"][own] + events["duration_ns"][own]])
    main = trace.lanes.index("main") if "main" in trace.lanes else 0
    columns = {
        **{name: values[picked] for name, values in events.items()},
        "start_ns": moments,
        "duration_ns": np.maximum(ends - moments, 0),
        "lane": np.full(picked.size, main, events["lane"].dtype),
    }
    return Trace.from_columns(columns, names=trace.names, lanes=trace.lanes, groups=trace.groups, ranks=trace.ranks)
