"""Sums of what a snapshot was to copy, against what it copied: whether somebody wrote meanwhile.

The trainer's device sums the words of each tensor where the save begins; the agent sums the same words of the image.
A tensor that was written while it was copied has another sum, but for writes that keep it: a permutation of its words.

>>> sum_of(b"abcdabcd", 4) == 2 * int.from_bytes(b"abcd", "little"), sum_of(b"", 8)
(True, 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.checkpoint.agents.messages import Slot
from headway.core.errors import HeadwayError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

_WORDS: dict[int, Any] = {8: np.int64, 4: np.int32, 2: np.int16, 1: np.uint8}
"""Bytes of a word -> type that a sum reads it as, on both sides."""


class TornError(HeadwayError):
    """The state was written while it was copied: the copy is of no moment."""


def sum_of(memory: Buffer, word_bytes: int) -> int:
    """Return the sum of the words modulo 2**64, as an int64; the memory is a whole number of words."""
    words: NDArray[Any] = np.frombuffer(memoryview(memory), dtype=_WORDS[word_bytes])
    return int(words.sum(dtype=np.int64))


def check_sums(image: Buffer, slots: Sequence[Slot], sums: Sequence[tuple[int, int]]) -> None:
    """Raise `TornError` unless each tensor of the image has its sum: `sums[k]` is (bytes of a word, sum), of slot k.

    A word of 0 bytes says that nobody summed that tensor: later work waited for its copy.
    """
    view = memoryview(image)
    torn = [
        slot.fqn
        for slot, (word_bytes, expected) in zip(slots, sums, strict=False)
        if word_bytes
        and sum_of(view[slot.payload_offset : slot.payload_offset + slot.payload_bytes], word_bytes) != expected
    ]
    if torn:
        raise TornError(
            f"{torn[0]!r}{f' and {len(torn) - 1} more' if torn[1:] else ''} changed while it was copied, and not in an "
            "attached optimizer's step. From now on work waits for the copy at once; call maybe_save() after the "
            "write, and attach every optimizer"
        )
