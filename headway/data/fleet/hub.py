"""The process around the master: one loop over the channels of workers, readers and the supervisor.

It holds no state of its own that matters: when it dies, the next one goes on
from the master's checkpoint, and workers and readers come back by themselves.

What a fleet does once it has given up: it tells everybody who comes to the master's address why.

Without this, readers and workers could not tell a fleet that has ended from
one whose master is about to come back. The process that refuses holds no state
of the fleet, so what ended the masters (a broken checkpoint, say) cannot end it.

>>> ended_with(-9), ended_with(1), ended_with(None)
('signal 9 (SIGKILL)', 'exit code 1', 'a code that the script collected itself')
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headway.core.errors import InputError
from headway.core.wire.channel import Channel, Listener, TcpListener
from headway.core.wire.loop import ServiceLoop
from headway.data.fleet.autoscale import Autoscaler, Load
from headway.data.fleet.master import Master
from headway.data.fleet.splits import (
    Beat,
    GaveUp,
    Joined,
    JoinPass,
    Placed,
    PrepareSplit,
    ReadProgress,
    Ready,
    Register,
    Revoke,
    SplitLost,
    SplitPlacement,
    SplitRequest,
    Stop,
    Target,
    ToMaster,
    listen,
)
from headway.data.service.messages import RequestFailed, StatusReply, StatusRequest

TICK_S = 0.05
SEND_S = 0.5
"""Longest that a peer may leave a message unread before its channel is closed."""


@dataclass(slots=True, eq=False)
class _Peer:
    """Who is at the other end of a channel, once it has said so."""

    channel: Channel
    worker: str = ""
    client: str = ""
    pid: int = 0
    guest: bool = False
    wants: SplitRequest | None = None
    placed: list[SplitPlacement] = field(default_factory=list)


@dataclass(slots=True)
class Scaling:
    """How the number of workers is decided: once per `period_s`, from what happened since."""

    scaler: Autoscaler
    period_s: float
    looked_s: float = 0.0
    seen: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Worker -> batches prepared and seconds busy at the last look."""
    taken: int = 0
    waited_s: float = 0.0

    def load(self, master: Master, now_s: float) -> Load:
        """Return what the fleet did since the last look."""
        serving = {name: w.report for name, w in master.workers.items() if not w.draining}
        before = {name: self.seen.get(name, (0, 0.0)) for name in serving}
        period_s, readers = max(now_s - self.looked_s, 1e-3), max(len(master.readers), 1)
        load = Load(
            num_workers=len(serving),
            prepared=sum(report.prepared - before[name][0] for name, report in serving.items()),
            busy_s=sum(report.busy_s - before[name][1] for name, report in serving.items()),
            buffered=sum(report.buffered for report in serving.values()) / max(len(serving), 1),
            taken=master.counts.taken - self.taken,
            waited_fraction=min(max((master.counts.waited_s - self.waited_s) / (period_s * readers), 0.0), 1.0),
            period_s=period_s,
        )
        self.seen = {name: (report.prepared, report.busy_s) for name, report in serving.items()}
        self.looked_s, self.taken, self.waited_s = now_s, master.counts.taken, master.counts.waited_s
        return load


class Hub:
    """Serves one master to its peers until the supervisor is gone."""

    def __init__(
        self,
        master: Master,
        listener: Listener | TcpListener,
        *,
        supervisor: Channel | None = None,
        num_workers: int = 1,
        scaling: Scaling | None = None,
    ) -> None:
        self.master, self._listener, self._supervisor = master, listener, supervisor
        self._wanted, self._scaling, self._target = num_workers, scaling, Target(-1, [])
        self._failed = ""
        self._peers: list[_Peer] = []
        self._loop, self._ends = ServiceLoop(patience_s=math.inf, send_s=SEND_S), False
        self._loop.admit(listener, self._admit)
        if supervisor is not None:
            self._admit(supervisor)
        self._answers: dict[type, Callable[[_Peer, Any], msgspec.Struct | None]] = {
            Register: self._register, SplitRequest: self._want, JoinPass: self._join, StatusRequest: self._ask,
            GaveUp: self._gave_up, Ready: self._ready,
            Beat: lambda peer, message: master.beat(peer.worker, message.report),
            ReadProgress: lambda peer, message: master.took(peer.client, message.taken, message.waited_s),
            SplitLost: lambda peer, message: master.lost(peer.client, message.split, message.generation),
        }  # fmt: skip

    def run(self) -> None:
        """Serve until the supervisor's channel closes (forever without one)."""
        while True:
            self._loop.turn(TICK_S)
            if self._ends:
                return
            silent = self.master.tick()  # when one wakes up it comes back, with what it held
            for peer in [peer for peer in self._peers if peer.worker in silent]:
                self._forget(peer)
            self._scale()
            self._tell()

    def _admit(self, channel: Channel) -> None:
        peer = _Peer(channel)
        self._peers.append(peer)
        self._loop.add(channel, lambda _, message: self._answer(peer, message), lambda *_: self._forget(peer))

    def _answer(self, peer: _Peer, message: msgspec.Struct) -> msgspec.Struct | None:
        """Do what a peer asks; returns the answer, if there is one."""
        try:
            return self._answers[type(message)](peer, message)
        except InputError as error:
            return RequestFailed.of(error)

    def _forget(self, peer: _Peer) -> None:
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        self._loop.drop(peer.channel)
        self._ends = self._ends or peer.channel is self._supervisor
        if peer.worker and not any(other.worker == peer.worker for other in self._peers):
            self.master.gone(peer.worker)
        if peer.client and not any(other.client == peer.client for other in self._peers):
            self.master.leave(peer.client)

    def _register(self, peer: _Peer, message: Register) -> Revoke:
        for other in [other for other in self._peers if other.worker == message.name and other is not peer]:
            other.worker = ""
            self._forget(other)
        peer.worker, peer.pid, peer.guest = message.name, message.pid, message.guest
        return Revoke([], self.master.register(message.name, message.address, message.held))

    def _want(self, peer: _Peer, message: SplitRequest) -> None:
        peer.wants = message

    def _ready(self, peer: _Peer, message: Ready) -> None:
        self.master.ready(peer.worker, message.split, message.generation)

    def _join(self, peer: _Peer, message: JoinPass) -> Joined | RequestFailed:
        taken = self.master.join(message.client, message.work, message.rank, message.taken, data=message.data)
        peer.client, peer.placed = message.client, []
        return RequestFailed("InputError", self._failed) if self._failed else Joined(taken)

    def _ask(self, _: _Peer, __: StatusRequest) -> StatusReply:
        pids = {other.worker: other.pid for other in self._peers if other.worker}
        return StatusReply({**self.master.statistics(), "wanted": self._wanted, "pids": pids})

    def _gave_up(self, _: _Peer, message: GaveUp) -> None:
        self._failed = message.why
        for peer in [peer for peer in self._peers if peer.client]:
            self._loop.send(peer.channel, RequestFailed("InputError", message.why))

    def _tell(self) -> None:
        """Give workers work, readers their places, and workers what ended."""
        for peer in list(self._peers):
            if peer.wants and (lease := self.master.next_split(peer.worker, room=peer.wants.room)):
                peer.wants = None
                self._loop.send(peer.channel, PrepareSplit(lease.key, lease.generation, self.master.begin(lease.key)))
        for peer in list(self._peers):
            if peer.worker and (ended := self.master.revoked(peer.worker)):
                self._loop.send(peer.channel, Revoke(ended))
            if peer.client and (placed := self.master.placements(peer.client)) != peer.placed:
                peer.placed = placed
                self._loop.send(peer.channel, Placed(placed))
            if peer.client and (why := self.master.broken(peer.client)):
                self._loop.send(peer.channel, RequestFailed("InputError", why))
        for name in self.master.drained():
            for peer in [peer for peer in self._peers if peer.worker == name]:
                self._loop.send(peer.channel, Stop())
                self._forget(peer)

    def _scale(self) -> None:
        """Once per period decide how many workers there should be; drain some, or have some started."""
        now_s = time.monotonic()
        scaling = self._scaling
        if scaling is not None and scaling.looked_s == 0.0:
            scaling.looked_s = now_s
        if scaling is not None and now_s - scaling.looked_s >= scaling.period_s:
            self._wanted = scaling.scaler.decide(scaling.load(self.master, now_s))
        serving = [peer for peer in self._peers if peer.worker and self._serves(peer.worker)]
        own = [peer for peer in serving if not peer.guest]
        # Guests come and go as they like; what demand needs besides them is the supervisor's to start.
        wanted = self._wanted if scaling is None else max(self._wanted - (len(serving) - len(own)), 0)
        for peer in sorted(own, key=lambda p: self.master.num_held(p.worker))[: max(len(own) - wanted, 0)]:
            self.master.drain(peer.worker)
        leaving = sorted(peer.pid for peer in self._peers if peer.worker and not self._serves(peer.worker))
        target = Target(wanted, leaving)
        if self._supervisor is not None and target != self._target and not self._failed:
            self._target = target
            self._loop.send(self._supervisor, target)

    def _serves(self, name: str) -> bool:
        worker = self.master.workers.get(name)
        return worker is not None and not worker.draining


# What a fleet does once it has given up: it tells everybody who comes to the master's address why.

LOOK_S = 0.2
"""How often the process looks whether its parent lives, and whether it can listen at last."""
ASKED = (JoinPass, StatusRequest, Register)
"""What those are told who ask something of a fleet that has ended."""
START_AGAIN = (
    "Remove the cause, start the fleet again, and go on from the last state: nothing that was taken before it "
    "comes again."
)


def ended_with(code: int | None) -> str:
    """Return how a process ended, in words; `code` is negative for signals, None when it is not known."""
    if code is None:
        return "a code that the script collected itself"
    if code >= 0:
        return f"exit code {code}"
    name = {number.value: f" ({number.name})" for number in signal.Signals}.get(-code, "")
    return f"signal {-code}{name}"


def refuse_all(address: str, token: str, why: str, user: Channel) -> None:
    """Answer everybody who asks something of the master at `address` with `why`, until the user's process goes.

    `user` is connected to that process, the parent of this one. While another process listens at `address`
    (the last master may need a moment to end), it tries again every `LOOK_S`.
    """
    parent, gone = os.getppid(), threading.Event()
    refused = RequestFailed("BackgroundError", why)
    listener: Listener | TcpListener | None = None
    with ServiceLoop(patience_s=math.inf, send_s=SEND_S) as loop:
        loop.watch(user, gone.set)
        try:
            while os.getppid() == parent and not gone.is_set():
                if listener is None:
                    with contextlib.suppress(InputError, OSError):
                        listener = listen(address, token, ToMaster)[0]
                        # The caller hangs up: were we to do it, over TCP its copy of the answer could be lost.
                        loop.listen(listener, lambda _, message: refused if isinstance(message, ASKED) else None)
                loop.turn(LOOK_S)
        finally:
            if listener is not None:
                listener.close()
