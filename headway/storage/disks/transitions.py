"""What it costs to bring stored data from one scheme to another, and the record of one such change.

Three ways, in bytes moved per byte of disk capacity that changes:

- type 1, few disks of an Rgroup: empty them onto the rest, hand them over empty;
- type 2, a whole Rgroup under a systematic code: read the data, write only the new parities;
- re-encode, what a store does that knows neither: read and write whole stripes for each disk that leaves.

>>> from headway.storage.disks.schemes import SCHEMES
>>> six, thirty = SCHEMES["6-of-9"], SCHEMES["30-of-33"]
>>> [round(METHODS[name](six, thirty), 3) for name in METHODS]
[2.0, 0.733, 12.0]
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

from headway.storage.disks.schemes import Scheme

SECONDS_PER_DAY = 86_400


class TransitionCost(Protocol):
    """A way to change schemes. Write a function of this shape; there is nothing to subclass."""

    def __call__(self, source: Scheme, target: Scheme) -> float:
        """Return bytes read and written per byte of disk capacity that changes from `source` to `target`."""
        ...


def empty_disks(source: Scheme, target: Scheme) -> float:
    """Type 1: each byte of a leaving disk is read once, and written to the rest of its Rgroup."""
    return 2.0


def new_parities(source: Scheme, target: Scheme) -> float:
    """Type 2: the k/n of capacity that is data is read once, m/k of it written as new parity; data stays."""
    return source.k / source.n * (1.0 + target.num_parities / target.k)


def reencode(source: Scheme, target: Scheme) -> float:
    """Conventional: for each chunk on a leaving disk its stripe's k chunks are read and written (the lower bound)."""
    return 2.0 * source.k


METHODS: dict[str, TransitionCost] = {"type 1": empty_disks, "type 2": new_parities, "re-encode": reencode}
"""Every way to change schemes. Adding one is adding a line."""


def cheaper_in_bulk(leaving_fraction: float, source: Scheme, target: Scheme) -> bool:
    """Tell whether changing a whole Rgroup (type 2) moves fewer bytes than emptying that fraction of it (type 1)."""
    return leaving_fraction * empty_disks(source, target) > new_parities(source, target)


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of scheme that a fleet's planner has begun."""

    day: int
    """When it was decided."""

    kind: str
    """`down` to less redundancy (infancy is over), `up` to more (wear-out is due), `purge` (too few disks to place)."""

    method: str
    """A line of `METHODS`."""

    dgroups: tuple[str, ...]
    """Models of the disks."""

    rgroup: str
    """Rgroup that they leave, or that changes as a whole."""

    source: str
    """Scheme before."""

    target: str
    """Scheme after."""

    num_disks: int
    """How many."""

    io_bytes: float
    """What it will move."""

    due_day: int | None
    """Day by which it should be done; None for a change that only saves space."""

    urgent: bool = False
    """The AFR is beyond what `source` tolerates: reliability goes before the cap on IO."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)
