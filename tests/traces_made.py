"""Traces made up: random ones for laws, and profiler JSON with known content."""

import json
from typing import Any

import numpy as np
from hypothesis import strategies as st

from headway.trace.events.trace import COLUMNS, Trace
from headway.trace.events.vocabulary import KINDS

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
"""Names with anything in them that UTF-8 can say."""

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def traces(draw: st.DrawFn, *, most: int = 12, wide: bool = True) -> Trace:
    """Random traces: every column over its whole range if `wide`, tables of any content."""
    n = draw(st.integers(0, most))
    names = draw(st.lists(TEXT, min_size=1, max_size=4, unique=True))
    lanes = draw(st.lists(TEXT, min_size=1, max_size=4, unique=True))
    columns: dict[str, Any] = {}
    for column, (dtype, blank) in COLUMNS.items():
        if column == "flops":
            values = st.floats(allow_nan=False, allow_infinity=False)
        elif wide and column not in ("start_ns", "duration_ns", "name", "lane", "kind"):
            bounds = np.iinfo(dtype)
            values = st.just(int(blank)) | st.integers(int(bounds.min), int(bounds.max))
        else:
            low, high = LIMITS.get(column, (-1, 5))
            values = st.integers(low, {"name": len(names) - 1, "lane": len(lanes) - 1}.get(column, high))
        columns[column] = np.array(draw(st.lists(values, min_size=n, max_size=n)), dtype=dtype)
    tables = st.dictionaries(TEXT, JSON_VALUES, max_size=2)
    return Trace.from_columns(
        columns, names=names, lanes=lanes, groups=draw(st.dictionaries(st.integers(0, 2**31 - 1), tables, max_size=2)),
        ranks=draw(st.dictionaries(st.integers(-1, 2**31 - 1), tables, max_size=2)), meta=draw(tables),
    )  # fmt: skip


LIMITS = {
    "start_ns": (0, 2**61), "duration_ns": (0, 2**60), "kind": (0, len(KINDS) - 1), "lane": (0, 0), "name": (-1, 0),
    "depth": (0, 5),
}  # fmt: skip
"""Column -> smallest and largest value drawn."""


def span(
    name: str, start_us: Any, duration_us: Any, *, lane: tuple[Any, Any] = (1, 1), cat: str = "cpu_op", **args: Any
):
    """Return a complete event."""
    place = {"pid": lane[0], "tid": lane[1]}
    return {"ph": "X", "cat": cat, "name": name, **place, "ts": start_us, "dur": duration_us, "args": args}


def profile(events: list[dict[str, Any]], **facts: Any) -> bytes:
    """Return profiler JSON."""
    return json.dumps({"schemaVersion": 1, **facts, "traceEvents": events}).encode()
