"""Recording from inside a script, for those who want more than `headway run` sees, or cannot use it.

Both forms work under `headway run` (they add names to its recording) and
without it (they record into a run folder of their own, ./headway-runs/<id>,
which is finalised when the block, or the process, ends).

    with headway.run() as r:
        for batch in headway.steps(loader):
            with r.region("augment"):
                ...

>>> with run("/nonexistent/never", enabled=False) as r:
...     with r.region("anything"):
...         total = sum(steps([1, 2, 3]))
>>> total, r.path
(6, '')
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headway.core.errors import InputError
from headway.core.host import host_cores
from headway.runtime import timers
from headway.runtime.probes import now, write_json
from headway.trace.vocabulary import SPANS

if TYPE_CHECKING:
    from headway.runtime.logger_bridge import LoggerBridge

T = TypeVar("T")

REGION = SPANS["region"].code
NEXT = SPANS["input.next"].code

DEFAULT_FOLDER = "headway-runs"


class Timer:
    """Records how long stretches take under a name of the script's own: `with`, or `begin()` and `end()`.

    Timers nest; each one times one stretch at a time. Once the rank computes on a CUDA device its events time the
    stretch, without synchronising; else the host's clock does. Without a recording nothing is recorded.
    """

    def __init__(self, name: str, session: Any) -> None:
        self.name = name
        self._probes = session.probes if session is not None else None
        self._begun: tuple[int, Any, int] | None = None

    def begin(self) -> None:
        """Begin a stretch. Raises `InputError` when one is going on."""
        if self._begun is not None:
            raise InputError(
                f"timer {self.name!r} was begun in step {self._begun[2]} and is begun again in {self._where()} without "
                "an end in between. End it first, or make a second timer for what lies inside."
            )
        probes = self._probes
        self._begun = (now(), self._event(), probes.steps[0] if probes is not None else -1)
        if probes is not None:
            probes.open_timers[id(self)] = (self.name, self._begun[2])

    def end(self) -> None:
        """End the stretch and record it. Raises `InputError` when none was begun."""
        if self._begun is None:
            raise InputError(
                f"timer {self.name!r} is ended in {self._where()} but was not begun. "
                f"Call begin() before it, or write: with headway.timer({self.name!r}): ..."
            )
        (start, event, _), self._begun = self._begun, None
        probes = self._probes
        if probes is None:
            return
        probes.open_timers.pop(id(self), None)
        code = self._code(probes)
        ended = self._event() if event is not None else None
        if ended is not None:
            probes.device_timers.add(REGION, code, event, ended, start)
        else:
            probes.emit(REGION, start, now() - start, code)

    def __enter__(self) -> Timer:
        """Begin."""
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self.end()

    def _event(self) -> Any:
        """Return an event recorded on the device, None where the host's clock has to do."""
        probes = self._probes
        if probes is None or probes.device_timers is None:
            return None
        return timers.event_of(probes)

    def _code(self, probes: Any) -> int:
        """Return the number of the name, which the tables keep."""
        names: list[str] = probes.tables.setdefault("regions", [])
        if self.name not in names:
            names.append(self.name)
            probes.write_tables()
        return names.index(self.name)

    def _where(self) -> str:
        return f"step {self._probes.steps[0]}" if self._probes is not None else "a run that is not recorded"


def timer(name: str) -> Timer:
    """Return a timer for a stretch of the script: `with headway.timer("augment"): ...`.

    Records under `headway run` and inside `with headway.run()`; anywhere else it does nothing.
    """
    from headway.runtime import bootstrap

    return Timer(name, bootstrap.active())


class Run:
    """A recording that is going on; `path` is its run folder, '' when nothing is recorded."""

    def __init__(self, session: Any, *, own: bool) -> None:
        self._session = session
        self._own = own
        self._started_ns = (now(), time.time_ns())
        self._pid = os.getpid()

    @property
    def path(self) -> str:
        """The run folder."""
        return str(self._session.probes.run) if self._session is not None else ""

    def region(self, name: str) -> Timer:
        """Record how long the block takes under a name of the script's own, such as 'augment'."""
        return Timer(name, self._session)

    def finish(self) -> None:
        """Stop a recording of our own and finalise its folder; one of `headway run` goes on."""
        session, self._session = self._session, None
        if session is None or not self._own or self._pid != os.getpid():
            return
        probes = session.probes
        session.stop()
        if probes.recorder.rank == 0:
            write_json(f"{probes.run}/run.json", run_facts(probes, self._started_ns))
        from headway.runtime.finalise import finalise_attempt  # loads numpy and pyarrow: only when the job is done

        finalise_attempt(Path(probes.run), probes.recorder.attempt, rank=probes.recorder.rank)


@contextlib.contextmanager
def run(path: str | os.PathLike[str] | None = None, *, enabled: bool = True) -> Iterator[Run]:
    """Record the block; yields a `Run`.

    Under `headway run` the recording is the launcher's and `path` is ignored. With `enabled=False`, or HEADWAY=off in
    the environment, nothing is recorded and everything else works.
    """
    from headway.runtime import bootstrap

    off = os.environ.get("HEADWAY", "").lower() in ("off", "0")
    session = bootstrap.active()
    if off or not enabled:
        yield Run(None, own=False)
        return
    if session is not None:
        yield Run(session, own=False)
        return
    with children_record(environment_for(path)) as environment:
        recording = Run(bootstrap.start_here(environment), own=True)
        try:
            yield recording
        finally:
            recording.finish()


def log_to(target: Any, *, every_s: float = 10.0, every_steps: int | None = None) -> LoggerBridge:
    """Hand this rank's step time, goodput and losses to an experiment logger, off the step path.

    `target` is a W&B run (`log`), the mlflow module (`log_metrics`), a TensorBoard SummaryWriter (`add_scalar`), or
    any object with such a method; none of them is imported here. A report comes every `every_steps` steps, or every
    `every_s` seconds. Names are `headway/step_s`, `headway/steps_per_s`, `headway/goodput` (of the run so far) and
    `headway/lost/<bucket>` (share of the time since the report before). A logger that is slow or fails costs reports,
    one warning and no training step. Where nothing is recorded it says so and does nothing.
    Raises `InputError` for a target without such a method.
    """
    from headway.runtime import bootstrap
    from headway.runtime.logger_bridge import LoggerBridge

    return LoggerBridge(bootstrap.active(), target, every_s=every_s, every_steps=every_steps)


def steps(loader: Iterable[T]) -> Iterator[T]:
    """Iterate over `loader`; the wait for each batch is recorded even when it is no torch DataLoader.

    A torch `DataLoader` is passed through: its own waits are recorded already.
    """
    from headway.runtime import bootstrap

    session = bootstrap.active()
    torch_data = sys.modules.get("torch.utils.data")
    if session is None or (torch_data is not None and isinstance(loader, torch_data.DataLoader)):
        yield from loader
        return
    emit = session.probes.emit
    iterator = iter(loader)
    seq = 0
    while True:
        start = now()
        try:
            batch = next(iterator)
        except StopIteration:
            emit(NEXT, start, now() - start, -1, -1, -1, -1)
            return
        emit(NEXT, start, now() - start, -1, seq, -1, -1)
        seq += 1
        yield batch


@contextlib.contextmanager
def children_record(environment: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Let processes that the block starts anew (spawn, forkserver) record into the same folder."""
    inject = str(Path(__file__).resolve().parent / "inject")
    paths = os.pathsep.join(part for part in (inject, os.environ.get("PYTHONPATH", "")) if part)
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
    return {**os.environ, "HEADWAY_RUN": os.path.abspath(path or fresh_folder()), "HEADWAY_PLAN": ""}


def fresh_folder() -> str:
    """Return the name of a run folder that all ranks of the job agree on."""
    job = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID") or ""
    name = job if job not in ("", "none") else f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return os.path.join(DEFAULT_FOLDER, name)


def run_facts(probes: Any, started_ns: tuple[int, int]) -> dict[str, Any]:
    """Return run.json of a recording without a launcher: no arguments, no environment, no exit code."""
    from headway import __version__

    start_ns, realtime_ns = started_ns
    end_ns = now()
    recorder = probes.recorder
    row = {
        "rank": recorder.rank, "local_rank": recorder.local_rank, "pid": os.getpid(), "start_ns": start_ns,
        "end_ns": end_ns, "exit_code": 0,
    }  # fmt: skip
    return {
        "schema": "headway.run-folder/1", "run_id": os.path.basename(probes.run), "headway_version": __version__,
        "attempt": recorder.attempt, "host": os.uname().nodename, "script": [], "env": {}, "start_ns": start_ns,
        "end_ns": end_ns, "realtime_ns": realtime_ns, "nproc": 1,
        "world_size": int(os.environ.get("WORLD_SIZE") or 1), "device_type": "cpu",
        "cores": host_cores(), "ranks": [row],
        "exit": {"code": 0, "class": "ok", "first_rank": None, "traceback": ""}, "baseline": None, "plan": None,
        "applied": [], "bytes_per_step": None, "dropped": 0,
        "loaders": {str(group): facts for group, facts in probes.loaders.items()},
    }  # fmt: skip
