"""Arrays made small enough for a page: downsampling that keeps extremes, and a compact encoding.

A chart of a million steps has as many pixels as one of a thousand. `thinned`
keeps, per group of steps, the least, the middle and the largest value, so
that no spike is lost; `encode` writes numbers as variable-length differences
in base64, which the page's script decodes. Values in the caller's unit (step
times in seconds); NaN and infinities mean 'missing' and leave a gap.

>>> line = thinned(np.array([[1.0, 9.0, 1.0, 1.0, 1.0, 1.0]]), bins=2)
>>> line.high.tolist(), line.first_step.tolist(), line.width
([9.0, 1.0], [0, 3], 3)
>>> encode(np.array([0.25, np.nan, -1.5]), 100)
{'n': 3, 'per': 100, 'base': -150, 'data': '4ALfAgI='}
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.why.answer import StragglerRow

Array = NDArray[np.float64]

STEP_BINS = 1600
"""Groups of steps in a line chart: two points per group, about one per pixel of a wide screen."""

SHARE_BINS = 400
"""Groups of steps in the chart of bucket shares."""

HEAT_ROWS, HEAT_COLUMNS = 256, 240
"""Most cells of a heat map in either direction; more are joined, the largest value kept."""

MOST_LINES = 16
"""Ranks drawn one by one; of more, the slowest are."""

RESOLUTION = 1e-4
"""Resolution of an encoded series, relative to its median magnitude."""


def encode(values: ArrayLike, per: int | None = None) -> dict[str, object]:
    """Return `values` [n] as {'n', 'per', 'base', 'data'}: whole numbers of 1 / `per`, missing ones kept.

    The data are bytes in base64: per value the zigzag difference to its
    predecessor as a LEB128 varint of a code, 0 = missing, else
    1 + value * per - base. `per` defaults to the power of ten that resolves
    1e-4 of the median magnitude.
    """
    array = np.asarray(values, dtype=np.float64).ravel()
    known = np.isfinite(array)
    parts = _parts_of_one(array[known]) if per is None else per
    whole = np.rint(np.where(known, array, 0.0) * parts).astype(np.int64)
    base = int(whole[known].min()) if known.any() else 0
    codes = np.where(known, whole - base + 1, 0)
    deltas = np.diff(codes, prepend=0)
    packed = _varints((deltas << 1) ^ (deltas >> 63))
    return {"n": len(array), "per": parts, "base": base, "data": base64.b64encode(packed).decode("ascii")}


def _parts_of_one(values: Array) -> int:
    """Return the power of ten that `values` are counted in; the page computes in doubles, so 2**52 must span them."""
    magnitudes = np.abs(values[values != 0])
    if not len(magnitudes):
        return 1
    fine = -math.floor(math.log10(float(np.median(magnitudes)) * RESOLUTION))
    widest = math.floor(math.log10(2.0**51 / float(magnitudes.max())))
    return int(10 ** max(0, min(fine, widest)))


def _varints(numbers: NDArray[np.int64]) -> bytes:
    """Return non-negative integers as LEB128, one byte position of all numbers at a time."""
    rest = numbers.astype(np.uint64)
    sizes = np.ones(len(rest), dtype=np.int64)
    for shift in range(7, 64, 7):
        sizes += (rest >> np.uint64(shift)) > 0
    ends = np.cumsum(sizes)
    out = np.zeros(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
    for place in range(int(sizes.max()) if len(sizes) else 0):
        mask = sizes > place
        more = np.where(sizes[mask] > place + 1, 128, 0)
        bits = (rest[mask] >> np.uint64(7 * place)) & np.uint64(127)
        out[ends[mask] - sizes[mask] + place] = bits | more.astype(np.uint64)
    return out.tobytes()


@dataclass(frozen=True, slots=True)
class Thinned:
    """Step times of several ranks in groups of `width` steps."""

    width: int
    """Steps per group; 1 when nothing was joined."""

    first_step: NDArray[np.int64]
    """[b] First step of each group, counted from 0."""

    low: Array
    """[b] Least value of any rank in the group, NaN when all are missing."""

    middle: Array
    """[b] Median over ranks and steps of the group."""

    high: Array
    """[b] Largest value of any rank in the group: no spike is lost."""

    lines: Array
    """[ranks, b] when `width` is 1, else [ranks, 2 b]: each group's least and largest value in order of occurrence."""


def thinned(values: Array, bins: int = STEP_BINS) -> Thinned:
    """Join the steps of `values` [ranks, steps] into at most `bins` groups, extremes kept.

    Raises `InputError` unless the array has two axes.
    """
    if values.ndim != 2:
        raise InputError(f"step times have {values.ndim} axes; they need two. Pass an array [ranks, steps].")
    ranks, steps = values.shape
    width = 1 if steps <= 2 * bins else -(-steps // bins)
    groups = -(-steps // width) if ranks else 0
    first = np.arange(groups, dtype=np.int64) * width
    padded = np.full((ranks, groups * width), np.nan)
    padded[:, :steps] = np.where(np.isfinite(values), values, np.nan)[:, : groups * width]
    cells = padded.reshape(ranks, groups, width)
    ordered = np.sort(cells.transpose(1, 0, 2).reshape(groups, -1), axis=1) if groups else np.zeros((0, 1))
    known = (~np.isnan(ordered)).sum(axis=1)
    low, high = _at(ordered, known, np.zeros_like(known)), _at(ordered, known, known - 1)
    middle = (_at(ordered, known, (known - 1) // 2) + _at(ordered, known, known // 2)) / 2
    lines = padded[:, :steps] if width == 1 else _zigzag(cells)
    return Thinned(width, first, low, middle, high, lines)


def _at(ordered: Array, known: NDArray[np.int64], place: NDArray[np.int64]) -> Array:
    """Return `ordered[i, place[i]]` of rows whose first `known[i]` values are not missing; NaN for empty rows."""
    if not len(ordered):
        return np.zeros(0)
    picked = ordered[np.arange(len(ordered)), np.clip(place, 0, ordered.shape[1] - 1)]
    return np.where(known > 0, picked, np.nan)


def _zigzag(cells: Array) -> Array:
    """Return [ranks, 2 groups]: each group's extremes, the earlier one first."""
    blank = np.isnan(cells)
    least = np.where(blank, np.inf, cells).argmin(axis=2)
    most = np.where(blank, -np.inf, cells).argmax(axis=2)
    places = np.stack([np.minimum(least, most), np.maximum(least, most)], axis=2)
    return np.take_along_axis(cells, places, axis=2).reshape(len(cells), -1)


MOST_MARKS = 400
"""Marks of one kind that a chart of steps shows; more would be a grey area."""


def step_chart(
    step_s: Array, ranks: Sequence[int], first_step: int = 0, marks: Mapping[str, Sequence[int]] | None = None
) -> dict[str, object] | None:
    """Return the page's object for step times [ranks, steps], None when not one was recorded.

    `marks` are steps by what began in them: 'epoch', 'evaluation'.
    """
    if not np.isfinite(step_s).any():
        return None
    whole = thinned(step_s)
    means = np.nan_to_num(whole.lines).sum(axis=1)
    shown = sorted(np.argsort(-means, kind="stable")[:MOST_LINES].tolist())
    alone = len(ranks) == 1
    return {
        "first": first_step, "width": whole.width, "steps": step_s.shape[1], "low": encode(whole.low),
        "middle": encode(whole.middle), "high": encode(whole.high),
        "ranks": [] if alone else [int(ranks[row]) for row in shown], "all_ranks": len(ranks),
        "lines": [] if alone else [encode(whole.lines[row]) for row in shown],
        "marks": {kind: list(steps) for kind, steps in (marks or {}).items() if 0 < len(steps) <= MOST_MARKS},
    }  # fmt: skip


def share_chart(bucket_s: Mapping[str, ArrayLike], first_step: int = 0) -> dict[str, object] | None:
    """Return the page's object for shares of device time over steps from device-seconds [steps] per bucket.

    Groups of steps are summed before they are divided, so each share is exact
    for its group. None when there is no step; a group without time is missing.
    """
    series = {name: np.nan_to_num(np.asarray(v, dtype=np.float64), posinf=0.0) for name, v in bucket_s.items()}
    steps = {len(v) for v in series.values()}
    if len(steps) > 1:
        raise InputError(f"bucket series differ in length: {sorted(steps)}. Give every bucket one value per step.")
    if not steps or steps == {0}:
        return None
    number = steps.pop()
    width = -(-number // SHARE_BINS)
    starts = np.arange(0, number, width)
    sums = {name: np.add.reduceat(np.maximum(v, 0.0), starts) for name, v in series.items()}
    total = np.sum(list(sums.values()), axis=0)
    shares = {name: np.divide(v, total, out=np.full_like(v, np.nan), where=total > 0) for name, v in sums.items()}
    used = {name: encode(v, 10_000) for name, v in shares.items() if np.nansum(v) > 0}
    return {"first": first_step, "width": width, "steps": number, "shares": used}


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A matrix worth looking at: slowdown by rank and step, or by data- and pipeline-parallel rank."""

    title: str
    """What is shown, in a few words."""

    values: Array
    """[rows, columns] Ratios, 1 = as fast as the ideal; NaN = nothing recorded."""

    row_title: str
    """What a row is: 'rank', 'dp'."""

    column_title: str
    """What a column is: 'step', 'pp'."""

    row_names: tuple[str, ...] = ()
    """[rows] Names; numbers from 0 when empty."""

    column_names: tuple[str, ...] = ()
    """[columns] Names; numbers from 0 when empty."""

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return row and column names, filled in; raises `InputError` when their numbers do not fit."""
        rows, columns = self.values.shape
        row_names = self.row_names or tuple(map(str, range(rows)))
        column_names = self.column_names or tuple(map(str, range(columns)))
        if (len(row_names), len(column_names)) != (rows, columns):
            raise InputError(
                f"heat map {self.title!r} is {rows} x {columns} but names {len(row_names)} rows and "
                f"{len(column_names)} columns. Give one name each, or none."
            )
        return row_names, column_names


def joined_cells(heat: HeatMap) -> HeatMap:
    """Return `heat` with at most `HEAT_ROWS` x `HEAT_COLUMNS` cells: neighbours joined, the largest value kept."""
    rows, columns = heat.names()
    values = np.where(np.isfinite(heat.values), heat.values, np.nan)
    for axis, most in ((0, HEAT_ROWS), (1, HEAT_COLUMNS)):
        size = values.shape[axis]
        if size > most:
            width = -(-size // most)
            values = np.fmax.reduceat(values, np.arange(0, size, width), axis=axis)
            rows = rows if axis else _joined_names(rows, width)
            columns = _joined_names(columns, width) if axis else columns
    return HeatMap(heat.title, values, heat.row_title, heat.column_title, rows, columns)


def _joined_names(names: Sequence[str], width: int) -> tuple[str, ...]:
    groups = [names[start : start + width] for start in range(0, len(names), width)]
    return tuple(group[0] if len(group) == 1 else f"{group[0]}–{group[-1]}" for group in groups)


def heat_chart(heat: HeatMap) -> dict[str, object]:
    """Return the page's object for a heat map too large for a table."""
    small = joined_cells(heat)
    rows, columns = small.names()
    titles = {name: getattr(small, name) for name in ("title", "row_title", "column_title")}
    return {**titles, "rows": list(rows), "columns": list(columns), "values": encode(small.values, 1_000)}


def worker_heat_map(straggler: StragglerRow | None) -> HeatMap | None:
    """Return the dp x pp slowdown of a `why` object's `straggler.by.worker` {'dp/pp': x}, None when it has none."""
    workers = straggler.by.get("worker", {}) if straggler else {}
    cells = {tuple(int(part) for part in key.split("/")): value for key, value in workers.items()}
    if not cells:
        return None
    dps, pps = sorted({dp for dp, _ in cells}), sorted({pp for _, pp in cells})
    values = np.array([[value if isinstance(value := cells.get((dp, pp)), (int, float)) else math.nan for pp in pps]
                       for dp in dps], np.float64)  # fmt: skip
    return HeatMap("Slowdown by worker", values, "dp", "pp", tuple(map(str, dps)), tuple(map(str, pps)))
