"""Jobs for a service: an executor that computes when they end, a script that saves when asked, a server to kill."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.cluster.service.executors import JobAttempt, JobCondition

SCRIPT = """
import fcntl, os, sys, time
from pathlib import Path
from headway.runtime.launching.save_and_leave import Leaving

folder, steps, step_s, how = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
folder.mkdir(exist_ok=True)
lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    (folder / "twice").touch()
    raise
saved, leaving = folder / "saved", Leaving()
step = int(saved.read_text()) if saved.exists() else 0

def save():
    (folder / "draft").write_text(str(step))
    (folder / "draft").replace(saved)

if "never" not in how:
    save()
    leaving.announce()
while step < steps:
    time.sleep(step_s)
    step += 1
    with (folder / "done").open("a") as done:
        done.write(f"{step}\\n")
    if leaving.is_due(step, lambda mine: [mine]):
        save()
        leaving.leave(step, lambda timeout_s: None)
save()
"""
"""SCRIPT FOLDER STEPS STEP_S [never]: appends each step to FOLDER/done, makes FOLDER/twice if it runs twice at once."""


@dataclass
class ComputedJobs:
    """An executor whose jobs do `rate[type]` steps/s and leave the moment they are asked; hosts may be taken away."""

    pools: dict[str, int]
    steps: Mapping[str, float]
    """Job -> steps that it takes."""
    rates: Mapping[str, float]
    """Type -> steps/s."""
    step_s: Callable[[], float]
    """The moment that the service handles."""
    horizon_s: Callable[[], float]
    """How far it can see: what ends later has not happened yet."""
    measures: bool = False
    """Steps/s are reported."""
    stubborn: frozenset[str] = frozenset()
    """Jobs that never save."""
    crash: Callable[[], object] = lambda: None
    """Called before and after each act; it may raise, as a server ends that is killed."""
    done: dict[str, float] = field(default_factory=dict)
    """Job -> steps that are saved."""
    begins: dict[str, tuple[JobAttempt, float]] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)
    """Job -> when it left, not told yet."""
    starts: list[tuple[float, str, tuple[str, ...]]] = field(default_factory=list)

    def slots(self) -> Mapping[str, int]:
        return self.pools

    def start(self, attempt: JobAttempt) -> str:
        assert attempt.job not in self.begins
        self.crash()
        self.begins[attempt.job] = attempt, self.step_s()
        self.starts.append((self.step_s(), attempt.job, attempt.slots))
        self.crash()
        return f"{attempt.job}/{attempt.number}"

    def end_s(self, job: str) -> float:
        attempt, since_s = self.begins[job]
        return since_s + (self.steps[job] - self.done.get(job, 0.0)) / self.rates[attempt.device_type]

    def alive(self, attempts: Sequence[JobAttempt]) -> Mapping[str, JobCondition]:
        return {attempt.job: self.condition(attempt.job) for attempt in attempts}

    def condition(self, job: str) -> JobCondition:
        if job not in self.begins:  # the service died before it began
            return JobCondition(False)
        attempt, since_s = self.begins[job]
        rate, now_s = self.rates[attempt.device_type], self.horizon_s()
        gone = any(int(slot.rpartition(":")[2]) >= self.pools[attempt.device_type] for slot in attempt.slots)
        end_s = self.left.pop(job, math.inf)
        if self.end_s(job) <= min(now_s, end_s):
            end_s = self.end_s(job)
            del self.begins[job]
            return JobCondition(False, 0, True, (end_s - since_s) * rate, end_s=end_s)
        if end_s <= now_s or gone:
            if not gone:
                self.done[job] = self.done.get(job, 0.0) + (end_s - since_s) * rate
            del self.begins[job]
            seen_s = None if gone else end_s
            return JobCondition(
                False, None if gone else 143, True, 0 if gone else (end_s - since_s) * rate, end_s=seen_s
            )
        speed = rate if self.measures else 0.0
        return JobCondition(True, None, job not in self.stubborn, (now_s - since_s) * rate, speed)

    def ask_to_leave(self, attempt: JobAttempt) -> None:
        self.crash()
        self.left.setdefault(attempt.job, self.step_s())
        self.crash()

    def end(self, attempt: JobAttempt) -> None:
        self.left[attempt.job] = self.step_s()


HEADWAY = [sys.executable, "-m", "headway", "cluster"]


def asked(folder: Path, *words: str) -> dict[str, Any]:
    """What a verb of a service prints as JSON."""
    verb, *others = words
    cut = others.index("--") if "--" in others else len(others)
    command = [*HEADWAY, verb, *others[:cut], "--dir", str(folder), "--json", *others[cut:]]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    answer: dict[str, Any] = json.loads(found.stdout)
    return answer


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server of its own; it is killed at the end, and its jobs are left to end."""
    with (folder.parent / "served.txt").open("ab") as out:
        server = subprocess.Popen(
            [*HEADWAY, "serve", "--dir", str(folder), *options], stdout=subprocess.PIPE, stderr=out
        )
    try:
        assert server.stdout.readline(), (folder.parent / "served.txt").read_text()
        yield server
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@dataclass(frozen=True)
class Survived:
    """What became of jobs whose server was killed."""

    states: list[str]
    twice: list[str]
    """Jobs that ran twice at once."""
    repeated: int
    """Steps that were done more than once."""
    missing: int
    """Steps that were never done."""
    restarts: int
    seconds: float


def through_kills(
    folder: Path, *, num_jobs: int, slots: int, steps: int, step_s: float, kills_s: Sequence[float], round_s: float
) -> Survived:
    """Run jobs on a service that is killed (SIGKILL) so many seconds after each start, and started again at once."""
    (folder / "job.py").write_text(SCRIPT)
    service, began_s = folder / "s", time.monotonic()
    options = "--slots", str(slots), "--round-s", str(round_s)
    with serving(service, *options):
        for number in range(num_jobs):
            words = "--", str(folder / "job.py"), str(folder / f"{number}"), str(steps), str(step_s)
            asked(service, "submit", *words)
        time.sleep(kills_s[0])
    for kill_s in kills_s[1:]:
        with serving(service, *options):
            time.sleep(kill_s)
    with serving(service, *options):
        while True:
            rows = asked(service, "queue")["jobs"]
            if all(row["state"] in ("finished", "failed", "cancelled") for row in rows):
                break
            assert time.monotonic() - began_s < 300, rows
            time.sleep(0.2)
    done = [(folder / f"{number}" / "done").read_text().split() for number in range(num_jobs)]
    return Survived(
        [row["state"] for row in rows],
        [path.parent.name for path in folder.glob("*/twice")],
        sum(len(each) - len(set(each)) for each in done),
        sum(steps - len(set(each)) for each in done),
        sum(row["restarts"] for row in rows),
        time.monotonic() - began_s,
    )
