"""When fusing pays: the rules of dPRO's optimiser for operations, gradients and parts (arXiv 2205.02473, section 5).

Use them to propose moves; a proposal is then scored by replay. p is a compute
operation, q its sync: duration d, end e, both of operation n - 1 and n, in
any one unit of time. t_sync is `Network.sync_ns`.

>>> op_fusion_pays(sync_ns=30, before_ns=50, now_ns=50, fused_ns=60)  # saves 40, delays a sync of 30
True
>>> gradient_fusion_pays(sync_end_ns=100, compute_end_ns=60, fused_sync_ns=70, sync_ns=40)  # 100 > 60 + 70 - 40
True
"""

from __future__ import annotations

import math

import numpy as np

from headway.core.errors import InputError
from headway.sim.graph.hops import Network
from headway.sim.training.training_step import Flags, Ints

MOST_PARTS = 64
"""More parts than this are never tried: each is a message of its own."""


def op_fusion_pays(*, sync_ns: float, before_ns: float, now_ns: float, fused_ns: float) -> bool:
    """Say whether to run n - 1 and n as one: the compute it saves exceeds the sync of n - 1 that it delays.

    q_d[n-1] < p_d[n-1] + p_d[n] - t_fused.
    """
    return sync_ns < before_ns + now_ns - fused_ns


def gradient_fusion_pays(*, sync_end_ns: float, compute_end_ns: float, fused_sync_ns: float, sync_ns: float) -> bool:
    """Say whether to send n - 1 and n as one: alone, n - 1 ends too late for n to start when it is ready.

    q_e[n-1] > p_e[n] + t_sync(s[n-1] + s[n], k*) - t_sync(s[n], k*_n).
    """
    return sync_end_ns > compute_end_ns + fused_sync_ns - sync_ns


def linear_parts(num_bytes: float, *, fast_s_per_byte: float, slow_latency_s: float) -> int:
    """Return k* of two hops of t = a s + b each: sqrt(s * a(faster hop) / b(slower hop)), rounded, at least 1.

    k parts take (a1 s / k + b1) + (a2 s / k + b2) and k - 1 more on the slower
    hop; `MOST_PARTS` without latency. Raises `InputError` on negative values.
    """
    if min(num_bytes, fast_s_per_byte, slow_latency_s) < 0:
        raise InputError(f"size {num_bytes}, rate {fast_s_per_byte}, latency {slow_latency_s}: give numbers >= 0.")
    if slow_latency_s == 0:
        return MOST_PARTS if num_bytes * fast_s_per_byte > 0 else 1
    return min(MOST_PARTS, max(1, round(math.sqrt(num_bytes * fast_s_per_byte / slow_latency_s))))


def best_parts(network: Network, num_bytes: int) -> int:
    """Return k* = argmin_k t_sync(s, k) over 1..`MOST_PARTS`, the fewest parts among equals.

    One for rings, whose rounds fill the link already.
    """
    cuts = np.arange(1, MOST_PARTS + 1)
    return int(cuts[np.argmin(network.sync_ns(num_bytes, cuts))])


def best_buckets(network: Network, ready_ns: Ints, gradient_bytes: Ints) -> Flags:
    """Return [T] joined flags of the buckets that are through soonest, sent in order of readiness in one part each.

    F(j) = min over i of max(F(i), ready(j)) + t(bytes of i+1..j) is when the
    first j gradients are through. Exact on one lane (rings); with several
    stages t is what the slowest one takes, which makes it a good start.
    O(T^2) sizes; of equal answers, the one with the largest last bucket.
    """
    tensors = ready_ns.size
    total = np.concatenate([[0], np.cumsum(gradient_bytes)])
    through, begin = np.zeros(tensors + 1, np.int64), np.zeros(tensors + 1, np.int64)
    for last in range(1, tensors + 1):
        stages = network.stages(total[last] - total[:last])
        takes = np.max([stage.job_ns * stage.jobs for stage in stages], axis=0) if stages else 0
        end = np.maximum(through[:last], ready_ns[last - 1]) + takes
        begin[last] = np.argmin(end)
        through[last] = end[begin[last]]
    joined, last = np.ones(tensors, np.bool_), tensors
    while last > 0:
        joined[last - 1] = False
        last = int(begin[last])
    return joined
