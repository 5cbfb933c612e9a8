"""How buckets are coloured and the figures of an answer are said, on every screen and page.

One place decides, so that the terminal and the HTML report never disagree; digits are those of `headway.core.units`.

>>> bucket_style("input").light, bucket_style("a newer one") is UNKNOWN_STYLE
('#db7b16', True)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.core.units import clean, finite, magnitude, percent
from headway.report.answers import RunAnswer
from headway.why.answer import Why


@dataclass(frozen=True, slots=True)
class BucketStyle:
    """How one bucket of the ledger is coloured, everywhere."""

    light: str
    """Colour on a light page, `#rrggbb`."""

    dark: str
    """Colour on a dark page, `#rrggbb`."""

    ansi: int
    """Colour of a 256-colour terminal, readable on both backgrounds."""

    hatched: bool = False
    """Drawn with stripes: tells greys and wines apart without relying on hue."""


BUCKET_STYLES: dict[str, BucketStyle] = {
    "useful": BucketStyle("#328ad4", "#4290dc", 68),
    "eval": BucketStyle("#7828e6", "#dca0fa", 141, hatched=True),
    "input": BucketStyle("#db7b16", "#f78f13", 208),
    "comm": BucketStyle("#f7c512", "#fed967", 178),
    "bubble": BucketStyle("#43c4e7", "#91e9f0", 80),
    "straggler": BucketStyle("#cd2b0b", "#e44f2e", 160),
    "checkpoint": BucketStyle("#772698", "#933da9", 133),
    "startup": BucketStyle("#979797", "#7e8084", 103),
    "restart": BucketStyle("#3b444d", "#56595d", 242),
    "rework": BucketStyle("#4b1b2a", "#63383c", 89, hatched=True),
    "host": BucketStyle("#317860", "#8bbc92", 35),
    "idle": BucketStyle("#dee1e3", "#2e2e2e", 248),
    "unknown": BucketStyle("#aaafb5", "#676d75", 245, hatched=True),
}
"""Bucket -> style, in the ledger's order. Colours keep apart under the three common colour deficiencies (tested)."""

UNKNOWN_STYLE = BUCKET_STYLES["unknown"]


def bucket_style(bucket: str) -> BucketStyle:
    """Return the style of a bucket, that of `unknown` for a name from a newer ledger."""
    return BUCKET_STYLES.get(bucket, UNKNOWN_STYLE)


def operation_lines(why: Why) -> list[str]:
    """Return MFU by the operations that were counted, beside the peaks of the dtype in use and of the fastest one."""
    row = why.compute
    if row.flops_per_step is None or not row.flops_per_s:
        return []
    done = f"{magnitude(row.flops_per_s)}FLOP/s per rank, {magnitude(row.flops_per_step)}FLOP a step"
    if row.mfu is None or not row.peak_flops_per_s:
        return [f"Operations by shapes: {done}; no peak of {clean(row.dtype)} is listed for {clean(row.device)}"]
    best = ""
    if row.best_flops_per_s and row.best_dtype != row.dtype:
        of_best = percent(row.flops_per_s / row.best_flops_per_s)
        best = f"; {of_best} of the {magnitude(row.best_flops_per_s)}FLOP/s that it has in {clean(row.best_dtype)}"
    peak = f"{magnitude(row.peak_flops_per_s)}FLOP/s in {clean(row.dtype)} of {clean(row.device)}"
    return [f"MFU {percent(row.mfu)} of the {peak}{best}; {done}, by shapes"]


TILES = {"wide": 8, "middle": 6, "narrow": 4}
"""The largest number of figures in a row, by the width of the page (page.css)."""


def columns(num_tiles: int, limit: int) -> int:
    """Return how many tiles, at most `limit`, a row takes so that no row is much shorter than the others.

    >>> [columns(9, limit) for limit in TILES.values()]
    [5, 5, 3]
    """
    return math.ceil(num_tiles / max(1, math.ceil(num_tiles / limit)))


def goodput_of(facts: Why | RunAnswer) -> str:
    """Write the goodput of a run, and that of its steps where start-up and the like make it another; '' without it.

    >>> goodput_of(Why(goodput=0.388, step_goodput=0.91)), goodput_of(Why(goodput=0.9, step_goodput=0.91))
    ('goodput 38.8 % (in its steps 91.0 %)', 'goodput 90.0 %')
    """
    whole, steps = finite(facts.goodput), finite(facts.step_goodput)
    if whole is None:
        return ""
    apart = steps is not None and steps - whole >= STARTS_SHOW
    return f"goodput {percent(whole)}" + (f" (in its steps {percent(steps)})" if apart else "")


STARTS_SHOW = 0.05
"""Difference of the goodput of a run and that of its steps from which both are said."""
