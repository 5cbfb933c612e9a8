"""Does a dataset give the same examples later? The same indices are read again in forked children, while recording.

What training or the script changes on the way (a curriculum, priorities, a ratio, a counter, files that are written
again) no look at one moment can show. So the indices of a loader's first load are kept, with a checksum of its batch;
children that can only read (`core.machine.apart`) read them again `LATER` steps after it, with the random number
generators as they were before it.

    step     0 .............. 8 .............................. 64
             first load       first child                      second child
             checksum   ==?   checksum                   ==?   checksum

With workers, which have the dataset, a first child reads at the first step what the others are compared with: the one
that counts the operations of the model's call (`call_flops`), where there is one. A child costs the training thread two
forks; its answer is read at a later step. Where a script makes loader after loader, forks
are put off until they are within a share of the time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from headway.core.lazy import resolved
from headway.core.machine.apart import DETACHED, RUN_CACHES, caches_of, name_process, step_apart
from headway.core.machine.child import unheard
from headway.core.machine.interruptions import pass_on, raised_behind
from headway.runtime.host.device import in_use
from headway.runtime.recorder.probes import NEVER, RECORDING, Probes, now
from headway.runtime.script.draws import own_generators, restorer
from headway.trace.events.vocabulary import READ_AGAIN

LATER = (8, 64)
"""Optimizer steps after the first load at which its indices are read again."""

SHARE = 0.01
"""Of the time since the first load, what the forks may take in all; those of the first loader are always done."""

POSTPONED = 8
"""Steps by which a fork is put off that would take more."""

FEW = 4
"""Examples that are read for a loader with workers."""

TIMEOUT_S = 20
"""Seconds that a child has; it ends itself."""

DEEPEST = 16
"""Levels of a batch that are looked into; an object may hold itself."""


def batch_bytes(batch: Any, depth: int = 0) -> int:
    """Return the bytes of the tensors and arrays in a batch of nested lists, tuples and mappings.

    What does not say how large it is, as a sparse tensor, counts as 0.
    """
    try:
        nbytes = getattr(batch, "nbytes", None)
    except Exception as cause:
        pass_on(cause)
        nbytes = 0
    if isinstance(nbytes, int):
        return nbytes
    if depth > 4:
        return 0
    if isinstance(batch, dict):
        return sum(batch_bytes(value, depth + 1) for value in batch.values())
    if isinstance(batch, (list, tuple)):
        return sum(batch_bytes(value, depth + 1) for value in batch)
    return 0


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


def checksum(batch: Any, crc: int = 0, depth: int = 0) -> int:
    """Return a checksum of the content of a batch: of tensors, arrays and texts in containers and objects.

    What it cannot look into, or lies deeper than `DEEPEST`, counts by its type. Raises what an object raises that is
    looked at.

    >>> checksum([1, "a"]) == checksum([1, "a"]), checksum([1, "a"]) == checksum([1, "b"])
    (True, False)
    """
    torch, kind = sys.modules.get("torch"), type(batch)
    if depth > DEEPEST:
        return zlib.crc32(kind.__name__.encode(), crc)
    if isinstance(batch, dict):
        for key, value in batch.items():
            crc = checksum(value, checksum(key, crc, depth + 1), depth + 1)
        return crc
    if isinstance(batch, (list, tuple)):
        for value in batch:
            crc = checksum(value, crc, depth + 1)
        return crc
    if isinstance(batch, (str, bytes, int, float, bool, type(None))):
        return zlib.crc32(repr(batch).encode(), crc)
    if torch is not None and isinstance(batch, torch.Tensor):
        if batch.layout is torch.sparse_coo:
            return checksum([batch._indices(), batch._values()], crc, depth + 1)
        plain = batch.layout is torch.strided and batch.device.type == "cpu"
        if not plain or batch.is_quantized or batch.is_nested or not batch.numel():
            return zlib.crc32(kind.__name__.encode(), crc)
        batch = batch.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
        return zlib.crc32(batch.tobytes(), crc)
    if hasattr(kind, "tobytes"):
        is_of_objects = getattr(getattr(batch, "dtype", None), "hasobject", False)  # its bytes are addresses
        return checksum(batch.ravel().tolist(), crc, depth + 1) if is_of_objects else zlib.crc32(batch.tobytes(), crc)
    crc = zlib.crc32(kind.__name__.encode(), crc)
    # Graph libraries, for example, have a class of their own for a batch.
    inside = {} if isinstance(batch, (type, FunctionType, ModuleType)) else getattr(batch, "__dict__", {})
    return checksum(inside, crc, depth + 1)


def collated(dataset: Any, collate_fn: Callable[[Any], Any], index: Any, *, batched: bool) -> Any:
    """Return the batch of the indices `index`, made as torch's fetcher does; not `batched`: of the one `index`."""
    if not batched:
        return collate_fn(dataset[index])
    many = getattr(dataset, "__getitems__", None)
    return collate_fn(many(index) if many else [dataset[one] for one in index])


def detached(work: Callable[[], bytes], run: str = "") -> tuple[int, int]:
    """Run `work` apart in a child of a child; return a pipe that will carry what it returns, and the child's pid.

    b"" comes through the pipe if it fails.
    """
    reading, writing = os.pipe()
    try:
        return reading, start_detached(work, writing, run=run)
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)


@dataclass(frozen=True, slots=True)
class Aside:
    """Work that a child does before its own, and the pipe for its answer."""

    work: Callable[[], bytes]
    writing: int

    def answer(self) -> None:
        """Do it, and close the pipe: without an answer where it fails."""
        with contextlib.suppress(BaseException):  # whoever reads the pipe finds nothing in it
            os.write(self.writing, self.work())
        os.close(self.writing)


def start_detached(
    work: Callable[[], bytes], writing: int, *, forks: bool = False, run: str = "", first: Aside | None = None
) -> int:
    """Run `work` apart in a child of a child, which writes what it returns into `writing`; return its process id.

    What `first` is there to do is done before it, and answered at once: one child for two.

    The child between ends at once and is waited for here, so that no wait of the script's meets a process of ours.
    With `forks`, `work` may fork children of its own that step apart themselves. Libraries write their caches below
    `run`, where `settle` removes them.
    """
    caches = caches_of(run) if run else ""
    with unheard(), raised_behind():
        return _start_detached(work, writing, caches, forks=forks, first=first)


def _start_detached(work: Callable[[], bytes], writing: int, caches: str, *, forks: bool, first: Aside | None) -> int:
    told, telling = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, as every loader does
            pid = os.fork()
    except OSError:  # no process is left: then no descriptor is to be lost as well
        os.close(told)
        os.close(telling)
        raise
    if pid == 0:
        try:
            name_process(DETACHED)  # before the fork: the child has the name from its first moment on, and can be ended
            grandchild = os.fork()
            if grandchild:
                os.write(telling, b"%d" % grandchild)
            else:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
                signal.alarm(3 * TIMEOUT_S if forks else TIMEOUT_S)
                os.nice(10)  # some take a second of CPU, beside steps that are recorded
                keep = (writing,) if first is None else (writing, first.writing)
                step_apart("end at writes", keep=keep, forks=forks, caches=caches)
                if first is not None:
                    first.answer()
                answer = work()
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
                os.write(writing, answer)
        finally:
            os._exit(0)
    os.close(telling)
    with contextlib.suppress(ChildProcessError):  # a handler of the script may have waited for it already
        os.waitpid(pid, 0)
    try:
        return int(os.read(told, 20) or 0)
    finally:
        os.close(told)


def end_detached(pid: int) -> None:
    """End a child of `start_detached`, unless it has ended by itself."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8") as file:  # or it is gone
        if file.read().strip() == DETACHED:
            os.kill(pid, signal.SIGKILL)


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

    def read(self) -> bytes:
        """Read the indices again; runs in the child."""
        sys.modules["torch"].set_num_threads(1)
        self.restore()
        collate_fn, batched = self.collate_fn(), isinstance(self.indices, list)
        assert collate_fn is not None, "no child is forked without one"
        return b"%d" % checksum(collated(self.dataset(), collate_fn, self.indices, batched=batched))

    def let_go(self) -> None:
        """Forget what was to be read, for good: nothing of the script's is kept in memory for it any more."""
        self.due.clear()
        self.collate_fn, self.restore, self.indices = lambda: None, lambda: None, None


class Rereadings:
    """The loads of this process that are read again. One per process that trains."""

    def __init__(self, probes: Probes) -> None:
        self._probes = probes
        self._kept: dict[int, FirstLoad] = {}
        self._pid = os.getpid()
        self._since_ns = self._spent_ns = 0

    def keep(self, group: int, dataset: Any, collate_fn: Callable[[Any], Any], indices: Any) -> FirstLoad | None:
        """Begin with a loader's first load, before it is read; None where it is not wanted, or was kept before.

        Indices of None stand for a loader with workers: a child reads its first few examples for comparison.
        """
        probes = self._probes
        if group in self._kept or group < 0 or probes.remedied or self._pid != os.getpid():
            return None
        own = type(dataset).__module__.startswith("headway.data.")
        if own or not hasattr(dataset, "__getitem__") or isinstance(dataset, (list, tuple)):
            return None
        iterable = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", ())
        if isinstance(dataset, iterable) or (indices is None and not hasattr(dataset, "__len__")):
            return None  # it has no examples that could be asked for by their place
        due = list(LATER)
        if indices is None:
            indices, due = list(range(min(FEW, len(dataset)))), [1, *LATER]
        restore = _generators_as_now(dataset, collate_fn)
        # A method would keep its object, often the dataset, in memory.
        method = weakref.WeakMethod(collate_fn) if isinstance(collate_fn, MethodType) else None
        collate = (lambda: collate_fn) if method is None else method
        kept = FirstLoad(group, weakref.ref(dataset), collate, indices, restore, probes.steps[0], due)
        self._kept[group] = kept
        if len(self._kept) == 1:
            self._since_ns = now()
            probes.listeners.append(self.stepped)
        probes.wanted[self.stepped] = 0
        probes.due[0] = 0
        return kept

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
        for kept in self._kept.values():
            try:
                waits.append(self._follow(kept, self._probes.steps[0] - kept.step))
            except Exception as cause:
                pass_on(cause)
                kept.let_go()
                self._note(kept, unchecked=f"{type(cause).__name__}: {cause}")
        return min(waits, default=NEVER)

    def _follow(self, kept: FirstLoad, since: int) -> int:
        """Go on with one loader, `since` steps after its load; return the steps until its next turn."""
        if kept.pipe >= 0:
            if not select.select([kept.pipe], [], [], 0)[0]:
                return 1
            answer = os.read(kept.pipe, 64)
            os.close(kept.pipe)
            kept.pipe = -1
            self._judge(kept, answer)
        if not kept.due:
            kept.let_go()
            return NEVER
        if since < kept.due[0]:
            return kept.due[0] - since
        if kept.group != next(iter(self._kept)) and self._spent_ns > SHARE * (now() - self._since_ns):
            return POSTPONED
        kept.at = since
        del kept.due[0]
        if in_use():
            kept.let_go()
            self._note(kept, unchecked="the process uses a device, and was not forked to read its data again")
            return NEVER
        if kept.dataset() is None or kept.collate_fn() is None:
            kept.let_go()
            return NEVER
        start = now()
        kept.pipe, kept.pid = detached(kept.read, self._probes.run)
        self._spent_ns += now() - start
        self._probes.emit(RECORDING, start, now() - start, READ_AGAIN)
        return 1

    def finish(self) -> None:
        """End the children that still read: the job does not wait for them, and leaves nobody behind."""
        for kept in self._kept.values() if self._pid == os.getpid() else ():
            if kept.pipe >= 0:
                end_detached(kept.pid)

    def _judge(self, kept: FirstLoad, answer: bytes) -> None:
        if not answer:
            kept.due.clear()
            self._note(kept, unchecked="a child that read it again failed, or wanted to write or to send something")
        elif kept.expected is None:
            kept.expected = int(answer)
        elif int(answer) != kept.expected:
            kept.due.clear()
            self._note(kept, changes=f"its first examples, read again {kept.at} steps later, were others")
        elif not kept.due:
            self._note(kept, changes="")

    def _note(self, kept: FirstLoad, *, changes: str | None = None, unchecked: str = "") -> None:
        """Add to the facts of the loader what was seen."""
        facts = self._probes.loaders.setdefault(kept.group, {})
        facts["changes"] = changes
        facts["changes_unchecked"] = unchecked
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


# Asks, in a child of the recorded process, what remedies would say of a loader, when its first iterator is made.
#
# The room that has the remedies is not known here: HEADWAY_REMEDIES names the function under `NAME`. What the child
# finds it writes into RUN/loaders/r<rank>-t<group>.json, whose lock it holds until then; nothing waits for it but the
# end of the recording, for a moment.
#
#     rank       iter(loader) --fork--> steps ...
#     child                    `-- imports, tries apart ------- writes, ends (lock released)
#     launcher                                                   finalise: takes the lock, reads

NAME = "rehearsal.loader"
"""Key of the function in HEADWAY_REMEDIES."""

MOST_LOADERS = 8
"""Loaders of a run that are asked about: each costs 0.5 s of another core, and the training thread two forks."""

PATIENCE_S = 10.0
"""Seconds that the end of a recording waits for children that still try."""


def begin(probes: Probes, group: int, loader: Any) -> None:
    """Start the child for the loader of number `group`; nothing where it cannot be, or need not be."""
    function = json.loads(os.environ.get("HEADWAY_REMEDIES") or "{}").get(NAME)
    if not function or group >= MOST_LOADERS or probes.remedied or not probes.leads or probes.recorder.rank != 0:
        return
    if in_use():  # what was forked then could not use the device
        return
    folder = f"{probes.run}/loaders"
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(f"{folder}/r0-t{group}.json", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

        def work() -> bytes:
            rehearsal = resolved(function)(loader)
            return json.dumps({group: {"rehearsal": {**rehearsal, "ended_ns": now()}}}).encode()

        start_detached(work, descriptor, forks=True, run=probes.run)
    finally:
        os.close(descriptor)


def settle(run: Path, patience_s: float = PATIENCE_S) -> None:
    """Wait until the children of the ranks in `run` have written, `patience_s` at most."""
    deadline = time.monotonic() + patience_s
    for path in sorted([*(run / "loaders").glob("r*-t*.json"), *(run / "flops").glob("r*-m*.json")]):
        with path.open("rb") as file:
            while not _is_free(file.fileno()) and time.monotonic() < deadline:
                time.sleep(0.01)
    shutil.rmtree(run / RUN_CACHES, ignore_errors=True)


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
