"""A process that is connected to a data server, as the server sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.core.machine.ring import Ring
from headway.core.wire.channel import Channel
from headway.data.serving.messages import Join


@dataclass(slots=True, eq=False)
class Client:
    """A connected process: one rank of a job, once it has joined."""

    channel: Channel
    pid_fd: int = -1
    """Readable when the process is gone, even if a child of it still has the socket."""
    join: Join | None = None
    begun: int = -1
    """Number of its pass."""
    warned: bool = False
    """Whether it has been told which other ranks its job waits for."""
    rings: dict[int, Ring] = field(default_factory=dict)
    """Number -> ring; batches go into the newest, earlier ones wait for their slots to be freed."""

    @property
    def ring(self) -> Ring | None:
        """The ring that is filled now."""
        return self.rings[max(self.rings)] if self.rings else None

    def has_room(self) -> bool:
        """Return whether a slot is free."""
        return self.ring is None or self.ring.num_free > 0

    def tidy(self) -> None:
        """Let go of earlier rings that nobody reads any more."""
        for number in [
            n for n, ring in self.rings.items() if ring is not self.ring and ring.num_free == ring.num_slots
        ]:
            self.rings.pop(number).close()
