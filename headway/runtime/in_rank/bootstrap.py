"""The start of recording in one process: probes follow the script's own import of torch.

`inject/sitecustomize.py` calls `start` when the script imports torch for the
first time; `annotate.run` calls `start_here` in a process that was started
without headway. The environment says where to write: HEADWAY_RUN (folder),
HEADWAY_RINGS (where its rings lie, if not there), HEADWAY_ATTEMPT,
RANK, LOCAL_RANK; HEADWAY_PLAN names a plan to apply, HEADWAY_REMEDIES maps its
remedies to functions, HEADWAY_WINDOWS is the fraction of time that profiler
windows may cost. HEADWAY=off starts nothing.

>>> rank_of({"SLURM_PROCID": "3"}), rank_of({"RANK": "1", "SLURM_PROCID": "3"}), rank_of({})
(3, 1, 0)
"""

from __future__ import annotations

import atexit
import gc  # noqa: F401  # built-in modules are patched here and now: no loader of their own could be watched
import logging  # noqa: F401  # the same
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from headway.runtime.calls import patches
from headway.runtime.host import process_probe
from headway.runtime.host.host_memory import process_memory
from headway.runtime.host.rank_env import number
from headway.runtime.host.warm_note import VARIABLE as NOTE_VARIABLE
from headway.runtime.host.warm_note import WarmNote
from headway.runtime.in_rank import remedy, windows
from headway.runtime.in_rank.hooks import PostImport
from headway.runtime.recorder import timers
from headway.runtime.recorder.probes import Probes, now, timers_off
from headway.trace.events.vocabulary import SPANS
from headway.trace.rings.ring import CHILD, MAIN, Recorder, warn

IMPORT = SPANS["host.import"].code

KINETO_QUIET = "5"
"""KINETO_LOG_LEVEL that silences the profiler's library, unless the user set one."""

FLIGHT_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Variables that say how many collectives the Flight Recorder keeps; the first one wins."""

FLIGHT_ENTRIES = "2000"
"""How many, unless the user says: as many as torch keeps by itself; older versions keep none."""

WATCHED = frozenset(patch.module for patch in patches.PATCHES.values()) | {"torch"}


class Session:
    """The recording of this process."""

    def __init__(self, probes: Probes, finder: PostImport | Any) -> None:
        self.probes, self.finder = probes, finder
        self.undos: list[patches.Undo] = []
        self.windows: windows.WindowRecorder | None = None
        self._torch_started = 0
        self._note: WarmNote | None = None

    def note_for_warm_starts(self, path: str) -> None:
        """Note for later attempts what the script did before it imported torch, which it begins now."""
        try:
            self._note = WarmNote(path, getattr(self.finder, "started", None))
            self.probes.after_first_step = self._note.stepped
        except Exception as cause:
            self.probes.failed("the note for warm starts", cause)

    def answer_for_stacks(self) -> None:
        """Register the signal by which the launcher asks for this process's stacks."""
        try:
            number = process_probe.register_stacks(self.probes.recorder.path.removesuffix(".ring") + ".stacks")
            self.probes.page.stacks_by(number)
        except Exception as cause:
            self.probes.failed("stacks on demand", cause)

    def before(self, name: str) -> None:
        """Note when the import of torch begins."""
        if name == "torch":
            self._torch_started = now()

    def after(self, module: ModuleType) -> None:
        """Patch a module that was just executed."""
        try:
            self.undos += patches.install_for(module.__name__, self.probes)
            if module.__name__ == "torch":
                self._after_torch()
        except Exception as cause:
            self.probes.failed(module.__name__, cause)

    def _after_torch(self) -> None:
        if self._note is not None:
            self._note.imported()
        if self._torch_started:
            self.probes.emit(IMPORT, self._torch_started, now() - self._torch_started)
        self.undos += remedy.apply_plan(self.probes, os.environ)
        self.windows = windows.WindowRecorder(self.probes, windows.budget_from(os.environ))

    def finish(self) -> None:
        """Write what is still in memory, and note the end of the process; what fails leaves the rest to be done."""
        acts = (self._end_of_rereadings, self._end_of_steps, self._end_of_windows, self._end_of_remedies)
        for act in (*acts, self._end_of_memory):
            try:
                act()
            except Exception as cause:  # after an error of the device, say, even asking for its memory fails
                self.probes.failed("the end of the process", cause)
        self.probes.write_tables()
        self.probes.recorder.close()

    def _end_of_rereadings(self) -> None:
        if self.probes.rereadings is not None:
            self.probes.rereadings.finish()

    def _end_of_steps(self) -> None:
        self.probes.gap.stop()
        timers.flush_last(self.probes)
        for name, step in self.probes.open_timers.values():
            warn(f"timer {name!r} was begun in step {step} and never ended: that stretch is not recorded")
        if self.probes.device_timers:
            self.probes.tables["timers"] = self.probes.device_timers.facts()
        if self.probes.steps[0]:
            self.probes.mark_cpu()

    def _end_of_windows(self) -> None:
        if self.windows is not None:
            self.windows.finish()

    def _end_of_remedies(self) -> None:
        if self.probes.context is not None:
            self.probes.context.write()  # facts may have grown since

    def _end_of_memory(self) -> None:
        self.probes.tables["memory"] = process_memory()

    def stop(self) -> None:
        """Take every patch out again and finish."""
        self.finder.remove()
        for undo in reversed(self.undos):
            undo()
        self.undos = []
        self.finish()
        atexit.unregister(self.finish)
        if _SESSIONS.get("active") is self:
            del _SESSIONS["active"]


def active() -> Session | None:
    """Return the recording of this process, None when there is none."""
    return _SESSIONS.get("active")


_SESSIONS: dict[str, Session] = {}
"""'active' -> the recording of this process: patches reach into torch, so there is one at most."""


def start(finder: PostImport | Any, environ: Mapping[str, str] = os.environ, *, launched: bool = True) -> Session:
    """Begin to record into HEADWAY_RUN: patch what is imported already, and let `finder` watch for the rest.

    A rank that was `launched` answers its launcher's question for its stacks.
    """
    is_main = environ.get("HEADWAY_MAIN_PID", "") in ("", str(os.getpid()))
    recorder = Recorder(
        environ.get("HEADWAY_RINGS") or os.path.join(environ["HEADWAY_RUN"], "rings"),
        rank=rank_of(environ),
        local_rank=local_rank_of(environ),
        attempt=int(environ.get("HEADWAY_ATTEMPT") or 0),
        role=MAIN if is_main else CHILD,
    )
    for name in ("HEADWAY_RANK", "HEADWAY_LOCAL_RANK"):
        os.environ.pop(name, None)  # processes that the script starts may be ranks of their own
    before_torch()
    if is_main:
        recorder.open()  # a child waits for its first record: most have none
    session = Session(Probes(recorder, environ["HEADWAY_RUN"]), finder)
    if launched and is_main and recorder.path and not timers_off():
        session.answer_for_stacks()
    if launched and is_main and environ.get(NOTE_VARIABLE):
        session.note_for_warm_starts(environ[NOTE_VARIABLE])
    _SESSIONS["active"] = session
    atexit.register(session.finish)
    for name in sorted(WATCHED):
        if name in sys.modules and name != "torch":
            session.undos += patches.install_for(name, session.probes)
        elif name not in sys.modules:
            finder.names.add(name)
    finder.names.discard("torch")
    finder.hand_over(before=before_import, after=after_import)
    return session


def before_torch() -> None:
    """Set the variables that torch looks at when it is imported, unless the user has."""
    os.environ.setdefault("KINETO_LOG_LEVEL", KINETO_QUIET)
    if not any(name in os.environ for name in FLIGHT_SIZES):
        os.environ[FLIGHT_SIZES[0]] = FLIGHT_ENTRIES


def leave() -> None:
    """Record nothing more in this process: a fork that leaves the job, and outlives it. The parent's goes on."""
    session = _SESSIONS.pop("active", None)
    if session is not None:
        session.probes.recorder.broken = "this process has left the job"


def start_here(environ: Mapping[str, str]) -> Session:
    """Begin to record in a process that was started without headway; torch may be imported already."""
    finder = PostImport(set(), before=before_import, after=after_import)
    finder.install()
    session = start(finder, environ, launched=False)
    torch = sys.modules.get("torch")
    if torch is not None:
        session.after(torch)
    else:
        finder.names.add("torch")
    return session


def before_import(name: str) -> None:
    """Called by the finder before a watched module is executed."""
    session = active()
    if session is not None:
        session.before(name)


def after_import(module: ModuleType) -> None:
    """Called by the finder after a watched module was executed."""
    session = active()
    if session is not None:
        session.after(module)


def rank_of(environ: Mapping[str, str]) -> int:
    """Return the rank that the launcher gave this process: ours, or what its launch line says, else 0."""
    if environ.get("HEADWAY_RANK", "").isdigit():
        return int(environ["HEADWAY_RANK"])
    return max(number(environ, "rank") or 0, 0)


def local_rank_of(environ: Mapping[str, str]) -> int:
    """Return its rank on this host, by the same rule."""
    if environ.get("HEADWAY_LOCAL_RANK", "").isdigit():
        return int(environ["HEADWAY_LOCAL_RANK"])
    return max(number(environ, "local_rank") or 0, 0)
