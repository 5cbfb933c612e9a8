"""One rank of a running job: its records until they are booked, and where its steps end.

Fed with the records of one process in the order in which they were written.
Times in ns on CLOCK_MONOTONIC.

>>> from headway.trace.rings.records import RECORD_DTYPE
>>> records = np.zeros(2, RECORD_DTYPE)
>>> records["code"], records["start_ns"], records["duration_ns"] = STEP, [10, 30], 5
>>> rank = LiveRank(0, 1, 0)
>>> rank.take(records); rank.begin(), rank.steps, rank.window(2).ends_ns.tolist()
(True, 2, [15, 35])

Where the steps of a running rank end: by the rule of `trace.recording.basis`, as far as it can be known by now.

Updates of the optimizer met first end steps, once gradients were seen only those that a gradient led to. A first
update without any gradient is held back until the next one: a restore makes one to fill in the state. While no
optimizer has stepped, a backward with fresh gradients ends the step before it; where none is computed either, every
forward is an iteration, after the first twenty; once there are gradients they were an evaluation, and do not count
any more. Differences from the finished run: of several updates before the
first gradient all stay counted, and several optimizers in loops of different depth are not told apart. Times in ns.

>>> from headway.trace.rings.records import RECORD_DTYPE
>>> records = np.zeros(3, RECORD_DTYPE)
>>> records["code"], records["start_ns"], records["c"] = BACKWARD, [10, 20, 30], [1, 0, 1]
>>> LiveEnds().of(records).tolist()
[20]

Evaluation and the script's own time in the steps of a running job: by the rules of the finished run.

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

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.intervals import Intervals, Ints
from headway.trace.events.vocabulary import BY_EVENTS, SPANS
from headway.trace.recording.basis import basis_of, evaluations, gradients_of, mark_learning
from headway.trace.recording.gaps import gaps
from headway.trace.recording.rows import training_thread, with_backwards
from headway.trace.rings.records import RECORD_DTYPE

# Where the steps of a running rank end: by the rule of `trace.recording.basis`, as far as it can be known by now.

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
    evaluated: int = 0
    """Forwards that counted before the first gradient or update came: they were an evaluation, no steps."""
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
        if self._forwards > FORWARDS and (self._lead >= 0 or self._gradients):
            self.evaluated, self._forwards = self.evaluated + self._forwards - FORWARDS, FORWARDS
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


Records = NDArray[np.void]

STEP, WAIT, SAVE, LOAD = (
    SPANS[name].code for name in ("optimizer.step", "comm.wait", "checkpoint.save", "checkpoint.load")
)
SNAPSHOT, COMMIT, RESTORE = (SPANS[f"checkpoint.{name}"].code for name in ("snapshot", "commit", "restore"))
DEVICE_WORK, CPU_MARK, SPINS = (SPANS[name].code for name in ("device.work", "host.cpu", "host.spins"))
TIMED = tuple(SPANS[name].code for name in BY_EVENTS)
LEARNING = tuple(SPANS[name].code for name in ("optimizer.step", "segment.backward", "segment.grad"))
"""Codes that only a thread that trains writes."""

TRAINING = (*LEARNING, *(SPANS[name].code for name in ("input.iter", "input.next", "forward")))
"""Codes that begin step 0."""

RATE_WINDOW_NS = 10_000_000_000
RECENT = 1024
"""Ends of steps remembered for the rate."""

OPEN_COPIES = 64
"""Copies that are remembered until their commit is seen."""

MOST_AHEAD = 64
"""Steps by which a host is believed to be ahead of its device; beyond, steps are booked by what the host says alone."""

OPEN_RECORDS = 1 << 16
"""Records (64 bytes each) held of a step that has not ended; of a rank that never updates older ones are given up."""


@dataclass(frozen=True, slots=True)
class BookingWindow:
    """Complete steps of one rank that are to be booked: from `low_ns` to the last of `ends_ns`."""

    rank: int
    """The rank."""

    first_step: int
    """Number of the first of the steps."""

    low_ns: int
    """Start of the first of the steps."""

    ends_ns: Ints
    """[n] End of each step, in order."""

    records: Records
    """[m] What its training thread recorded then, by record number."""

    given_up: int = 0
    """Records of these steps that were not held."""

    device_ns: int = -1
    """From when on records tell when the rank's device was at work; -1 = none did."""

    marks: Records = field(default_factory=lambda: np.zeros(0, RECORD_DTYPE))
    """[k] Marks of CPU time and of waiting for a core: the two before the window, and all later ones so far."""


@dataclass(slots=True)
class LiveRank:
    """What is known of one rank in the present attempt."""

    rank: int
    pid: int
    from_ns: int
    """From when on this attempt answers for the rank."""

    first_ns: int = -1
    """Start of step 0; -1 before it."""

    booked_ns: int = 0
    """Everything before is booked."""

    booked_steps: int = 0
    steps: int = 0
    """Complete steps, booked or not."""

    newest_ns: int = 0
    """Length of the newest booked step."""

    usual_ns: int = 0
    """Median length of the steps booked last."""

    last_ns: int = 0
    """End of the newest record."""

    last_step_ns: int = 0
    """End of the newest complete step; 0 before the first."""

    saved: int = -1
    """Complete steps before its last save that is known to be complete; -1 without one."""

    device_ns: int = -1
    """Start of the first work of its device that was seen; -1 before."""

    device_known_ns: int = -1
    """End of the newest work of its device: what it did until then is known."""

    loaded: bool = False
    """Whether it loaded state before its first step."""

    ended: bool = False
    """Whether its process has noted its end."""

    _copied: dict[int, int] = field(default_factory=dict)
    """Checkpoint of headway's own that is not known to be committed -> complete steps before its copy."""

    _committed: list[int] = field(default_factory=list)
    """Checkpoints whose commit was seen since the last window."""

    _lane: int = -1
    _step_ends: LiveEnds = field(default_factory=LiveEnds)
    _held: list[Records] = field(default_factory=list)
    _open: int = 0
    _given_up: dict[int, int] = field(default_factory=dict)
    _ends: list[Ints] = field(default_factory=list)
    _recent: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    _marks: Records = field(default_factory=lambda: np.zeros(0, RECORD_DTYPE))
    """The last two marks of CPU time before `booked_ns`."""

    def __post_init__(self) -> None:
        self.last_ns = self.from_ns

    def take(self, records: Records) -> None:
        """Hold new records, and find the steps that they complete."""
        self.last_ns = max(self.last_ns, int((records["start_ns"] + records["duration_ns"]).max()))
        if self._lane != 0 and np.isin(records["code"], LEARNING).any():
            lane = training_thread(records)
            if lane == 0 or self._lane < 0:
                self._lane = lane
                self._held = [self._own(held) for held in self._held]
        records = self._own(records) if self._lane >= 0 else records
        # Written down long after it began: its own time may lie in steps that are booked already.
        self._committed += records["b"][records["code"] == COMMIT].tolist()
        self._held.append(records)
        timed = records[np.isin(records["code"], TIMED)]
        if len(timed):
            self.device_known_ns = max(self.device_known_ns, int((timed["start_ns"] + timed["duration_ns"]).max()))
            self.device_ns = self.device_ns if self.device_ns >= 0 else int(timed["start_ns"].min())
        ends = self._step_ends.of(records)
        if len(ends):
            ends = np.maximum(np.maximum.accumulate(ends), self.last_step_ns)
            self._ends.append(ends)
            self.steps += len(ends)
            self.last_step_ns = int(ends[-1])
            self._recent = np.concatenate([self._recent, ends])[-RECENT:]
            self._open = 0
        self._open += int((records["start_ns"] >= self.last_step_ns).sum())
        if self._open > OPEN_RECORDS:
            self._give_up()

    @property
    def steps_made(self) -> int:
        """Its steps, but for forwards that counted as such and proved to be an evaluation."""
        return self.steps - self._step_ends.evaluated

    def _give_up(self) -> None:
        """Let go of the older half of what was recorded since the newest complete step."""
        held = np.concatenate(self._held)
        later = np.flatnonzero(held["start_ns"] >= self.last_step_ns)
        old = later[: len(later) - OPEN_RECORDS // 2]
        self._held = [np.delete(held, old)]
        self._open = len(later) - len(old)
        self._given_up[self.steps] = self._given_up.get(self.steps, 0) + len(old)

    def begin(self) -> bool:
        """Say whether the first step has begun only now."""
        if self.first_ns >= 0:
            return False
        held = self._own(np.concatenate(self._held), lane=max(self._lane, 0))
        found = np.isin(held["code"], TRAINING)
        if not found.any():
            return False
        self.first_ns = self.booked_ns = max(int(held["start_ns"][found].min()), self.from_ns)
        loads = np.isin(held["code"], [LOAD, RESTORE])
        self.loaded = bool((loads & (held["start_ns"] <= self.first_ns)).any())
        return True

    @property
    def bookable(self) -> int:
        """Complete steps of which all is known: a device is done with a step some steps of its host later."""
        if self.device_ns < 0 or self.ended or self.booked_steps + MOST_AHEAD < self.steps:
            return self.steps
        waiting = [end for ends in self._ends for end in ends.tolist()]
        return self.steps - sum(1 for end in waiting if end > self.device_known_ns)

    def window(self, horizon: int) -> BookingWindow | None:
        """Hand over the complete steps before number `horizon` that are not booked; None when there is none."""
        count = min(horizon, self.steps) - self.booked_steps
        if count <= 0 or self.first_ns < 0:
            return None
        every = np.concatenate(self._ends)
        ends, self._ends = np.maximum(every[:count], self.booked_ns), [every[count:]]
        high, low, first = int(ends[-1]), self.booked_ns, self.booked_steps
        held = np.concatenate(self._held)
        end_ns = held["start_ns"] + held["duration_ns"]
        marks = np.concatenate([self._marks, held[np.isin(held["code"], (CPU_MARK, SPINS))]])
        self._marks = marks[marks["start_ns"] <= high][-4:]
        self._held = [held[end_ns > high]]
        records = held[(held["start_ns"] < high) & (end_ns > low)]
        lengths = np.diff(ends, prepend=low)
        self.newest_ns, self.usual_ns = (
            int(lengths[-1]),
            int(np.sort(lengths[-RECENT:])[(len(lengths[-RECENT:]) - 1) // 2]),
        )
        self._note_saves(records[(records["start_ns"] >= low) | (first == 0)], first, ends)
        self.booked_ns, self.booked_steps = high, first + count
        given_up = sum(self._given_up.pop(step) for step in list(self._given_up) if step < self.booked_steps)
        return BookingWindow(self.rank, first, low, ends, records, given_up, self.device_ns, marks)

    def _note_saves(self, records: Records, first: int, ends: Ints) -> None:
        """See what was saved in a window that begins with step `first` and whose steps end at `ends`."""
        saves = records[records["code"] == SAVE]
        if len(saves):
            self.saved = first + int(np.searchsorted(ends, int(saves["start_ns"][-1]), side="right"))
        updates, copies = records[records["code"] == STEP], records[records["code"] == SNAPSHOT]
        for number, copied_ns in zip(copies["b"].tolist(), copies["start_ns"].tolist(), strict=True):
            # A copy inside an update was made by a hook behind it: it holds what that update made.
            around = updates["start_ns"] <= copied_ns
            moment = max(copied_ns, int((updates["start_ns"] + updates["duration_ns"])[around].max(initial=0)))
            self._copied[number] = first + int(np.searchsorted(ends, moment, side="right"))
        for number in [*self._copied][:-OPEN_COPIES]:  # the rank that commits for all of them is another one
            del self._copied[number]
        for number in [number for number in self._committed if number in self._copied]:
            self._committed.remove(number)
            self.saved = max(self.saved, self._copied.pop(number))

    def steps_per_s(self, now_ns: int) -> float:
        """Return the rate over the last ten seconds of steps; a step that is overdue lowers it."""
        recent = self._recent[self._recent >= self.last_step_ns - RATE_WINDOW_NS]
        if len(recent) < 2:
            recent = self._recent[-2:]
        if len(recent) < 2:
            return 0.0
        span = int(recent[-1] - recent[0])
        mean = span / (len(recent) - 1)
        open_ns = 0 if self.ended else now_ns - self.last_step_ns
        return (len(recent) - 1) / max(span + max(open_ns - 2 * mean, 0), 1) * 1e9

    def _own(self, records: Records, lane: int = -1) -> Records:
        """Return what the training thread recorded; autograd's own thread sees the end of backward."""
        lane = self._lane if lane < 0 else lane
        own: Records = records[(records["lane"] == lane) | (records["code"] == WAIT)]
        return own


# Evaluation and the script's own time in the steps of a running job: by the rules of the finished run.

SCRIPT = SPANS["host.script"].code


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
