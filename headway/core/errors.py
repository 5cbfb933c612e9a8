"""Every error that headway raises on purpose.

    HeadwayError
    +-- InputError           the caller's mistake: value, rule, fix          (exit code 2)
    |   +-- UnknownNameError     a name that a table does not list
    |   +-- FormatError          a file that is not what it should be
    |   +-- CycleError           an order that contradicts itself
    +-- DamageError          stored bytes are not what was written           (exit code 3)
    +-- BarMissedError       a comparison or benchmark fell short of its bar (exit code 3)
    +-- BackgroundError      a failure of background work, raised at the next call

A message says the value, the rule and the fix.

>>> raise InputError("world_size is 0; it must be at least 1. Pass --nproc-per-node 1.")
Traceback (most recent call last):
headway.core.errors.InputError: world_size is 0; it must be at least 1. Pass --nproc-per-node 1.
"""

from __future__ import annotations

import re


class HeadwayError(Exception):
    """Root of the tree."""

    exit_code = 1
    """What the command exits with when this error reaches it."""


class InputError(HeadwayError, ValueError):
    """The caller passed something that cannot work."""

    exit_code = 2


class UnknownNameError(InputError, KeyError):
    """A name that its table does not list; the message offers the nearest one."""

    def __str__(self) -> str:
        """Return the message itself: `KeyError` would quote it."""
        return str(self.args[0]) if self.args else ""


class FormatError(InputError):
    """A file cannot be read as the format it claims; the message says where.

    Numbers of more than 40 digits, which only broken files and hostile ones hold, are cut in it.

    >>> raise FormatError(f"a.npy has {10**50} items")
    Traceback (most recent call last):
    headway.core.errors.FormatError: a.npy has 100000000000... (51 digits) items
    """

    def __init__(self, message: str) -> None:
        super().__init__(re.sub(r"\d{41,}", lambda found: f"{found[0][:12]}... ({len(found[0])} digits)", message))


class CycleError(InputError):
    """Operations wait for each other in a circle; `operations` names one such circle."""

    def __init__(self, message: str, operations: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.operations = operations


class DamageError(HeadwayError):
    """Stored bytes differ from what was written."""

    exit_code = 3


class BarMissedError(HeadwayError):
    """A measured figure fell short of the bar it was held to."""

    exit_code = 3


class BackgroundError(HeadwayError):
    """Work in the background failed earlier; the cause is chained."""
