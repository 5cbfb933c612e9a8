"""What a data server and its clients say to each other, over a `headway.core.wire.channel`.

A client joins with what its job is, begins passes, and frees slots; the server
tells where each batch lies. All arrays of items are little-endian int64.
Numbers are those of `headway.data.service.service`.

    client: Join, then any of Begin and Freed; or StatusRequest
    server: Welcome, then Rings, Filled, Decided and Over; StatusReply; RequestFailed where a request was wrong

>>> begin = Begin(1, epoch=0, remaining=np.array([3, 1]))
>>> FROM_CLIENT.decode(msgspec.msgpack.encode(begin, enc_hook=np.ndarray.tobytes)).remaining.tolist()
[3, 1]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from headway.core.errors import BackgroundError, HeadwayError, InputError
from headway.data.orders.job_order import DataShareError
from headway.data.service.batches import Ints
from headway.data.service.jobs import NO_MORE, Known

PROTOCOL = 4
"""Of these messages; both ends must speak the same one."""


class Join(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A rank of a job asks for its batches."""

    protocol: int
    job: str
    rank: int
    world_size: int
    batch_size: int
    shuffle: bool
    tail: str
    fingerprint: str
    """Dataset and pipeline that the job reads."""
    items: Ints | None = None
    """Its subset, in its order; None: all of the dataset."""
    collated: bool = True
    """Whether batches are made as torch's default collate function makes them; else the examples come apart."""
    num_held: int = 4
    """Slots that the client may hold, besides those that are ahead."""


class Decided(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What a rank needs to go on exactly without this server, and without ranks that need nothing of a pass any more.

    One that has had its last batch, or left, takes what it had along: should the server be lost then, the others know.

    >>> told = Decided(begun=1, number=2, known=Known([np.array([2]), np.array([3])], complete=True, gone=[0]))
    >>> told.behind(3).known.decided, told.behind(3).number
    ([array([3])], 3)
    """

    begun: int
    """Number of the pass, as the `Begin` of the rank that is told has it, or will have it."""
    number: int
    """Global batch at which what is known begins."""
    known: Known

    def behind(self, number: int) -> Decided:
        """Return the same for a rank that has had the global batches before `number`."""
        later = replace(self.known, decided=self.known.decided[max(number - self.number, 0) :])
        return msgspec.structs.replace(self, number=max(number, self.number), known=later)


class Begin(msgspec.Struct, tag=True, frozen=True):
    """The rank begins a pass."""

    number: int
    """Of this pass, in the client's own count: batches of an earlier one may still be on their way."""
    epoch: int
    remaining: Ints | None = None
    """What the pass sets out to give; None: all items of the job."""
    history: list[Ints] | None = None
    """Global batches of it that the loop took from a server that is lost; None: there was none."""
    index: int | None = None
    """Passes that this rank began before it, on any server; None: as many as on this one."""
    decided: Decided | None = None
    """What the lost server told of the pass, behind `history`."""

    def known(self) -> Known:
        """Return what is known beyond the history. Raises `InputError` where there is a gap between them."""
        if self.decided is None:
            return NO_MORE
        if self.decided.number != len(self.history or ()):
            raise InputError(
                f"what was decided begins at batch {self.decided.number}. Send what is behind the history."
            )
        return self.decided.known


class Freed(msgspec.Struct, tag=True, frozen=True):
    """A slot was released: there is room again."""


class StatusRequest(msgspec.Struct, tag="Ask", frozen=True):
    """Somebody asks how the server, or the fleet, is."""


class Welcome(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The job may begin."""

    options: dict[str, Any]
    """How the server serves: what it was started with."""
    notes: list[str]
    """What a user should know of how the dataset is read: one lock, shared draws."""


class Rings(msgspec.Struct, tag=True, frozen=True):
    """A ring of slots, passed beside; slots of earlier rings stay until they are freed."""

    number: int


class Filled(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A batch lies in a slot, as (items of all ranks in it, batch); or failed, and lies nowhere.

    Small, whatever the batch: all that may be ahead fits into a socket's buffer, so that nobody waits for a client.
    """

    ring: int
    slot: int
    generation: int
    begun: int
    """Number of the pass, as its `Begin` has it."""
    collated: bool
    """Whether it is one batch, or a list of examples."""
    num_missing: int
    """Examples of it that were left out: filtered, or skipped after an error."""
    fetch_ns: int
    prep_ns: int
    read_bytes: int
    """What making it took, on the server."""
    error: str | None = None
    everybody: Ints | None = None
    """Items of all ranks in a batch that failed."""


class Over(msgspec.Struct, tag=True, frozen=True):
    """The rank has had every batch of its pass."""

    begun: int
    counts: dict[str, int]
    """What the server has counted since it began, for all jobs."""
    order: dict[str, int] = {}
    """How many of the job's items so far came in place of its own next one, where the order does that."""
    finding: str = ""
    """Why the server keeps no examples any more, '' while it does."""


class RequestFailed(msgspec.Struct, tag="Failed", frozen=True):
    """A request could not be granted; a data server closes the channel, a fleet's master does not."""

    kind: str
    """Name of the error class: "BackgroundError" where nobody gets anything from the fleet any more."""
    text: str

    @classmethod
    def of(cls, error: HeadwayError) -> RequestFailed:
        """Return what tells the other end why."""
        return cls(type(error).__name__, str(error))

    def error(self) -> HeadwayError:
        """Return what the other end raises."""
        kinds = {"DataShareError": DataShareError, "BackgroundError": BackgroundError}
        return kinds.get(self.kind, InputError)(self.text)


class StatusReply(msgspec.Struct, tag="Told", frozen=True):
    """How it is: facts that JSON can hold."""

    facts: dict[str, Any]


class Waiting(msgspec.Struct, tag=True, frozen=True):
    """The job waits for other ranks: they were connected to a server that was lost, and have not come to this one."""

    ranks: list[int]
    since_s: float
    """How long it has waited, at least."""
    grace_s: float
    """How long it waits in all, before the job is given up."""


FROM_CLIENT, FROM_SERVER = (
    msgspec.msgpack.Decoder(types, dec_hook=lambda _, raw: np.frombuffer(raw, "<i8"))
    for types in (
        Join | Begin | Freed | StatusRequest,
        Welcome | Rings | Filled | Decided | Over | RequestFailed | StatusReply | Waiting,
    )
)
"""What each end accepts."""
