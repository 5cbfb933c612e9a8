"""What `headway run --verify` found: batches under remedies compared with the script's own, over all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.trace.recording.run_facts import outcomes_of

COUNTS = ("batches", "compared", "equal", "unequal")


def verified(path: Path) -> dict[str, Any] | None:
    """Return how many batches of the run at `path` remedies made, how many of them were compared, equal and unequal.

    `not_compared` says why some that were due were not. None where the run was not verified, or no remedy was applied.
    """
    found: dict[str, Any] = {**dict.fromkeys(COUNTS, 0), "not_compared": {}}
    facts = [row.facts for row in outcomes_of(path) if row.facts is not None and "verification" in row.facts]
    for fact in facts:
        for name in COUNTS:
            found[name] += int(fact["verification"][name])
        for reason, count in fact["not_compared"].items():
            found["not_compared"][reason] = found["not_compared"].get(reason, 0) + int(count)
    return found if facts else None


def withdrawn(path: Path) -> dict[str, str]:
    """Return remedy -> why it was taken away from a loader, or gave one back, while the run at `path` went on."""
    found: dict[str, dict[str, None]] = {}
    for row in outcomes_of(path):
        reasons = [(entry.dataset, entry.reason) for entry in row.decisions("withdrawn")]
        taken = set()
        for entry in row.decisions("loaders"):  # in the order of the decisions
            if entry.reason_not_applied is None:
                taken.add(entry.dataset)
            elif row.applied and entry.dataset in taken:
                reasons.append((entry.dataset, entry.reason_not_applied))
        for dataset, reason in reasons:
            found.setdefault(row.name, {})[f"{dataset}: {reason}"] = None
    return {name: "; ".join(reasons) for name, reasons in found.items()}
