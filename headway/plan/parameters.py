"""What the parameters of a plan's remedies may be: checked where a plan file is read, before anything starts.

A plan file may have been written by hand. Without this a wrong value would
only be found inside the ranks, where it costs the run its remedy.

>>> from headway.core.files.planfile import PlanFile, Remedy
>>> plan = PlanFile((Remedy("data.workers", {"num_workers": 2}),))
>>> check_parameters(plan, {"data.workers": {"num_workers": "count"}})
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from headway.core.errors import InputError
from headway.core.files.planfile import PlanFile
from headway.core.tables import pick
from headway.cost.codecs import read_codec


def _is_codec(name: object) -> bool:
    """Tell whether `name` says a codec of gradients."""
    try:
        read_codec(name)  # type: ignore[arg-type]  # what is no text is refused by it
    except InputError:
        return False
    return True


def check_parameters(plan: PlanFile, known: Mapping[str, Mapping[str, str]]) -> None:
    """Raise `InputError` for a parameter that its remedy does not know, or whose value is of another kind.

    `known` is remedy -> parameter -> entry of `KINDS`; a remedy that it does not list is not checked.
    """
    for remedy in plan.remedies:
        kinds = known.get(remedy.name)
        for name, value in remedy.parameters.items() if kinds is not None else ():
            kind = pick(kinds or {}, name, f"parameter of {remedy.name}")
            fits, rule = pick(KINDS, kind, "kind of parameter")
            if not fits(value):
                raise InputError(
                    f"{name} of {remedy.name} is {value!r}; it must be {rule}. Mend it in the plan, or make it anew "
                    "with `headway plan RUN`."
                )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "count": (lambda value: _is_whole(value) and value >= 0, "a whole number from 0 upwards"),
    "size": (lambda value: _is_whole(value) and value >= 1, "a whole number from 1 upwards"),
    "number": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "numbers": (
        lambda value: isinstance(value, list) and bool(value) and all(_is_number(one) and one > 0 for one in value),
        "a list of numbers above 0",
    ),
    "names": (
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "a list of names",
    ),
    "name": (lambda value: isinstance(value, str), "a name"),
    "codec": (
        lambda value: all(map(_is_codec, value.values() if isinstance(value, dict) else [value])) and bool(value),
        "a codec such as 'topk:0.01', or patterns over parameter names with a codec each",
    ),
    "flag": (lambda value: isinstance(value, bool), "true or false"),
}
"""Kind of a parameter -> whether a JSON value is of it, and the rule in words."""
