"""A service on a Ray cluster: each attempt is an actor that holds the custom resources of its slots.

    ray start --head --resources '{"v100": 4}'                on one machine
    ray start --address HEAD:6379 --resources '{"k80": 4}'    on the others
    headway cluster serve --executor ray --slots v100=4,k80=4

Ray finds a machine with as many free resources of the type as the job has ranks, and starts the actor there; what the
actor does on its machine is `LocalExecutor`'s work. An actor is detached and has the attempt's name, so that a server
that was killed finds it. Folders lie on a file system that all machines share. RAY_ADDRESS names another cluster than
the one of this machine.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.cluster.service.executors import AttemptFolders, JobAttempt, JobCondition, LocalExecutor
from headway.core.errors import HeadwayError

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
