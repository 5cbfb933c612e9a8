"""The plan file: which remedies a run applies, with what parameters and what predicted gain.

Written by the planner, read by the start-up code of every rank before the
script runs: it imports the standard library only. One JSON object, replaced
atomically.

>>> plan = PlanFile((Remedy("data.workers", {"num_workers": 2}, predicted_speedup=1.8, interval=(1.6, 1.9)),))
>>> PlanFile.from_json(plan.to_json()) == plan
True
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import check_replaceable, read_json, whole_file

SCHEMA = "headway.plan-file/1"
"""Value of the key "schema"."""

ALLOWANCES: tuple[str, ...] = ("result-equivalent", "lossy", "data.threads")
"""What a remedy may ask of the user (`--allow`), each by its own name: none of them implies another.

`result-equivalent`, or in plainer words `same-distribution`: the same distribution of results, but not the same random
draws. `lossy`: an approximation, such as compressed gradients or a lower precision, which changes results.
`data.threads`: code of the dataset runs in threads beside the training loop, and finds the same objects.
"""

ALSO_CALLED = {"same-distribution": "result-equivalent"}
"""Another name of a grant -> the grant."""


def granted(allow: str | None) -> tuple[str, ...]:
    """Return the grants of a comma list, in the order of `ALLOWANCES`. Raises `InputError` on an unknown one.

    >>> granted("lossy, result-equivalent"), granted(None)
    (('result-equivalent', 'lossy'), ())
    """
    words = [] if allow is None else [ALSO_CALLED.get(word.strip(), word.strip()) for word in allow.split(",")]
    unknown = [word for word in words if word not in ALLOWANCES]
    if unknown:
        spoken = {grant: name for name, grant in ALSO_CALLED.items()}
        names = " or ".join(spoken.get(grant, grant) for grant in ALLOWANCES)
        raise InputError(
            f"--allow is {allow!r}; {unknown[0]!r} is unknown: choose {names}, separated by commas, or drop it."
        )
    return tuple(word for word in ALLOWANCES if word in words)


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change to a run."""

    name: str
    """Room and remedy, as in the catalogue: "data.workers"."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Keyword -> JSON value, for the function that applies it."""

    predicted_speedup: float | None = None
    """Predicted step time before / after, of this remedy alone; None = unknown."""

    interval: tuple[float, float] | None = None
    """Lower and upper bound of `predicted_speedup`."""

    allow: str | None = None
    """Entry of `ALLOWANCES` that the user must grant; None = results stay the same bit for bit."""

    def __post_init__(self) -> None:
        """Check the fields; raises `InputError`."""
        if not self.name or not isinstance(self.name, str):
            raise InputError(f"a remedy is named {self.name!r}; give it a name like 'data.workers'.")
        if not isinstance(self.parameters, Mapping) or not all(isinstance(key, str) for key in self.parameters):
            raise InputError(f"parameters of {self.name} are {self.parameters!r}; pass a mapping with string keys.")
        _check_speedups(self.name, self.predicted_speedup, self.interval)
        if isinstance(self.allow, str):
            object.__setattr__(self, "allow", ALSO_CALLED.get(self.allow, self.allow))
        if self.allow is not None and self.allow not in ALLOWANCES:
            raise InputError(f"{self.name} asks for --allow {self.allow!r}; choose one of: {', '.join(ALLOWANCES)}.")


@dataclass(frozen=True, slots=True)
class PlanFile:
    """An ordered set of remedies; none of them twice."""

    remedies: tuple[Remedy, ...] = ()
    """In the order in which they are applied."""

    schema: str = SCHEMA
    """Version of the format."""

    predicted_speedup: float | None = None
    """Predicted step time before / after, all remedies together; None = unknown."""

    interval: tuple[float, float] | None = None
    """Lower and upper bound of `predicted_speedup`."""

    baseline: str | None = None
    """Run folder that the plan was made from, for the comparison afterwards."""

    step_s: float | None = None
    """Seconds of an optimizer step in that run, as `headway.plan.setup` tells it; None = unknown, as in older plans."""

    def __post_init__(self) -> None:
        """Check the schema and that no remedy comes twice; raises `InputError`."""
        object.__setattr__(self, "remedies", tuple(self.remedies))
        if self.schema != SCHEMA:
            raise InputError(
                f"the plan's schema is {self.schema!r}, this headway reads {SCHEMA!r}. Make the plan again."
            )
        _check_speedups("the plan", self.predicted_speedup, self.interval)
        if self.step_s is not None and not _is_positive(self.step_s):
            raise InputError(f"the plan's step_s is {self.step_s!r}; write a finite number > 0, or leave it out.")
        if self.baseline is not None and not isinstance(self.baseline, str):
            raise InputError(f"the plan's baseline is {self.baseline!r}; write the path of a run folder, or null.")
        names = [remedy.name for remedy in self.remedies]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(f"the plan holds {', '.join(twice)} more than once; keep one of each.")

    def to_json(self) -> dict[str, object]:
        """Return the JSON object of the file."""
        return {
            "schema": self.schema,
            "predicted_speedup": self.predicted_speedup,
            "interval": None if self.interval is None else list(self.interval),
            "baseline": self.baseline,
            "step_s": self.step_s,
            "remedies": [
                {
                    "name": remedy.name,
                    "parameters": dict(remedy.parameters),
                    "predicted_speedup": remedy.predicted_speedup,
                    "interval": None if remedy.interval is None else list(remedy.interval),
                    "allow": remedy.allow,
                }
                for remedy in self.remedies
            ],
        }

    @classmethod
    def from_json(cls, content: object) -> PlanFile:
        """Build a plan from a decoded JSON object; raises `InputError` on anything that is not one."""
        if not isinstance(content, dict) or not isinstance(content.get("remedies"), list):
            raise InputError('a plan is an object with a list "remedies". Write one with `headway plan RUN -o FILE`.')
        remedies = tuple(_remedy(row) for row in content["remedies"])
        return cls(
            remedies,
            schema=content.get("schema", ""),
            predicted_speedup=content.get("predicted_speedup"),
            interval=_interval(content.get("interval"), "the plan"),
            baseline=content.get("baseline"),
            step_s=content.get("step_s"),
        )


def read_plan(path: str | os.PathLike[str]) -> PlanFile:
    """Read a plan file. Raises `InputError` when it is missing, `FormatError` (with the place) when it is no plan."""
    try:
        content = read_json(path, fix="Write a plan with `headway plan RUN -o FILE`.")
    except OSError as cause:
        raise InputError(
            f"cannot read the plan {path}: {cause.strerror}. Write one with `headway plan RUN`."
        ) from cause
    try:
        return PlanFile.from_json(content)
    except InputError as cause:
        raise FormatError(f"{path}: {cause}") from cause


def write_plan(plan: PlanFile, path: str | os.PathLike[str]) -> None:
    """Write a plan file; a reader sees the old one or the new one, never a part. Raises `InputError` if it cannot."""
    try:
        text = json.dumps(plan.to_json(), indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as cause:
        raise InputError(f"a parameter of the plan is no JSON value ({cause}); use numbers, strings, lists.") from cause
    try:
        check_replaceable(path, b"{", "plan")
        with whole_file(Path(path)) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as cause:
        raise InputError(
            f"cannot write the plan {path}: {cause.strerror}. Choose a folder that can be written."
        ) from cause


def _check_speedups(of: str, predicted: object, interval: Sequence[object] | None) -> None:
    """Raise `InputError` where a predicted speedup or its bounds are no finite numbers above 0, or out of order."""
    bounds: list[Any] = [] if interval is None else list(interval)
    numbers = bounds if predicted is None else [predicted, *bounds]
    if not all(map(_is_positive, numbers)):
        raise InputError(f"the speedups of {of} are {repr(numbers)[:80]}; write finite numbers > 0.")
    if interval is not None and not (len(bounds) == 2 and bounds[0] <= bounds[1]):
        raise InputError(f"the interval of {of} is {bounds}; write [low, high] with low <= high.")


def _is_positive(value: Any) -> bool:
    """Say whether a JSON value is a number above 0 that a double can hold."""
    return _is_number(value) and 0 < value <= sys.float_info.max


def _is_number(value: object) -> bool:
    """Say whether a JSON value is a number (bool is not)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _remedy(row: object) -> Remedy:
    """Build one remedy from its JSON object."""
    if not isinstance(row, dict) or "name" not in row:
        raise InputError(f'a remedy is {row!r}; write an object with at least "name".')
    unknown = sorted(set(row) - set(Remedy.__dataclass_fields__))
    if unknown:
        raise InputError(f"remedy {row['name']} has unknown keys: {', '.join(map(str, unknown))}. Remove them.")
    return Remedy(**{**row, "interval": _interval(row.get("interval"), row["name"])})


def _interval(value: object, of: str) -> tuple[float, float] | None:
    """Read [low, high] or null."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(map(_is_number, value)):
        raise InputError(f"the interval of {of} is {value!r}; write [low, high].")
    return value[0], value[1]
