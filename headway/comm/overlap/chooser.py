"""The forms of a matmul beside its collective, and which one a shape gets: plain unless another is 5 % faster.

Use `measure` to time every form of some shapes on ranks of this host, `fastest` to choose from times. Times are
seconds. A shape is the matmul that one rank does, in all its rows:

    512x1024x4096      gather the rows of x: [512, 1024] @ [1024, 4096], each of W ranks brings 512 / W rows
    rs:512x4096x1024   scatter the rows of the sum: [512, 4096] @ [4096, 1024], each rank is left with 512 / W rows

The backward of either is the other: the gradient of the gathered x is a matmul of `MatmulShape.backward`.

Source: Chang et al., "FLUX: Fast Software-based Communication Overlap On GPUs Through Kernel Fusion" (2024); the ring
of chunks is the form of it that needs no kernel of its own.

>>> fastest({"plain": [1.0] * 7, "ring:W": [0.93] * 7, "ring:2W": [0.8, 0.7, 0.8, 0.8, 0.8, 0.8, 0.9]})
'ring:2W'
>>> fastest({"plain": [1.0] * 7, "ring:W": [0.96] * 7, "ring:2W": [0.8, 1.2, 0.8, 1.2, 0.8, 1.2, 0.8]})
'plain'
>>> read_shape("rs:512x4096x1024").backward
MatmulShape(way='ag', m=512, k=1024, n=4096)
"""

from __future__ import annotations

import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.core.errors import InputError
from headway.core.files.bounded_json import read_json
from headway.core.tables import pick

PLAIN, RING, SYMM_MEM = "plain", "ring:W", "symm_mem"

OVERLAPS: dict[str, int] = {PLAIN: 0, RING: 1, "ring:2W": 2, SYMM_MEM: 0}
"""Form -> chunks that the rows of each rank travel in; 0 = it is no ring. `symm_mem` is torch's own fused operator, for
CUDA devices that see each other's memory. The first is taken unless another wins."""

LEAST_GAIN = 1.05
"""A form is taken where plain takes at least so many times as long (the median over rounds of measurement)."""

GATHER, SCATTER = "ag", "rs"

BY_CHANCE = 0.01
"""A form that wins no more rounds than a form as fast as plain does with this probability is not taken."""

ROUNDS = 31
"""Rounds of a measurement, in which the forms take turns."""

LONGEST_S = 300.0
"""A measurement may take this long."""

SCHEMA = "headway.comm-overlap/1"

OVERLAP_FILE = "overlap.json"
"""File of a run folder: what was measured for its shapes (`headway comm overlap`)."""


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """A matmul beside a collective, as one rank does it: [m, k] @ [k, n]."""

    way: str
    """`ag`: the rows of the left matrix are gathered; `rs`: the rows of the sum over ranks are scattered."""

    m: int
    """Rows over all ranks."""

    k: int
    """Columns of the left matrix."""

    n: int
    """Columns of the product."""

    def __str__(self) -> str:
        """Return what `read_shape` takes."""
        return ("" if self.way == GATHER else f"{self.way}:") + f"{self.m}x{self.k}x{self.n}"

    @property
    def backward(self) -> MatmulShape:
        """The matmul that gives the gradient of the left matrix: that of the product, times the right matrix's."""
        return MatmulShape(SCATTER if self.way == GATHER else GATHER, self.m, self.n, self.k)

    @property
    def travels(self) -> int:
        """Numbers that the collective brings together, or adds up."""
        return self.m * (self.k if self.way == GATHER else self.n)


def read_shape(text: str) -> MatmulShape:
    """Read 'MxKxN', 'ag:MxKxN' or 'rs:MxKxN'; raises `InputError` for anything else."""
    match = re.fullmatch(r"(?:(ag|rs):)?([1-9]\d{0,8})x([1-9]\d{0,8})x([1-9]\d{0,8})", text.strip())
    if match is None:
        raise InputError(
            f"the shape {text!r} is not MxKxN with whole numbers from 1; write 512x1024x4096 for rows that are "
            "gathered, rs:512x4096x1024 for rows that are scattered."
        )
    return MatmulShape(match[1] or GATHER, int(match[2]), int(match[3]), int(match[4]))


def read_form(name: str) -> str:
    """Return the name of a form; raises `UnknownNameError` with the nearest ones."""
    pick(OVERLAPS, name, "form of overlap")
    return name


def fastest(times: Mapping[str, Sequence[float]]) -> str:
    """Return the form to take, of the seconds of each form by round; all forms were timed in each round.

    Rounds are compared one by one: what slows the host down slows both down. A form's gain is the smaller of the median
    ratio and the ratio of the medians. It counts from `LEAST_GAIN` on, and only where so many rounds were won that a
    form as fast as plain would win them once in a hundred times (a sign test: 7 of 7, 13 of 15, 23 of 31). The largest
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
        """Seconds of the longer of both: all of the other hidden behind it."""
        return max(self.matmul_s, self.collective_s)


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
    command = [sys.executable, "-m", "headway.comm.overlap.torch_measure", str(ranks), ",".join(missing)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    except subprocess.TimeoutExpired as cause:
        raise InputError(f"{len(missing)} shapes were not measured within {LONGEST_S:g} s. Pass fewer.") from cause
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"matmuls could not be measured: {last}")
    made = msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=OverlapTable)
    table = OverlapTable(
        ranks=ranks, device=made.device, dtype=made.dtype,
        rows=[*(row for row in kept if row.shape not in missing), *made.rows],
    )  # fmt: skip
    if os.environ.get("RANK", "0") != "0":
        return table
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(table))
    return table
