"""The forms of a matmul beside its collective, and which one a shape gets: plain unless another is 5 % faster.

Use `measure` to time every form of some shapes on ranks of this host, `fastest` to choose from times. Times are
seconds. Forms and shapes are those of `headway.cost.overlaps`.

>>> fastest({"plain": [1.0] * 7, "ring:W": [0.93] * 7, "ring:2W": [0.8, 0.7, 0.8, 0.8, 0.8, 0.8, 0.9]})
'ring:2W'
>>> fastest({"plain": [1.0] * 7, "ring:W": [0.96] * 7, "ring:2W": [0.8, 1.2, 0.8, 1.2, 0.8, 1.2, 0.8]})
'plain'
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from headway.comm.measuring_child import run_measurement
from headway.core.errors import InputError
from headway.core.files.bounded_json import read_json
from headway.core.tables import pick
from headway.cost.overlaps import PLAIN, MatmulShape

LEAST_GAIN = 1.05
"""A form is taken where plain takes at least so many times as long (the median over rounds of measurement)."""

BY_CHANCE = 0.05
"""A form that wins no more rounds than a form as fast as plain does with this probability is not taken."""

ROUNDS = 31
"""Rounds of a measurement, in which the forms take turns."""

LONGEST_S = 300.0
"""A measurement may take this long."""

SCHEMA = "headway.comm-overlap/1"

OVERLAP_FILE = "overlap.json"
"""File of a run folder: what was measured for its shapes (`headway comm overlap`)."""


def fastest(times: Mapping[str, Sequence[float]]) -> str:
    """Return the form to take, of the seconds of each form by round; all forms were timed in each round.

    Rounds are compared one by one: what slows the host down slows both down. A form's gain is the smaller of the median
    ratio and the ratio of the medians. It counts from `LEAST_GAIN` on, and only where so many rounds were won that a
    form as fast as plain would win them once in twenty times (a sign test: 7 of 7, 12 of 15, 21 of 31). The largest
    gain decides.
    """
    if PLAIN not in times:
        raise InputError(f"times of {', '.join(times) or 'no form'} say nothing without those of plain. Time it too.")
    gains, plain = {PLAIN: 1.0}, times[PLAIN]
    for name, seconds in times.items():
        ratios = [before / after for before, after in zip(plain, seconds, strict=True)]
        gain = min(statistics.median(ratios), statistics.median(plain) / statistics.median(seconds))
        wins, rounds = sum(ratio > 1 for ratio in ratios), len(ratios)
        by_chance = sum(math.comb(rounds, count) for count in range(wins, rounds + 1)) / 2**rounds
        if name != PLAIN and gain >= LEAST_GAIN and by_chance <= BY_CHANCE:
            gains[name] = gain
    return max(gains, key=lambda name: gains[name])


class OverlapTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The forms of one shape, on the ranks and the link that measured them."""

    shape: str
    """What `read_shape` takes."""
    forms: dict[str, list[float]]
    """Form -> seconds of each round, the slowest rank's; forms that these ranks cannot run are not in it."""
    matmul_s: float
    """Median seconds of the matmul without its collective."""
    collective_s: float
    """Median seconds of the collective without its matmul."""

    @property
    def chosen(self) -> str:
        """The form to take."""
        return fastest(self.forms)

    def seconds(self, form: str) -> float:
        """Return the median seconds of a form."""
        return statistics.median(pick(self.forms, form, "measured form"))

    @property
    def ideal_s(self) -> float:
        """Seconds of the longer of both, all of the other hidden; never more than a form was measured with."""
        return min(max(self.matmul_s, self.collective_s), *(self.seconds(form) for form in self.forms))


class OverlapTable(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured on one link, as it is kept in a file."""

    ranks: int
    """Ranks that took part."""
    device: str
    """Type of their device."""
    dtype: str
    """Type of the numbers."""
    rows: list[OverlapTimes]
    """The shapes."""

    def of(self, shape: MatmulShape) -> OverlapTimes | None:
        """Return what is known of a shape."""
        return next((row for row in self.rows if row.shape == str(shape)), None)


def read_table(path: Path) -> OverlapTable:
    """Read what `measure` has written; raises `InputError` for any other file."""
    try:
        return msgspec.convert(read_json(path, fix="Measure anew: headway comm overlap --again."), OverlapTable)
    except msgspec.ValidationError as cause:
        raise InputError(f"{path} is no table of overlaps: {cause}. Delete it, and measure anew.") from cause


def measure(shapes: Iterable[MatmulShape], path: Path, *, ranks: int = 2, again: bool = False) -> OverlapTable:
    """Time all forms of the shapes that the file does not have yet, on gloo processes of this host; return the table.

    The file keeps the rows of one number of ranks: other rows are measured again. A rank that a launcher has started
    measures with all ranks of the launcher, each of which calls this; the first one writes the file. Raises
    `InputError` where the processes fail, and for fewer than two ranks.
    """
    if "RANK" in os.environ:
        ranks = int(os.environ["WORLD_SIZE"])
    if ranks < 2:
        raise InputError(f"--ranks is {ranks}; one rank gathers from nobody. Pass 2 or more.")
    names = list(dict.fromkeys(map(str, shapes)))
    before = read_table(path) if path.exists() and not again else None
    kept = [] if before is None or before.ranks != ranks else before.rows
    missing = [name for name in names if name not in {row.shape for row in kept}]
    if not missing:
        assert before is not None
        return before
    printed = run_measurement(
        "headway.comm.overlap.torch_measure", [str(ranks), ",".join(missing)], what="matmuls", longest_s=LONGEST_S,
        too_late=f"{len(missing)} shapes were not measured within {LONGEST_S:g} s. Pass fewer.",
    )  # fmt: skip
    made = msgspec.json.decode(printed.strip().splitlines()[-1], type=OverlapTable)
    table = OverlapTable(
        ranks=ranks, device=made.device, dtype=made.dtype,
        rows=[*(row for row in kept if row.shape not in missing), *made.rows],
    )  # fmt: skip
    if os.environ.get("RANK", "0") != "0":
        return table
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(table))
    return table
