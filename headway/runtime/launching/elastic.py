"""Several hosts: torch's elastic rendezvous decides who takes part, our own supervision runs the ranks.

Each host's launcher is one elastic agent. Ranks, streams, signals, drains and
exit classes are the same as on one host; only the places (who is rank what,
where the store is) come from the rendezvous. Every attempt has a store of its
own: a dead attempt's addresses would make gloo's restart fail.

>>> backend_setup("static", "", "10.0.0.1", 29400, {})[0]
'10.0.0.1:29400'
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousGracefulExitError

from headway.core.errors import InputError, say_beside
from headway.runtime.host import rank_env
from headway.runtime.host.rank_env import Port, RankEnvironment
from headway.runtime.host.reserve import Reserve
from headway.runtime.launching.agent import Group, Signals
from headway.runtime.launching.options import LaunchOptions
from headway.runtime.launching.rendezvous import open_rendezvous, why_ended
from headway.runtime.launching.run_of_ranks import (
    ExitReport,
    RankSupervisor,
    open_recording,
    open_streams,
    report,
    say,
    specs_of,
)
from headway.runtime.run_folder.exit_class import OomWatch, RankEnd

DEFAULT_PORT = 29500
"""torchrun's port for the static rendezvous of several hosts: the one number that all of them must agree on."""

RENDEZVOUS_S = 900
"""Seconds to wait for the other hosts; `--rdzv-conf timeout=N` changes it."""


def backend_setup(
    backend: str, endpoint: str, master_addr: str, master_port: int | None, more: Mapping[str, str | int | float]
) -> tuple[str, dict[str, str | int | float]]:
    """Return (endpoint, settings) of the rendezvous; raises `InputError` when the endpoint is missing."""
    if backend == "static":
        endpoint = endpoint or f"{master_addr}:{master_port or DEFAULT_PORT}"
    if not endpoint:
        raise InputError(f"--rdzv-backend {backend} has no --rdzv-endpoint. Pass --rdzv-endpoint HOST:PORT.")
    return endpoint, {"timeout": RENDEZVOUS_S, **more}


class HostAgent(SimpleElasticAgent):
    """The elastic agent of this host; torch calls it, our `Group` does the work."""

    def __init__(self, spec: WorkerSpec, options: LaunchOptions, script: Sequence[str], signals: Signals) -> None:
        super().__init__(spec)
        self.ends: list[RankEnd] = []
        """How the ranks of the last attempt ended."""
        self.attempts: RankSupervisor | None = None
        self.replaced = False
        """Whether this host left its place to one in reserve."""
        self._options, self._script, self._signals = options, script, signals
        self._start_ns = 0
        self._stack = ExitStack()
        self._port: Port | None = None
        self._group: Group | None = None
        self._ended: Group | None = None
        self._watch = OomWatch()
        self._restarts = 0
        self._ours = False
        signals.on_stop = self._interrupt

    @property
    def reserve(self) -> Reserve | None:
        """This host's place among those that came, where some wait in reserve."""
        return getattr(self._worker_group.spec.rdzv_handler, "reserve", None)

    @property
    def dismissed(self) -> bool:
        """Whether the job ended while this host waited in reserve."""
        return self.reserve is not None and self.reserve.dismissed

    def open(self, start_ns: int, stack: ExitStack) -> HostAgent:
        """Say when the launcher started, and where to leave what must be closed at its end."""
        self._start_ns, self._stack = start_ns, stack
        return self

    def leave(self) -> None:
        """Close the rendezvous: nobody needs this host any more."""
        self._worker_group.spec.rdzv_handler.shutdown()

    def _interrupt(self) -> None:
        """Break a rendezvous or a sleep of torch's loop; our own loops look at the signals themselves."""
        if not self._ours:
            break_off(self._signals)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self._signals.stop:  # what the handler raised was lost, in a finaliser for example
            break_off(self._signals)
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._ours = True
        try:
            attempt = self._restarts
            if self.reserve is not None:  # one that waited joins the others in the middle: they count alike
                attempt = max(attempt, self.reserve.look().round)
            self._restarts = attempt + 1
            if self.attempts is None:
                self.attempts = self._open_attempts(worker_group)
            self.attempts.recording.world_size = worker_group.workers[0].world_size
            places = self._places(worker_group, attempt)
            self._group = self.attempts.start(
                specs_of(self._options, self._script, places, self.attempts.recording), attempt
            )
        finally:
            self._ours = False
        return {rank.spec.local_rank: rank.pid for rank in self._group.ranks}

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the ranks and note why; then meet the others again, unless a host in reserve is to take this place."""
        self._stop_workers(worker_group)
        if self.attempts is not None and self._ended is not None:
            left = max(worker_group.spec.max_restarts - self._restarts + 1, 1)
            waiting = self.reserve.waiting() if self.reserve is not None else 0
            # Whether the job goes on is torch's to decide: it knows the other hosts.
            self.attempts.again(self._ended, self.ends, left, standbys=waiting)
            if self.attempts.action == "standby":
                self.replaced = True
                say(self._options, "this host is to blame again: it leaves its place to one in reserve")
                raise RendezvousGracefulExitError("a host in reserve takes this place")
        super()._restart_workers(worker_group)

    def _open_attempts(self, worker_group: WorkerGroup) -> RankSupervisor:
        recording = open_recording(
            self._options,
            self._script,
            self._start_ns,
            nproc=len(worker_group.workers),
            world_size=worker_group.workers[0].world_size,
            # A host that takes another's place writes a file of its own: its clocks are not the other's.
            group_rank=self.reserve.number if self.reserve is not None else worker_group.group_rank or 0,
            shared=True,
        )
        streams = open_streams(self._options, recording)
        return self._stack.enter_context(RankSupervisor(self._options, recording, streams, self._signals))

    def _places(self, worker_group: WorkerGroup, attempt: int) -> list[RankEnvironment]:
        spec = worker_group.spec
        addr, port = worker_group.master_addr, worker_group.master_port
        if spec.rdzv_handler.get_backend() == "static":
            addr, port = self._fresh_store(worker_group, attempt)
        rank_env.check_host(str(addr), "the address of host 0")
        return [
            RankEnvironment(
                worker.global_rank,
                worker.local_rank,
                worker.world_size,
                spec.local_world_size,
                group_rank=worker_group.group_rank or 0,
                group_world_size=worker_group.group_world_size or 1,
                master_addr=str(addr),
                master_port=int(port or 0),
                role=spec.role,
                role_rank=worker.role_rank,
                role_world_size=worker.role_world_size,
                attempt=attempt,
                max_restarts=spec.max_restarts,
                run_id=spec.rdzv_handler.get_run_id(),
            )
            for worker in worker_group.workers
        ]

    def _fresh_store(self, worker_group: WorkerGroup, attempt: int) -> tuple[str, int]:
        """Agree on a port for this attempt's store: host 0 reserves it and tells the others."""
        store, key = worker_group.store, f"headway/store/{attempt}"
        if store is None:
            raise RendezvousError("the rendezvous gave no store")
        if worker_group.group_rank == 0:
            if self._port is not None:
                self._port.__exit__()
            self._port = self._stack.enter_context(Port())
            store.set(key, str(self._port.number))
        return str(worker_group.master_addr), int(store.get(key))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        group = self._group
        if group is None or self.attempts is None:
            return RunResult(state=WorkerState.INIT)
        self._ours = True
        try:
            running = group.step(
                self._signals,
                grace_s=self._options.grace_s,
                is_secondary=self.attempts.is_secondary,
                timeout_s=self._options.monitor_interval,
            )
        finally:
            self._ours = False
        if self._signals.stop:
            break_off(self._signals)
        if running and not group.failed:
            return RunResult(state=WorkerState.HEALTHY)
        if group.failed:
            failures = {
                rank.spec.rank: ProcessFailure(rank.spec.local_rank, rank.pid, rank.code or 0, "")
                for rank in group.ranks
                if rank.code
            }
            return RunResult(state=WorkerState.FAILED, failures=failures)
        return RunResult(state=WorkerState.SUCCEEDED, return_values={rank.spec.rank: None for rank in group.ranks})

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._end_attempt(signal.SIGTERM)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        self._end_attempt(death_sig)

    def _end_attempt(self, number: int) -> None:
        """Stop what still runs and write the attempt's events, once."""
        group, self._group = self._group, None
        if group is None or self.attempts is None:
            return
        self._ours = True
        try:
            group.stop(grace_s=self._options.grace_s, number=number, signals=self._signals)
            self.ends, self._ended = self.attempts.finish(group, self._watch), group
        finally:
            self._ours = False


def break_off(signals: Signals) -> None:
    """Raise what torch's loops end on, for the first stop signal."""
    number = signals.stop[0]
    raise SignalException(f"signal {number}", signal.Signals(number))


def run_elastic(options: LaunchOptions, script: Sequence[str], start_ns: int, hosts: tuple[int, int]) -> ExitReport:
    """Take part in a run over `hosts` (fewest, most) as this host, and return how it ended here.

    A stop signal ends the wait for other hosts at once: then no rank was started and there is no run folder.
    Raises `InputError` when the rendezvous cannot work or nobody came.
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    endpoint, settings = backend_setup(
        options.rdzv_backend, options.rdzv_endpoint, options.master_addr, options.master_port, options.rdzv_conf
    )
    if options.rdzv_backend == "static":
        settings["rank"] = options.node_rank
    agent: HostAgent | None = None
    with Signals() as signals, ExitStack() as stack:
        signals.on_stop = lambda: break_off(signals)
        try:
            spec = _spec_of(options, script, endpoint, settings, hosts)
            agent = HostAgent(spec, options, script, signals).open(start_ns, stack)
            agent.run()
        except (RendezvousError, DistNetworkError) as cause:  # a closed rendezvous is the others' failure
            say(options, f"the rendezvous ended: {why_ended(cause, endpoint, was_met=agent is not None)}")
        except SignalException:
            pass
        signals.on_stop = None
        if agent is not None and not (signals.stop or agent.dismissed or agent.replaced):
            agent.leave()
    if agent is not None and agent.attempts is not None:
        attempts = agent.attempts
        return report(options, attempts.recording, agent.ends, signals, output_lost=attempts.streams.output_lost)
    if agent is not None and agent.dismissed:
        say(options, "the job ended; this host, which waited in reserve, was not needed")
        return ExitReport(0, "ok", None, None, (time.perf_counter_ns() - start_ns) / 1e9, None)
    if signals.stop:
        return _stopped_alone(signals.stop[0], endpoint, start_ns)
    raise InputError(
        f"no rank was started: the rendezvous at {endpoint} did not come about. "
        "Check that every host was given the same endpoint and id, and that it is reachable."
    )


def _spec_of(
    options: LaunchOptions,
    script: Sequence[str],
    endpoint: str,
    settings: Mapping[str, str | int | float],
    hosts: tuple[int, int],
) -> WorkerSpec:
    """Return what torch's agent needs to know; a c10d store is reached here. Raises `InputError`, `RendezvousError`."""
    try:
        handler = open_rendezvous(
            options.rdzv_backend, endpoint, settings, run_id=options.rdzv_id, hosts=hosts,
            local_addr=options.local_addr, standby=options.standby, say=lambda text: say(options, text),
        )  # fmt: skip
    except ValueError as cause:
        raise InputError(
            f"the rendezvous at {endpoint!r} cannot be: {cause}. Fix --rdzv-endpoint or --rdzv-conf."
        ) from cause
    master, _, _ = endpoint.rpartition(":")
    return WorkerSpec(
        role=options.role,
        local_world_size=rank_env.num_processes(options.nproc_per_node),
        entrypoint=script[0],
        args=tuple(script[1:]),
        rdzv_handler=handler,
        max_restarts=options.max_restarts,
        monitor_interval=options.monitor_interval,
        master_addr=master if options.rdzv_backend == "static" else None,
        local_addr=options.local_addr,
    )


def _stopped_alone(number: int, endpoint: str, start_ns: int) -> ExitReport:
    """Say that a signal came before the other hosts did."""
    cls = "user" if number == signal.SIGINT else "preempted"
    name = signal.Signals(number).name
    say_beside(
        f"headway: stopped by {name} while waiting for the other hosts at {endpoint}. "
        "No rank was started, there is no run folder.\n"
    )
    return ExitReport(128 + number, cls, None, None, (time.perf_counter_ns() - start_ns) / 1e9, None)
