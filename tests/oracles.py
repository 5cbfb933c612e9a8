"""Slow, obvious twins of the compiled kernels: plain Python, written for reading, used as the truth in tests.

Each takes edges as a list of (source, target, lag) and durations as a list.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from headway.data.pipeline.optimize import Op

Edge = tuple[int, int, int]


def with_lanes(n: int, edges: Sequence[Edge], lane: Sequence[int]) -> list[Edge]:
    """Add an edge between neighbours of each lane, in index order."""
    chained = list(edges)
    for wanted in set(lane) - {-1}:
        members = [op for op in range(n) if lane[op] == wanted]
        chained += [(a, b, 0) for a, b in itertools.pairwise(members)]
    return chained


def grouped(num_rows: int, row: Sequence[int], value: Sequence[int]) -> list[list[int]]:
    """Return the values of each row, in the order given: the twin of `csr`."""
    return [[v for r, v in zip(row, value, strict=True) if r == wanted] for wanted in range(num_rows)]


def topological(n: int, edges: Sequence[Edge]) -> list[int] | None:
    """Return some topological order, or None when there is a cycle: the twin of `compile_order`."""
    order: list[int] = []
    left = set(range(n))
    while left:
        blocked = {target for source, target, _ in edges if source in left}
        ready = sorted(left - blocked)
        if not ready:
            return None
        order += ready
        left -= set(ready)
    return order


def replay(n: int, edges: Sequence[Edge], duration: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return (start, end): the twin of `longest_path`. `edges` already hold the lane order."""
    start: list[float] = [0] * n
    end: list[float] = [0] * n
    order = topological(n, edges)
    assert order is not None
    into: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    for source, target, lag in edges:
        into[target].append((source, lag))
    for op in order:
        start[op] = max([end[source] + lag for source, lag in into[op]], default=0)
        end[op] = start[op] + duration[op]
    return start, end


def longest_walk(n: int, edges: Sequence[Edge], duration: Sequence[float]) -> float:
    """Return the makespan by trying every walk: exponential, and obviously right."""
    onward: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    for source, target, lag in edges:
        onward[source].append((target, lag))

    def after(op: int) -> float:
        return duration[op] + max([lag + after(target) for target, lag in onward[op]], default=0)

    return max([after(op) for op in range(n)], default=0)


def slack(n: int, edges: Sequence[Edge], duration: Sequence[int]) -> list[int]:
    """Return how much longer each op may run before the makespan moves, by trying: the twin of `latest_end`."""
    makespan = max(replay(n, edges, duration)[1], default=0)
    spare = []
    for op in range(n):
        longer = list(duration)
        longer[op] += 10**6
        spare.append(int(makespan - (max(replay(n, edges, longer)[1]) - 10**6)))
    return spare


def attribute(
    n: int,
    edges: Sequence[Edge],
    base: Sequence[int],
    ideal: Sequence[int],
    code: Sequence[int],
    finish: Sequence[int],
    component: Sequence[int],
    keep: bool,
) -> list[list[float]]:
    """Replay every column on its own: the twin of `attribute_columns`."""
    num_groups = max(code, default=-1) + 1
    yes, no = (base, ideal) if keep else (ideal, base)
    columns = [[yes[op] if code[op] == g else no[op] for op in range(n)] for g in range(num_groups)]
    columns += [list(base), list(ideal)]
    ends = [replay(n, edges, column)[1] for column in columns]
    return [
        [max(end[op] for op in finish if component[op] == c) for end in ends] for c in range(max(component) + 1)
    ]  # fmt: skip


def list_schedule(
    n: int,
    edges: Sequence[Edge],
    lane: Sequence[int],
    capacity: Sequence[int],
    priority: Sequence[float],
    duration: Sequence[int],
    order: str = "priority,ready,index",
) -> tuple[list[int], list[int]]:
    """Return (start, end) by looking at every op at every instant: the twin of `list_schedule`."""
    start: list[int | None] = [None] * n
    end: list[int | None] = [None] * n
    done = [False] * n
    now = 0

    def ready(op: int) -> int | None:
        into = [(source, lag) for source, target, lag in edges if target == op]
        if not all(done[source] for source, _ in into):
            return None
        return max([int(end[source] or 0) + lag for source, lag in into], default=0)

    def rank(op: int) -> tuple[float, ...]:
        words = {"priority": priority[op], "ready": ready(op) or 0, "index": op}
        return tuple(words[word] for word in order.split(","))

    while not all(done):
        changed = True
        while changed:  # settle: what ends now, and what starts now without a lane
            changed = False
            for op in range(n):
                if not done[op] and end[op] is not None and int(end[op] or 0) <= now:
                    done[op] = changed = True
            for op in range(n):
                when = ready(op)
                if lane[op] < 0 and start[op] is None and when is not None and when <= now:
                    start[op], end[op], changed = now, now + duration[op], True
        started = False
        for on in set(lane) - {-1}:
            waiting = [op for op in range(n) if lane[op] == on and start[op] is None]
            waiting = sorted((op for op in waiting if (when := ready(op)) is not None and when <= now), key=rank)
            running = sum(lane[op] == on and start[op] is not None and not done[op] for op in range(n))
            for op in waiting[: capacity[on] - running]:
                start[op], end[op], started = now, now + duration[op], True
        if not started and not all(done):
            ends = [int(end[op] or 0) for op in range(n) if end[op] is not None and not done[op]]
            readies = [when for op in range(n) if start[op] is None and (when := ready(op)) is not None]
            now = min(t for t in ends + readies if t > now)
    return [int(s or 0) for s in start], [int(e or 0) for e in end]


def smoothed(power, step_s, floor_w, up_w_per_s, down_w_per_s, hold_s):
    """Return what a device with a floor and ramps draws, sample by sample."""
    output, since = [], math.inf
    for asked in power:
        since = 0 if asked > 0.5 * floor_w else since + 1
        target = max(asked, floor_w) if since <= (math.inf if hold_s == math.inf else round(hold_s / step_s)) else asked
        if output and target > output[-1] + up_w_per_s * step_s:
            target = output[-1] + up_w_per_s * step_s
        elif output and target < output[-1] - down_w_per_s * step_s:
            target = output[-1] - down_w_per_s * step_s
        output.append(target)
    return output


def stored(power, step_s, capacity_j, limit_w, tau_s, efficiency):
    """Return what the grid delivers and the charge of a battery that starts half full, sample by sample."""
    keep, pull = math.exp(-step_s / tau_s), 1 / (20 * tau_s)
    slow, charge, grid, charges = power[0], capacity_j / 2, [], []
    for asked in power:
        slow = keep * slow + (1 - keep) * asked
        flow = min(max(slow + (capacity_j / 2 - charge) * pull - asked, -limit_w, -asked), limit_w)
        if flow > 0:
            flow = min(flow, (capacity_j - charge) / (efficiency * step_s))
            charge = min(charge + efficiency * flow * step_s, capacity_j)
        else:
            flow = max(flow, -charge * efficiency / step_s)
            charge = max(charge + flow * step_s / efficiency, 0.0)
        grid.append(asked + flow)
        charges.append(charge)
    return grid, charges


def legal_orders(ops: Sequence[Op]) -> Iterator[tuple[int, ...]]:
    """Yield every order of a pipeline's operators that is legal: all permutations, as written first, but for those."""
    for order in itertools.permutations(op.id for op in ops):
        place = {op: k for k, op in enumerate(order)}
        stays = all(place[op.id] == k for k, op in enumerate(ops) if op.fixed or op.source)
        if stays and all(place[other] < place[op.id] for op in ops for other in op.depends_on):
            yield order


def time_sliced(threads: list[Iterator[tuple[str, Any]]], cores: int, slice_ns: int = 250_000) -> int:
    """Run threads on cores in slices, round robin; return when the first thread ends.

    A thread yields ('cpu', ns), ('sleep', ns) or ('until', predicate): an event loop in the plainest form.
    """
    now, state = 0, {index: next(thread) for index, thread in enumerate(threads)}
    wake: dict[int, int] = {}
    queue: list[int] = []

    def advance(index: int) -> None:
        """Go on to what the thread wants next, as far as that takes no time."""
        wake.pop(index, None)
        for want in threads[index]:
            state[index] = want
            if not (want[0] == "until" and want[1]()) and want[1] != 0:
                return
        del state[index]

    while 0 in state:
        changed = True
        while changed:
            changed = False
            for index in list(state):
                kind, what = state[index]
                if kind == "sleep":
                    wake.setdefault(index, now + what)
                if (kind == "sleep" and wake[index] <= now) or (kind == "until" and what()):
                    advance(index)
                    changed = True
                elif kind == "cpu" and index not in queue:
                    queue.append(index)
        for _ in range(min(cores, len(queue))):
            index = queue.pop(0)
            left = state[index][1] - slice_ns
            state[index] = ("cpu", left)
            if left <= 0:
                state[index] = ("until", lambda: True)
        now += slice_ns
    return now


def sliced_loader(num_batches: int, *, workers: int, fetch: int, prep: int, compute: int, busy: bool) -> float:
    """Return seconds per batch of torch's loader on two cores: turns, two batches ahead per worker, in order."""
    done: set[int] = set()
    taken = [0]

    def trainer() -> Iterator[tuple[str, Any]]:
        for batch in range(num_batches):
            if workers:
                yield "until", lambda batch=batch: batch in done
            else:
                yield "sleep", fetch
                yield "cpu", prep
            taken[0] += 1
            yield ("cpu" if busy else "sleep"), compute

    def worker(index: int) -> Iterator[tuple[str, Any]]:
        for batch in range(index, num_batches, workers):
            yield "until", lambda batch=batch: batch < taken[0] + 2 * workers
            yield "sleep", fetch
            yield "cpu", prep
            done.add(batch)

    return time_sliced([trainer(), *(worker(index) for index in range(workers))], cores=2) / num_batches / 1e9
