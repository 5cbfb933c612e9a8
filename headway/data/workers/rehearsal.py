"""What the remedies of the data room would say of a loader, asked while it is recorded: then no plan proposes more.

The functions that decide are those that decide when a remedy is applied, so the two agree. Random draws that workers
make from the generators that torch seeds are left out here: recorded facts name them, and the user may allow them.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader

from headway.core.units import NS_PER_S
from headway.data.guard.cache_trial import uncacheable
from headway.data.guard.decisions import look_s
from headway.data.guard.trial import run_delay_ns, waited_ns
from headway.data.workers.apply import untunable
from headway.data.workers.torch_threads import barred, different


def rehearse(loader: DataLoader[Any]) -> dict[str, str | float]:
    """Return the fields of `trace.events.loader_facts.Rehearsal`; takes 0.1 to 0.5 s, in forked children mostly."""
    processes, processes_s = _timed(lambda: untunable(loader, may_draw=True))
    threads, threads_s = _timed(lambda: barred(loader) or different(loader))
    cache, cache_s = _timed(lambda: uncacheable(loader)[0])
    return {
        "processes": processes or "", "processes_s": processes_s, "threads": threads or "", "threads_s": threads_s,
        "cache": cache or "", "cache_s": cache_s, "look_s": look_s((loader.dataset, loader.collate_fn)),
    }  # fmt: skip


def _timed(decide: Callable[[], str | None]) -> tuple[str | None, float]:
    """Return what `decide` says, and its seconds without what it waited for a core beside training."""
    begin, waited = perf_counter(), waited_ns[0] + run_delay_ns()
    found = decide()
    delay_s = (waited_ns[0] + run_delay_ns() - waited) / NS_PER_S
    return found, max(perf_counter() - begin - delay_s, 0.0)
