"""A service on a Slurm cluster: each attempt is a batch job, beside the site's own.

    sbatch --parsable job.sh           -> number of the job, our handle
    squeue --json --name NAME,...      -> who is pending, running, completing; also found by name after a crash
    scancel --signal=TERM --batch N    the batch shell hands it on to the launcher: ranks save and leave
    scancel N                          ends it, saved or not

`--slots` says how much of the cluster the service may use at once; Slurm still decides when each job begins, and its
variables (SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT) hold for all of them. Folders lie on a file system that
all hosts share: exit codes, steps and saves are read there. A job that was submitted while the server died is found by
its name, or runs too late: its script then finds a newer number and ends.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headway.cluster.service.executors import AttemptFolders, JobAttempt, JobCondition
from headway.core.errors import FormatError, HeadwayError

ANSWER_S = 60.0
"""A command that has not ended by then hangs."""


SEEN_S = 60.0
"""How long the exit code of a job that has left the queue may take to be seen on a shared file system."""


class _SlurmJob(msgspec.Struct):
    """What we read of a job of `squeue --json`."""

    job_id: int
    name: str
    job_state: str | list[str]
    """A word in older versions of Slurm, a list of words in newer ones."""


class _SqueueAnswer(msgspec.Struct):
    """What we read of `squeue --json`."""

    jobs: list[_SlurmJob]


ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "STOPPED")
"""States of a job that may still do something."""

CODES = {"COMPLETED": 0, "FAILED": 1, "OUT_OF_MEMORY": 1}
"""State -> exit code of a job whose own is not seen yet; after other states nobody knows."""


class SlurmExecutor:
    """Batch jobs of one user, on a file system that this host and the cluster share."""

    def __init__(self, root: Path, pools: Mapping[str, int]) -> None:
        """Use at most `pools` at once; raises `HeadwayError` where Slurm is not there."""
        self._folders, self._pools = AttemptFolders(root.resolve()), dict(pools)
        self._gone_s: dict[str, float] = {}
        self._mark = re.sub(r"\W", "-", root.resolve().name)
        if shutil.which("sbatch") is None:
            raise HeadwayError("there is no sbatch here. Serve on a host of the cluster, or with --executor local.")

    def slots(self) -> Mapping[str, int]:
        """Return the slots as they were given."""
        return self._pools

    def start(self, attempt: JobAttempt) -> str:
        """Submit a batch job with as many devices as ranks."""
        folder = self._folders.make(attempt)
        device_type = "" if attempt.device_type == "slot" else f"{attempt.device_type}:"
        head = "".join(
            f"#SBATCH {line}\n"
            for line in (
                f"--job-name={self._name(attempt)}", f"--output={folder}/out", "--nodes=1", "--ntasks=1",
                "--no-requeue", f"--gres=gpu:{device_type}{attempt.scale}", "--open-mode=append",
            )
        )  # fmt: skip
        (folder / "job.sh").write_text(self._folders.script(attempt, head=head))
        return run_command(["sbatch", "--parsable", str(folder / "job.sh")], "Slurm").strip().partition(";")[0]

    def alive(self, attempts: Sequence[JobAttempt]) -> Mapping[str, JobCondition]:
        """Ask the queue; the exit code of a job that has left it lies in its folder, once that is seen here."""
        queued, result = self._queued(attempts), {}
        for attempt in attempts:
            job = queued.get(attempt.handle or self._name(attempt))
            states = [] if job is None else [job.job_state] if isinstance(job.job_state, str) else job.job_state
            code = self._folders.exit_code(attempt)
            alive = any(state in ALIVE for state in states)
            if code is None:
                code = next((CODES[state] for state in states if state in CODES), None)
            if not states and code is None:  # it has left the queue, and its exit code may be on its way here
                since_s = self._gone_s.setdefault(self._name(attempt), time.monotonic())
                alive = time.monotonic() - since_s < SEEN_S
            result[attempt.job] = self._folders.condition(attempt, alive=alive and code is None, code=code)
        return result

    def ask_to_leave(self, attempt: JobAttempt) -> None:
        """Signal the batch shell, which hands it on."""
        run_command(["scancel", "--signal=TERM", "--batch", self._which(attempt)], "Slurm")

    def end(self, attempt: JobAttempt) -> None:
        """Have Slurm end it."""
        run_command(["scancel", self._which(attempt)], "Slurm")
        self._gone_s[self._name(attempt)] = -math.inf  # it need not say how it ended

    def _which(self, attempt: JobAttempt) -> str:
        """Return how scancel is told of a job: by number, or by name where the server died before it heard that."""
        return attempt.handle or f"--name={self._name(attempt)}"

    def _name(self, attempt: JobAttempt) -> str:
        return f"headway-{self._mark}-{attempt.job}-{attempt.number}"

    def _queued(self, attempts: Sequence[JobAttempt]) -> dict[str, _SlurmJob]:
        """Return number and name -> the job that Slurm has of it."""
        text = run_command(["squeue", "--json", "--name", ",".join(map(self._name, attempts))], "Slurm")
        try:
            jobs = msgspec.json.decode(text, type=_SqueueAnswer).jobs
        except msgspec.DecodeError as error:
            raise FormatError(
                f"squeue --json printed something else than Slurm 22.05 and later do ({error}). Check: squeue --json"
            ) from error
        return {key: job for job in jobs for key in (str(job.job_id), job.name)}


def run_command(command: Sequence[str], what: str, *, text: str | None = None) -> str:
    """Return what a scheduler's command prints; raises `HeadwayError` where it fails, hangs or is not there."""
    try:
        result = subprocess.run(command, input=text, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except FileNotFoundError:
        raise HeadwayError(
            f"there is no {command[0]} here. Serve on a host of {what}, or pass --executor local."
        ) from None
    except subprocess.TimeoutExpired:
        raise HeadwayError(f"{command[0]} did not answer within {ANSWER_S:g} s. Check that {what} works.") from None
    if result.returncode:
        why = (result.stderr or result.stdout).strip()[-500:]
        raise HeadwayError(
            f"{' '.join(command[:4])} failed with code {result.returncode}: {why}. Check that {what} works."
        )
    return result.stdout
