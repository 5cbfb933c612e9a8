"""One record per remedy: what its parameters may be, which causes it acts against, its grant, and what applies it.

A room lists its records in `remedies.py`, which imports no torch: the command
reads them to check a plan before anything starts, and every rank reads them to
apply it. To add a remedy is to add a record, a function that proposes it
(`advise.py`) and a function that applies it.

>>> class Cache(Parameters):
...     bytes: Size
>>> record = RemedyRecord("data.cache", Cache, "headway.data.cached.apply:cache", ("input.fetch",))
>>> record.read({"bytes": 4096})
Cache(bytes=4096)
>>> record.read({"bytes": 0})
Traceback (most recent call last):
headway.core.errors.InputError: bytes of data.cache is 0; it must be a whole number from 1 upwards. Fix it in the \
plan, or regenerate it: headway plan RUN.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta

from headway.core.errors import InputError
from headway.core.tables import pick, resolved

Count = Annotated[int, Meta(ge=0, description="a whole number from 0 upwards")]
Size = Annotated[int, Meta(ge=1, description="a whole number from 1 upwards")]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max, description="a number above 0")]
Sizes = Annotated[list[Positive], Meta(min_length=1, description="a list of numbers above 0")]
Names = Annotated[list[str], Meta(description="a list of names")]
Flag = Annotated[bool, Meta(description="true or false")]


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a remedy can be told, as a plan file says it; a field without a default must be given.

    A rule between fields stands in `__post_init__`, which raises `InputError`.
    """

    def to_json(self) -> dict[str, Any]:
        """Return the fields that have a value, for the outcome in RUN/applied."""
        return {name: value for name, value in msgspec.to_builtins(self).items() if value is not None}


class NoParameters(Parameters, frozen=True):
    """Of a remedy that is applied or not."""


@dataclass(frozen=True, slots=True)
class RemedyRecord:
    """A remedy as the room that has it declares it."""

    name: str
    """Room and remedy: "data.workers"."""

    parameters: type[Parameters] = NoParameters
    """What a plan may tell it."""

    apply: str | None = None
    """"module:function" that applies it inside a rank, called with (parameters, context); None: it is only predicted.
    Returns `headway.runtime.in_rank.remedy.Applied` or `RefusedRemedy`."""

    causes: tuple[str, ...] = ()
    """Causes that it acts against."""

    allow: str | None = None
    """Entry of `planfile.ALLOWANCES` without which it is never applied; None: it asks for one where it needs it."""

    conflicts: tuple[str, ...] = ()
    """Remedies beside which it cannot be applied."""

    changes: str = ""
    """What needs the grant, as a refusal says it."""

    @property
    def asks(self) -> str:
        """What a refusal for want of the grant says."""
        return f"{self.changes}: grant --allow {self.allow}"

    def read(self, given: Mapping[str, Any]) -> Parameters:
        """Return the parameters in a plan. Raises `InputError` for an unknown or missing one, or a wrong value."""
        fields = {field.name: field for field in msgspec.structs.fields(self.parameters)}
        if given and not fields:
            raise InputError(f"{self.name} takes no parameters, but the plan gives {sorted(given)}. Remove them.")
        values = {}
        for name, value in given.items():
            kind = pick(fields, name, f"parameter of {self.name}").type
            try:
                values[name] = msgspec.convert(value, kind)
            except msgspec.ValidationError as cause:
                raise InputError(
                    f"{name} of {self.name} is {value!r}; it must be {_rule(kind)}. Fix it in the plan, or "
                    "regenerate it: headway plan RUN."
                ) from cause
        for name, field in fields.items():
            if field.required and name not in given:
                raise InputError(
                    f"{name} of {self.name} is missing; it must be {_rule(field.type)}. Write it into the plan, or "
                    "regenerate it: headway plan RUN."
                )
        return self.parameters(**values)


def record_at(place: str, name: str) -> RemedyRecord:
    """Return the record called `name` in the tuple that `place`, "module:attribute", says."""
    records: tuple[RemedyRecord, ...] = resolved(place)
    return next(record for record in records if record.name == name)


def _rule(kind: Any) -> str:
    """Return what a value of this type must be, in words."""
    if get_origin(kind) is Annotated:
        return next(meta.description for meta in get_args(kind)[1:] if isinstance(meta, Meta) and meta.description)
    rules = [_rule(one) for one in get_args(kind) if one is not type(None)]
    return " or ".join(rules) or getattr(kind, "__name__", str(kind))
