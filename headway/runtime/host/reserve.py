"""Which hosts of a c10d rendezvous train, and which wait in reserve until one of those is gone.

`headway run --nnodes N --standby K` is started on N + K hosts. In the order in
which they come the first N train; each of the others looks at torch's state of
the rendezvous, and joins it once fewer than N hosts have been alive for
`SETTLED_S`. A host that restarts its ranks is away for milliseconds, so that
nobody takes its place. torch's own list of redundant nodes does not make that
difference: there a standby host and one that restarts race for its place, and
the one that loses remains on the list of those who wait, for which the others
restart again and again.

The host that keeps the store comes last: it waits for N others, so that the
store outlives every host that trains. Seconds are wall seconds; heartbeats
are compared with this host's clock, as torch does.

    3 hosts, N = 2       host 0: trains   host 1: trains   host 2: waits -> trains
                                            x gone           2, then 15 + 2 s later joins round 1
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

LOOK_S = 0.5
"""Seconds between two looks at the rendezvous."""

SETTLED_S = 2.0
"""Seconds for which hosts must be missing before one in reserve joins."""

COME_S = 30.0
"""Most seconds for which the host of the store waits for others to come first."""

PRESENT_S = 5.0
"""Seconds for which a host that waits counts as there after its last word."""

LINGER_S = 3.0
"""Seconds for which the host of the store stays when the job has ended: others leave by way of it."""


@dataclass(frozen=True, slots=True)
class Members:
    """A rendezvous at one moment."""

    round: int
    """Grows with each attempt of the job."""

    alive: int
    """Hosts that train or are about to, and were heard of lately."""

    closed: bool
    """Whether the job has ended."""


def members_of(state: Any, expires_s: float) -> Members:
    """Read torch's state of a rendezvous; who was silent for `expires_s` is gone."""
    oldest = datetime.now(UTC) - timedelta(seconds=expires_s)
    members = {*state.participants} | {*state.wait_list}
    alive = sum(state.last_heartbeats.get(one, oldest) > oldest for one in members)
    return Members(state.round, alive, state.closed)


@dataclass(slots=True)
class Reserve:
    """This host's place among those that came."""

    store: Any
    """The store of the rendezvous."""

    backend: Any
    """Reads torch's state of it."""

    run_id: str
    """Name of the job there."""

    hosts: int
    """How many train."""

    settings: Mapping[str, Any]
    """Of the rendezvous: keep_alive_interval and keep_alive_max_attempt say when a host is gone."""

    keeps_store: bool
    """Whether the store is in this process."""

    say: Callable[[str], None]
    """Prints one line."""

    number: int = -1
    """Of this host, in the order in which they came."""

    dismissed: bool = False
    """Whether the job ended while this host waited."""

    waited: bool = False
    """Whether it waited for a place."""

    _trains: bool = field(default=False)

    @property
    def expires_s(self) -> float:
        """How long a host may be silent."""
        interval, attempts = (
            int(self.settings.get(name, default))
            for name, default in (("keep_alive_interval", 5), ("keep_alive_max_attempt", 3))
        )
        return float(interval * attempts)

    def look(self) -> Members:
        """Return the rendezvous as it is now. Raises torch's `RendezvousError` where the store is gone."""
        found = self.backend.get_state()
        if found is None:
            return Members(0, 0, closed=False)
        return members_of(pickle.loads(found[0]), self.expires_s)  # as its own agents do

    def waiting(self) -> int:
        """Return how many hosts wait in reserve, by what they said of late."""
        oldest = time.time() - PRESENT_S
        numbers = range(self.hosts, int(self.store.add(self._key("hosts"), 0)))
        keys = [key for number in numbers if self.store.check([key := self._key(f"waits/{number}")])]
        return sum(float(self.store.get(key)) > oldest for key in keys)

    def _key(self, name: str) -> str:
        return f"headway/{self.run_id}/{name}"

    def await_turn(self) -> None:
        """Return once this host may join. Raises torch's `RendezvousGracefulExitError` where it is not needed."""
        if self._trains:
            return
        if self.number < 0:
            self._come()
        if self.number >= self.hosts:
            self._wait()
        self._trains = True

    def _come(self) -> None:
        key = self._key("hosts")
        if self.keeps_store:
            until = time.monotonic() + COME_S
            while self.store.add(key, 0) < self.hosts and time.monotonic() < until:
                time.sleep(LOOK_S / 10)
        self.number = self.store.add(key, 1) - 1

    def _wait(self) -> None:
        self.waited = True
        self.say(f"host {self.number} waits in reserve: {self.hosts} others train")
        missing_since: float | None = None
        key = self._key(f"waits/{self.number}")
        while True:
            self.store.set(key, str(time.time()))
            now, seen = time.monotonic(), self.look()
            if seen.closed:
                self.dismissed = True
                time.sleep(LINGER_S if self.keeps_store else 0.0)
                raise RendezvousGracefulExitError("the job ended while this host waited in reserve")
            if seen.alive >= self.hosts:
                missing_since = None
            elif missing_since is None:
                missing_since = now
            elif now - missing_since >= SETTLED_S:
                self.store.set(key, "0")
                self.say(f"host {self.number} takes the place of a host that is gone")
                return
            time.sleep(LOOK_S)
