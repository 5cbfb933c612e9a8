"""Where the steps of a running rank end: by the rule of `trace.recording.basis`, as far as it can be known by now.

Updates of the optimizer met first end steps, once gradients were seen only those that a gradient led to. A first
update without any gradient is held back until the next one: a restore makes one to fill in the state. While no
optimizer has stepped, a backward with fresh gradients ends the step before it; where none is computed either, every
forward is an iteration, after the first twenty. Differences from the finished run: of several updates before the
first gradient all stay counted, and several optimizers in loops of different depth are not told apart. Times in ns.

>>> from headway.trace.rings.records import RECORD_DTYPE
>>> records = np.zeros(3, RECORD_DTYPE)
>>> records["code"], records["start_ns"], records["c"] = BACKWARD, [10, 20, 30], [1, 0, 1]
>>> LiveEnds().of(records).tolist()
[20]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.sweep import Ints
from headway.trace.events.vocabulary import SPANS

UPDATE, BACKWARD, GRAD, FORWARD = (
    SPANS[name].code for name in ("optimizer.step", "segment.backward", "segment.grad", "forward")
)

STRAY_UPDATES = 32
"""Updates by others after which an optimizer that made none no longer ends the steps."""

FORWARDS = 20
"""Forwards without any gradient before which none counts: an evaluation may precede the training."""


@dataclass(slots=True)
class LiveEnds:
    """What of one rank's records decides where its next step ends; feed it with `of`."""

    _lead: int = -1
    _strays: int = 0
    _gradients: int = 0
    """Gradients seen so far."""
    _led_by: int = 0
    """`_gradients` at the last update that counted."""
    _first_end_ns: int = -1
    """End of the only update so far, where no gradient led to it; -1 where there is none, or it was decided on."""
    _backward_end_ns: int = -1
    """End of the newest backward; -1 before the first."""
    _forwards: int = 0
    _updated: bool = False
    """Whether an update was looked at."""

    def of(self, records: NDArray[np.void]) -> Ints:
        """Return the ends of the steps that new records of the training thread complete."""
        code = records["code"]
        # An update's record may carry the backward before it, which then has none of its own.
        gradient = np.isin(code, [BACKWARD, GRAD]) | ((code == UPDATE) & (records["d"] > 0))
        seen = self._gradients + np.cumsum(gradient)
        ends = self._by_update(records, seen)
        if self._lead < 0:
            ends = self._by_backward(records)
            if not len(ends) and not seen[-1:].any():
                ends = self._by_forward(records)
        self._gradients = int(seen[-1]) if len(seen) else self._gradients
        return ends

    def _by_update(self, records: NDArray[np.void], seen: Ints) -> Ints:
        at = np.flatnonzero(records["code"] == UPDATE)
        if not len(at):
            return np.zeros(0, np.int64)
        if self._lead < 0:
            self._lead = int(records["a"][at[0]])
        lead = at[records["a"][at] == self._lead]
        self._strays = 0 if len(lead) else self._strays + len(at)
        if self._strays >= STRAY_UPDATES:  # that optimizer is done: a later phase of training has others
            self._lead, self._strays = int(records["a"][at[-1]]), 0
            lead = at[records["a"][at] == self._lead]
        before = np.concatenate([[self._led_by], seen[lead][:-1]]) if len(lead) else seen[lead]
        is_first = not self._updated
        lead = lead[(seen[lead] > before) | (seen[lead] == 0)]
        if not len(lead):
            return np.zeros(0, np.int64)
        self._led_by, self._updated = int(seen[lead[-1]]), True
        ends: Ints = records["start_ns"][lead] + records["duration_ns"][lead]
        if is_first and seen[lead[0]] == 0:
            self._first_end_ns, lead, ends = int(ends[0]), lead[1:], ends[1:]
        if len(lead) and self._first_end_ns >= 0:
            held, self._first_end_ns = self._first_end_ns, -1
            if seen[lead[0]] == 0:  # another one without a gradient: nobody sees gradients here
                ends = np.concatenate([[held], ends])
        return ends

    def _by_backward(self, records: NDArray[np.void]) -> Ints:
        """Return the ends of the backwards before those that began with fresh gradients."""
        found = records[np.isin(records["code"], [BACKWARD, GRAD])]
        if not len(found):
            return np.zeros(0, np.int64)
        ends = found["start_ns"] + found["duration_ns"]
        before = np.concatenate([[self._backward_end_ns], ends[:-1]])
        self._backward_end_ns = int(ends[-1])
        fresh = (found["c"] == 1) | (found["code"] == GRAD)
        result: Ints = before[fresh & (before >= 0)]
        return result

    def _by_forward(self, records: NDArray[np.void]) -> Ints:
        found = records[records["code"] == FORWARD]
        skip = max(FORWARDS - self._forwards, 0)
        self._forwards += len(found)
        ends: Ints = (found["start_ns"] + found["duration_ns"])[skip:]
        return ends
