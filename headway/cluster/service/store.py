"""What happened in a service, event by event, in SQLite: the state of a service is the replay of its log.

One process writes (`EventLog.open`), any number reads. An event is on disk
before anything is done that follows from it, so a server that is killed at any
moment goes on from its log. Times are seconds of the service's own clock,
which begins at 0 and never goes back; it does not follow the time of day.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "log.sqlite"
>>> with EventLog(path) as log:
...     log.append([JobCancelled(at_s=1.5, job="job1")])
>>> [(event.at_s, event.job) for event in EventLog(path, write=False).read()]
[(1.5, 'job1')]
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from headway.core.errors import FormatError, HeadwayError

APPLICATION, SCHEMA = 0x68777131, 2
"""What marks a SQLite file as a log of ours, and the version of its events and of the rules that they follow.

By version 1 a job that came was owed a share of the time since the last decision, before it came.
"""


class ServiceEvent(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Something that happened."""

    at_s: float
    """When, on the clock of the service."""


class ServerBegan(ServiceEvent, frozen=True, tag=True, kw_only=True):
    """A server began, or its devices changed."""

    pools: dict[str, int]
    """Device type -> slots."""
    policy: str
    round_s: float
    executor: str
    boot: str
    """Which start of the host the next field belongs to."""
    boot_s: float
    """Seconds since that start of the host (CLOCK_BOOTTIME)."""


class JobSubmitted(ServiceEvent, frozen=True, tag=True, kw_only=True):
    """A job came."""

    job: str
    name: str
    scale: int
    command: list[str]
    """The script and its arguments."""
    folder: str
    """Where it runs."""
    owner: str = ""
    fewest: int = 0
    """Fewest slots that it runs on where no type has `scale` of them; 0: exactly `scale`."""


class JobFigures(msgspec.Struct, frozen=True):
    """What a job did since it got its devices."""

    seconds: float
    steps: float
    ended: bool
    done: bool
    rates: list[float] = []
    """[W] Its steps/s on each type, where they are known better than before."""


class RoundAdvanced(ServiceEvent, frozen=True, tag=True, kw_only=True):
    """The engine ended a round, or gave away devices within one."""

    did: dict[str, JobFigures]
    """Job -> what it did, of all that had devices."""
    fixed: list[str]
    """Jobs that could not leave."""
    runs: dict[str, list[str]]
    """Job -> its slots from now on, such as v100:0."""


class AttemptStarting(ServiceEvent, frozen=True, tag=True, kw_only=True):
    """An attempt of a job is about to be started."""

    job: str
    attempt: int
    slots: list[str]


class AttemptRunning(ServiceEvent, frozen=True, tag=True, kw_only=True):
    """It was started."""

    job: str
    handle: str
    """What the executor calls it: a process, a job of Slurm."""


class AttemptAsked(ServiceEvent, frozen=True, tag=True, kw_only=True):
    """A job was asked to save and leave; not `gently`: it is ended, whatever it has saved."""

    job: str
    gently: bool = True


class AttemptEnded(ServiceEvent, frozen=True, tag=True, kw_only=True):
    """An attempt ended."""

    job: str
    how: str
    """done, left (it saved and waits again), lost (nobody knows why), failed, cancelled."""
    steps: float
    """Steps that the attempt did."""
    reason: str = ""


class JobCancelled(ServiceEvent, frozen=True, tag=True, kw_only=True):
    """Somebody wants a job no more."""

    job: str


Event = (
    ServerBegan
    | JobSubmitted
    | RoundAdvanced
    | AttemptStarting
    | AttemptRunning
    | AttemptAsked
    | AttemptEnded
    | JobCancelled
)


class EventLog:
    """The log of one service. Close it."""

    def __init__(self, path: Path, *, write: bool = True) -> None:
        """Open or, to `write`, make it; raises `FormatError` on a file of another kind or version."""
        self.path = path
        if not write and not path.is_file():
            raise FormatError(
                f"{path.parent} holds no log of a service. Name the folder of one with --dir, or start one there: "
                f"headway cluster serve --slots 2 --dir {path.parent}"
            )
        try:
            if write:
                os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            self._database = sqlite3.connect(f"file:{path}?mode={'rw' if write else 'ro'}", uri=True, timeout=10.0)
            marks = [self._number(name) for name in ("application_id", "user_version")]
            if marks == [0, 0] and write and not self._number("schema_version"):
                self._create()
                marks = [APPLICATION, SCHEMA]
        except sqlite3.Error as error:
            raise FormatError(f"{path} cannot be read as a log ({error}). Name another folder with --dir.") from error
        if marks != [APPLICATION, SCHEMA]:
            self.close()
            what = f"version {marks[1]}" if marks[0] == APPLICATION else "another program's"
            raise FormatError(
                f"{path} is {what}, this release reads version {SCHEMA} of headway's logs. Use the release that wrote "
                "it, or name another folder with --dir."
            )
        if write:
            self._database.execute("PRAGMA synchronous = FULL")
        self._file = os.stat(path)

    def check(self) -> None:
        """Raise `HeadwayError` where the log is not in its place any more: what is written then, nobody would read."""
        try:
            same = os.path.samestat(os.stat(self.path), self._file)
        except OSError:
            same = False
        if not same:
            raise HeadwayError(
                f"{self.path} was deleted or replaced. This server ends; jobs that run go on to their end. Serve again "
                "to begin a new log."
            )

    def append(self, events: Sequence[Event]) -> None:
        """Write events, all or none; they are on disk when this returns. Raises `HeadwayError` where that fails."""
        self.check()
        rows = [(event.at_s, type(event).__name__, msgspec.json.encode(event)) for event in events]
        try:
            with self._database:
                self._database.executemany("INSERT INTO events (at_s, kind, body) VALUES (?, ?, ?)", rows)
        except sqlite3.Error as error:
            raise HeadwayError(f"{self.path} cannot be written ({error}). Free some room, and serve again.") from error

    def read(self) -> list[Event]:
        """Return all events, the oldest first. Raises `FormatError` on one that is none."""
        decoder = msgspec.json.Decoder(Event)
        try:
            rows = self._database.execute("SELECT number, body FROM events ORDER BY number").fetchall()
        except sqlite3.Error as error:
            raise FormatError(f"{self.path} cannot be read ({error}). Name another folder with --dir.") from error
        events: list[Event] = []
        for number, body in rows:
            try:
                events.append(decoder.decode(body))
            except msgspec.DecodeError as error:
                raise FormatError(f"{self.path}: event {number} is damaged ({error}). Name another folder.") from error
        return events

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _number(self, pragma: str) -> int:
        return int(self._database.execute(f"PRAGMA {pragma}").fetchone()[0])

    def _create(self) -> None:
        self._database.executescript(
            "PRAGMA journal_mode = WAL; BEGIN;"
            "CREATE TABLE events (number INTEGER PRIMARY KEY, at_s REAL, kind TEXT, body BLOB);"
            f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {SCHEMA}; COMMIT"
        )
