"""What the probes of one process share: where records go, what failed, who waits for steps.

A probe is a function around one function of torch or Python. Probes are made
by factories `wrapper(original, probes)` in `probe_*.py`; `patches.py` lists
where each goes. Rules for all of them: one closure with everything bound, the
original is called exactly once with exactly the caller's arguments, and what
headway does around it can fail only into `Probes.failed`.

Remedies change the outermost call of a module (`OuterCall`), each around the one before:

    torch's call  <-  autocast  <-  channels last  <-  the script's `model(x)`

>>> calls = OuterCall()
>>> calls.plain = lambda module, args, kwargs: module * args[0]
>>> undo = calls.add(lambda inner: lambda module, args, kwargs: inner(module, args, kwargs) + 1)
>>> calls.current[0](5, (2,), {}), undo(), calls.current[0]
(11, None, None)

The sync and the rename of a save are recognised by what the process saved last (`ProcessSaves`).

>>> saves = ProcessSaves()
>>> saves.saved("/tmp/model.pt.tmp", 5, end_ns=100, steps=7)
>>> saves.since(descriptor=5, start_ns=130, steps=7), saves.since(descriptor=6, start_ns=130, steps=7)
(100, 130)
"""

from __future__ import annotations

import _thread
import functools
import json
import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from headway.core.machine.hidden_thread import HiddenThread
from headway.core.machine.interruptions import pass_on
from headway.runtime.host.device import device_type, in_use
from headway.runtime.script.compute_facts import first_parameter, note, note_settings, num_parameters, optimizer_facts
from headway.runtime.script.gap_stacks import GapStacks, loop_depth
from headway.runtime.script.gradients import GradientCounter
from headway.runtime.script.run_delay import Garbage, PoolDelay, open_schedstat, read_delay
from headway.runtime.script.stack_looks import StackLooks
from headway.trace.events.vocabulary import SPANS
from headway.trace.rings.ring import CHILD, MAIN, PROGRESS_NS, SPAWNED, PageWriter, Recorder, warn
from headway.trace.rings.ring import STEP as STEPS

CHAIN_NS = 5_000_000_000
"""A sync this long after the save of the same file no longer starts at the save's end."""

KEEP_PATHS = 64
"""Saved paths that are remembered for their renames."""


class ProcessSaves:
    """The saves of one process: the last one of each thread, and the paths of the latest ones."""

    def __init__(self) -> None:
        self.count = 0
        """Saves so far."""
        self._paths: dict[str, None] = {}
        self._last: dict[int, tuple[int, str, int, int]] = {}

    def saved(self, path: str, descriptor: int, *, end_ns: int, steps: int) -> None:
        """Note the end of a save to `path` ('' if unknown) through `descriptor` (-1 if closed or unknown)."""
        self.count += 1
        self._last[_thread.get_ident()] = (descriptor, path, end_ns, steps)
        if path:
            self._paths[path] = None
            if len(self._paths) > KEEP_PATHS:
                del self._paths[next(iter(self._paths))]

    def synced(self, end_ns: int) -> None:
        """Move the end of this thread's last save: its rename is counted from here on."""
        descriptor, path, _, steps = self._last[_thread.get_ident()]
        self._last[_thread.get_ident()] = (descriptor, path, end_ns, steps)

    def since(self, *, path: str = "", descriptor: int = -1, start_ns: int, steps: int) -> int:
        """Return where the span that really started at `start_ns` begins: at the end of its save, if one just ended.

        Same thread, same file and no optimizer step in between: what lies between can only be flush and close.
        """
        last_descriptor, last_path, end_ns, last_steps = self._last.get(_thread.get_ident(), (-1, "", 0, -1))
        same = (descriptor >= 0 and descriptor == last_descriptor) or (path != "" and path == last_path)
        return end_ns if same and steps == last_steps and start_ns - end_ns < CHAIN_NS else start_ns

    def knows(self, path: str, descriptor: int = -1) -> bool:
        """Whether a file was saved, or is a folder that something was saved into; `descriptor` where it has no path."""
        last = self._last.get(_thread.get_ident())
        if descriptor >= 0 and last is not None and last[0] == descriptor and last[1] in ("", path):
            return True
        return path in self._paths or any(saved.startswith(f"{path}/") for saved in self._paths if path)


Args = tuple[object, ...]
Kwargs = dict[str, object]

CallFn = Callable[[Any, Args, Kwargs], object]
"""Calls a module: (module, args, kwargs) -> what it returns."""


class OuterCall:
    """Which function makes the outermost call of a module."""

    def __init__(self) -> None:
        self.plain: CallFn | None = None
        """Torch's own way; None before its modules are there."""
        self.current: list[CallFn | None] = [None]
        """[1] What to call instead; None: torch's own way."""
        self._wrappers: list[Callable[[CallFn], CallFn]] = []

    def add(self, wrapper: Callable[[CallFn], CallFn]) -> Callable[[], None]:
        """Make calls by `wrapper(the way they were made)` from now on, until the function returned is called."""
        self._wrappers.append(wrapper)
        self.compose()

        def undo() -> None:
            """Leave it out again; the others stay."""
            if wrapper in self._wrappers:
                self._wrappers.remove(wrapper)
                self.compose()

        return undo

    def compose(self) -> None:
        """Put the wrappers around torch's own way, where that is known."""
        call = self.plain
        if call is None:
            return
        for wrapper in self._wrappers:
            call = wrapper(call)
        self.current[0] = call if self._wrappers else None


now = time.perf_counter_ns
"""The clock of every record: CLOCK_MONOTONIC, the same for all processes of a host."""

NEVER = 1 << 62

CPU, SPINS, RECORDING = (SPANS[name].code for name in ("host.cpu", "host.spins", "host.recording"))

OWN_NS = 200_000
"""Work of headway's own that took less has no record: it would cost more than it tells."""


@dataclass(slots=True)
class Probes:
    """The shared state of this process's probes."""

    recorder: Recorder
    """Writes the records."""

    run: str
    """Run folder."""

    emit: Callable[..., None] = field(init=False)
    """`recorder.emit`, or a function that raises when HEADWAY_BREAK=run asks for it."""

    page: Any = field(init=False)
    """`recorder.page`, or one that writes nowhere when the timers are switched off."""

    device_timers: Any = None
    """The process's `device_timers.AllTimers`; None where the host has no device."""

    last_backward: list[int] = field(default_factory=lambda: [0, 0, 0])
    """[3] Start and duration of a backward that is not recorded yet (duration 0 = none), 1 if it began a new cycle."""

    last_forward: list[tuple[int, ...] | None] = field(default_factory=lambda: [None])
    """[1] The numbers of a forward with gradients that is not recorded yet: it is written with the update behind it,
    because two records in a row take half as long as two apart."""

    open_timers: dict[int, tuple[str, int]] = field(default_factory=dict)
    """`id` of a timer of the script's own that was begun -> its name and the step of its begin."""

    garbage: Garbage = field(init=False)
    """The garbage collections."""

    fetching: list[int] = field(default_factory=lambda: [0, -1])
    """[2] The thread of this process that is inside a dataset, 0 while none is: what it loads there is input, not a
    checkpoint, and modules that it calls are transforms, no model. Behind it the group of the loader that read last."""

    opening: list[int] = field(default_factory=lambda: [-1])
    """[1] Group of the loader whose iterator is being made; a loader worker inherits that of its own. -1 = none."""

    num_rng_probes: dict[int, int] = field(default_factory=dict)
    """Group -> loads around which this process has looked at the random number generators."""

    rereadings: Any = None
    """What is read again later (`rereading.Rereadings`); None before the first loader."""

    inside: set[int] = field(default_factory=set)
    """Threads inside a recorded save, load or collective: what those call themselves is not recorded again."""

    saves: ProcessSaves = field(default_factory=ProcessSaves)
    """What was saved last."""

    groups: Any = None
    """The process groups seen (`probe_comm.Groups`); None before the first one."""

    context: Any = None
    """The remedies of the plan (`remedy.Context`); None without a plan."""

    constructed: WeakKeyDictionary[Any, dict[str, str]] = field(default_factory=WeakKeyDictionary)
    """Loader -> where the script constructs it, or which library does."""

    compile_started: list[int] = field(default_factory=lambda: [0, 0, 0])
    """[3] When the compiler began its present work; what its cache had given, and had not, till then."""

    stepping: list[bool] = field(default_factory=lambda: [False])
    """[1] Whether an optimizer is stepping: one that it steps inside is part of its step."""

    gradients: GradientCounter = field(default_factory=GradientCounter)
    """Which updates count, and what counts where there is no optimizer."""

    losses: Any = None
    """The losses that were looked at (`bad_loss.LossLooks`); None before torch was imported."""

    models: Any = None
    """The models that were called (`probe_model.Models`); None before torch was imported."""

    outer_call: OuterCall = field(default_factory=OuterCall)
    """How the outermost call of a module is made."""

    pool: PoolDelay = field(default_factory=PoolDelay)
    """How long the training thread and the threads that compute with it had no core."""

    gap: GapStacks = field(default_factory=GapStacks)
    """What the script does between an update and the next forward."""

    looks: StackLooks = field(default_factory=StackLooks)
    """What the training thread does in its loads and forwards, and where it waits for a device."""

    forwarding: list[bool] = field(default_factory=lambda: [False])
    """[1] Whether the training thread is inside a module, or a backward: the modules called there are parts."""

    differentiating: list[bool] = field(default_factory=lambda: [False])
    """[1] Whether gradients are computed without a backward just now: what that calls itself is not recorded again."""

    after_first_step: Callable[[], None] = lambda: None
    """Called once, after the first update that counts."""

    trainer: list[int] = field(default_factory=lambda: [0])
    """[1] Identifier of the thread that ran the last backward or update; 0 before the first."""

    steps: list[int] = field(default_factory=lambda: [0])
    """[1] Optimizer steps so far, all optimizers together; without an optimizer: backwards, or forwards, that count."""

    due: list[int] = field(default_factory=lambda: [1])
    """[1] `wake` is called when `steps` reaches this number."""

    live: list[bool] = field(default_factory=lambda: [True])
    """[1] False once the recording was stopped: wrappers that cannot be taken out stay idle."""

    listeners: list[Callable[[int], int]] = field(default_factory=list)
    """Called by `wake` with the optimizer's index; each returns the number of optimizer steps until its next call."""

    wanted: dict[Callable[[int], int], int] = field(default_factory=dict)
    """Listener -> optimizer step of its next call; one that is not listed is called at the next step."""

    tables: dict[str, Any] = field(default_factory=lambda: {"patches": {}, "groups": {}, "optimizers": {}})
    """What codes in the records mean; written to RUN/tables/r<rank>.json."""

    loaders: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Facts of each loader by group; written to RUN/loaders/r<rank>.json."""

    indices: dict[int, int] = field(default_factory=dict)
    """`id` of a live optimizer -> its number, see `index_of`."""

    gone: dict[tuple[str, int], int] = field(default_factory=dict)
    """Name of the class and `id` of the first parameter of an optimizer that is gone -> its number.

    Not the class: one of the script's that lived on would keep its module's files from being flushed at exit.
    """

    _is_full: bool = False
    """Whether an error of the run folder was told."""

    _writing: HiddenThread | None = None
    """Writes tables beside the training; None before the first time."""

    def __post_init__(self) -> None:
        self.page = PageWriter() if timers_off() else self.recorder.page
        self.emit = _broken_emit if "run" in os.environ.get("HEADWAY_BREAK", "").split(",") else self.recorder.emit
        self.garbage = Garbage(self.emit, self.failed)
        os.register_at_fork(after_in_child=functools.partial(self.last_forward.__setitem__, 0, None))

    def failed(self, name: str, cause: BaseException) -> None:
        """Warn once that a probe does not work, and note it for the coverage.

        A `cause` that is the script's (`interruptions.is_scripts`) is raised again: call this in an `except`.
        """
        pass_on(cause)
        if name in self.tables["patches"] and self.tables["patches"][name] != "ok":
            return
        reason = f"{type(cause).__name__}: {cause}"
        self.tables["patches"][name] = reason
        if not isinstance(cause, OSError):
            warn(f"{name} is not recorded: {reason}")
        elif not self._is_full:  # of a full disk, or a folder that is gone, each file would tell
            self._is_full = True
            warn(f"{name}, and maybe more, is not recorded: {cause.strerror or reason}")

    def wake(self, optimizer: int, ended_ns: int = 0) -> None:
        """Call the listeners whose step has come: an optimizer step that one of them waits for has ended.

        What takes long here is recorded: it would pass for the script's own time between its steps. `ended_ns` is when
        the step ended, where the caller knows; what it has done since counts as well.
        """
        moment, cpu_ns = self.mark_cpu(), time.thread_time_ns()
        start = ended_ns or moment
        steps, due = self.steps[0], NEVER
        for listener in tuple(self.listeners):
            try:
                wanted = self.wanted.get(listener, 0)
                if steps >= wanted:
                    wanted = self.wanted[listener] = steps + listener(optimizer)
                due = min(due, wanted)
            except Exception as cause:
                self.failed(getattr(listener, "__qualname__", "a listener"), cause)
                self.listeners.remove(listener)
        if steps == 1:
            self.page.train_here()
            if (torch := sys.modules.get("torch")) is not None:
                self.tables["threads"] = torch.get_num_threads()
                note_settings(self.tables.setdefault("compute", {}))
            self.write_tables_beside()
            if self.gradients.watched[0]:
                look = self.looks.of(self.trainer, self.fetching, self.gap, on_device=in_use())
                self.gap.follow(self.trainer, self._write_in_gap, look)
        self.due[0] = due
        if self.worked(start):
            self.pool.headway_ns += time.thread_time_ns() - cpu_ns

    def begins_pass(self, start_ns: int) -> None:
        """Record headway's own work since `start_ns`, and how a training thread stands before its first step.

        That step may wait for a core as well.
        """
        self.worked(start_ns)
        if not self.steps[0]:
            self.mark_cpu()

    def worked(self, start_ns: int) -> bool:
        """Record headway's own work on the training thread since `start_ns`; return whether it took long."""
        spent = now() - start_ns
        if spent < OWN_NS:
            return False
        self.emit(RECORDING, start_ns, spent)
        self.gap.resumed[0] = start_ns + spent
        return True

    def advance(self, index: int) -> None:
        """Count a step that no optimizer's wrapper counts itself; `index` as for `wake`."""
        if self.garbage.stamps:
            self.garbage.note()
        count = self.steps[0] = self.steps[0] + 1
        page = self.page.cells[0]
        page[PROGRESS_NS], page[STEPS] = now(), count
        if count >= self.due[0]:
            self.wake(index)

    def mark_cpu(self) -> int:
        """Note the CPU time of the calling thread, its wait for a core, and the CPU time of all threads; return when.

        They tell a replay how many cores of the host compute occupies, and how much of it was waiting for one.
        """
        moment, cpu_ns = now(), time.thread_time_ns()
        delay_ns, more_ns = self.pool.with_pool(cpu_ns, read_delay(open_schedstat()))
        self.emit(CPU, moment, 0, cpu_ns, delay_ns, time.process_time_ns(), more_ns // 1_000_000)
        if self.pool.sampled:
            self.emit(SPINS, moment, 0, self.pool.spun_ns + self.pool.headway_ns)
        return moment

    def index_of(self, optimizer: Any) -> int:
        """Return a small number for an optimizer, in order of first step; a dead one's `id` is not mistaken for it.

        One that a script makes anew, over the first parameter of one that is gone, has the number of that one: made for
        each step, each would be counted as an optimizer of a single step.
        """
        index = self.indices.get(id(optimizer), -1)
        if index < 0:
            key = type(optimizer).__name__, id(first_parameter(optimizer))
            index = self.gone.pop(key, len(self.tables["optimizers"]))
            self.indices[id(optimizer)] = index
            weakref.finalize(optimizer, self._let_go, id(optimizer), key).atexit = False
            self.gradients.uses.optimizers[index] = weakref.ref(optimizer)
            if str(index) in self.tables["optimizers"]:
                return index
            self.tables["optimizers"][str(index)] = type(optimizer).__name__
            self.tables.setdefault("parameters", {})[str(index)] = num_parameters(optimizer)
            self.tables.setdefault("loops", {})[str(index)] = loop_depth(sys._getframe(1))
            note(self.tables.setdefault("compute", {}), "optimizers", lambda: optimizer_facts(optimizer))
        return index

    def _let_go(self, number: int, key: tuple[str, int]) -> None:
        self.gone[key] = self.indices.pop(number)

    @property
    def leads(self) -> bool:
        """Whether this process is a rank, and not a child of one."""
        return self.recorder.role in (MAIN, SPAWNED)

    @property
    def remedied(self) -> bool:
        """Whether a plan with remedies is applied: what is recorded then is not the script as it was made."""
        return self.context is not None and bool(self.context.outcomes)

    def became_rank(self, rank: int) -> None:
        """Note the rank that `init_process_group` gave this process; a child becomes a rank by that."""
        self.recorder.set_rank(rank, role=SPAWNED if self.recorder.role == CHILD else None)
        if self.context is not None:
            self.context.write()

    def write_tables(self) -> None:
        """Write the tables and loader facts of a rank, each in one atomic act.

        A child writes them once it trains, under its process id: it may become a rank of its own.
        """
        if self._writing is not None:
            self._writing.join()
        self._write_files(self._files())

    def write_tables_beside(self) -> None:
        """Do the same in a thread, from what is known now: a training step does not wait for the disk.

        While an earlier write still waits for the disk there is nothing more to hurry with.
        """
        if self._writing is not None and self._writing.is_alive():
            return
        try:
            files = self._files()
            self._writing = HiddenThread(lambda: self._write_files(files), name="headway-tables").start()
        except (RuntimeError, TypeError, ValueError) as cause:
            self.failed("tables file", cause)

    def _write_in_gap(self) -> None:
        """Do so where the script works between its steps: what it costs is not the script's."""
        start = now()
        self.write_tables_beside()
        self.worked(start)

    def _files(self) -> list[tuple[str, str, str]]:
        """Return (folder, file name, content) of what is to be written; a child that has not trained has nothing."""
        if not (self.leads or (self.recorder.role == CHILD and self.steps[0])):
            return []
        rank = self.recorder.rank
        if self.looks.profiled:
            self.tables.setdefault("compute", {})["profiled"] = round(self.looks.profiled, 3)
        collectives = self.groups.lines() if self.groups is not None else []
        for name, lines in (*self.gap.tables(), *self.looks.tables(), ("collectives", collectives)):
            if lines:
                self.tables[name] = lines
        file = f"r{rank}.json" if self.leads else f"p{os.getpid()}.json"
        tables = {**self.tables, "rank": rank, "attempt": self.recorder.attempt, "device_type": device_type()}
        found = []
        for folder, content in (("tables", tables), ("loaders", self.loaders)):
            try:
                found.append((folder, file, json.dumps(content, indent=1)))
            except (TypeError, ValueError) as cause:
                self.failed(f"{folder} file", cause)
        return found

    def _write_files(self, files: list[tuple[str, str, str]]) -> None:
        for folder, file, text in files:
            try:
                write_whole(f"{self.run}/{folder}/{file}", text)
            except OSError as cause:
                self.failed(f"{folder} file", cause)


def timers_off() -> bool:
    """Whether HEADWAY_TIMERS=off leaves out the timers of segments, the progress page and the stacks on demand."""
    return os.environ.get("HEADWAY_TIMERS", "").lower() in ("off", "0")


def write_json(path: str, content: object) -> None:
    """Write a small JSON file so that a reader sees the old or the new one, never half of it."""
    write_whole(path, json.dumps(content, indent=1))


def write_whole(path: str, text: str) -> None:
    """Do so with a text."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    half = f"{path}.{os.getpid()}"
    with open(half, "w", encoding="utf-8") as file:
        file.write(text)
    # os.replace may be one of the patched functions: the bare system call keeps headway's files out of the trace.
    _replace(half, path)


_replace = os.replace


def _broken_emit(*_: object) -> None:
    raise RuntimeError("HEADWAY_BREAK=run: every record fails on purpose")
