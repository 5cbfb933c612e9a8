"""Seconds of operators that nobody measured, from operators of the same name that somebody did.

>>> made = [Operator("mm", "", 2e6 * k, 8e4 * k, 4e4 * k, (100 * k, 100)) for k in (1, 2, 4, 8)]
>>> model = OperatorModel(made, np.array([1.0, 2.0, 4.0, 8.0]) * 1e-4)
>>> bool(2.5e-4 < model.seconds([Operator("mm", "", 6e6, 2.4e5, 1.2e5, (300, 100))])[0] < 3.5e-4)
True
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.tables import suggestion

Floats = NDArray[np.float64]

NUM_EXTENTS = 12
"""Extents that count; further ones are dropped, missing ones are 1."""

TREND, LOCAL, NOISE, RADIUS = 10.0, 1.0, 0.02, 4.0
"""Prior variances of log seconds: of a linear trend, of what is local and unexplained; distance of what is local.

Of ten settings tried on models left out, by the mean error of log seconds over products, convolutions, norms and
attention; the others are within a fifth of it.
"""


@dataclass(frozen=True, slots=True)
class Operator:
    """One computation of a step: a leaf of its tree of loop nests."""

    name: str
    """As torch names it: mm, convolution_backward."""

    kind: str
    """Operators of one kind stand in for each other where a name was never measured: pointwise; "" = none does."""

    flops: float
    """Floating-point operations of matrix products and convolutions; 0 for others."""

    read_bytes: float
    """Bytes of its inputs."""

    written_bytes: float
    """Bytes of its outputs."""

    extents: tuple[int, ...]
    """Up to four sizes of each of its first three inputs."""

    dtype: str = "float32"
    """Precision of its floating-point outputs and inputs: operators of another one are not compared with it."""

    def features(self) -> list[float]:
        """Return the logarithms that its time depends on."""
        extents = (*self.extents, *[1] * NUM_EXTENTS)[:NUM_EXTENTS]
        return [float(np.log1p(v)) for v in (self.flops, self.read_bytes, self.written_bytes, *extents)]


@dataclass(frozen=True, slots=True, eq=False)
class OperatorModel:
    """Measured operators; predictions are Gaussian processes over operators of one name, or one kind."""

    operators: Sequence[Operator]
    """[n] What was measured."""

    measured_s: Floats
    """[n] Seconds, above 0."""

    def __post_init__(self) -> None:
        """Check the values; raises `InputError`."""
        if not len(self.operators):
            raise InputError("no operator was measured; run `headway cost calibrate` first.")
        if not (np.isfinite(self.measured_s) & (self.measured_s > 0)).all():
            raise InputError("a measured time is not above 0; remove that line of the table and calibrate again.")

    def seconds(self, wanted: Sequence[Operator]) -> Floats:
        """Return [len(wanted)] seconds; raises `InputError` on an operator with neither name nor kind measured."""
        if not wanted:
            raise InputError("the graph is empty: there is no operator to predict. Name a model that computes.")
        found = np.zeros(len(wanted))
        groups: dict[tuple[str, str], list[int]] = {}
        for place, op in enumerate(wanted):
            groups.setdefault((op.name, op.dtype), []).append(place)
        for (name, dtype), places in groups.items():
            rows = self._rows(wanted[places[0]])
            if not rows:
                raise InputError(f"operator {name!r} in {dtype} was never measured. {self._instead(name, dtype)}")
            measured = np.array([self.operators[row].features() for row in rows])
            new = np.array([wanted[place].features() for place in places])
            found[places] = np.exp(_regress(measured, np.log(self.measured_s[rows]), new))
        return found

    def _rows(self, asked: Operator) -> list[int]:
        """Return the measurements that an operator is predicted from: of its name, else of its kind."""
        near = [(row, op) for row, op in enumerate(self.operators) if op.dtype == asked.dtype]
        rows = [row for row, op in near if op.name == asked.name]
        return rows or [row for row, op in near if asked.kind and op.kind == asked.kind]

    def unmeasured(self, needed: Sequence[Operator]) -> list[Operator]:
        """Return the operators, each once, with neither name nor kind measured, in a precision that was."""
        dtypes = {op.dtype for op in self.operators}
        return [op for op in dict.fromkeys(needed) if op.dtype in dtypes and not self._rows(op)]

    def by_bytes(self, needed: Sequence[Operator]) -> Floats:
        """Return [len(needed)] seconds of operators as if they were pointwise: views, copies, allocations, indexing."""
        return self.seconds([replace(op, name="", kind="pointwise") for op in needed])

    def with_more(self, operators: Sequence[Operator], measured_s: Floats) -> OperatorModel:
        """Return a model that knows further operators."""
        return OperatorModel([*self.operators, *operators], np.concatenate((self.measured_s, measured_s)))

    def _instead(self, name: str, dtype: str) -> str:
        """Say what was measured in its place."""
        names = {op.name for op in self.operators if op.dtype == dtype}
        if names:
            return suggestion(names, name)
        measured = ", ".join(sorted({op.dtype for op in self.operators}))
        return f"Measured are {measured}; run `headway cost calibrate --dtypes {dtype}`."


def _regress(known: Floats, log_s: Floats, new: Floats) -> Floats:
    """Return [m] log seconds at [m, d] features, by a trend plus what is local, from [n, d] features."""
    base, mean = known.mean(0), log_s.mean()
    known, new = known - base, new - base

    def covariance(left: Floats, right: Floats) -> Floats:
        distance = np.square(left[:, None] - right[None]).sum(-1)
        local: Floats = LOCAL * np.exp(-distance / (2 * RADIUS**2))
        both: Floats = TREND / known.shape[1] * (left @ right.T) + local
        return both

    solved = np.linalg.solve(covariance(known, known) + NOISE * np.eye(len(log_s)), log_s - mean)
    found: Floats = mean + covariance(new, known) @ solved
    return found
