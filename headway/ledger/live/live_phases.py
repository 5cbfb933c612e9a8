"""Evaluation and the script's own time in the steps of a running job: by the rules of the finished run.

A window holds whole steps, so what lies between two updates can be judged as
soon as it is booked. What a later step would say of an earlier one is not
known: a model counts as trained once it learned in the same window.
Times in ns.

>>> from headway.trace.rings.records import RECORD_DTYPE
>>> records, spans = phases(BookingWindow(0, 0, 0, np.array([100]), np.zeros(0, RECORD_DTYPE)))
>>> len(records), len(spans[0])
(0, 0)
"""

from __future__ import annotations

import numpy as np

from headway.ledger.live.live_rank import BookingWindow, Records
from headway.trace.events.intervals import Intervals
from headway.trace.events.vocabulary import SPANS
from headway.trace.recording.basis import basis_of, gradients_of
from headway.trace.recording.evaluation import evaluations, mark_learning
from headway.trace.recording.gaps import gaps
from headway.trace.recording.rows import with_backwards
from headway.trace.rings.records import RECORD_DTYPE

FORWARD, SCRIPT = SPANS["forward"].code, SPANS["host.script"].code


def phases(window: BookingWindow) -> tuple[Records, Intervals]:
    """Return records of the script's own time in the steps of `window`, and when it evaluated."""
    made = np.zeros(0, RECORD_DTYPE)
    if not (window.records["code"] == FORWARD).any():
        return made, (made["start_ns"], made["start_ns"])
    main = with_backwards(window.records)
    gradients, basis = gradients_of(main), basis_of(main)
    mark_learning(main, gradients, basis)
    found = evaluations(main, gradients)
    script = gaps(main, np.concatenate([[window.low_ns], window.ends_ns]), found, gradients, basis)
    made = np.zeros(len(script), RECORD_DTYPE)
    made["code"], made["start_ns"], made["duration_ns"] = SCRIPT, script.start_ns, script.duration_ns
    return made, (found.start_ns, found.start_ns + found.duration_ns)
