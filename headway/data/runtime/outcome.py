"""What became of a remedy, loader by loader: known only when each loader is first read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headway.runtime.remedy import Applied, Context, Refused

Report = Callable[[Mapping[str, Any]], None]
"""Takes the facts of one decision; 'reason_not_applied' among them means that a loader was left alone."""


def reporter(name: str, parameters: Mapping[str, Any], context: Context) -> Report:
    """Return the function that keeps the outcome of remedy `name` up to date.

    The remedy counts as applied as soon as one loader takes it; it is refused while all have been left alone.
    """
    decisions: list[dict[str, Any]] = []

    def report(facts: Mapping[str, Any]) -> None:
        if facts in decisions:
            return  # a loader made anew for each epoch: nothing new to say, and nothing to keep
        decisions.append(dict(facts))
        reasons = [fact["reason_not_applied"] for fact in decisions if "reason_not_applied" in fact]
        if len(reasons) < len(decisions):
            context.note(Applied(name, {**parameters, "loaders": decisions}))
        else:
            context.note(Refused(name, "; ".join(dict.fromkeys(reasons))))

    return report
