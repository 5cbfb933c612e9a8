"""What `headway run --verify` found: batches under remedies compared with the script's own, over all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.trace.recording.assemble import json_object

COUNTS = ("batches", "compared", "equal", "unequal")


def verified(path: Path) -> dict[str, Any] | None:
    """Return how many batches of the run at `path` remedies made, how many of them were compared, equal and unequal.

    `not_compared` says why some that were due were not. None where the run was not verified, or no remedy was applied.
    """
    found: dict[str, Any] = {**dict.fromkeys(COUNTS, 0), "not_compared": {}}
    facts = [row["facts"] for row in _rows(path) if "verification" in row.get("facts", {})]
    for fact in facts:
        for name in COUNTS:
            found[name] += int(fact["verification"][name])
        for reason, count in fact["not_compared"].items():
            found["not_compared"][reason] = found["not_compared"].get(reason, 0) + int(count)
    return found if facts else None


def withdrawn(path: Path) -> dict[str, str]:
    """Return remedy -> why it was taken away from a loader, or gave one back, while the run at `path` went on."""
    found: dict[str, dict[str, None]] = {}
    for row in _rows(path):
        facts = row.get("facts", {})
        for entry in facts.get("withdrawn", ()):
            found.setdefault(row["name"], {})[f"{entry['dataset']}: {entry['reason']}"] = None
        taken = set()
        for entry in facts.get("loaders", ()):  # in the order of the decisions
            if "reason_not_applied" not in entry:
                taken.add(entry.get("dataset"))
            elif row.get("applied") and entry.get("dataset") in taken:
                found.setdefault(row["name"], {})[f"{entry['dataset']}: {entry['reason_not_applied']}"] = None
    return {name: "; ".join(reasons) for name, reasons in found.items()}


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the entries of RUN/applied, rank by rank."""
    files = sorted((path / "applied").glob("r*.json"))
    return [row for file in files for row in json_object(file).get("remedies", [])]
