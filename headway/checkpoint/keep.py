"""Which committed checkpoints stay, and which may go: the newest few, and one of every so many steps for ever.

>>> sorted(Keep(last=2, every=100).kept([10, 100, 150, 200, 250, 260]))
[100, 200, 250, 260]
>>> sorted(Keep(last=1).surplus([10, 20, 30]))
[10, 20]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headway.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Keep:
    """How many checkpoints stay; an older one goes only after a newer one is committed."""

    last: int = 2
    """The newest so many; at least 1."""

    every: int | None = None
    """Those whose step is a multiple of this stay for ever; None: no others do."""

    def __post_init__(self) -> None:
        """Raise `InputError` on numbers that keep nothing."""
        if self.last < 1:
            raise InputError(f"last is {self.last}; one checkpoint has to stay. Pass 1 or more.")
        if self.every is not None and self.every < 1:
            raise InputError(f"every is {self.every}; it counts steps. Pass 1 or more, or None.")

    def kept(self, steps: Iterable[int]) -> set[int]:
        """Return which of the committed `steps` stay."""
        known = sorted(set(steps))
        forever = {step for step in known if self.every and step % self.every == 0}
        return forever | set(known[-self.last :])

    def surplus(self, steps: Iterable[int]) -> set[int]:
        """Return which of the committed `steps` may go."""
        known = set(steps)
        return known - self.kept(known)

    def disposable(self, steps: Iterable[int], is_intact: Callable[[int], bool]) -> set[int]:
        """Return which of the surplus may go for sure: where none that stays is intact, the newest intact one does.

        Where none is intact at all, none goes.

        >>> sorted(Keep(last=1).disposable([10, 20, 30], lambda step: step == 20))
        [10]
        """
        newest_first = sorted(set(steps), reverse=True)
        surplus = self.surplus(newest_first)
        if surplus and not any(is_intact(step) for step in newest_first if step not in surplus):
            good = next((step for step in newest_first if step in surplus and is_intact(step)), None)
            surplus -= surplus if good is None else {good}
        return surplus
