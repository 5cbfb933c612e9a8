"""Whether the examples of a dataset may be kept: what all its readers have seen of them so far.

A look at a few examples before the first epoch says nothing of the others, nor
of later epochs. So every example that is missed is read between two looks at
the random number generators: one that drew is never kept. And examples that
are found are read anew at times and compared. As soon as one that had been
kept turns out to draw, or to have changed, nobody knows which others have: all
that is kept of the dataset is out of use, for all its readers, for good.

How soon is that? The n-th example found is read anew with a chance of

    p(n) = max(1 / CHECK_EVERY, CHECK_FIRST / (n + CHECK_FIRST)),

besides the first that each reader finds in a pass, and the first of each size
(a power of two of bytes). After n finds, C(n) = p(1) + .. + p(n) are expected
to have been compared: 4 ln(1 + n / 4) up to n = 508, then one more in 128. If a
share f of what is kept would differ when read anew, that stays unseen with a
chance of at most exp(-f C(n)). It is below 1 in 1000 after

    f = 99 %: 22 finds      f = 50 %: 139      f = 10 %: 6930      f = 1 %: 86 600

This concerns only what no generator shows: clocks, `os.urandom`, counters in
other modules, files that are written. The memory is shared by forked workers.

>>> scrutiny = Scrutiny(3)
>>> scrutiny.may_keep(0, drew=False), scrutiny.may_keep(1, drew=True), scrutiny.finding
(True, False, '')
>>> scrutiny.may_keep(0, drew=True), scrutiny.finding.partition(",")[0]
(False, 'example 0')
"""

from __future__ import annotations

import os
import random

from headway.core.machine.arena import shared_memory
from headway.trace.events.loader_facts import CHECK_EVERY, CHECK_FIRST

CHANGED, DREW, ALTERED, FAILED = 1, 2, 3, 4
"""What ended the use of kept examples: one read anew differed, one draws by now, the script changed the dataset, or
something of the cache's own failed."""

_TEXTS = {
    CHANGED: "example {} had changed when it was read again",
    DREW: "example {}, read before without a draw, now draws random numbers, or does what others can see",
    ALTERED: "it was changed, or what it goes by was, after its first examples had been kept",
    FAILED: "the cache failed in use",
}
_FINDING, _WHICH, _FOUND, _COMPARED, _SIZES, _SAID = range(6)
_HEAD_BYTES = 8 * 6
_UNREAD, _STEADY, _RANDOM = range(3)
"""What is known of an example: nothing; it was read and did not draw; it drew."""


class Scrutiny:
    """What the readers of one dataset know: threads, and processes forked after it was made. Needs no lock.

    Two writers at once may lose a count: then a little more is compared. A finding is only ever set.
    """

    def __init__(self, num_examples: int) -> None:
        """Know nothing yet of examples 0 to `num_examples` - 1."""
        self.num_examples = num_examples
        """Examples of the dataset."""
        self._file, memory = shared_memory("headway-scrutiny", _HEAD_BYTES + num_examples)
        self._numbers = memoryview(memory)[:_HEAD_BYTES].cast("q")
        self._states = memoryview(memory)[_HEAD_BYTES:]
        self._dice, self._pid = random.Random(), os.getpid()
        self.cause = ""
        """What failed, where that was in this process."""

    @property
    def finding(self) -> str:
        """Why nothing that was kept may be used any more; '' while it may."""
        code = self._numbers[_FINDING]
        return _TEXTS[code].format(self._numbers[_WHICH]) + self.cause if code else ""

    @property
    def over(self) -> bool:
        """Whether there is a finding."""
        return self._numbers[_FINDING] != 0

    @property
    def found(self) -> int:
        """Examples found so far."""
        return self._numbers[_FOUND]

    @property
    def compared(self) -> int:
        """Examples found that were read anew and compared."""
        return self._numbers[_COMPARED]

    def may_keep(self, index: int, *, drew: bool | None) -> bool:
        """Note that an example was read, and say whether it may be kept. `drew` None: nobody knows."""
        if drew is None:
            return False
        before = self._states[index]
        if drew and before == _STEADY:
            self.end(DREW, index)
        self._states[index] = _RANDOM if drew or before == _RANDOM else _STEADY
        return self._states[index] == _STEADY and not self.over

    def is_due(self, num_bytes: int, *, first: bool) -> bool:
        """Count an example found, of `num_bytes` encoded, and say whether to compare it; `first`: of its reader."""
        if self._pid != os.getpid():  # workers must not all choose alike
            self._dice, self._pid = random.Random(), os.getpid()
        numbers = self._numbers
        numbers[_FOUND] += 1
        size = 1 << min(num_bytes.bit_length(), 62)
        due = first or not numbers[_SIZES] & size or self._dice.random() < chance(numbers[_FOUND])
        numbers[_SIZES] |= size
        numbers[_COMPARED] += due
        return due

    def end(self, code: int, index: int = 0) -> None:
        """Take all that is kept out of use, for every reader: one of CHANGED, DREW, ALTERED, FAILED."""
        if not self.over:
            self._numbers[_WHICH] = index
            self._numbers[_FINDING] = code

    def is_news(self) -> bool:
        """Whether there is a finding that no reader has spoken of yet: the one that gets True does."""
        if not self.over or self._numbers[_SAID]:
            return False
        self._numbers[_SAID] = 1
        return True


def chance(found: int) -> float:
    """Return the chance that the `found`-th example found, from 1, is compared."""
    return max(1 / CHECK_EVERY, CHECK_FIRST / (found + CHECK_FIRST))
