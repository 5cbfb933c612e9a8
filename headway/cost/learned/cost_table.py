"""A host's measured operators and steps, a line of JSON for each model; and the step of a model that is not among them.

The first line says where the others were measured. A line is appended when its
model is done, so an interrupted calibration goes on with the next model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError, InputError
from headway.core.regular_file import read_regular
from headway.cost.learned.operators import Operator, OperatorModel

SCHEMA = "headway.cost-table/1"


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a table was measured."""

    host: str
    """Name of the host."""

    torch: str
    """Version."""

    threads: int
    """Threads of one operator."""

    device: str = "cpu"
    """Device of the operators."""

    schema: str = SCHEMA
    """Version of the file."""


class MeasuredModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


@dataclass(frozen=True, slots=True, eq=False)
class StepCosts:
    """What a calibration knows about steps."""

    operators: OperatorModel
    """Seconds of operators."""

    ratios: NDArray[np.float64]
    """[models] Measured step over the sum of its operators, each predicted from the other models, sorted."""

    def scaled(self, operators_s: float) -> tuple[float, tuple[float, float]]:
        """Return the seconds of a step whose operators take `operators_s`, and the range of 80 % of the models."""
        low, middle, high = np.quantile(self.ratios, [0.1, 0.5, 0.9]) * operators_s
        return float(middle), (float(low), float(high))


def read_table(path: Path) -> tuple[Host, list[MeasuredModel]]:
    """Read a table; a last line without its end is left out. Raises `FormatError` with line and field."""
    lines = read_regular(path).split(b"\n")[:-1]
    if not lines:
        raise FormatError(f"{path} is empty; write it with `headway cost calibrate -o {path}`.")
    line = 1
    try:
        host = msgspec.json.decode(lines[0], type=Host)
        models = []
        for line, text in enumerate(lines[1:], start=2):
            models.append(model := msgspec.json.decode(text, type=MeasuredModel))
            if not len(model.operators) == len(model.seconds) == len(model.calls) or not model.step_s > 0:
                raise FormatError(f"{path}, line {line}: lists differ in length, or step_s is not above 0. Remove it.")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}, line {line}: {error}. Remove the line, or calibrate into another file.") from None
    if host.schema != SCHEMA:
        raise FormatError(f"{path} has schema {host.schema!r}; this version reads {SCHEMA!r}. Calibrate again.")
    return host, models


def check_host(table: Host, here: Host, path: Path) -> None:
    """Refuse a table that was measured elsewhere; raises `InputError` with the field that differs."""
    for name in ("host", "torch", "threads", "device"):
        if (there := getattr(table, name)) != getattr(here, name):
            raise InputError(
                f"{path} was measured with {name} {there!r}; here it is {getattr(here, name)!r}. Calibrate into "
                "another file with -o."
            )


def step_costs(models: list[MeasuredModel]) -> StepCosts:
    """Fit the operators of all models, and judge every model's step by the others; raises `InputError` under 4."""
    if len(models) < 4:
        raise InputError(f"the table has {len(models)} models; at least 4 are needed. Run `headway cost calibrate` on.")
    ratios = []
    for model in models:
        others = _fit([other for other in models if other is not model])
        try:
            predicted_s = others.seconds(model.operators)
        except InputError:  # it alone has some operator
            continue
        ratios.append(model.step_s / float(predicted_s @ np.array(model.calls)))
    if not ratios:
        raise InputError("no model of the table shares its operators with the others. Run `headway cost calibrate` on.")
    return StepCosts(_fit(models), np.sort(ratios))


def _fit(models: list[MeasuredModel]) -> OperatorModel:
    operators = [op for model in models for op in model.operators]
    return OperatorModel(operators, np.array([seconds for model in models for seconds in model.seconds]))
