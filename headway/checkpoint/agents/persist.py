"""One pass over an image: CRC-32s put where they belong, digests of its blocks, bytes into a file.

The image lies in shared memory, complete but for the CRC-32s of the tensors'
payloads. A window of it goes through a core's cache once: payloads are
checksummed and their CRCs patched in, then blocks are digested, then the
window is written. CRCs lie behind their payload, so that a block is digested
only after it is final. Sizes are bytes.

>>> import io
>>> image = bytearray(b"head" + b"payload" + b"????" + b"tail")
>>> file = io.BytesIO()
>>> written = persist(image, [Payload(4, 11, (11,))], file, RateLimiter())
>>> file.getvalue() == bytes(image), image[11:15] == written.crc32s[0].to_bytes(4, "little"), written.digested.num_bytes
(True, True, 19)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from headway.core.errors import InputError
from headway.core.units import MIB
from headway.core.wire.pace import RateLimiter
from headway.storage.stored.digests import Digested, Digester, block_bytes_for

if TYPE_CHECKING:
    from typing_extensions import Buffer

WINDOW_BYTES = MIB
"""Bytes that are checksummed, digested and written together: they stay in a core's cache meanwhile."""


class Sink(Protocol):
    """Where bytes go: a file opened for writing."""

    def write(self, data: memoryview, /) -> int:
        """Take the next bytes, all of them."""
        ...


@dataclass(frozen=True, slots=True)
class Payload:
    """The elements of one tensor in an image."""

    start: int
    stop: int
    crc_offsets: tuple[int, ...]
    """Where their CRC-32 is written, little-endian, all at or behind `stop`."""


@dataclass(frozen=True, slots=True)
class Written:
    """What one pass found out."""

    digested: Digested
    crc32s: tuple[int, ...]
    """[payloads] CRC-32 of each, in their order."""


def persist(image: Buffer, payloads: Sequence[Payload], file: Sink, pace: RateLimiter) -> Written:
    """Write `image` to `file`, patching the CRC-32 of each of the `payloads` (ascending, disjoint) into it first.

    Raises `InputError` when a CRC belongs in front of its payload's end; what the file raises passes through.
    """
    view = memoryview(image).cast("B")
    check(payloads, len(view))
    digester = Digester(block_bytes_for(len(view)))
    crcs: list[int] = []
    done = written = 0

    def take(stop: int) -> None:
        """Digest up to `stop`; write what makes a window."""
        nonlocal done, written
        while done < stop:
            step = min(written + WINDOW_BYTES, stop)
            digester.update(view[done:step])
            done = step
            if done - written == WINDOW_BYTES or done == len(view):
                file.write(view[written:done])
                pace.wait(done - written)
                written = done

    for payload in payloads:
        take(payload.start)
        digester.take_crc32()
        take(payload.stop)
        crcs.append(digester.take_crc32())
        for offset in payload.crc_offsets:
            view[offset : offset + 4] = crcs[-1].to_bytes(4, "little")
    take(len(view))
    return Written(digester.finish(), tuple(crcs))


def check(payloads: Sequence[Payload], num_bytes: int) -> None:
    """Raise `InputError` unless payloads ascend within the image and their CRCs lie behind them."""
    end = 0
    for payload in payloads:
        behind = all(payload.stop <= offset <= num_bytes - 4 for offset in payload.crc_offsets)
        if not (end <= payload.start <= payload.stop <= num_bytes and behind):
            raise InputError(
                f"the payload {payload} does not fit an image of {num_bytes} bytes after byte {end}. "
                "Pass payloads in ascending order, each with its CRCs behind it."
            )
        end = payload.stop
