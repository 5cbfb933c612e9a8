"""A service on a Kubernetes cluster with Kueue: each attempt is a suspended Job in the queue of its device type.

The service decides who runs; Kueue admits it beside what other teams have. For each device type there is a flavor, a
ClusterQueue with as many devices as the service may use, and a LocalQueue, `headway-TYPE`: a job runs on the type that
the policy chose. The Job of one that is to leave is deleted: its pod gets SIGTERM and saves within its grace, and the
Job is there until its pod has gone.

    kubectl apply -f -                       queues once, then one Job per attempt
    kubectl get jobs -l headway/service=...  -> active, succeeded, failed
    kubectl delete job NAME --cascade=foreground

Manifests are JSON, which YAML contains. The folder of the service is on a volume that all pods mount at the same path.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headway.cluster.service.executors import GRACE_S, AttemptFolders, JobAttempt, JobCondition
from headway.cluster.service.slurm import run_command
from headway.core.errors import FormatError

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
