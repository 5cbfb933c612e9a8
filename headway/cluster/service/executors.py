"""What starts, watches and ends the jobs of a service: the protocol, and processes of this host under `headway run`.

An executor has five functions. It is told what to start, and asked how that is; it decides nothing. Each attempt of a
job has a folder of its own, `jobs/JOB/ATTEMPT` in the folder of the service, that all executors fill alike:

    pid      the shell that waits for the launcher, and the launcher     exit   its exit code, once it has one
    run/     the run folder: steps are counted there                     out    what the job printed
    saves/   a file of each rank that saves when it is asked (`HEADWAY_SAVES`)   asked  it was asked to leave

Nothing is started twice: shell, launcher and ranks inherit a lock of `lock` in that folder, and the attempt is alive
until the last of them has ended, whichever of them somebody kills. A server that is killed while it starts a job leaves
either a locked file or no process.

A service on a Ray cluster: each attempt is an actor that holds the custom resources of its slots.

    ray start --head --resources '{"v100": 4}'                on one machine
    ray start --address HEAD:6379 --resources '{"k80": 4}'    on the others
    headway cluster serve --executor ray --slots v100=4,k80=4

Ray finds a machine with as many free resources of the type as the job has ranks, and starts the actor there; what the
actor does on its machine is `LocalExecutor`'s work. An actor is detached and has the attempt's name, so that a server
that was killed finds it. Folders lie on a file system that all machines share. RAY_ADDRESS names another cluster than
the one of this machine.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from headway.core.errors import HeadwayError
from headway.core.files.private import private_folder
from headway.core.files.safe_files import whole_file
from headway.core.machine.host import process_stat
from headway.runtime.launching.save_and_leave import SAVES
from headway.runtime.run_folder.live_feed import LiveFeed
from headway.trace.events.parquet import StoredTrace

GRACE_S = 30.0
"""How long a job that was asked to leave may take to save."""

LAST_S = 10.0
"""How long its launcher and its shell may then take to end."""


@dataclass(frozen=True, slots=True)
class JobAttempt:
    """One incarnation of a job, on its slots."""

    job: str
    number: int
    scale: int
    """Ranks, each on one slot."""

    command: tuple[str, ...]
    """The script and its arguments."""

    folder: str
    """Where it runs."""

    slots: tuple[str, ...]
    """[scale] Such as v100:0."""

    handle: str = ""
    """What the executor called it; empty where the server was killed before it could note that."""

    @property
    def device_type(self) -> str:
        """Type of its slots."""
        return self.slots[0].rpartition(":")[0]


@dataclass(frozen=True, slots=True)
class JobCondition:
    """How an attempt is."""

    alive: bool
    code: int | None = None
    """Exit code once it is gone; None: nobody knows, as of a host that died."""

    can_leave: bool = False
    """Every rank saves when it is asked."""

    steps: float = 0.0
    """Steps that the attempt did."""

    steps_per_s: float = 0.0
    """Lately; 0 = not known."""

    pid: int = 0
    """Process of this host that ends with it, if there is one."""

    end_s: float | None = None
    """When it ended, on the clock of the service; None: just now."""


class Executor(Protocol):
    """What carries out what a service decides."""

    def slots(self) -> Mapping[str, int]:
        """Return device type -> slots, as of now; they are counted from 0, and the last ones leave first."""
        ...

    def start(self, attempt: JobAttempt) -> str:
        """Start an attempt, unless one of its job is alive; return its handle. Raises `HeadwayError`."""
        ...

    def alive(self, attempts: Sequence[JobAttempt]) -> Mapping[str, JobCondition]:
        """Return job -> how it is, also of attempts that a server started before this one."""
        ...

    def ask_to_leave(self, attempt: JobAttempt) -> None:
        """Have it save and end; it may take `GRACE_S`. Asking again changes nothing."""
        ...

    def end(self, attempt: JobAttempt) -> None:
        """End it, saved or not."""
        ...


class AttemptFolders:
    """The folders of all attempts under the folder of a service, and how far their runs are."""

    def __init__(self, root: Path) -> None:
        """Make nothing yet."""
        self.root = root
        self._feeds: dict[Path, LiveFeed] = {}

    def of(self, attempt: JobAttempt) -> Path:
        """Return the folder of an attempt."""
        return self.root / "jobs" / attempt.job / str(attempt.number)

    def make(self, attempt: JobAttempt) -> Path:
        """Make the folder of an attempt, with the shell script that runs it; and the newest number of its job."""
        folder = self.of(attempt)
        private_folder(folder.parent)
        private_folder(folder)
        private_folder(folder / "saves")
        (folder / "job.sh").write_text(self.script(attempt))
        with whole_file(folder.parent / "newest") as draft:
            draft.write_text(f"{attempt.number}\n")
        return folder

    def launcher(self, attempt: JobAttempt) -> list[str]:
        """Return the command that runs the script, recorded, on so many ranks."""
        ranks = [] if attempt.scale == 1 else ["--nproc-per-node", str(attempt.scale)]
        options = ["--quiet", "--grace-s", f"{GRACE_S:g}", "--out", str(self.of(attempt) / "run"), *ranks]
        return [sys.executable, "-m", "headway", "run", *options, "--", *attempt.command]

    def script(self, attempt: JobAttempt, *, head: str = "", launcher: Sequence[str] = ()) -> str:
        """Return what runs an attempt: it notes process and exit code, hands SIGTERM on, and never runs an old one."""
        folder = self.of(attempt)
        slots = ",".join(attempt.slots)
        return f"""#!/bin/sh
{head}cd {shlex.quote(str(folder))} || exit 1
[ "$(cat ../newest)" = {attempt.number} ] || exit 0
export {SAVES}={shlex.quote(str(folder / "saves"))} HEADWAY_SLOTS={shlex.quote(slots)}
trap '[ -z "$asked" ] && [ -n "$child" ] && asked=1 && : >asked && kill -TERM $child' TERM
trap : INT HUP
(cd {shlex.quote(attempt.folder)} && exec {shlex.join(launcher or self.launcher(attempt))}) </dev/null &
child=$!
echo $$ $child >pid.new && mv pid.new pid
while :; do
    wait $child; code=$?
    kill -0 $child 2>/dev/null || break
done
echo $code >exit.new && mv exit.new exit
exit $code
"""

    def exit_code(self, attempt: JobAttempt) -> int | None:
        """Return the exit code that an attempt noted; None: it did not."""
        with suppress(OSError, ValueError):
            return int((self.of(attempt) / "exit").read_text())
        return None

    def processes(self, attempt: JobAttempt) -> tuple[int, int]:
        """Return the shell and the launcher; zeros where they are not known."""
        with suppress(OSError, ValueError):
            shell, launcher = map(int, (self.of(attempt) / "pid").read_text().split())
            return shell, launcher
        return 0, 0

    def condition(self, attempt: JobAttempt, *, alive: bool, code: int | None = None, pid: int = 0) -> JobCondition:
        """Return how an attempt is, with its steps and whether it can leave."""
        folder = self.of(attempt)
        feed = self._feeds.setdefault(folder, LiveFeed(folder / "run"))
        feed.poll()
        figures = feed.figures()
        steps, rate = (0.0, 0.0) if figures is None else (float(figures.total_steps), figures.steps_per_s)
        saves = len(os.listdir(folder / "saves")) if (folder / "saves").is_dir() else 0
        if not alive:
            self._feeds.pop(folder).close()
            steps = max(steps, float(recorded_steps(folder / "run")))
            if code is None and feed.facts.exit is not None:  # its shell was killed: the launcher noted it, too
                code = feed.facts.exit.code
        return JobCondition(alive, code, saves >= attempt.scale, steps, rate, pid)


def recorded_steps(run: Path) -> int:
    """Return the steps that the record of a finished run has, of the rank that made most; attempts summed."""
    steps: dict[str, int] = {}
    for path in (run / "events").glob("a*-r*.parquet"):
        with suppress(HeadwayError, OSError):
            trace = StoredTrace(path).read(columns=["name"])
            attempt = path.name.partition("-")[0]
            steps[attempt] = max(steps.get(attempt, 0), int(trace.named("step").sum()))
    return sum(steps.values())


class LocalExecutor:
    """Processes of this host, each under `headway run`; slots are devices of it."""

    def __init__(self, root: Path, pools: Mapping[str, int], *, numbered: bool = True) -> None:
        """Run jobs in `root`/jobs on the slots given; `numbered`: the numbers of slots are those of CUDA devices."""
        self._folders, self._pools, self._numbered = AttemptFolders(root), dict(pools), numbered
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def slots(self) -> Mapping[str, int]:
        """Return the slots as they were given."""
        return self._pools

    def start(self, attempt: JobAttempt) -> str:
        """Start a shell that holds the attempt's lock, and hands it down, in a session of its own."""
        before = replace(attempt, number=attempt.number - 1)
        if _is_locked(self._folders.of(before)) and self._folders.exit_code(before) != 0:
            raise HeadwayError(f"attempt {before.number} of job {attempt.job} is alive; the next one is not started.")
        folder = self._folders.make(attempt)
        lock = _lock_of(folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            environment = dict(os.environ)
            if self._numbered and Path("/dev/nvidiactl").exists():
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(slot.rpartition(":")[2] for slot in attempt.slots)
            with (folder / "out").open("ab") as out:
                child = subprocess.Popen(
                    ["/bin/sh", str(folder / "job.sh")], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    env=environment, start_new_session=True, pass_fds=[lock],
                )  # fmt: skip
        except BlockingIOError:
            raise HeadwayError(f"attempt {attempt.number} of job {attempt.job} is alive already.") from None
        finally:
            os.close(lock)
        self._children[attempt.job] = child
        return str(child.pid)

    def alive(self, attempts: Sequence[JobAttempt]) -> Mapping[str, JobCondition]:
        """Ask the locks: who holds one is alive. What a script leaves running that ended well is left alone."""
        result = {}
        for attempt in attempts:
            folder = self._folders.of(attempt)
            code, child = self._folders.exit_code(attempt), self._children.get(attempt.job)
            # Where somebody has deleted the lock, the shell that we started says so too, and is never waited for.
            alive = code != 0 and (_is_locked(folder) or (child is not None and child.poll() is None))
            if alive and code is not None and time.time() - (folder / "exit").stat().st_mtime > GRACE_S:
                self.end(attempt)  # its launcher was killed: ranks were asked to end by that, and have had their time
            elif not alive and child is not None and child.poll() is not None:
                del self._children[attempt.job]
            pid = next((pid for pid in self._folders.processes(attempt) if _runs(pid)), 0)
            result[attempt.job] = self._folders.condition(attempt, alive=alive, code=code, pid=pid)
        return result

    def ask_to_leave(self, attempt: JobAttempt) -> None:
        """Send the shell SIGTERM, which hands on the first one: a second would have the launcher kill at once."""
        shell, launcher = self._folders.processes(attempt)
        if not _is_locked(self._folders.of(attempt)):
            return
        with suppress(ProcessLookupError, FileExistsError):
            if _runs(shell):
                os.kill(shell, signal.SIGTERM)
            elif _runs(launcher):  # somebody has killed the shell
                (self._folders.of(attempt) / "asked").touch(exist_ok=False)
                os.kill(launcher, signal.SIGTERM)

    def end(self, attempt: JobAttempt) -> None:
        """Have the launcher end, and kill its ranks: whoever else holds the lock; later calls kill all who are left."""
        first = self._folders.of(attempt) / "ending"
        again = first.exists() and time.time() - first.stat().st_mtime > LAST_S
        with suppress(OSError):
            first.touch(exist_ok=False)
        self.ask_to_leave(attempt)
        lock = str((self._folders.of(attempt) / "lock").resolve())
        spared = () if again else self._folders.processes(attempt)  # one that is stopped would never end by itself
        for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):
                pid = int(descriptor.parts[2])
                if os.readlink(descriptor).removesuffix(" (deleted)") == lock and pid not in spared:
                    os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    """Say whether a process is there, and has not ended."""
    with suppress(OSError):
        return process_stat(pid)[0] not in "ZX"
    return False


def _lock_of(folder: Path) -> int:
    """Return a descriptor of the lock of an attempt."""
    return os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _is_locked(folder: Path) -> bool:
    """Say whether a process of an attempt is alive."""
    if not folder.is_dir():  # the server ended before it made it
        return False
    lock = _lock_of(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


ExecutorMaker = Callable[[Path, Mapping[str, int]], Executor]
"""(folder of the service, device type -> slots) -> its executor."""


ANSWER_S = 10.0
"""An actor that has not answered by then waits for its resources, or its machine is busy: it is alive."""


class AttemptActor:
    """An attempt on the machine that Ray chose."""

    def __init__(self, root: Path, attempt: JobAttempt) -> None:
        """Start it; raises `HeadwayError` where another of its job is alive."""
        self._attempt = attempt
        # Ray has set the devices of this process.
        self._executor = LocalExecutor(root, {}, numbered=False)
        self._executor.start(attempt)

    def condition(self) -> JobCondition:
        """Return how it is."""
        return self._executor.alive([self._attempt])[self._attempt.job]

    def ask_to_leave(self) -> None:
        """Have it save and end."""
        self._executor.ask_to_leave(self._attempt)

    def end(self) -> None:
        """End it, saved or not."""
        self._executor.end(self._attempt)


class RayExecutor:
    """Actors on a Ray cluster, and a file system that its machines share with this host."""

    def __init__(self, root: Path, pools: Mapping[str, int]) -> None:
        """Connect; use at most `pools` at once. Raises `HeadwayError` without Ray, or without a cluster."""
        self._root, self._pools = root.resolve(), dict(pools)
        self._folders = AttemptFolders(self._root)
        self._namespace = f"headway-{re.sub(r'[^a-zA-Z0-9]', '-', self._root.name)}"
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError as cause:
            raise HeadwayError(f"Ray is not installed ({cause}). Install it with: pip install ray") from cause
        if not self._ray.is_initialized():
            try:
                self._ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
            except (ConnectionError, RuntimeError) as cause:
                raise HeadwayError(
                    f"no Ray cluster answers ({cause}). Start one: ray start --head --resources '{{\"slot\": 2}}'"
                ) from cause
        lacking = [name for name in self._pools if name not in self._ray.cluster_resources()]
        if lacking:
            raise HeadwayError(
                f"the Ray cluster has no resource {lacking[0]!r}. Start its machines with: ray start ... --resources "
                f"'{{\"{lacking[0]}\": {self._pools[lacking[0]]}}}'"
            )

    def slots(self) -> Mapping[str, int]:
        """Return what the machines that are there have, up to what may be used."""
        resources = self._ray.cluster_resources()
        return {name: min(count, int(resources.get(name, 0))) for name, count in self._pools.items()}

    def start(self, attempt: JobAttempt) -> str:
        """Have Ray start the actor, once its resources are free; one that is there already stays the only one."""
        name = self._name(attempt)
        self._folders.make(attempt)
        gpus = attempt.scale if self._ray.cluster_resources().get("GPU", 0) else 0
        actor = self._ray.remote(AttemptActor).options(
            name=name, namespace=self._namespace, lifetime="detached", get_if_exists=True, max_restarts=0,
            num_cpus=0, num_gpus=gpus, resources={attempt.device_type: attempt.scale},
        )  # fmt: skip
        actor.remote(self._root, attempt)
        return name

    def alive(self, attempts: Sequence[JobAttempt]) -> Mapping[str, JobCondition]:
        """Ask the actors; of one that is gone the exit code lies in its folder, if it had one."""
        asked, result = {}, {}
        for attempt in attempts:
            actor = self._actor(attempt)
            if actor is not None:
                asked[attempt.job] = actor.condition.remote()
        if asked:
            self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
        for attempt in attempts:
            alive = code = None
            if attempt.job in asked:
                try:
                    condition = self._ray.get(asked[attempt.job], timeout=0.1)
                    alive, code = condition.alive, condition.code
                except self._ray.exceptions.GetTimeoutError:
                    alive = True
                except self._ray.exceptions.RayError:  # its process or its machine died, or it refused to start
                    alive = False
            if not alive:
                code = self._folders.exit_code(attempt) if code is None else code
                self._kill(attempt)
            result[attempt.job] = self._folders.condition(attempt, alive=bool(alive), code=code)
        return result

    def ask_to_leave(self, attempt: JobAttempt) -> None:
        """Have the actor's job save and end."""
        actor = self._actor(attempt)
        if actor is not None:
            actor.ask_to_leave.remote()

    def end(self, attempt: JobAttempt) -> None:
        """Have the actor end its job; one that still waits for its resources is taken back."""
        actor = self._actor(attempt)
        if actor is None:
            return
        ready, _ = self._ray.wait([actor.end.remote()], timeout=ANSWER_S)
        if not ready:
            self._kill(attempt)

    def _name(self, attempt: JobAttempt) -> str:
        return f"{attempt.job}-{attempt.number}"

    def _actor(self, attempt: JobAttempt) -> Any:
        """Return the actor of an attempt; None where there is none."""
        with suppress(ValueError):
            return self._ray.get_actor(self._name(attempt), namespace=self._namespace)
        return None

    def _kill(self, attempt: JobAttempt) -> None:
        """Give its resources back."""
        actor = self._actor(attempt)
        if actor is not None:
            self._ray.kill(actor)
