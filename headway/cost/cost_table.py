"""A host's measured operators and steps, a line of JSON for each model; and the step of a model that is not among them.

The first line says where the others were measured. A line is appended when its
model is done, so an interrupted calibration continues with the next model. A
job whose predicted step was measured later adds a line too: it can widen the
interval of later predictions, and nothing else.

The step of a model with `n` calls of operators that take `s` seconds alone is

    step = a * s + b * n

b: what a call costs beyond the operator (autograd, the optimizer's loop); a:
operators in a step find colder caches than operators that are repeated. Both
are fitted to the measured models, so short steps are not scaled like long ones.

Measured latencies of many architectures on many settings (device and batch size), checked once when they are read.

>>> table = LatencyTable(("conv", "skip"), np.array([[0, 1], [0, 0]]), ("a_1", "b_1"), np.array([[1.0, 2], [3, 5]]))
>>> table.one_hot().tolist()
[[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]
>>> table.rows(["b_1"]).tolist()
[[3.0, 5.0]]

Seconds of operators that nobody measured, from operators of the same name that somebody did.

>>> made = [Operator("mm", "", 2e6 * k, 8e4 * k, 4e4 * k, (100 * k, 100)) for k in (1, 2, 4, 8)]
>>> model = OperatorModel(made, np.array([1.0, 2.0, 4.0, 8.0]) * 1e-4)
>>> bool(2.5e-4 < model.seconds([Operator("mm", "", 6e6, 2.4e5, 1.2e5, (300, 100))])[0] < 3.5e-4)
True
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError, InputError
from headway.core.files.inert import read_arrays
from headway.core.files.safe_files import read_regular
from headway.core.tables import pick, suggestion

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


SCHEMA = "headway.cost-table/2"


class MeasuredHost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a table was measured."""

    host: str
    """Name of the host."""

    torch: str
    """Version."""

    threads: int
    """Threads of one operator."""

    cpu: str
    """Model of its processor."""

    device: str = "cpu"
    """Device of the operators."""

    schema: str = SCHEMA
    """Version of the file."""


class MeasuredModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="model"):
    """One model of a calibration."""

    model: int
    """Its number."""

    step_s: float
    """Seconds of a step: forward, backward and SGD."""

    operators: list[Operator]
    """[n] Different operators of the step, without those dropped."""

    seconds: list[float]
    """[n] What one call of each takes."""

    calls: list[int]
    """[n] How often a step calls each."""

    dropped: int
    """Operators that were too noisy to count."""

    dtype: str = "float32"
    """Precision of its parameters."""


class ObservedStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="observed"):
    """A predicted step that a job ran later."""

    run: str
    """Id of its recording."""

    predicted_s: float
    """Seconds that were predicted from this table."""

    measured_s: float
    """Seconds that a tenth of its steps kept below."""


@dataclass(frozen=True, slots=True, eq=False)
class CostTable:
    """A table as it is read."""

    host: MeasuredHost
    """Where it was measured."""

    models: list[MeasuredModel]
    """Its models."""

    observed: list[ObservedStep]
    """Predictions that were judged."""


CALL_S = np.linspace(0, 10e-6, 41)
"""Costs of a call that are tried."""


@dataclass(frozen=True, slots=True, eq=False)
class StepCosts:
    """What a calibration knows about steps."""

    operators: OperatorModel
    """Seconds of operators."""

    factor: float
    """a: seconds of a step per second of its operators measured alone."""

    call_s: float
    """b: further seconds per call."""

    ratios: NDArray[np.float64]
    """[models] Measured step over predicted step, each predicted from the other models, sorted."""

    observed: NDArray[np.float64]
    """[k] The same of predictions that were judged by a job."""

    def step(self, operators_s: float, num_calls: int) -> tuple[float, tuple[float, float]]:
        """Return the seconds of a step with `num_calls` operators of `operators_s` in all, and its interval.

        The interval holds 80 % of the table's models, and every observed step.
        """
        step_s = self.factor * operators_s + self.call_s * num_calls
        low, high = np.quantile(self.ratios, [0.1, 0.9])
        ends = np.array([1.0, low, high, *self.observed]) * step_s
        return step_s, (float(ends.min()), float(ends.max()))


def read_table(path: Path) -> CostTable:
    """Read a table; a last line without its end is left out. Raises `FormatError` with line and field."""
    lines = read_regular(path).split(b"\n")[:-1]
    if not lines:
        raise FormatError(f"{path} is empty; write it with `headway cost calibrate -o {path}`.")
    line = 1
    try:
        table = CostTable(msgspec.json.decode(lines[0], type=MeasuredHost), [], [])
        if table.host.schema != SCHEMA:
            raise FormatError(
                f"{path} has schema {table.host.schema!r}; this version reads {SCHEMA!r}. Calibrate into another file."
            )
        for line, text in enumerate(lines[1:], start=2):
            row = msgspec.json.decode(text, type=MeasuredModel | ObservedStep)
            if isinstance(row, ObservedStep):
                table.observed.append(row)
                positive = [row.predicted_s, row.measured_s]
            else:
                table.models.append(row)
                positive = [row.step_s, *row.seconds]
            if isinstance(row, MeasuredModel) and not len(row.operators) == len(row.seconds) == len(row.calls):
                raise FormatError(f"{path}, line {line}: its lists differ in length. Remove the line.")
            if not all(0 < seconds < np.inf for seconds in positive):
                raise FormatError(f"{path}, line {line}: a time is not above 0. Remove the line, and calibrate again.")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}, line {line}: {error}. Remove the line, or calibrate into another file.") from None
    return table


def add_line(path: Path, row: MeasuredModel | ObservedStep) -> None:
    """Append a line to a table."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")


def check_host(table: MeasuredHost, here: MeasuredHost, path: Path) -> None:
    """Refuse a table that was measured elsewhere; raises `InputError` with the field that differs."""
    for name in ("host", "torch", "threads", "cpu", "device"):
        if (there := getattr(table, name)) != getattr(here, name):
            raise InputError(
                f"{path} was measured with {name} {there!r}; here it is {getattr(here, name)!r}. Calibrate into "
                "another file with -o."
            )


def step_costs(table: CostTable) -> StepCosts:
    """Fit the operators of all models, and judge every model's step by the others; raises `InputError` under 4."""
    models = table.models
    if len(models) < 4:
        raise InputError(f"the table has {len(models)} models; at least 4 are needed. Run `headway cost calibrate` on.")
    known = []
    for model in models:
        others = operators_of([other for other in models if other is not model])
        try:
            predicted_s = others.seconds(model.operators)
        except InputError:  # it alone has some operator
            continue
        known.append((model.step_s, float(predicted_s @ np.array(model.calls)), sum(model.calls)))
    if len(known) < 2:
        raise InputError("no model of the table shares its operators with the others. Run `headway cost calibrate` on.")
    steps = np.array(known)
    ratios = []
    for index, (step_s, operators_s, num_calls) in enumerate(steps):
        factor, call_s = _overheads(np.delete(steps, index, axis=0))
        ratios.append(step_s / (factor * operators_s + call_s * num_calls))
    observed = np.array([row.measured_s / row.predicted_s for row in table.observed])
    return StepCosts(operators_of(models), *_overheads(steps), np.sort(ratios), observed)


def operators_of(models: list[MeasuredModel]) -> OperatorModel:
    """Return what the operators of all `models` say."""
    operators = [op for model in models for op in model.operators]
    return OperatorModel(operators, np.array([seconds for model in models for seconds in model.seconds]))


def _overheads(steps: NDArray[np.float64]) -> tuple[float, float]:
    """Return a and b with the least mean |log error|, from [n, 3]: seconds of a step, of its operators, calls.

    For each b that is tried, a is the median of what is left: a few steps measured beside other load change neither.
    """
    step_s, operators_s, num_calls = steps.T
    left = np.maximum(step_s - CALL_S[:, None] * num_calls, 0.1 * step_s)
    factors = np.median(left / operators_s, axis=1)
    errors = np.abs(np.log((factors[:, None] * operators_s + CALL_S[:, None] * num_calls) / step_s)).mean(1)
    best = int(errors.argmin())
    return float(factors[best]), float(CALL_S[best])


FIELDS = ("ops", "op_names", "settings", "latency_ms")
"""Arrays of a file of latencies."""


@dataclass(frozen=True, slots=True, eq=False)
class LatencyTable:
    """Latencies of `n` architectures of equal depth under `s` settings."""

    op_names: tuple[str, ...]
    """[o] Kinds of operators."""

    ops: NDArray[np.int64]
    """[n, layers] Operator of each layer, index into `op_names`."""

    settings: tuple[str, ...]
    """[s] Device and batch size, such as titan_rtx_64."""

    latency_s: NDArray[np.float64]
    """[s, n] Seconds, above 0."""

    def __post_init__(self) -> None:
        """Check shapes and values; raises `InputError`."""
        shape = (len(self.settings), len(self.ops))
        if self.ops.ndim != 2 or self.latency_s.shape != shape:
            raise InputError(
                f"latencies have shape {self.latency_s.shape}, operators {self.ops.shape}; they must be [settings, "
                f"architectures] = {shape} and [architectures, layers]. Correct the file."
            )
        if shape[1] < 2:
            raise InputError(f"{shape[1]} architectures are too few; at least 2 are needed. Measure more.")
        if self.ops.shape[1] == 0:
            raise InputError("the architectures have no operators; each needs at least one. Correct `ops`.")
        if len(set(self.settings)) < len(self.settings):
            raise InputError("a setting appears twice in `settings`; give each row a name of its own.")
        if len(set(self.op_names)) < len(self.op_names):
            raise InputError("an operator appears twice in `op_names`; all settings must mean the same one by a name.")
        unknown = np.argwhere((self.ops < 0) | (self.ops >= len(self.op_names)))
        if len(unknown):
            row, layer = map(int, unknown[0])
            raise InputError(
                f"architecture {row}, layer {layer} has unknown operator {self.ops[row, layer]}; `op_names` lists "
                f"{len(self.op_names)}. Correct `ops`, or name the operator."
            )
        wrong = np.argwhere(~(np.isfinite(self.latency_s) & (self.latency_s > 0)))
        if len(wrong):
            row, sample = map(int, wrong[0])
            raise InputError(
                f"the latency of architecture {sample} on {self.settings[row]} is {self.latency_s[row, sample]} s; it "
                f"must be above 0. Remove or repeat that measurement ({len(wrong)} of them)."
            )

    @classmethod
    def read(cls, path: str | Path) -> LatencyTable:
        """Read an NPZ file with `ops`, `op_names`, `settings` and `latency_ms`; raises `FormatError`."""
        arrays = read_arrays(path, FIELDS)
        try:
            ops, latency = arrays[0].astype(np.int64), arrays[3].astype(np.float64)
            names, settings = (tuple(map(str, each.ravel())) for each in arrays[1:3])
        except (ValueError, TypeError) as error:
            raise FormatError(f"{path} holds other values than numbers: {error}. Write it with numpy.savez.") from error
        return cls(names, ops, settings, latency / 1e3)

    def rows(self, settings: Sequence[str]) -> NDArray[np.float64]:
        """Return [len(settings), n] seconds of these settings; raises `UnknownNameError`."""
        index = {name: place for place, name in enumerate(self.settings)}
        return self.latency_s[[pick(index, name, "setting") for name in settings]]

    def one_hot(self) -> NDArray[np.float64]:
        """Return [n, layers * o]: 1 where a layer has that operator."""
        return np.eye(len(self.op_names))[self.ops].reshape(len(self.ops), -1)
