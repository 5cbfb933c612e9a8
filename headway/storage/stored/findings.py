"""One place where stored bytes are not what was written.

What checking a checkpoint found so far: places of damage, bytes checked, bytes that cannot be.

>>> findings = Findings()
>>> for start in (0, 4096, 12288):
...     findings.add("a.distcp", "w", start, "block", 4096)
>>> [(damage.offset_bytes, damage.num_bytes) for damage in findings.damaged]
[(0, 8192), (12288, 4096)]
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from headway.core.errors import FormatError
from headway.core.wire.pace import RateLimiter


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


# What checking a checkpoint found so far: places of damage, bytes checked, bytes that cannot be.


@dataclass(slots=True)
class Findings:
    """What checking a checkpoint found so far."""

    pace: RateLimiter = field(default_factory=RateLimiter)
    """Holds the reading back to a rate."""

    damaged: list[Damage] = field(default_factory=list)
    """Places that differ, in the order of their files; neighbours of one kind are one."""

    checked_bytes: int = 0
    """Bytes that were held to a checksum, or to a rule that a flipped bit breaks."""

    unchecked_bytes: int = 0
    """Bytes for which there is no checksum."""

    notes: list[str] = field(default_factory=list)
    """What a person should know, and what is no damage."""

    tensors: dict[str, frozenset[str]] = field(default_factory=dict)
    """File -> names of the tensors in it, of torch.save and safetensors files that could be read."""

    def note(self, sentence: str | None) -> None:
        """Keep what a person should know, once."""
        if sentence is not None and sentence not in self.notes:
            self.notes.append(sentence)

    def explain(self, cause: FormatError) -> None:
        """Keep why something cannot be read; the advice to check it is followed already."""
        self.note(str(cause).removesuffix(" Check it: headway ckpt verify"))

    def add(self, file: str, tensor: str | None, offset_bytes: int, what: str, num_bytes: int = 0) -> None:
        """Note a damaged place; one that goes on where the last one of its kind ended makes that one longer."""
        last = self.damaged[-1] if self.damaged else None
        goes_on = last is not None and last.num_bytes > 0 and last.offset_bytes + last.num_bytes == offset_bytes
        if last is not None and goes_on and (last.file, last.tensor, last.what) == (file, tensor, what):
            self.damaged[-1] = Damage(file, tensor, last.offset_bytes, what, last.num_bytes + num_bytes)
        else:
            self.damaged.append(Damage(file, tensor, offset_bytes, what, num_bytes))
