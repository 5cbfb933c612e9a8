"""Linear and mixed-integer programs, solved by HiGHS.

minimise cost @ x  subject to  row_low <= rows @ x <= row_high,
low <= x <= high, and x[i] whole where `whole[i]`.

The rows are a dense matrix, or triplets (row, column, value) of its entries
that are not zero: a program with thousands of rows and variables fits only so.

>>> best = minimise([-1, -2], rows=[[1, 1]], row_high=[3], high=[2, 2], whole=[True, True])
>>> best.x.tolist(), best.value, best.bound
([1.0, 2.0], -5.0, -5.0)
>>> minimise([-1, -2], rows=([0, 0], [0, 1], [1, 1]), num_rows=1, row_high=[3], high=[2, 2], whole=1).value
-5.0
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import HeadwayError, InputError

Triplets = tuple[ArrayLike, ArrayLike, ArrayLike]
"""Row, column and value of each entry of a matrix: three lists of one length."""

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Optimum:
    """Where a program is smallest."""

    x: NDArray[np.float64]
    """[n] The variables."""

    value: float
    """cost @ x."""

    bound: float
    """No x costs less than this: `value` itself in a linear program, up to `gap` lower with whole variables."""

    row_price: NDArray[np.float64]
    """[m] Change of `value` per unit of each row's bound (linear programs); zeros with whole variables."""


def minimise(
    cost: ArrayLike,
    *,
    rows: ArrayLike | Triplets | None = None,
    num_rows: int | None = None,
    row_low: ArrayLike | None = None,
    row_high: ArrayLike | None = None,
    low: ArrayLike | None = None,
    high: ArrayLike | None = None,
    whole: ArrayLike | None = None,
    gap: float = 0.0,
    time_limit_s: float | None = None,
    inside: bool = False,
) -> Optimum:
    """Solve one program: `cost` [n], `rows` [m, n], bounds of rows [m], of variables [n] (0 and infinity), `whole` [n].

    With `num_rows`, `rows` is three lists of one length: the row, the column
    and the value of each entry; entries of one cell are added up. With whole
    variables the search ends as soon as value - bound <= gap * |value|. With `inside` a program without whole
    variables is solved by an interior point method: `x` is then inside the set of the best ones, within about 1e-7.

    Deterministic (one thread). Raises `InputError` when shapes disagree, a
    number is NaN, a triplet is outside the matrix, `gap` is negative, or the
    program has no solution or no least one; `HeadwayError` when the solver
    gives up, at `time_limit_s` for example.
    """
    if not gap >= 0:
        raise InputError(f"gap is {gap}; it must be >= 0. Pass 0 for the exact optimum.")
    prices = _vector(cost, None, "cost", 0.0)
    n = prices.size
    row_of, column_of, values, num_rows = _dense(rows, n) if num_rows is None else _sparse(rows, num_rows, n)
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = n, num_rows
    program.col_cost_ = prices
    program.col_lower_, program.col_upper_ = _vector(low, n, "low", 0.0), _vector(high, n, "high", np.inf)
    program.row_lower_ = _vector(row_low, num_rows, "row_low", -np.inf)
    program.row_upper_ = _vector(row_high, num_rows, "row_high", np.inf)
    # Compressed rows: the entries of row i are start[i] .. start[i + 1], because `row_of` ascends.
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.searchsorted(row_of, np.arange(num_rows + 1)).astype(np.int32)
    program.a_matrix_.index_ = column_of.astype(np.int32)
    program.a_matrix_.value_ = values
    kinds = _vector(whole, n, "whole", 0.0) != 0
    if kinds.any():
        kind = highspy.HighsVarType
        program.integrality_ = [kind.kInteger if is_whole else kind.kContinuous for is_whole in kinds]
    return _solved(program, kinds, gap, time_limit_s, inside=inside and not kinds.any())


def _dense(rows: ArrayLike | Triplets | None, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Values, int]:
    """Return row, column and value of the entries of a dense matrix that are not 0, row by row, and its row count."""
    matrix = np.zeros((0, n)) if rows is None else np.asarray(rows, np.float64)
    if matrix.ndim != 2 or matrix.shape[1] != n:
        raise InputError(f"rows has shape {list(matrix.shape)}, cost has {n} entries; give rows {n} columns.")
    if not np.isfinite(matrix).all():
        raise InputError("rows holds NaN or infinity; pass finite coefficients.")
    row_of, column_of = np.nonzero(matrix)
    return row_of, column_of, matrix[row_of, column_of], matrix.shape[0]


def _sparse(
    rows: ArrayLike | Triplets | None, num_rows: int, n: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], Values, int]:
    """Return what `_dense` returns, of triplets in any order.

    Each cell is one number, row * n + column, so that sorting these numbers
    sorts by row and then by column, and equal numbers are one cell:

        (1, 0, 2.0), (0, 1, 3.0), (1, 0, 5.0) of a [2, 2] matrix
        cells 2 1 2 -> unique 1 2 -> values 3.0, 2.0 + 5.0
    """
    if num_rows < 0:
        raise InputError(f"num_rows is {num_rows}; it must be >= 0.")
    if not isinstance(rows, tuple | list) or len(rows) != 3:
        raise InputError("with num_rows, rows must be three lists: (row, column, value). Drop num_rows for a matrix.")
    row, column = (_indices(part, what) for part, what in zip(rows[:2], ("row", "column"), strict=True))
    values = np.asarray(rows[2], np.float64)
    if not row.shape == column.shape == values.shape:
        raise InputError(
            f"the triplets have shapes {list(row.shape)}, {list(column.shape)} and {list(values.shape)}; "
            "pass three lists of one length."
        )
    if not np.isfinite(values).all():
        raise InputError("rows holds NaN or infinity; pass finite coefficients.")
    for indices, limit, what in ((row, num_rows, "row"), (column, n, "column")):
        outside = (indices < 0) | (indices >= limit)
        if outside.any():
            at = int(outside.argmax())
            raise InputError(f"{what} {indices[at]} of triplet {at} is outside 0 to {limit - 1}; correct it.")
    cells, where = np.unique(row * n + column, return_inverse=True)
    sums = np.bincount(where.reshape(-1), values, minlength=cells.size)
    cells, sums = cells[sums != 0], sums[sums != 0]
    return cells // n, cells % n, sums, num_rows


def _indices(values: ArrayLike, what: str) -> NDArray[np.int64]:
    """Return a flat array of whole numbers."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError(f"the {what} indices must be a flat list of integers, not {array.dtype} {list(array.shape)}.")
    return array.astype(np.int64)


def _solved(
    program: highspy.HighsLp, whole: NDArray[np.bool_], gap: float, time_limit_s: float | None, *, inside: bool
) -> Optimum:
    """Run the solver and read its answer."""
    solver = highspy.Highs()  # type: ignore[no-untyped-call]  # its constructor has no annotations
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    if inside:
        solver.setOptionValue("solver", "ipm")
        solver.setOptionValue("run_crossover", "off")
    solver.setOptionValue("mip_rel_gap", float(gap))
    if time_limit_s is not None:
        solver.setOptionValue("time_limit", float(time_limit_s))
    solver.passModel(program)
    solver.run()
    status, words = solver.getModelStatus(), highspy.HighsModelStatus
    if inside and status != words.kOptimal:  # it could not tell: the simplex method does
        return _solved(program, whole, gap, time_limit_s, inside=False)
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
    value = float(np.dot(program.col_cost_, x))
    # A linear program is solved to its optimum; a search over whole numbers ends with the least bound of what it left.
    bound = min(value, solver.getInfo().mip_dual_bound) if whole.any() else value
    return Optimum(x, value, bound, price)


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
