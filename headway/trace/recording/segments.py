"""Forward and backward of every step as rows, from what the recorder left of them.

Use it while a rank's trace is put together. On the host's clock a backward is
recorded as it is and a forward derived: it reaches from the last thing that
comes before a forward (a batch, an update, the backward of the micro-batch
before, a save, a compilation) to the backward that follows. Where device
events timed a backward their rows stand, and the host's, which only show its
launch, go. Rows are bookkeeping: they own no time. Times in int64 ns.

>>> rows = RecordedRows.concat([RecordedRows.of(CODE["input.next"], np.array([0]), np.array([10]), kind=KIND["DATA"]),
...                     RecordedRows.of(BACKWARD, np.array([40]), np.array([20]), kind=KIND["MARK"])])
>>> found = with_forwards(rows)
>>> forward = found.where(found.name == FORWARD)
>>> forward.start_ns.tolist(), forward.duration_ns.tolist()
([10], [30])
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.steps import step_of
from headway.trace.events.vocabulary import BY_EVENTS, KIND, SPANS
from headway.trace.recording.rows import RecordedRows

CODE = {name: index for index, name in enumerate(SPANS)}
"""Name -> its index in the name table of recorded traces."""

FORWARD, BACKWARD, REGION = CODE["segment.forward"], CODE["segment.backward"], CODE["region"]
TIMED = [CODE[name] for name in BY_EVENTS]

BEFORE_FORWARD = [
    CODE[name] for name in SPANS
    if name in ("input.next", "input.iter", "optimizer.step", "comm.init", "host.compile", "host.import", "pause")
    or name.startswith("checkpoint.")
]  # fmt: skip
"""Names whose end may be the beginning of a forward."""

ON_DEVICE = 1
"""`corr` of a segment that device events timed."""


def with_forwards(main: RecordedRows) -> RecordedRows:
    """Return the segment rows of the training lane: outermost backwards and their forwards, or those of the device.

    `main` holds the rows of the training thread, in any order.
    """
    raw = main.where((main.name == FORWARD) | (main.name == BACKWARD))
    timed = raw.corr == ON_DEVICE
    on_device = raw.where(timed)
    backward = outermost(raw.where(~timed))
    backward = backward.where(~_launched_in(backward, on_device.where(on_device.name == BACKWARD)))
    before = main.where(np.isin(main.name, BEFORE_FORWARD))
    ends = np.sort(np.concatenate([before.start_ns + before.duration_ns, backward.start_ns + backward.duration_ns]))
    at = np.searchsorted(ends, backward.start_ns, side="right")
    known = at > 0
    start = ends[at[known] - 1] if known.any() else backward.start_ns[known]
    forward = RecordedRows.of(FORWARD, start, backward.start_ns[known] - start, kind=KIND["MARK"])
    for rows in (forward, backward):
        rows.corr[:], rows.seq[:], rows.peer[:] = 0, -1, -1
    return RecordedRows.concat([on_device, forward, backward])


def _launched_in(host: RecordedRows, on_device: RecordedRows) -> NDArray[np.bool_]:
    """Return [n] whether device events timed each backward of the host: theirs were recorded at its end."""
    found = np.zeros(len(host), bool)
    if len(host) and len(on_device):
        at = np.searchsorted(host.start_ns, on_device.seq, side="right") - 1
        found[at[at >= 0]] = True
    return found


def outermost(rows: RecordedRows) -> RecordedRows:
    """Return the rows that do not lie inside another one, in order of start: a backward may run others inside."""
    rows = rows.where(np.lexsort((-rows.duration_ns, rows.start_ns)))
    end = rows.start_ns + rows.duration_ns
    reach = np.concatenate([[np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1]]) if len(rows) else end
    return rows.where(end > reach)


def place(rows: RecordedRows, bounds_ns: NDArray[np.int64]) -> None:
    """Give segments their number within the step, and what a device did later the step that launched it.

    `rows` have their steps by their own start already; changes them.
    """
    segment = (rows.name == FORWARD) | (rows.name == BACKWARD)
    worked = np.flatnonzero(np.isin(rows.name, TIMED))
    # Of what a device did, `seq` is the host's moment of launch until here: the step is that of the launch.
    rows.step[worked] = step_of(rows.seq[worked], bounds_ns)
    rows.seq[worked] = rows.start_ns[worked] + rows.duration_ns[worked] - rows.seq[worked]
    late = np.flatnonzero((rows.seq >= 0) & (segment | (rows.name == REGION)))
    rows.step[late] = step_of(rows.seq[late], bounds_ns)
    rows.seq[late] = ON_DEVICE
    for name in (FORWARD, BACKWARD):
        own = np.flatnonzero(rows.name == name)
        own = own[np.lexsort((rows.start_ns[own], rows.step[own]))]
        step = rows.step[own]
        # Number within the step = position in this order less the position of the step's first row.
        first = np.flatnonzero(np.concatenate([[True], step[1:] != step[:-1]])) if len(own) else own
        rows.seq[own] = np.arange(len(own)) - np.repeat(first, np.diff(np.append(first, len(own))))
