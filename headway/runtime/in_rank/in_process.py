"""A recording that a script or a notebook begins itself: as a `with` block, or with `start()` and `stop()`.

Under `headway run` it joins the launcher's recording. Without a launcher it
records into a run folder of its own, ./headway-runs/<id>, which is finalised
by the end of the block, by `stop()`, or by the end of the process. A finished
recording shows its ledger in a notebook (`_repr_html_`) and in IPython
(`_repr_pretty_`); what draws it is given to `InProcessRun`, because this room lies
below the reports. Nothing here writes to stdout, and a failure of headway's
is one warning.

Pauses of a recording that spans cells of a notebook: from the end of one cell to the beginning of the next.

IPython tells when a cell begins and ends. Anywhere else nothing is followed, and nothing is recorded.

    cell 1: run.start() ... train() |          | cell 2: train() ... run.stop()
                                    [  pause   )

A cell may run others inside (`get_ipython().run_cell`): a pause begins with the end of the outermost. What the
kernel runs between cells, such as a widget's callback, records itself; that is cut out of the pause when the run is
finalised.

>>> with InProcessRun("/nonexistent/never", enabled=False) as recording:
...     with recording.region("anything"):
...         total = sum([1, 2, 3])
>>> total, recording
(6, <headway.run: nothing is recorded>)
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from headway.core.files.private import private_folder
from headway.core.machine.host import host_cores
from headway.runtime.host.rank_env import INJECT, number
from headway.runtime.in_rank import bootstrap
from headway.runtime.in_rank.annotate import Evaluation, Timer, mark_epoch
from headway.runtime.recorder.probes import Probes, now, write_json
from headway.runtime.run_folder import redact
from headway.runtime.run_folder.exit_class import RankEnd, classify
from headway.trace.events.vocabulary import CLOSED, SPANS
from headway.trace.rings.ring import warn

DEFAULT_FOLDER = "headway-runs"

PAUSE = SPANS["pause"].code


@dataclass(slots=True)
class Cells:
    """The cells of a notebook while a recording goes on; made in one of them."""

    probes: Probes
    """Where pauses are recorded."""

    _events: Any = None
    _depth: int = 1
    _ended_ns: int = field(default=0)
    """When the last cell ended; 0 while one runs."""
    _was_open: int = CLOSED
    """Which gap of the script was open then."""

    def follow(self) -> None:
        """Ask IPython to tell of cells; outside of it nothing happens."""
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is None:
            return
        self._events = shell.events
        self._events.register("pre_run_cell", self._begins)
        self._events.register("post_run_cell", self._ends)

    def leave(self) -> None:
        """Be told no more; a pause that goes on ends here."""
        self._record()
        events, self._events = self._events, None
        if events is not None:
            events.unregister("pre_run_cell", self._begins)
            events.unregister("post_run_cell", self._ends)

    def _begins(self, *_: object) -> None:
        self._record()
        self._depth += 1

    def _ends(self, *_: object) -> None:
        # An empty cell ends without having begun: the pause goes on.
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and not self._ended_ns:
            self._ended_ns = now()
            # No line of the script is to be found on the stack until the next cell.
            self._was_open, self.probes.gap.open[0] = self.probes.gap.open[0], CLOSED

    def _record(self) -> None:
        """Record the pause that ends now, if there is one."""
        started_ns, self._ended_ns = self._ended_ns, 0
        if started_ns:
            self.probes.emit(PAUSE, started_ns, now() - started_ns)
            self.probes.gap.open[0] = self._was_open or self.probes.gap.open[0]


@dataclass(frozen=True, slots=True)
class Shown:
    """The ledger of a finished recording, drawn."""

    text: str
    """For a terminal."""

    html: str
    """A fragment of a page, complete in itself."""


class InProcessRun:
    """A recording of this process; made by `headway.run`."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        enabled: bool = True,
        draw: Callable[[Path], Shown] | None = None,
    ) -> None:
        """Prepare a recording into `path`, or into a new folder of ./headway-runs; `draw` shows a finished one."""
        self._wanted = path
        self._enabled = enabled and os.environ.get("HEADWAY", "").lower() not in ("off", "0")
        self._draw = draw
        self._session: bootstrap.Session | None = None
        self._cells: Cells | None = None
        self._own = False
        self._environment = contextlib.ExitStack()
        self._started_ns = (now(), time.time_ns())
        self._pid = os.getpid()
        self._joined = ""
        self._finished: Path | None = None
        self._shown: Shown | None = None

    @property
    def path(self) -> str:
        """The run folder; '' where nothing is recorded."""
        if self._session is not None:
            return str(self._session.probes.run)
        return str(self._finished or "")

    def start(self) -> InProcessRun:
        """Begin to record, until `stop()`; returns self.

        A recording that an earlier `start()` left open, as when a notebook's cell is run twice, ends first.
        """
        if self._session is None:
            _end_forgotten()
            self._begin()
            if self._own:
                _STARTED.append(self)
            self._follow_cells()
        return self

    def stop(self) -> None:
        """Stop the recording and write its run folder; one of `headway run`, or of an outer block, continues."""
        self._end(None)

    def __enter__(self) -> InProcessRun:
        """Begin to record."""
        if self._session is None:
            self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop; an exception passes, and run.json names it."""
        self._end(error)

    def region(self, name: str) -> Timer:
        """Record how long the block takes under a name of the script's own, such as 'augment'."""
        return Timer(name, self._session)

    def evaluation(self) -> Evaluation:
        """Mark an evaluation: `with run.evaluation(): ...`."""
        return Evaluation(self._session)

    def epoch(self, index: int) -> None:
        """Mark the beginning of epoch `index`."""
        mark_epoch(self._session, index)

    def _follow_cells(self) -> None:
        """Tell the cells of a notebook from the time between them."""
        try:
            if self._session is not None:
                self._cells = Cells(self._session.probes)
                self._cells.follow()
        except Exception as cause:
            warn(f"time between cells is not told from steps: {type(cause).__name__}: {cause}")

    def _leave_cells(self) -> None:
        """Follow the cells of a notebook no more."""
        cells, self._cells = self._cells, None
        try:
            if cells is not None:
                cells.leave()
        except Exception as cause:
            warn(f"the cells of the notebook are still followed: {type(cause).__name__}: {cause}")

    def _begin(self) -> None:
        """Join the recording of this process, or begin one."""
        if not self._enabled:
            return
        self._session, self._own = bootstrap.active(), False
        self._started_ns, self._pid = (now(), time.time_ns()), os.getpid()
        self._finished = self._shown = None
        if self._session is not None:
            return
        try:
            environment = self._environment.enter_context(children_record(environment_for(self._wanted)))
            private_folder(environment["HEADWAY_RUN"])
            self._session = bootstrap.start_here(environment)
        except Exception as cause:  # the training matters more than its recording
            self._environment.close()
            warn(f"nothing is recorded: {type(cause).__name__}: {cause}")
            return
        self._own = True
        atexit.register(self.stop)

    def _end(self, error: BaseException | None) -> None:
        """Stop a recording of our own and finalise its folder."""
        session, self._session = self._session, None
        if session is None or self._pid != os.getpid():
            return
        self._leave_cells()
        if not self._own:
            self._joined = str(session.probes.run)
            return
        atexit.unregister(self.stop)
        if self in _STARTED:
            _STARTED.remove(self)
        probes = session.probes
        folder = Path(probes.run)
        try:
            session.stop()
            if probes.recorder.rank == 0:
                write_json(f"{folder}/run.json", run_facts(probes, self._started_ns, error))
            # Loads numpy and pyarrow: only when the job is done.
            from headway.runtime.run_folder.finalise import finalise_attempt, pack_windows

            rank = {probes.recorder.rank}
            finalise_attempt(folder, probes.recorder.attempt, rings=folder / "rings", ranks=rank)
            pack_windows(folder / "windows", rank)
            self._finished = folder
        except Exception as cause:
            warn(f"the recording in {folder} was not finalised: {type(cause).__name__}: {cause}")
        finally:
            self._environment.close()

    def __repr__(self) -> str:
        """Say in one line how far the recording is."""
        if self._session is not None:
            steps = f"{self._session.probes.steps[0]} optimizer steps so far"
            how = "recording" if self._own else "part of the recording"
            return f"<headway.run: {how} into {self.path}, {steps}>"
        if self._finished is not None:
            return f"<headway.run: recorded into {self._finished}>"
        if self._joined:
            return f"<headway.run: was part of the recording into {self._joined}>"
        return f"<headway.run: {'not recording' if self._enabled else 'nothing is recorded'}>"

    def _repr_html_(self) -> str | None:
        """Return the ledger for a notebook; None (the text is shown) before the recording has ended."""
        shown = self._show()
        return shown.html if shown is not None else None

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the ledger in IPython."""
        shown = None if cycle else self._show()
        printer.text(shown.text if shown is not None else repr(self))

    def _show(self) -> Shown | None:
        """Return the drawn ledger of a finished recording; None without one, or where it cannot be drawn."""
        if self._shown is None and self._finished is not None and self._draw is not None:
            try:
                self._shown = self._draw(self._finished)
            except Exception as cause:
                warn(f"the ledger of {self._finished} cannot be shown: {type(cause).__name__}: {cause}")
        return self._shown


_STARTED: list[InProcessRun] = []
"""Recordings that `start()` began and nothing has ended yet: one at most."""


def _end_forgotten() -> None:
    """End the recording that an earlier `start()` left open, and say so."""
    for earlier in tuple(_STARTED):
        path = earlier.path
        earlier.stop()
        warn(f"the recording in {path} was still open; it ends here, because another one starts")


@contextlib.contextmanager
def children_record(environment: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Let processes that the block starts anew (spawn, forkserver) record into the same folder."""
    paths = os.pathsep.join(part for part in (str(INJECT), os.environ.get("PYTHONPATH", "")) if part)
    added = {"HEADWAY_RUN": environment["HEADWAY_RUN"], "HEADWAY_MAIN_PID": str(os.getpid()), "PYTHONPATH": paths}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield {**environment, **added}
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def environment_for(path: str | os.PathLike[str] | None) -> Mapping[str, str]:
    """Return the environment of a recording without a launcher: this process's own, with a run folder added."""
    return {
        **os.environ,
        "HEADWAY_RUN": os.path.abspath(unused(path or default_folder())),
        "HEADWAY_RINGS": "",
        "HEADWAY_PLAN": "",
    }


def default_folder() -> str:
    """Return the name of a run folder that all ranks of the job agree on."""
    job = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID") or ""
    name = job if job not in ("", "none") else f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return os.path.join(DEFAULT_FOLDER, name)


def unused(path: str | os.PathLike[str]) -> str:
    """Return `path`, or the first `path-N` when a run is there already: a cell that is run twice records twice.

    Ranks of one job share their folder, so it is never changed for them.
    """
    wanted = os.fspath(path)
    if (number(os.environ, "world_size") or 1) > 1:
        return wanted
    names = itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2)))
    marks = ("run.json", "rings", "hosts", "events")
    return next(name for name in names if not any(os.path.exists(os.path.join(name, mark)) for mark in marks))


def run_facts(probes: Any, started_ns: tuple[int, int], error: BaseException | None = None) -> dict[str, object]:
    """Return run.json of a recording without a launcher: no arguments and no environment."""
    from headway import __version__

    start_ns, realtime_ns = started_ns
    end_ns = now()
    recorder = probes.recorder
    ended = exit_of(error, recorder.rank, end_ns)
    row = {
        "rank": recorder.rank, "local_rank": recorder.local_rank, "pid": os.getpid(), "start_ns": start_ns,
        "end_ns": end_ns, "exit_code": ended["code"],
    }  # fmt: skip
    return {
        "schema": "headway.run-folder/1", "run_id": os.path.basename(probes.run), "headway_version": __version__,
        "attempt": recorder.attempt, "host": os.uname().nodename, "script": [], "launched": False, "env": {},
        "start_ns": start_ns, "end_ns": end_ns, "realtime_ns": realtime_ns, "nproc": 1,
        "world_size": number(os.environ, "world_size") or 1, "device_type": "cpu",
        "cores": host_cores(), "ranks": [row], "exit": ended, "baseline": None, "plan": None,
        "applied": [], "bytes_per_step": None, "dropped": 0,
        "loaders": {str(group): facts for group, facts in probes.loaders.items()},
    }  # fmt: skip


def exit_of(error: BaseException | None, rank: int, end_ns: int) -> dict[str, object]:
    """Return the `exit` entry of run.json for a block that ended with `error`.

    >>> [exit_of(error, 0, 0)["class"] for error in (None, KeyboardInterrupt(), ValueError("x"))]
    ['ok', 'preempted', 'user']
    """
    if error is None or (isinstance(error, (SystemExit, GeneratorExit)) and not getattr(error, "code", None)):
        return {"code": 0, "class": "ok", "first_rank": None, "traceback": ""}
    text = "".join(traceback.format_exception(error))
    stopped = isinstance(error, KeyboardInterrupt)
    code = 130 if stopped else 1
    kind = classify(RankEnd(rank, code, end_ns=end_ns, stderr=text), preempted=stopped)
    return {"code": code, "class": kind, "first_rank": rank, "traceback": redact.text(text)}
