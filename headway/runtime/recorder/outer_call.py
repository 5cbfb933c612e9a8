"""The outermost call of a module, as remedies change it: each stands around the one before.

    torch's call  <-  autocast  <-  channels last  <-  the script's `model(x)`

>>> calls = OuterCall()
>>> calls.plain = lambda module, args, kwargs: module * args[0]
>>> undo = calls.add(lambda inner: lambda module, args, kwargs: inner(module, args, kwargs) + 1)
>>> calls.current[0](5, (2,), {}), undo(), calls.current[0]
(11, None, None)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Args = tuple[object, ...]
Kwargs = dict[str, object]

CallFn = Callable[[Any, Args, Kwargs], object]
"""Calls a module: (module, args, kwargs) -> what it returns."""


class OuterCall:
    """Which function makes the outermost call of a module."""

    def __init__(self) -> None:
        self.plain: CallFn | None = None
        """Torch's own way; None before its modules are there."""
        self.current: list[CallFn | None] = [None]
        """[1] What to call instead; None: torch's own way."""
        self._wrappers: list[Callable[[CallFn], CallFn]] = []

    def add(self, wrapper: Callable[[CallFn], CallFn]) -> Callable[[], None]:
        """Make calls by `wrapper(the way they were made)` from now on, until the function returned is called."""
        self._wrappers.append(wrapper)
        self.compose()

        def undo() -> None:
            """Leave it out again; the others stay."""
            if wrapper in self._wrappers:
                self._wrappers.remove(wrapper)
                self.compose()

        return undo

    def compose(self) -> None:
        """Put the wrappers around torch's own way, where that is known."""
        call = self.plain
        if call is None:
            return
        for wrapper in self._wrappers:
            call = wrapper(call)
        self.current[0] = call if self._wrappers else None
