"""A folder that the PyTorch profiler filled -> one trace of all ranks.

Use it on what `tensorboard_trace_handler` leaves: a file per process and
window, `<worker>.<ns>.pt.trace.json(.gz)`, and on any several profiler files.
A file's rank is what its own `distributedInfo` says, unless that says that
the process is alone in its world; else what its name says (`rank3`, `r3-`);
else every process gets a rank of its own, in order of name, with a warning.
Processes are told apart by their worker's name, else by host and number of
the process, else by file. Several files of one rank are windows: their
correlation ids are kept apart. Times are int64 ns.

>>> [rank_in_name(name) for name in ("rank_3.17.pt.trace.json", "r2-w0.json.gz", "host_991.1700.pt.trace.json")]
[3, 2, None]
>>> worker_in_name("host_991.1700000000.pt.trace.json.gz")
'host_991'
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, pairwise

import numpy as np

from headway.core.errors import InputError
from headway.trace.events.content import Content
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND
from headway.trace.profiler import kineto

WINDOW_BITS = 32
"""Correlation ids of one window stay below this many bits; the number of the window stands above them."""

MOST_WINDOWS = 256

_log = logging.getLogger(__name__)


def rank_in_name(name: str) -> int | None:
    """Return the rank that a file's name tells, None when it tells none."""
    found = re.search(r"(?:^|[^a-zA-Z])rank[_-]?(\d{1,9})|^r(\d{1,9})-", name)
    return int(found[1] or found[2]) if found else None


def worker_in_name(name: str) -> str:
    """Return the name without the moment and the endings that the profiler's handler adds."""
    return re.sub(r"(\.\d{6,})?(\.pt)?(\.trace)?\.json(\.gz)?$", "", name)


def read(contents: Sequence[Content]) -> list[Trace]:
    """Read profiler files of one job, every row under its rank, in order of rank and time.

    Raises `InputError` when two files of one rank overlap in time: they cannot be windows of one process.
    """
    read = [kineto.parse_with_origin(content, str(content.path)) for content in contents]
    traces = [trace for trace, _ in read]
    names = [content.path.name for content in contents]
    ranks = _ranks([str(content.path) for content in contents], names, [origin for _, origin in read])
    windows: dict[int, list[tuple[Trace, str]]] = defaultdict(list)
    for trace, rank, name in zip(traces, ranks, names, strict=True):
        windows[rank].append((_under(trace, rank), name))
    return [trace for rank in sorted(windows) for trace in _apart(windows[rank], rank)]


def _ranks(paths: Sequence[str], names: Sequence[str], origins: Sequence[kineto.ProfiledProcess]) -> list[int]:
    """Return the rank of each file; a process that nothing tells the rank of gets one that no other has."""
    ranks = [
        rank_in_name(name) if origin.rank is None else origin.rank for name, origin in zip(names, origins, strict=True)
    ]
    guessed = [place for place, rank in enumerate(ranks) if rank is None]
    free = (rank for rank in count() if rank not in ranks)
    given: dict[object, int] = {}
    for place in sorted(guessed, key=lambda place: (names[place], paths[place])):
        process = _process(paths[place], names[place], origins[place])
        if process not in given:
            given[process] = next(free)
        ranks[place] = given[process]
    if len(given) > 1 or (given and len(given) < len(set(ranks))):
        first = min(names[place] for place in guessed)
        _log.warning("%d files, such as %s, tell no rank: ranks are given in order of name", len(guessed), first)
    return [rank for rank in ranks if rank is not None]


def _process(path: str, name: str, origin: kineto.ProfiledProcess) -> object:
    """Return what files of one process share, and no others as far as they tell."""
    if re.search(r"\.\d{6,}\.", name):
        return worker_in_name(name)  # the profiler's own handler: host and process stand before the moment
    return path if origin.process is None else (origin.host, origin.process)


def _under(trace: Trace, rank: int) -> Trace:
    """Return the trace of one file with all its rows under `rank`."""
    own = next(iter(trace.ranks))
    if own == rank:
        return trace
    events = {**trace.events, "rank": np.full(len(trace), rank, np.int32)}
    return replace(trace, events=events, ranks={rank: trace.ranks[own]})


def _apart(windows: list[tuple[Trace, str]], rank: int) -> list[Trace]:
    """Return the windows of one rank in order of time, each with correlation ids of its own."""
    windows.sort(key=lambda window: window[0].span_ns)
    for (before, first), (after, second) in pairwise(windows):
        if len(before) and len(after) and after.span_ns[0] < before.span_ns[1]:
            raise InputError(
                f"{first} and {second} both say they are rank {rank}, and overlap in time. Put the files of one job "
                "into the folder, or name them rank<n>.json so that they are told apart."
            )
    return [_numbered(trace, place) for place, (trace, _) in enumerate(windows)]


def _numbered(trace: Trace, window: int) -> Trace:
    """Return the trace with the number of its window above the correlation ids."""
    corr, seq = trace.events["corr"], trace.events["seq"]
    low = corr & ((1 << 40) - 1)  # Above stand the flags of `kineto_names`: which kind of id it is.
    if not window or window >= MOST_WINDOWS or bool((low[corr >= 0] >> WINDOW_BITS).any()):
        return trace
    awaits = (trace.events["kind"] == KIND["SYNC"]) & (seq >= 0)  # Their `seq` is the correlation of a record.
    added = window << WINDOW_BITS
    moved = {"corr": np.where(corr >= 0, corr + added, corr), "seq": np.where(awaits, seq + added, seq)}
    return replace(trace, events={**trace.events, **moved})
