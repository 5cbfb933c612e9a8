"""The small tables of a trace as plain values, ready for JSON.

Use it in a writer: what it returns holds only text, numbers, lists and dicts
with text keys, so that reading it back gives equal tables. Nothing is changed
silently: what has no JSON form is refused.

>>> plain_tables(Trace.from_columns({}, groups={0: {"name": "dp", "ranks": [0, 1]}}))["groups"]
{'0': {'name': 'dp', 'ranks': [0, 1]}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headway.core.errors import InputError
from headway.trace.events.trace import Trace


def plain_tables(trace: Trace) -> dict[str, Any]:
    """Return lanes, groups, ranks and meta; the numbers that key groups and ranks become text.

    Raises `InputError` on a value without a JSON form and on a key that is no text.
    """
    return {
        "lanes": list(trace.lanes),
        "groups": {str(key): _plain(value, f"groups[{key}]") for key, value in trace.groups.items()},
        "ranks": {str(key): _plain(value, f"ranks[{key}]") for key, value in trace.ranks.items()},
        "meta": _plain(trace.meta, "meta"),
    }


def numbered(table: Mapping[str, Any]) -> dict[int, Any]:
    """Undo the text keys of groups and ranks."""
    return {int(key): value for key, value in table.items()}


def _plain(value: object, where: str) -> Any:
    """Return one value in JSON's terms."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InputError(f"{where} has the key {key!r}; JSON keys are text. Write it as {str(key)!r}.")
        return {key: _plain(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist(), where)
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise InputError(
        f"{where} is a {type(value).__name__}, which has no JSON form. Keep to text, numbers, lists and dicts."
    )
