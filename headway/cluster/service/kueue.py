"""A service on a Kubernetes cluster with Kueue: each attempt is a suspended Job in the queue of its device type.

The service decides who runs; Kueue admits it beside what other teams have. For each device type there is a flavor, a
ClusterQueue with as many devices as the service may use, and a LocalQueue, `headway-TYPE`: a job runs on the type that
the policy chose. The Job of one that is to leave is deleted: its pod gets SIGTERM and saves within its grace, and the
Job is there until its pod has gone.

    kubectl apply -f -                       queues once, then one Job per attempt
    kubectl get jobs -l headway/service=...  -> active, succeeded, failed
    kubectl delete job NAME --cascade=foreground

Manifests are JSON, which YAML contains. The folder of the service is on a volume that all pods mount at the same path.

A service on a Slurm cluster: each attempt is a batch job, beside the site's own.

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

import json
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headway.cluster.service.executors import GRACE_S, AttemptFolders, JobAttempt, JobCondition
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


RESOURCE = "nvidia.com/gpu"
"""What a pod asks for."""

Manifest = Mapping[str, object]
"""One object of Kubernetes, as its JSON says."""


class _Metadata(msgspec.Struct):
    """What we read of an object's metadata."""

    name: str


class _JobStatus(msgspec.Struct):
    """What we read of a Job's status."""

    succeeded: int = 0
    failed: int = 0


class _KubernetesJob(msgspec.Struct):
    """What we read of a Job."""

    metadata: _Metadata
    status: _JobStatus = msgspec.field(default_factory=_JobStatus)


class _JobList(msgspec.Struct):
    """What `kubectl get jobs -o json` prints."""

    items: list[_KubernetesJob]


def queue_manifests(pools: Mapping[str, int], *, namespace: str = "default") -> list[Manifest]:
    """Return flavors, queues and the priority of a service that may use `pools`, device type -> devices."""
    result: list[Manifest] = [
        {
            "apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "WorkloadPriorityClass", "metadata": {"name": "headway"},
            "value": 1000, "description": "jobs that a service of headway decided to run now",
        }
    ]  # fmt: skip
    for device_type, count in pools.items():
        name = f"headway-{_label(device_type)}"
        quota = [{"name": RESOURCE, "nominalQuota": count}]
        group = {"coveredResources": [RESOURCE], "flavors": [{"name": name, "resources": quota}]}
        version = {"apiVersion": "kueue.x-k8s.io/v1beta1"}
        labels = {} if device_type == "slot" else {"nodeLabels": {"headway/device-type": _label(device_type)}}
        result += [
            {**version, "kind": "ResourceFlavor", "metadata": {"name": name}, "spec": labels},
            {
                **version, "kind": "ClusterQueue", "metadata": {"name": name},
                "spec": {"namespaceSelector": {}, "resourceGroups": [group]},
            },
            {
                **version, "kind": "LocalQueue", "metadata": {"name": name, "namespace": namespace},
                "spec": {"clusterQueue": name},
            },
        ]  # fmt: skip
    return result


def job_manifest(attempt: JobAttempt, *, name: str, service: str, script: Path, image: str) -> Manifest:
    """Return the Job of an attempt: one pod with as many devices as ranks, which is never started again by others."""
    volume = {"name": "folder", "hostPath": {"path": str(script.parents[3])}}
    container = {
        "name": "headway", "image": image, "command": ["/bin/sh", str(script)],
        "resources": {"limits": {RESOURCE: attempt.scale}},
        "volumeMounts": [{"name": "folder", "mountPath": str(script.parents[3])}],
    }  # fmt: skip
    labels = {
        "headway/service": service, "kueue.x-k8s.io/queue-name": f"headway-{_label(attempt.device_type)}",
        "kueue.x-k8s.io/priority-class": "headway",
    }  # fmt: skip
    pod = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": int(GRACE_S), "containers": [container],
        "volumes": [volume],
    }  # fmt: skip
    return {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "labels": labels},
        "spec": {"suspend": True, "backoffLimit": 0, "completions": 1, "parallelism": 1, "template": {"spec": pod}},
    }  # fmt: skip


class KueueExecutor:
    """Jobs of one namespace, through `kubectl`; `HEADWAY_IMAGE` names the image that they run in."""

    def __init__(self, root: Path, pools: Mapping[str, int]) -> None:
        """Make the queues; raises `HeadwayError` where `kubectl` is not there or may not."""
        self._folders, self._pools = AttemptFolders(root.resolve()), dict(pools)
        self._service = _label(root.resolve().name)
        self._image = os.environ.get("HEADWAY_IMAGE", "pytorch/pytorch:latest")
        self._apply({"apiVersion": "v1", "kind": "List", "items": queue_manifests(pools)})

    def slots(self) -> Mapping[str, int]:
        """Return the slots as they were given."""
        return self._pools

    def start(self, attempt: JobAttempt) -> str:
        """Apply the Job of an attempt: with its name, applying it twice makes one."""
        folder, name = self._folders.make(attempt), self._name(attempt)
        script = self._folders.script(attempt, launcher=["python3", *self._folders.launcher(attempt)[1:]])
        (folder / "job.sh").write_text(script)
        self._apply(
            job_manifest(attempt, name=name, service=self._service, script=folder / "job.sh", image=self._image)
        )
        return name

    def alive(self, attempts: Sequence[JobAttempt]) -> Mapping[str, JobCondition]:
        """Ask for all Jobs of the service; one that is gone has ended."""
        command = ["kubectl", "get", "jobs", "-l", f"headway/service={self._service}", "-o", "json"]
        try:
            jobs = msgspec.json.decode(run_command(command, "Kubernetes"), type=_JobList).items
        except msgspec.DecodeError as error:
            raise FormatError(
                f"kubectl get jobs printed something else than Jobs ({error}). Check: {command}"
            ) from error
        by_name, result = {job.metadata.name: job for job in jobs}, {}
        for attempt in attempts:
            job, code = by_name.get(self._name(attempt)), self._folders.exit_code(attempt)
            over = job is None or bool(job.status.succeeded or job.status.failed)
            alive = code is None and not over
            if code is None and job is not None and job.status.succeeded:
                code = 0
            result[attempt.job] = self._folders.condition(attempt, alive=alive, code=code)
        return result

    def ask_to_leave(self, attempt: JobAttempt) -> None:
        """Delete it: its pod has its grace to save."""
        self._delete(attempt)

    def end(self, attempt: JobAttempt) -> None:
        """Delete it, with no grace."""
        self._delete(attempt, "--grace-period=0", "--force")

    def _delete(self, attempt: JobAttempt, *options: str) -> None:
        gently = "--cascade=foreground", "--wait=false", "--ignore-not-found"
        run_command(["kubectl", "delete", "job", self._name(attempt), *gently, *options], "Kubernetes")

    def _name(self, attempt: JobAttempt) -> str:
        return f"headway-{self._service}-{attempt.job}-{attempt.number}"

    def _apply(self, manifest: Manifest) -> None:
        run_command(["kubectl", "apply", "-f", "-"], "Kubernetes", text=json.dumps(manifest))


def _label(text: str) -> str:
    """Return text as a name of Kubernetes: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40]
