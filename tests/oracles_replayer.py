"""The published replayer in plain Python: a clock and a ready queue per device, the earliest device goes first.

It is dPRO's (arXiv 2205.02473, section 4.2) without its caches. A device's clock is the moment at which it can begin
its next operation, the later of the end of its last one and of what waits in its queue: with the end of the last one
alone, an idle device would promise itself to an operation that is not ready yet while another arrives before it.
"""

from collections.abc import Sequence

from tests.oracles import Edge


class Device:
    """A serial resource."""

    def __init__(self) -> None:
        self.free = 0.0
        self.queue: list[int] = []


def replay(
    n: int,
    edges: Sequence[Edge],
    lane: Sequence[int],
    duration: Sequence[float],
    priority: Sequence[float] | None = None,
) -> tuple[list[float], list[float]]:
    """Return (start, end). Queues are served by priority, then ready time (FIFO without priorities), then index.

    An operation without a lane has a device of its own.
    """
    after: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    waits = [0] * n
    for source, target, lag in edges:
        after[source].append((target, lag))
        waits[target] += 1
    device_of = [lane[op] if lane[op] >= 0 else -1 - op for op in range(n)]
    devices = {name: Device() for name in device_of}
    ready: list[float] = [0] * n
    start: list[float] = [0] * n
    end: list[float] = [0] * n
    rank = [0.0] * n if priority is None else list(priority)
    for op in range(n):
        if waits[op] == 0:
            devices[device_of[op]].queue.append(op)
    busy = {name for name, device in devices.items() if device.queue}
    for _ in range(n):
        clocks = {name: max(devices[name].free, min(ready[op] for op in devices[name].queue)) for name in busy}
        name = min(clocks, key=lambda name: (clocks[name], name))
        device, now = devices[name], clocks[name]
        waiting = [op for op in device.queue if ready[op] <= now]
        op = min(waiting, key=lambda op: (rank[op], ready[op], op))
        device.queue.remove(op)
        if not device.queue:
            busy.discard(name)
        start[op], end[op] = now, now + duration[op]
        device.free = end[op]
        for target, lag in after[op]:
            ready[target] = max(ready[target], end[op] + lag)
            waits[target] -= 1
            if waits[target] == 0:
                devices[device_of[target]].queue.append(target)
                busy.add(device_of[target])
    return start, end
