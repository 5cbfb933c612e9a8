"""Which remedies were in force in a run, with which parameters: what `applied` of run.json says, read with care.

>>> row = {"name": "host.gc", "facts": {"every_steps": 100}, "reason_not_applied": None}
>>> in_force({"applied": [row, {"name": "data.cache", "reason_not_applied": "not pure"}, "damaged"]})
{'host.gc': {'every_steps': 100}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def in_force(meta: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return remedy -> its facts, for those that were applied and not withdrawn while the run went on."""
    rows = meta.get("applied")
    found = {}
    for row in rows if isinstance(rows, list) else ():
        facts = row.get("facts") if isinstance(row, Mapping) else None
        if not isinstance(facts, Mapping) or "name" not in row:
            continue  # the row of the whole plan, or one of an older run, which says no parameters
        if not (row.get("reason_not_applied") or row.get("withdrawn") or facts.get("withdrawn")):
            found[str(row["name"])] = dict(facts)
    return found
