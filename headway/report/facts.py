"""The facts of a run as a page shows them: what ran where, and when it began.

From run.json, whose secrets were replaced when it was written.

>>> created(RunFacts()), created(RunFacts(realtime_ns=86_400_000_000_000))
('', '1970-01-02 00:00 UTC')
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from headway.core.units import NS_PER_S, format_bytes
from headway.trace.events.trace import Trace
from headway.trace.recording.run_facts import RunFacts


def facts_of(meta: dict[str, Any], trace: Trace | None) -> dict[str, Any]:
    """Return the facts at the foot of the page."""
    facts: dict[str, Any] = {"script": " ".join(map(str, meta.get("script") or []))} if meta else {}
    wanted = ("host", "device_type", "cores", "world_size", "headway_version", "dropped", "run_id")
    facts |= {key: meta[key] for key in wanted if meta.get(key) is not None}
    if isinstance(meta.get("bytes_per_step"), (int, float)):
        facts["events written"] = f"{format_bytes(meta['bytes_per_step'])} per step"
    loaders = meta.get("loaders")
    facts |= {f"loader {name}": row for name, row in (loaders if isinstance(loaders, dict) else {}).items()}
    if not meta and trace is not None:
        facts |= {key: trace.meta[key] for key in ("source", "device_type", "world_size") if key in trace.meta}
    return facts


def created(facts: RunFacts) -> str:
    """Return when the run started, as text."""
    if not facts.realtime_ns:
        return ""
    try:
        return datetime.fromtimestamp(facts.realtime_ns / NS_PER_S, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):  # no time that a clock has shown
        return ""
