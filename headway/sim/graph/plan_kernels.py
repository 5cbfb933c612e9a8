"""Compiled kernels that score many plans of one step: arrays in, arrays out, as `headway.sim.graph.kernels`.

Use them through `StageChains` and the cost functions that searches call thousands of times. Plans [k, n] give each of
n tensors an option; what all of them begin with is computed once, since a search changes one tensor at a time.

>>> common_prefix(np.array([[0, 1, 2], [0, 1, 3]]))
2
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.sim.graph.kernels import Index, Ints, heap_pop, heap_push, kernel


@kernel
def common_prefix(plans: Ints) -> int:
    """Return how many of the first columns of plans[k, n] are the same in all rows."""
    same = plans.shape[1]
    for k in range(1, plans.shape[0]):
        at = 0
        while at < same and plans[k, at] == plans[0, at]:
            at += 1
        same = at
    return int(same)


@kernel
def one_link(
    plans: Ints,
    ready: NDArray[np.float64],
    late: NDArray[np.float64],
    work: NDArray[np.float64],
    side_option: int,
    cost: NDArray[np.float64],
    gap: Ints,
) -> None:
    """Fill cost[k] and gap[k] of plans[k, n]: tensors go over one link in index order, some beside it.

    Tensor i with option o is ready at ready[i] + the sum of late[j, o_j] so far, and takes work[i, o, 0] and then
    work[i, o, 1]; with `side_option` it starts after the link and what is beside it, and does not hold the link up.
    `gap` is the last tensor that came later than all before it were sent (0 without one).
    """
    # What all plans begin with is computed once: a search changes one tensor at a time.
    same = common_prefix(plans)
    delay = link = side = 0.0
    last = 0
    for k in range(-1, plans.shape[0]):
        begin_at, end_at, row = (0, same, 0) if k < 0 else (same, plans.shape[1], k)
        late_now, link_free, side_free, last_gap = delay, link, side, last
        for i in range(begin_at, end_at):
            option = plans[row, i]
            late_now += late[i, option]
            begin = ready[i] + late_now
            if begin > link_free and begin > side_free:
                last_gap = i
            if option == side_option:
                side_free = max(link_free, begin, side_free) + work[i, option, 0] + work[i, option, 1]
            else:
                link_free = max(link_free, begin) + work[i, option, 0] + work[i, option, 1]
        if k < 0:
            delay, link, side, last = late_now, link_free, side_free, last_gap
        else:
            cost[k] = max(link_free, side_free)
            gap[k] = last_gap


@kernel
def run_chains(
    plan: Ints,
    segment: Ints,
    lane: Ints,
    duration: Ints,
    span: tuple[int, int, int, int],
    ready: Ints,
    queue: Index,
    state: Ints,
) -> tuple[int, int]:
    """Schedule until segment `stop` is about to end, or all has ended; return the time, and the gap's tensor.

    `span` = (stop, gap lane, time, gap's tensor); `ready`, `queue` and `state` are as `stage_chains` makes them, and
    are left as they are then.
    """
    stop, gap_lane, now, last = span
    width = lane.shape[2] + 1
    queued, running, end = state[0], state[1], state[2]
    nothing = np.empty(0, np.float64)
    while True:
        if running[0] == stop * width and end[0] <= now:
            return now, last
        # All that ends now is settled first, then each free lane takes its first waiting op.
        for at in range(queued.size):
            if running[at] < 0 or end[at] > now:
                continue
            tensor, stage = running[at] // width, running[at] % width
            running[at] = -1
            option = plan[tensor]
            if stage + 1 < width and lane[tensor, option, stage] >= 0:
                on = lane[tensor, option, stage]
                succ = np.int32(tensor * width + stage + 1)
                ready[succ] = now
                heap_push(queue[on], queued[on], succ, 3, nothing, ready)
                queued[on] += 1
            # The next segment waits for this one, and for a first stage on its lane.
            first_here = width > 1 and lane[tensor, option, 0] == 0
            if stage == (1 if first_here else 0) and tensor + 1 < segment.size:
                succ = np.int32((tensor + 1) * width)
                ready[succ] = now
                heap_push(queue[0], queued[0], succ, 3, nothing, ready)
                queued[0] += 1
        at_once = False
        for at in range(queued.size):
            if running[at] >= 0 or queued[at] == 0:
                continue
            op = heap_pop(queue[at], queued[at], 3, nothing, ready)
            queued[at] -= 1
            tensor, stage = op // width, op % width
            if at == gap_lane:
                last = tensor if now > end[at] else min(last, tensor)
            took = segment[tensor] if stage == 0 else duration[tensor, plan[tensor], stage - 1]
            running[at] = op
            end[at] = now + took
            at_once = at_once or took == 0
        if at_once:
            continue
        following = -1
        for at in range(queued.size):
            if running[at] >= 0 and (following < 0 or end[at] < following):
                following = end[at]
        if following < 0:
            return now, last
        now = following


@kernel
def stage_chains(
    plans: Ints, segment: Ints, lane: Ints, duration: Ints, lanes: tuple[int, int], makespan: Ints, gap: Ints
) -> None:
    """Fill makespan[k] and gap[k] of plans[k, n] by list scheduling (`headway.comm.compression.options`).

    Op i * (stages + 1) is segment i, those behind it are its stages: index order is (tensor, stage). `lanes` is how
    many there are, and the one whose idle gaps count.
    """
    num_lanes, gap_lane = lanes
    n, width = segment.size, lane.shape[2] + 1
    if n == 0 or plans.shape[0] == 0:
        return
    ready, queue = np.zeros(n * width, np.int64), np.zeros((num_lanes, n + 1), np.int32)
    # Rows: ops waiting, op running (-1: none), end of the one that runs or ran last.
    state = np.zeros((3, num_lanes), np.int64)
    state[1] = -1
    state[0, 0] = 1  # segment 0 waits
    # What all plans begin with, up to the end of the segment before the first difference, is scheduled once.
    same = min(common_prefix(plans), n - 1)
    now, last = run_chains(plans[0], segment, lane, duration, (same, gap_lane, 0, 0), ready, queue, state)
    for k in range(plans.shape[0]):
        own_ready, own_queue, own_state = ready.copy(), queue.copy(), state.copy()
        makespan[k], gap[k] = run_chains(
            plans[k], segment, lane, duration, (n, gap_lane, now, last), own_ready, own_queue, own_state
        )
