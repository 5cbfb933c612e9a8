"""`headway parallel bubbles RUN`: what a recorded pipeline waits, by kind, by rank and by reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text

from headway.core.units import format_fraction, format_seconds
from headway.parallel.advise import RecordedBubbles
from headway.report.paper import ScreenOptions, add_row, draw, grid, paragraph, title, uncut
from headway.verbs.shared.output import emit
from headway.verbs.shared.source import run_at

WORDS = {
    "transfers": "messages between stages",
    "unequal": "stages of unequal time",
    "order": "the order of forwards and backwards",
    "work": "the mean stage's work, and all else",
}
"""Reason -> how it is printed."""


def bubbles(run: Path | None = None, /, *, json: bool = False) -> int:
    """Show what the stages of a recorded pipeline wait for each other, and why.

    Example: `headway parallel bubbles headway-runs/train-1`

    Parameters
    ----------
    run
        A run folder; the newest one by default.
    json
        Print one JSON object (schema headway.bubbles/1) instead of text.
    """
    recorded = run_at(run)
    found = RecordedBubbles.of(recorded)
    answer = {
        "schema": "headway.bubbles/1", "step_s": found.step_s, "orders": list(found.orders),
        "kinds_s": {kind: list(values) for kind, values in found.kinds_s.items()}, "reasons_s": found.reasons_s,
    }  # fmt: skip
    emit(answer, lambda screen: _screen(answer, str(recorded.path), screen), as_json=json)
    return 0


def _screen(answer: dict[str, Any], source: str, screen: ScreenOptions) -> str:
    """Return the answer as text."""
    step_s, kinds = answer["step_s"], answer["kinds_s"]
    waits = grid("left", *["right"] * (len(kinds) + 1))
    add_row(waits, "stage", *(kind.replace("_", " ") for kind in kinds), "of a step", style="dim")
    for stage in range(len(answer["orders"])):
        own = [values[stage] for values in kinds.values()]
        add_row(waits, str(stage), *map(format_seconds, own), format_fraction(sum(own) / step_s))
    why = grid("right", "right", "left")
    for reason, seconds in answer["reasons_s"].items():
        add_row(why, format_seconds(seconds), format_fraction(seconds / step_s), WORDS[reason])
    listing = grid("left", "left")
    for stage, order in enumerate(answer["orders"]):
        add_row(listing, str(stage), order)
    orders = uncut(listing)
    return draw(
        [
            title("headway parallel bubbles", f"{source} · {format_seconds(step_s)} per step", width=screen["width"]),
            Text(),
            paragraph("Waits for other stages, per step"),
            waits,
            Text(),
            paragraph("What a step is made of: replayed without one after another"),
            why,
            Text(),
            orders,
        ],
        **screen,
    )
