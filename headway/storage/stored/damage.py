"""One place where stored bytes are not what was written."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class Damage:
    """One place where stored bytes are not what was written: what `verify` finds and `parity.assess` judges.

    >>> Damage("rank-0/__0_0.distcp", "model.0.weight", 4096, "block", 4096).to_json()["offset_bytes"]
    4096
    """

    file: str
    """Path inside the checkpoint."""

    tensor: str | None
    """Name of the tensor or object that the bytes belong to; None where they belong to none."""

    offset_bytes: int
    """Where in the file: the start of the damaged block, record or field; 0 for a whole file."""

    what: str
    """`missing`, `truncated`, `extra`, or what differs: `block`, `payload`, `container`, `checksum`, ..."""

    num_bytes: int = 0
    """How many bytes are in doubt; 0: to the end of the file."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)
