"""Objects that are closed at the end of a `with` block.

>>> class Door(Closing):
...     def close(self) -> None:
...         raise BackgroundError("it is stuck.")
>>> with Door():
...     raise KeyError("keys")
Traceback (most recent call last):
    ...
KeyError: 'keys'
"""

from __future__ import annotations

from types import TracebackType
from typing import ClassVar, Self

from headway.core.errors import BackgroundError, HeadwayError


class Closing:
    """Gives a class that has `close` its `with` block: an error of the block goes before one of closing."""

    _gives_way: ClassVar[type[HeadwayError]] = BackgroundError
    """Errors of `close` that are not shown where the block has failed already."""

    def close(self) -> None:
        """Finish; written by who inherits."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; an error of the block goes first."""
        try:
            self.close()
        except self._gives_way:
            if error is None:
                raise
