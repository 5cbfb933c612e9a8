"""Tests that are a table of what is refused, each with the words of its error."""

from collections.abc import Callable
from typing import Any

import pytest

from headway.core.errors import InputError


def refused(
    *cases: Any,
    by: Callable[..., object] | None = None,
    says: str | None = None,
    error: type[Exception] | tuple[type[Exception], ...] = InputError,
) -> Callable[..., None]:
    """Return a test with one case for each of `cases`: a call of it raises `error` with words that match its pattern.

    A case is the arguments of `by` and then the pattern. With `says`, the pattern of all, it is the only argument of
    `by`; without `by` it is a function without arguments, and the pattern.
    """
    act = by if by is not None else lambda call: call()
    table = [((case,), says) if says is not None else (case[:-1], case[-1]) for case in cases]

    @pytest.mark.parametrize(
        ("arguments", "pattern"), table, ids=[f"{n}-{pattern}" for n, (_, pattern) in enumerate(table)]
    )
    def test(arguments: tuple[Any, ...], pattern: str) -> None:
        with pytest.raises(error, match=pattern):
            act(*arguments)

    return test
