"""Does a dataset give the same examples later? The same indices are read again in forked children, while recording.

What training or the script changes on the way (a curriculum, priorities, a ratio, a counter, files that are written
again) no look at one moment can show. So the indices of a loader's first load are kept, with a checksum of its batch;
children that can only read (`core.machine.apart`) read them again `LATER` steps after it, with the random number
generators as they were before it.

    step     0 .............. 8 .............................. 64
             first load       first child                      second child
             checksum   ==?   checksum                   ==?   checksum

Where the pass has ended by then, the dataset may have changed between two passes only, as by a `set_epoch`: that is no
hindrance but for what outlives a pass. What changes within a pass for the first time after that shows in passes 1, 2,
4, 8, ..., or the next that the share of the time allows: the first load of each is read again when the pass has ended.
What the first pass began with is read once more when the job ends: a change that lasts shows there at the latest.
Where passes are short it is read at their ends as well, until the 64 steps are over: a short job has no such step.

    pass 4   first load ................................ end
             checksum            ==?                     child

With workers, which have the dataset, a first child reads at the first step what the others are compared with: the one
that counts the operations of the model's call (`rehearsals`), where there is one. A child costs the training thread two
forks, and what it writes next a fault for each page, as both processes have it: with 11 million parameters a fork of
12 ms makes the next step .09 s longer on one thread, .26 s on two. Its answer is read at a later step. Where a script
makes loader after loader, forks are put off until they are within a share of the time.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from headway.core.machine.child import Aside, detached, end_detached
from headway.core.machine.interruptions import pass_on
from headway.core.units import NS_PER_S
from headway.runtime.host.device import in_use
from headway.runtime.recorder.probes import NEVER, RECORDING, Probes, now
from headway.runtime.script.batches import checksum
from headway.runtime.script.draws import own_generators, restorer
from headway.trace.events.vocabulary import READ_AGAIN, READING_FAILED, UNREAD

LATER = (8, 64)
"""Optimizer steps after the first load at which its indices are read again."""

SHARE = 0.01
"""Of the time since the first load, what the forks may take in all; those of the first loader are always done."""

STATE_BYTES, PAGE_BYTES, FAULT_NS = 12, 4096, 4000
"""Of a parameter, its gradient and its momentum, which each step writes; and a write to a page that a child has as
well: 2 us on one thread, 5 us on two."""

POSTPONED = 8
"""Steps by which a fork is put off that would take more."""

FEW = 4
"""Examples that are read for a loader with workers."""

WITHIN, END, ACROSS = "within", "end", "across"

LAST_S, MOST_LAST_S = 0.3, 2.0
"""Seconds that the end of the job waits for the children whose answers are the last for their loaders: the first, or
`SHARE` of the time up to the second."""


def begin_alike(firsts: dict[int, list[int]], worker: int, num_workers: int, batch: object) -> bool | None:
    """Say whether workers of a stream begin with the same two batches; None until two of each were seen.

    `firsts` keeps their checksums, by worker. A stream that does not ask which worker reads it yields all its examples
    in each of them. Batches that do not change tell nothing.
    """
    sums = firsts.setdefault(worker, [])
    if len(sums) < 2:
        sums.append(checksum(batch))
    if len(firsts) < num_workers or any(len(pair) < 2 for pair in firsts.values()):
        return None
    changing = all(pair[0] != pair[1] for pair in firsts.values())
    return changing and len({tuple(pair) for pair in firsts.values()}) < num_workers


def collated(dataset: Any, collate_fn: Callable[[Any], Any], index: Any, *, batched: bool) -> Any:
    """Return the batch of the indices `index`, made as torch's fetcher does; not `batched`: of the one `index`."""
    if not batched:
        return collate_fn(dataset[index])
    many = getattr(dataset, "__getitems__", None)
    return collate_fn(many(index) if many else [dataset[one] for one in index])


@dataclass(slots=True)
class FirstLoad:
    """The first load of a loader, and what became of its later readings."""

    group: int
    dataset: weakref.ref[Any]
    collate_fn: Callable[[], Callable[[Any], Any] | None]
    """Returns it; None when it was a method of an object that is gone."""
    indices: Any
    """As the dataset's fetcher got them: a list, or one index."""
    restore: Callable[[], None]
    """Puts the generators back to where they were before the load."""
    step: int
    """Optimizer step of the load."""
    due: list[int]
    """Steps after it at which a child is still to read."""
    expected: int | None = None
    """Checksum of the batch; None until it is known."""
    pipe: int = -1
    """What carries the answer of the child under way; -1 without one."""
    pid: int = 0
    """That child."""
    at: int = 0
    """Steps after the load at which that child was forked."""
    number: int = 1
    """Which pass of its loader it belongs to, from 1 on."""
    at_end: bool = True
    """Whether a child is still to read at the end of that pass."""
    is_over: bool = False
    """Whether that pass has ended, or another one has begun."""
    moment: str = ""
    """When the child under way reads: `WITHIN` its pass, at its `END`, or `ACROSS` another one."""
    is_steady: bool = False
    """Whether it was the same at the end of its pass."""
    is_alike_later: bool = False
    """Whether it was the same across another pass."""

    def read(self) -> bytes:
        """Read the indices again; runs in the child."""
        sys.modules["torch"].set_num_threads(1)
        self.restore()
        collate_fn, batched = self.collate_fn(), isinstance(self.indices, list)
        assert collate_fn is not None, "no child is forked without one"
        return b"%d" % checksum(collated(self.dataset(), collate_fn, self.indices, batched=batched))

    def leave(self) -> None:
        """End the child under way, if there is one."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
            end_detached(self.pid)

    def let_go(self) -> None:
        """Forget what was to be read, for good: nothing of the script's is kept in memory for it any more."""
        self.due.clear()
        self.at_end = False
        if self.number == 1 and self.is_steady:  # it is read at the end of the job, if the script still has all of it
            self.collate_fn = _weakly(self.collate_fn)
            return
        self.collate_fn, self.restore, self.indices = lambda: None, lambda: None, None


def _is_readable(pipe: int, wait_s: float = 0.0) -> bool:
    """Say whether a pipe has something to read within `wait_s`; its number may be any, which `select` refuses."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(1000 * wait_s))


def _weakly(returns: Callable[[], Any]) -> Callable[[], Any]:
    """Return what returns the same as `returns` as long as somebody else holds it."""
    if isinstance(returns, weakref.ref):
        return returns
    try:
        return weakref.ref(returns())
    except TypeError:  # such an object cannot be held weakly
        return lambda: None


class Rereadings:
    """The loads of this process that are read again. One per process that trains."""

    def __init__(self, probes: Probes) -> None:
        self._probes = probes
        self._kept: dict[int, FirstLoad] = {}
        self._earliest: dict[int, FirstLoad] = {}
        """Those of first passes."""
        self._ended: list[FirstLoad] = []
        """Those of passes that are over, with a child under way."""
        self._passes: Counter[int] = Counter()
        self._pid = os.getpid()
        self._since_ns = self._spent_ns = self._last_ns = 0
        self._spent_on_passes_ns = 0
        """The same without those of first passes, which are read again at all events."""

    def keep(self, group: int, dataset: Any, collate_fn: Callable[[Any], Any], indices: Any) -> FirstLoad | None:
        """Begin with the first load of a pass of a loader, before it is read; None where this one is not wanted.

        Indices of None stand for a loader with workers: a child reads its first few examples for comparison.
        """
        probes = self._probes
        if group < 0 or probes.remedied or self._pid != os.getpid():
            return None
        self._passes[group] += 1
        if not self._is_wanted(group):
            return None
        own = type(dataset).__module__.startswith("headway.data.")
        if own or not hasattr(dataset, "__getitem__") or isinstance(dataset, (list, tuple)):
            return None
        iterable = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", ())
        if isinstance(dataset, iterable) or (indices is None and not hasattr(dataset, "__len__")):
            return None  # it has no examples that could be asked for by their place
        number = self._passes[group]
        due = [*([1] if indices is None else ()), *(LATER if number == 1 else ())]
        if indices is None:
            indices = list(range(min(FEW, len(dataset))))
        restore = _generators_as_now(dataset, collate_fn)
        # A method would keep its object, often the dataset, in memory.
        method = weakref.WeakMethod(collate_fn) if isinstance(collate_fn, MethodType) else None
        collate = (lambda: collate_fn) if method is None else method
        kept = FirstLoad(group, weakref.ref(dataset), collate, indices, restore, probes.steps[0], due, number=number)
        self._kept[group] = kept
        self._earliest.setdefault(group, kept)
        if self.stepped not in probes.listeners:
            self._since_ns = now()
            probes.listeners.append(self.stepped)
        probes.wanted[self.stepped] = 0
        probes.due[0] = 0
        return kept

    def _is_wanted(self, group: int) -> bool:
        """Say whether the first load of the pass that begins is to be kept; the end of the one before was not seen."""
        before = self._kept.get(group)
        if before is None:
            return True
        before.at_end, before.is_over = False, True
        if not before.due and before.pipe < 0:
            before.let_go()
        is_alike = self._probes.loaders.get(group, {}).get("changes") == ""
        is_time = self._passes[group] >= 2 * before.number and self._is_within_share()
        if before.due or not is_alike or not is_time:
            return False
        if before.pipe >= 0:
            self._ended.append(before)
        return True

    def _is_within_share(self) -> bool:
        return self._spent_on_passes_ns + self._last_ns <= SHARE * (now() - self._since_ns)

    def ended(self, group: int) -> None:
        """Fork the child that reads again what the pass which has just ended began with, where that is due."""
        load = self._kept.get(group)
        if load is None or self._pid != os.getpid():
            return
        moment = END if load.at_end else ACROSS
        if moment == ACROSS and not (load.number == 1 and load.due and load.is_over):
            return
        load.at_end, load.is_over = False, True
        is_first = load.number == 1 and group == next(iter(self._kept)) and self._passes[group] <= 2
        is_wanted = is_first or self._is_within_share()
        if not self._has_answered(load):
            if moment == ACROSS or load.moment != WITHIN or load.expected is None or not is_wanted:
                return
            load.leave()  # what it would say, the one that reads at the end says as well
        if load.expected is not None and is_wanted:
            since = self._probes.steps[0] - load.step
            load.due = [step for step in load.due if step > since]
            self._fork(load, since, moment)
            self._spent_on_passes_ns += self._last_ns
            self._probes.wanted[self.stepped] = self._probes.due[0] = 0
        elif not load.due:
            load.let_go()

    @contextlib.contextmanager
    def aside(self) -> Iterator[Aside | None]:
        """Have a child that is forked in this block read first what a loader with workers is compared with later.

        None where nothing is due at the first step. A block that raises leaves the reading to a child of its own.
        """
        waiting = (load for load in self._kept.values() if load.due[:1] == [1] and load.pipe < 0)
        load = next(waiting, None) if self._pid == os.getpid() else None
        if load is None or load.dataset() is None or load.collate_fn() is None or in_use():
            yield None
            return
        reading, writing = os.pipe()
        try:
            yield Aside(load.read, writing)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        load.pipe, load.at = reading, 1
        del load.due[0]

    def stepped(self, _: int) -> int:
        """Take answers, and fork the children that are due; return the steps until there is more to do."""
        waits = []
        self._ended = [load for load in self._ended if load.pipe >= 0]
        for load in (*self._kept.values(), *self._ended):
            try:
                waits.append(self._follow(load, self._probes.steps[0] - load.step))
            except Exception as cause:
                pass_on(cause)
                load.let_go()
                load.leave()
                self._note(load, unchecked=f"{type(cause).__name__}: {cause}")
        return min(waits, default=NEVER)

    def _follow(self, kept: FirstLoad, since: int) -> int:
        """Go on with one loader, `since` steps after its load; return the steps until its next turn."""
        if not self._has_answered(kept):
            return 1
        if not kept.due:
            if not kept.at_end:
                kept.let_go()
            return NEVER
        if since < kept.due[0]:
            return kept.due[0] - since
        if kept.at_end and since <= (end := self._num_batches(kept)) <= 2 * kept.due[0]:
            return end + 1 - since  # the pass is read at its end soon
        if kept.group != next(iter(self._kept)) and self._spent_ns > SHARE * (now() - self._since_ns):
            return POSTPONED
        del kept.due[0]
        if in_use() and kept.number == 1:
            self._note(kept, unchecked="the process uses a device, and was not forked to read its data again")
        self._fork(kept, since, ACROSS if kept.is_over else WITHIN)
        return 1 if kept.pipe >= 0 else NEVER

    def _num_batches(self, load: FirstLoad) -> int:
        """Return how many batches a pass of its loader has at most; 0 where nobody knows."""
        facts = self._probes.loaders.get(load.group, {})
        return -(-(facts.get("dataset_size") or 0) // (facts.get("batch_size") or 1))

    def _has_answered(self, kept: FirstLoad) -> bool:
        """Take the answer of the child under way, if there is one; say whether none is under way any more."""
        if kept.pipe < 0:
            return True
        if not _is_readable(kept.pipe):
            return False
        answer = os.read(kept.pipe, 64)
        os.close(kept.pipe)
        kept.pipe = -1
        self._judge(kept, answer)
        return True

    def _fork(self, kept: FirstLoad, since: int, moment: str) -> None:
        """Fork a child that reads a load again, `since` steps after it; where none can be, forget the load."""
        if in_use() or kept.dataset() is None or kept.collate_fn() is None:
            kept.let_go()
            return
        start, kept.at, kept.moment = now(), since, moment
        kept.pipe, kept.pid = detached(kept.read, self._probes.run)
        forked_ns = now() - start
        num_parameters = sum(filter(None, self._probes.tables.get("parameters", {}).values()))
        self._last_ns = forked_ns + STATE_BYTES * num_parameters // PAGE_BYTES * FAULT_NS
        self._spent_ns += self._last_ns
        self._probes.emit(RECORDING, start, forked_ns, READ_AGAIN)

    def finish(self) -> None:
        """End the children that still read: the job does not wait long for them, and leaves nobody behind."""
        if self._pid != os.getpid():
            return
        share_s = SHARE * (now() - self._since_ns) / NS_PER_S
        until = time.monotonic() + max(LAST_S, min(share_s, MOST_LAST_S))
        for load in (*self._kept.values(), *self._ended, *self._last_readings(until)):
            if load.pipe >= 0 and not load.due:
                _is_readable(load.pipe, max(0.0, until - time.monotonic()))
            if not self._has_answered(load):
                load.leave()
                if load.moment == ACROSS and load.number == 1 and not load.due:
                    self._note_unread(load)
        for load in self._earliest.values():  # of a short job whose dataset is gone
            if load.due and load.is_steady and load.is_alike_later and load.pipe < 0:
                self._note(load, changes="")

    def _last_readings(self, until: float) -> list[FirstLoad]:
        """Have read once more what first passes began with, where there were others; return what is read then."""
        read = list[FirstLoad]()
        for group, load in self._earliest.items():
            if self._passes[group] < 2 or time.monotonic() >= until or load.dataset() is None:
                continue
            if not self._has_answered(load) and load.moment != ACROSS:
                load.leave()
            changes = self._probes.loaders.get(group, {}).get("changes")
            is_unjudged = changes is None and bool(load.due) and load.expected is not None
            if is_unjudged or (changes == "" and load.is_steady):
                load.due.clear()
                if load.pipe < 0:
                    self._fork(load, self._probes.steps[0] - load.step, ACROSS)
                read.append(load)
        return read

    def _note_unread(self, load: FirstLoad) -> None:
        """Note that the last reading did not answer, where no other one has said that examples stay the same."""
        if self._probes.loaders.get(load.group, {}).get("changes") is None:
            self._note(load, unchecked=UNREAD)

    def _judge(self, kept: FirstLoad, answer: bytes) -> None:
        if not answer:
            if kept.number == 1 and not kept.is_steady:
                self._note(kept, unchecked=READING_FAILED)
            kept.let_go()
        elif kept.expected is None:
            kept.expected = int(answer)
        elif int(answer) != kept.expected:
            kept.let_go()
            first = "its first examples" if kept.number == 1 else f"the first examples of pass {kept.number}"
            found = f"{first}, read again {kept.at} steps later, were others"
            if kept.moment == ACROSS and kept.is_steady:
                self._note(kept, changes="", between=found)
            else:
                self._note(kept, changes=found)
        else:
            kept.is_steady |= kept.moment == END
            kept.is_alike_later |= kept.moment == ACROSS
            if not kept.due:
                self._note(kept, changes="")

    def _note(self, kept: FirstLoad, *, changes: str | None = None, unchecked: str = "", between: str = "") -> None:
        """Add to the facts of the loader what was seen."""
        facts = self._probes.loaders.setdefault(kept.group, {})
        if facts.get("changes"):
            return  # in an earlier pass
        facts["changes"] = changes
        facts["changes_unchecked"] = unchecked
        if between:
            facts["changes_between"] = between
        self._probes.write_tables()


def _generators_as_now(*holders: Any) -> Callable[[], None]:
    """Return a function that puts the global generators, and those that `holders` hold, back to where they are now."""
    acts: list[Callable[[], Any]] = [
        partial(random.setstate, random.getstate()), restorer(own_generators(*holders)),
    ]  # fmt: skip
    numpy, torch = sys.modules.get("numpy"), sys.modules["torch"]
    if numpy is not None:
        acts.append(partial(numpy.random.set_state, numpy.random.get_state()))
    acts.append(partial(torch.default_generator.set_state, torch.default_generator.get_state()))

    def restore() -> None:
        for act in acts:
            act()

    return restore
