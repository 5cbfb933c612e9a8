"""Failure logs of real disks: totals per model at some dates, and lifetimes of single drives.

`read_totals` reads a CSV with a row per model and columns model, size,
n_unique (disks ever seen), drive_days, failed, all cumulative; two dates give
a window of failures (`windows`). `read_lifetimes` reads a CSV with a row per
drive and columns model, capacity_bytes, min_date, max_date, first_fail, and
maybe serial_number. Both are forms in which Backblaze's public records are
passed on.

>>> before = {"st4": Totals("st4", 4e12, 3e3, 1e5, 10.0)}
>>> after = {"st4": Totals("st4", 4e12, 3e3, 3.7e5, 25.0)}
>>> windows(before, after)
[ObservationWindow(model='st4', capacity_bytes=4000000000000.0, days=90.0, disk_days=270000.0, failures=15.0)]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import number_of, read_table
from headway.core.units import parse_bytes

LEAST_COUNTED = 100
"""Disks from which on a model's counts are held to what can be; fewer are never judged, and are noise in real logs."""

RENAMING_DAYS = 3
"""Days within which a renaming is complete: drives are listed once a day, and a list may be missing."""

SLACK = 1.05
"""Days that a disk may have lived per day of a window: logs are cut at different hours."""


@dataclass(frozen=True, slots=True)
class Totals:
    """One model of disk up to some date."""

    model: str
    """Make and model, in small letters."""

    capacity_bytes: float
    """Of one disk."""

    num_disks: float
    """Disks ever seen."""

    disk_days: float
    """Days that they have lived, summed."""

    failures: float
    """Of them."""


@dataclass(frozen=True, slots=True)
class ObservationWindow:
    """One model of disk between two dates."""

    model: str
    """Make and model, in small letters."""

    capacity_bytes: float
    """Of one disk."""

    days: float
    """Between the dates."""

    disk_days: float
    """Lived between them."""

    failures: float
    """Between them."""

    @property
    def num_disks(self) -> float:
        """Disks in service, on average."""
        return self.disk_days / self.days


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Drives of one log, `n` of them; days count from the first date in it."""

    models: tuple[str, ...]
    """Models that occur."""

    capacity_bytes: tuple[float, ...]
    """Of one disk of each model."""

    model: NDArray[np.int64]
    """[n] Index into `models`."""

    first: NDArray[np.int64]
    """[n] Day each was first seen."""

    last: NDArray[np.int64]
    """[n] Day each was last seen."""

    failed: NDArray[np.bool_]
    """[n] Whether it failed on its last day."""

    @property
    def num_days(self) -> int:
        """Days that the log covers."""
        return int(self.last.max()) + 1


def read_totals(path: str | Path) -> dict[str, Totals]:
    """Read model -> totals; rows of one model (its name written in several ways) are added up.

    Raises `InputError` when the file cannot be read, `FormatError` naming line and column otherwise.
    """
    found: dict[str, Totals] = {}
    for line, row in read_table(path, ("model", "size", "n_unique", "drive_days", "failed")):
        name = _name(row["model"])
        disks, days, failures = (
            number_of(row[key], f"{path}, line {line}: {key}") for key in ("n_unique", "drive_days", "failed")
        )
        if failures > disks:
            raise FormatError(f"{path}, line {line}: {failures:g} failures of {disks:g} disks. Correct that row.")
        found[name] = _added(found.get(name), Totals(name, float(parse_bytes(row["size"])), disks, days, failures))
    return found


def renamed(totals: Mapping[str, Totals], same: Mapping[str, str]) -> dict[str, Totals]:
    """Return totals under the names that models have now: `same` maps an old name to the new one.

    >>> old = Totals("hitachi x", 4e12, 10, 100, 1)
    >>> list(renamed({"hitachi x": old}, {"Hitachi X": "hgst x"}))
    ['hgst x']
    """
    names = {_name(old): _name(new) for old, new in same.items()}
    found: dict[str, Totals] = {}
    for total in totals.values():
        name = names.get(total.model, total.model)
        found[name] = _added(found.get(name), replace(total, model=name))
    return found


def _name(text: str) -> str:
    """Return the name of a model as it is kept: small letters, single spaces."""
    return " ".join(text.lower().split())


def _added(known: Totals | None, more: Totals) -> Totals:
    """Return the totals of two rows of one model."""
    if known is None:
        return more
    disks, days = known.num_disks + more.num_disks, known.disk_days + more.disk_days
    return replace(known, num_disks=disks, disk_days=days, failures=known.failures + more.failures)


def _check_renames(before: Mapping[str, Totals], after: Mapping[str, Totals], days: float) -> None:
    """Raise `InputError` where a model that is new must be an older one under another name.

    Totals only rise, so a model that is in the older log alone was renamed; and one that is new cannot have lived
    longer than the `days` between the logs.
    """
    gone = [total for name, total in before.items() if name not in after and total.num_disks >= LEAST_COUNTED]
    new = [total for name, total in after.items() if name not in before and total.num_disks >= LEAST_COUNTED]
    for total in new:
        older = [
            past.model for past in gone
            if past.capacity_bytes == total.capacity_bytes and past.disk_days <= total.disk_days
            and past.failures <= total.failures and past.num_disks <= total.num_disks
        ]  # fmt: skip
        lived = total.disk_days / total.num_disks
        if lived > SLACK * days:
            guess = f", likely {older[0]!r}: pass --same '{older[0]}={total.model}'" if older else ""
            raise InputError(
                f"{total.model}: {total.num_disks:g} disks that are in the newer log alone have {total.disk_days:g} "
                f"disk-days, {lived:.0f} each, in a window of {days:.0f} days. The model had another name{guess or '.'}"
                f"{'' if guess else ' Pass --same OLD=NEW, or correct that row.'}"
            )
        if older:
            raise InputError(
                f"{older[0]} is in the older log alone and {total.model}, of the same capacity, in the newer. "
                f"If it was renamed, pass --same '{older[0]}={total.model}'; if not, add its totals to the newer log."
            )


def windows(
    before: Mapping[str, Totals], after: Mapping[str, Totals], *, least_disks: int = 1000
) -> list[ObservationWindow]:
    """Return what happened to each model between two dates; models that are new count from nothing.

    The days between are those that the steadiest model of at least
    `least_disks` disks has lived: no disk lives more. Raises `InputError`
    when a total falls (the dates are the wrong way round), when nothing is
    left, and when a model that is new must be one that was renamed (see
    `renamed`), or has more disk-days than its disks can have lived.
    """
    lived = {}
    for name, total in after.items():
        past = before.get(name, Totals(name, total.capacity_bytes, 0, 0, 0))
        days, failures = total.disk_days - past.disk_days, total.failures - past.failures
        if days < 0 or failures < 0:
            raise InputError(
                f"{name}: {days:g} disk-days and {failures:g} failures between two dates; totals only rise. "
                "Give the older log first."
            )
        lived[name] = (total, days, failures)
    known = [days / total.num_disks for name, (total, days, _) in lived.items() if total.num_disks >= least_disks
             and name in before]  # fmt: skip
    if not known or max(known) <= 0:
        raise InputError(f"no model of {least_disks} disks lived between the two logs; give logs of different dates.")
    _check_renames(before, after, max(known))
    return [
        ObservationWindow(name, total.capacity_bytes, max(known), days, failures)
        for name, (total, days, failures) in lived.items()
        if days > 0
    ]


@dataclass(frozen=True, slots=True)
class _Drive:
    """One row of a log of drives; days are ordinals of dates."""

    line: int
    model: str
    capacity_bytes: float
    first: int
    last: int
    failed: bool


def read_lifetimes(path: str | Path, same: Mapping[str, str] | None = None) -> Lifetimes:
    """Read a log of single drives; `same` maps old names of models to new ones.

    Where there are serial numbers, rows of one number and capacity are one drive; under two names its model was
    renamed, and so all drives of the old name are of the new one.

    Raises `InputError` when the file cannot be read, and when a model ends as another one of its capacity begins,
    which must be told apart from a renaming; `FormatError` naming the line when dates are not dates, a drive was last
    seen before it was first seen, or had two rows at once.
    """
    drives: list[_Drive] = []
    by_serial: dict[tuple[str, float], int] = {}
    names = dict(same or {})
    for line, row in read_table(path, ("model", "capacity_bytes", "min_date", "max_date", "first_fail")):
        drive = _drive(path, line, row)
        serial = (row.get("serial_number") or "").strip()
        place = by_serial.setdefault((serial, drive.capacity_bytes), len(drives)) if serial else len(drives)
        if place == len(drives):
            drives.append(drive)
            continue
        older, newer = sorted((drives[place], drive), key=lambda one: one.first)
        if newer.first <= older.last:
            raise FormatError(
                f"{path}, line {line}: drive {serial} is in line {drives[place].line} at that time. Correct the row."
            )
        if newer.model != older.model:
            names[older.model] = newer.model
        drives[place] = replace(newer, first=older.first)
    if not drives:
        raise FormatError(f"{path} holds no drive. Give a log with a row per drive.")
    drives = [replace(drive, model=_newest(drive.model, names)) for drive in drives]
    _check_successors(drives, distinct={new for old, new in names.items() if old == new})
    models: dict[str, float] = {}
    for drive in drives:
        models.setdefault(drive.model, drive.capacity_bytes)
    number = {model: index for index, model in enumerate(models)}
    first_day, last_day = (np.array([getattr(drive, key) for drive in drives]) for key in ("first", "last"))
    begin = int(first_day.min())
    return Lifetimes(
        tuple(models), tuple(models.values()), np.array([number[drive.model] for drive in drives]),
        first_day - begin, last_day - begin, np.array([drive.failed for drive in drives]),
    )  # fmt: skip


def _drive(path: str | Path, line: int, row: Mapping[str, str]) -> _Drive:
    """Return what a row says."""
    try:
        first, last = (date.fromisoformat(row[key]).toordinal() for key in ("min_date", "max_date"))
    except ValueError as cause:
        raise FormatError(f"{path}, line {line}: {cause}. Write dates as 2013-12-31.") from cause
    if last < first:
        raise FormatError(f"{path}, line {line}: last seen {row['max_date']}, first seen later. Correct that row.")
    if row["first_fail"].strip() > row["max_date"].strip():
        raise FormatError(f"{path}, line {line}: it failed {row['first_fail']}, last seen before. Correct that row.")
    capacity = number_of(row["capacity_bytes"], f"{path}, line {line}: capacity_bytes")
    return _Drive(line, row["model"], capacity, first, last, bool(row["first_fail"].strip()))


def _newest(name: str, names: Mapping[str, str]) -> str:
    """Return the name that a model has in the end; each name is followed once."""
    seen = {name}
    while (name := names.get(name, name)) not in seen:
        seen.add(name)
    return name


def _check_successors(drives: Sequence[_Drive], distinct: Set[str]) -> None:
    """Raise `InputError` where a model ends, all at once and without failures, as another of its capacity begins.

    Of the models `distinct` it is known that they are others.
    """
    by_model: dict[tuple[str, float], list[_Drive]] = {}
    for drive in drives:
        by_model.setdefault((drive.model, drive.capacity_bytes), []).append(drive)
    large = {key: own for key, own in by_model.items() if len(own) >= LEAST_COUNTED}
    for (old, capacity), gone in large.items():
        end = max(drive.last for drive in gone)
        for (new, other), come in large.items():
            begin = min(drive.first for drive in come)
            if other != capacity or new in distinct or not 0 < begin - end <= RENAMING_DAYS:
                continue
            ended = sum(drive.last > end - RENAMING_DAYS and not drive.failed for drive in gone)
            begun = sum(drive.first < begin + RENAMING_DAYS for drive in come)
            if min(ended, begun) >= LEAST_COUNTED and ended <= SLACK * begun:
                raise InputError(
                    f"{ended} drives of {old} are seen for the last time, unfailed, as {begun} of {new}, of the same "
                    f"capacity, are seen for the first. If it was renamed, pass --same '{old}={new}'; if not, "
                    f"--same '{new}={new}'."
                )
