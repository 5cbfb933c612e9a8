"""What a remedy is in a script's own terms: for a recording that no launcher began, as a notebook's.

`headway run --apply` runs a script under a plan. A notebook is no script, so what it can do is change the line itself.

>>> row = Proposal("data.workers", "data", ("workers=8",), 2.0, (1.9, 2.1), applies=True,
...                parameters={"num_workers": 8, "prefetch_factor": 2, "persistent_workers": True, "pin_memory": False})
>>> script_terms(row)
'DataLoader(..., num_workers=8, prefetch_factor=2, persistent_workers=True)'
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from headway.plan.proposal import Proposal

OF_REMEDY: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "data.workers": lambda given: call(
        "DataLoader", given, "num_workers", "prefetch_factor", "persistent_workers", "pin_memory"
    ),
    "data.threads": lambda given: call(
        "headway.data.DataLoader", {**given, "workers": "threads"}, "num_workers", "workers"
    ),
    "data.cache": lambda given: call("headway.data.DataLoader", {"cache_bytes": given.get("bytes")}, "cache_bytes"),
    "data.server": lambda given: call("headway.data.DataLoader", {"server": "auto"}, "server"),
    "comm.bucket": lambda given: call(
        "DistributedDataParallel", {"bucket_cap_mb": given.get("bucket_mb")}, "bucket_cap_mb"
    ),
    "comm.gradient_view": lambda given: call(
        "DistributedDataParallel", {"gradient_as_bucket_view": True}, "gradient_as_bucket_view"
    ),
    "comm.compress": lambda given: f"headway.comm.compress(model, {given.get('codec', 'half')!r})",
    "comm.static_graph": lambda given: call("DistributedDataParallel", {"static_graph": True}, "static_graph"),
    "host.gc": lambda given: f"gc.freeze() and gc.disable(), then gc.collect() every {given.get('every_steps')} steps",
    "host.logging": lambda given: (
        "q = queue.Queue(); logging.handlers.QueueListener(q, *log.handlers).start(); "
        "log.handlers = [logging.handlers.QueueHandler(q)]"
    ),
    "parallel.schedule": lambda given: "",  # torch has no public way to give a schedule another order
    "checkpoint.async": lambda given: "headway.Checkpointer(root, model=..., opt=...) in place of the save",
}  # fmt: skip
"""Remedy -> its parameters in the script's own terms."""


def script_terms(row: Proposal) -> str:
    """Return what to write for a proposal; '' where the cause's own advice says it already."""
    terms = OF_REMEDY.get(row.name)
    return "" if terms is None else terms(row.parameters)


def chosen_terms(proposals: Iterable[Proposal], chosen: Collection[str]) -> list[str]:
    """Return what to write for each of the `chosen` proposals that has terms of the script's own, in their order."""
    found = [script_terms(row) for row in proposals if row.name in chosen]
    return [terms for terms in found if terms]


def call(name: str, given: Mapping[str, Any], *keys: str) -> str:
    """Return a call with those of `keys` that are given and not False, beside what it has already.

    >>> call("f", {"a": 1, "b": False, "c": "x"}, "a", "b", "c", "d")
    "f(..., a=1, c='x')"
    """
    return f"{name}({', '.join(['...', *(f'{key}={given[key]!r}' for key in keys if given.get(key))])})"
