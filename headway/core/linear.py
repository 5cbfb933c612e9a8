"""Linear and mixed-integer programs, solved by HiGHS.

minimise cost @ x  subject to  row_low <= rows @ x <= row_high,
low <= x <= high, and x[i] whole where `whole[i]`.

>>> best = minimise([-1, -2], rows=[[1, 1]], row_high=[3], high=[2, 2], whole=[True, True])
>>> best.x.tolist(), best.value
([1.0, 2.0], -5.0)
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import HeadwayError, InputError


@dataclass(frozen=True, slots=True, eq=False)
class Optimum:
    """Where a program is smallest."""

    x: NDArray[np.float64]
    """[n] The variables."""

    value: float
    """cost @ x."""

    row_price: NDArray[np.float64]
    """[m] Change of `value` per unit of each row's bound (linear programs); zeros with whole variables."""


def minimise(
    cost: ArrayLike,
    *,
    rows: ArrayLike | None = None,
    row_low: ArrayLike | None = None,
    row_high: ArrayLike | None = None,
    low: ArrayLike | None = None,
    high: ArrayLike | None = None,
    whole: ArrayLike | None = None,
    time_limit_s: float | None = None,
) -> Optimum:
    """Solve one program: `cost` [n], `rows` [m, n], bounds of rows [m], of variables [n] (0 and infinity), `whole` [n].

    Deterministic (one thread). Raises `InputError` when shapes disagree, a
    number is NaN, or the program has no solution or no least one;
    `HeadwayError` when the solver gives up, at `time_limit_s` for example.
    """
    prices = _vector(cost, None, "cost", 0.0)
    n = prices.size
    matrix = np.zeros((0, n)) if rows is None else np.asarray(rows, np.float64)
    if matrix.ndim != 2 or matrix.shape[1] != n:
        raise InputError(f"rows has shape {list(matrix.shape)}, cost has {n} entries; give rows {n} columns.")
    if not np.isfinite(matrix).all():
        raise InputError("rows holds NaN or infinity; pass finite coefficients.")
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = n, matrix.shape[0]
    program.col_cost_ = prices
    program.col_lower_, program.col_upper_ = _vector(low, n, "low", 0.0), _vector(high, n, "high", np.inf)
    program.row_lower_ = _vector(row_low, matrix.shape[0], "row_low", -np.inf)
    program.row_upper_ = _vector(row_high, matrix.shape[0], "row_high", np.inf)
    row_of, column_of = np.nonzero(matrix)
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.searchsorted(row_of, np.arange(matrix.shape[0] + 1)).astype(np.int32)
    program.a_matrix_.index_ = column_of.astype(np.int32)
    program.a_matrix_.value_ = matrix[row_of, column_of]
    kinds = _vector(whole, n, "whole", 0.0) != 0
    if kinds.any():
        kind = highspy.HighsVarType
        program.integrality_ = [kind.kInteger if is_whole else kind.kContinuous for is_whole in kinds]
    return _solved(program, kinds, time_limit_s)


def _solved(program: highspy.HighsLp, whole: NDArray[np.bool_], time_limit_s: float | None) -> Optimum:
    """Run the solver and read its answer."""
    solver = highspy.Highs()  # type: ignore[no-untyped-call]  # its constructor has no annotations
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("mip_rel_gap", 0.0)
    if time_limit_s is not None:
        solver.setOptionValue("time_limit", float(time_limit_s))
    solver.passModel(program)
    solver.run()
    status, words = solver.getModelStatus(), highspy.HighsModelStatus
    if status == words.kInfeasible:
        raise InputError("no x satisfies all the rows and bounds. Drop or widen one of them.")
    if status in (words.kUnbounded, words.kUnboundedOrInfeasible):
        raise InputError("the program has no least value, or no solution at all. Add bounds, or drop a contradiction.")
    if status not in (words.kOptimal, words.kModelEmpty):
        raise HeadwayError(f"the solver stopped with '{solver.modelStatusToString(status)}'. Raise time_limit_s.")
    answer = solver.getSolution()
    x = np.array(answer.col_value, np.float64)
    x[whole] = np.round(x[whole])
    price = np.zeros(program.num_row_) if whole.any() else np.array(answer.row_dual, np.float64)
    return Optimum(x, float(np.dot(program.col_cost_, x)), price)


def _vector(values: ArrayLike | None, size: int | None, what: str, default: float) -> NDArray[np.float64]:
    """Return a flat array of numbers of the given length."""
    if values is None:
        return np.full(size or 0, default)
    array = np.asarray(values, np.float64)
    if array.ndim == 0 and size is not None:
        array = np.full(size, array)
    if array.ndim != 1 or (size is not None and array.size != size):
        raise InputError(
            f"{what} has shape {list(array.shape)}; pass {'a flat list' if size is None else size} numbers."
        )
    if np.isnan(array).any():
        raise InputError(f"{what}[{int(np.isnan(array).argmax())}] is NaN; pass numbers.")
    return array
