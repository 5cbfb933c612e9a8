"""A set-associative cache that forgets the least recently used line first: which lines it holds, which are dirty.

Lines are numbers; a line's set is its number modulo the number of sets. Each
set is a dict from line to "is dirty" in the order of last use, which makes a
look-up one operation of the interpreter: a million accesses take about a
second. Holds no bytes.

>>> cache = SetAssociativeCache(4 * 64, ways=2)          # two sets of two
>>> [cache.insert(line, line == 0) for line in (0, 2)], cache.hit(2, True)
([-1, -1], True)
>>> cache.insert(4, False), cache.dirty()  # line 0 was dirty and makes room; -1: nothing to write back
(0, [2])
"""

from __future__ import annotations


class SetAssociativeCache:
    """Lines in sets. `hit` and `insert` are apart so that a caller says what a miss does."""

    __slots__ = ("_sets", "_ways", "num_sets")

    def __init__(self, num_bytes: int, *, ways: int, line_bytes: int = 64) -> None:
        self.num_sets = max(num_bytes // (line_bytes * ways), 1)
        """Number of sets."""
        self._sets: list[dict[int, bool]] = [{} for _ in range(self.num_sets)]
        self._ways = ways

    def __contains__(self, line: int) -> bool:
        """Say whether a line is held; that is no use of it."""
        return line in self._sets[line % self.num_sets]

    def hit(self, line: int, dirty: bool) -> bool:
        """Use a line if it is held, and say whether it is; it stays dirty once it was."""
        lines = self._sets[line % self.num_sets]
        was = lines.pop(line, None)
        if was is None:
            return False
        lines[line] = was or dirty
        return True

    def insert(self, line: int, dirty: bool) -> int:
        """Take in a line that is not held; return the dirty line that made room for it, or -1."""
        lines = self._sets[line % self.num_sets]
        victim = -1
        if len(lines) >= self._ways:
            oldest = next(iter(lines))
            if lines.pop(oldest):
                victim = oldest
        lines[line] = dirty
        return victim

    def is_dirty(self, line: int) -> bool:
        """Say whether a line is held and differs from what lies below; that is no use of it."""
        return self._sets[line % self.num_sets].get(line, False)

    def drop(self, line: int) -> bool:
        """Forget a line; say whether it was held."""
        return self._sets[line % self.num_sets].pop(line, None) is not None

    def dirty(self) -> list[int]:
        """Return the dirty lines, ascending."""
        return sorted(line for lines in self._sets for line, dirty in lines.items() if dirty)
