"""Windows of data-parallel jobs whose truth is known: played by an obvious fluid model, written as the profiler would.

The model is not that of `headway.sim`: no Dag, no pieces. Collectives at once share the link continuously; two backend
threads per rank take them first in, first out.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from headway.sim.ddp.ddp_replay import DdpReplay
from headway.sim.ddp.ddp_window import StepWindow, joined
from headway.trace.events.trace import Trace, concat
from headway.trace.events.vocabulary import KIND
from headway.trace.profiler.kineto_names import FORWARD

US, MS = 1_000, 1_000_000
LANES = ("main", "thread 1", "thread 2", "profiler")
GRADIENT = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
COPY = "torch.distributed.ddp.reducer::copy_bucket_to_grad"


@dataclass(frozen=True)
class Job:
    """A network of layers with one parameter each, trained by `ranks` ranks."""

    forward_ns: tuple[int, ...] = (3 * MS, 4 * MS, 5 * MS, 2 * MS)
    """[layers]"""

    size: tuple[int, ...] = (4_000_000, 2_000_000, 3_000_000, 900_000)
    """[layers] Bytes of the parameter."""

    limit: tuple[int, int] = (1 << 20, 25 << 20)
    """Limits of DDP's buckets."""

    bytes_per_s: float = 1e8
    latency_ns: int = 350 * US
    ranks: int = 2
    lag: tuple[float, ...] = (1.0, 1.0)
    """[ranks] Factor on the rank's compute."""

    slow: dict[int, float] = field(default_factory=dict)
    """Layer -> factor on its forward and backward."""

    steps: int = 3
    rate_of: tuple[float, ...] = (1.0,)
    """Factor on the rate, step by step in turn: a link that is none."""

    views: bool = False
    """Gradients are views of their buckets: nothing is copied out."""

    def buckets(self) -> list[list[int]]:
        """Return layers per bucket, in the order of readiness (the last layer first), one type."""
        found: list[list[int]] = [[]]
        filled, bound = 0, self.limit[0]
        for layer in reversed(range(len(self.size))):
            found[-1].append(layer)
            filled += self.size[layer]
            if filled >= bound:
                found.append([])
                filled, bound = 0, self.limit[1]
        return [bucket for bucket in found if bucket]

    def model(self) -> dict[str, Any]:
        """Return what a run would note of it."""
        count = len(self.size)
        return {
            "parameter_names": [f"layer.{index}.weight" for index in range(count)],
            "parameter_bytes": list(self.size), "parameter_types": ["f"] * count, "order": list(range(count))[::-1],
            "first_bucket_bytes": self.limit[0], "bucket_bytes": self.limit[1],
        }  # fmt: skip


@dataclass
class Played:
    """What playing a job gives."""

    step_s: float
    """Seconds of a step."""

    window: StepWindow
    """As the profiler and the Flight Recorder saw it."""


def fluid(ready: list[int], sizes: list[int], rate: float, latency: int) -> tuple[list[int], list[int]]:
    """Return start and end of collectives that became ready in this order, two at once at most, sharing the rate."""
    first = ready[0]
    ready = [moment - first for moment in ready]  # Small numbers: moments of the clock would use up a float's digits.
    start, end = [0] * len(ready), [0] * len(ready)
    left: dict[int, float] = {}
    now, waiting, free = 0.0, list(range(len(ready))), 2
    carrying: dict[int, float] = {}  # collective -> when its latency is over
    while waiting or carrying:
        if waiting and free and ready[waiting[0]] <= now + 1e-6:
            one = waiting.pop(0)
            start[one], carrying[one], left[one] = round(now) + first, now + latency, float(sizes[one])
            free -= 1
            continue
        active = [one for one in carrying if carrying[one] <= now + 1e-6]
        moments = [carrying[one] for one in carrying if one not in active]
        moments += [now + left[one] * len(active) / rate * 1e9 for one in active]
        moments += [float(ready[waiting[0]])] if waiting and free else []
        then = max(min(moments), now)
        # A step that a float cannot make any more: what was due to end at it has ended.
        over = [one for one in active if then == now and now + left[one] * len(active) / rate * 1e9 <= then]
        for one in active:
            left[one] = 0.0 if one in over else left[one] - (then - now) / 1e9 * rate / len(active)
        now = then
        for one in [one for one in active if left[one] <= 0.01]:
            end[one] = round(now) + first
            del carrying[one]
            free += 1
    return start, end


class _Rows:
    """Rows of one rank."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, int, int, int, int]] = []

    def add(self, name: str, lane: int, start: float, duration: float, kind: str = "COMPUTE", corr: int = -1) -> None:
        """Append one."""
        self.rows.append((name, kind, lane, round(start), round(duration), corr))

    def trace(self, lanes: tuple[str, ...] = LANES, **columns: list[int]) -> Trace:
        """Return them as a trace of rank 0, which the profiler writes whoever it was."""
        names = sorted({row[0] for row in self.rows})
        return Trace.from_columns(
            {
                "name": [names.index(row[0]) for row in self.rows], "kind": [KIND[row[1]] for row in self.rows],
                "lane": [row[2] for row in self.rows], "start_ns": [row[3] for row in self.rows],
                "duration_ns": [row[4] for row in self.rows], "corr": [row[5] for row in self.rows],
                "rank": [0] * len(self.rows), **columns,
            },
            names=names, lanes=lanes, ranks={0: {}},
        )  # fmt: skip


def play(job: Job, *, origin_ns: int = 10**15) -> Played:
    """Play the job; the first rank begins at `origin_ns`."""
    kineto, flight = [_Rows() for _ in range(job.ranks)], [_Rows() for _ in range(job.ranks)]
    numbers: list[list[tuple[int, int]]] = [[] for _ in range(job.ranks)]
    at = [float(origin_ns)] * job.ranks
    buckets, seq = job.buckets(), 0
    for step in range(job.steps):
        calls = [_compute(job, rows, at, rank, step, buckets) for rank, rows in enumerate(kineto)]
        sizes = [sum(job.size[layer] for layer in bucket) for bucket in buckets]
        ready = [max(calls[rank][b] for rank in range(job.ranks)) for b in range(len(buckets))]
        rate = job.bytes_per_s * job.rate_of[step % len(job.rate_of)]
        _, end = fluid(ready, sizes, rate, job.latency_ns)
        for rank, rows in enumerate(kineto):
            _backend(rows, calls[rank], end)
            for b, bucket in enumerate(buckets):
                at[rank] = max(at[rank], end[b])
                for layer in bucket if not job.views else ():
                    rows.add(COPY, 0, at[rank] + 2 * US, job.size[layer] / 5)
                    at[rank] += 2 * US + job.size[layer] / 5
                # The call was made a little before its span began to be noted by the other recorder.
                flight[rank].add("gloo:all_reduce", 0, calls[rank][b] - 20 * US, 0, "COLL")
                numbers[rank].append((seq + b, sizes[b]))
            rows.add("Optimizer.step#SGD.step", 0, at[rank] + 30 * US, 2 * MS, "OPTIM")
            at[rank] += 30 * US + 2 * MS
        seq += len(buckets)
    parts = []
    for rank in range(job.ranks):
        seqs, sizes = ([pair[k] for pair in numbers[rank]] for k in (0, 1))
        columns = {"group": [0] * len(seqs), "seq": seqs, "bytes": sizes}
        parts.append(joined(kineto[rank].trace(), flight[rank].trace(**columns), rank))
    return Played((max(at) - origin_ns) / 1e9 / job.steps, StepWindow(concat(parts), job.steps))


def _compute(job: Job, rows: _Rows, at: list[float], rank: int, step: int, buckets: list[list[int]]) -> list[int]:
    """Write forward and backward of one rank; returns when each bucket was in the queue, and moves `at`."""
    rows.add("DistributedDataParallel.forward", 0, at[rank], 1, "MARK")
    for layer, forward in enumerate(job.forward_ns):
        cost = forward * job.lag[rank] * job.slow.get(layer, 1.0)
        rows.add(f"layer.{layer}", 0, at[rank], cost, "MARK")
        rows.add("aten::mm", 0, at[rank] + 1, cost - 2, corr=FORWARD + step * 100 + layer)
        at[rank] += cost
    calls, last = [], {bucket[-1]: b for b, bucket in enumerate(buckets)}
    for layer in reversed(range(len(job.forward_ns))):
        cost = 2 * job.forward_ns[layer] * job.lag[rank] * job.slow.get(layer, 1.0)
        rows.add("MmBackward0", 0, at[rank], cost, corr=FORWARD + step * 100 + layer)
        at[rank] += cost
        queued = 80 * US if layer in last else 0
        rows.add(GRADIENT, 0, at[rank], 100 * US + queued)
        rows.add("torch::distributed::reducer::mul_out", 0, at[rank] + 10 * US, 80 * US)
        at[rank] += 100 * US
        if queued:
            rows.add("c10d::allreduce_", 0, at[rank], queued, "HOST")
            at[rank] += queued
            calls.append(round(at[rank]))
    return calls


def _backend(rows: _Rows, calls: list[int], end: list[int]) -> None:
    """Write the spans of the two backend threads."""
    free = [0, 0]
    for called, ended in zip(calls, end, strict=True):
        thread = free.index(min(free))
        begin = max(called, free[thread])
        rows.add("gloo:all_reduce", 1 + thread, begin, ended - begin, "COLL")
        free[thread] = ended


def changed(job: Job, **changes: Any) -> Job:
    """Return the job with other fields."""
    return replace(job, **changes)


LAUNCH = 8 * US
"""What the host takes to launch a kernel: far less than the kernel takes, so that the host runs ahead."""

DEVICE_LANES = ("main", "thread 1", "stream 7", "stream 20")
MAIN, AUTOGRAD, COMPUTING, COMMUNICATING = range(len(DEVICE_LANES))


class _Launches:
    """Rows of one rank with a device: each kernel has the call that launched it."""

    def __init__(self, origin_ns: int) -> None:
        self.rows, self.host, self.device, self.corr = _Rows(), float(origin_ns), float(origin_ns), 0

    def launch(self, name: str, lane: int, duration: float) -> None:
        """Launch a kernel of the computing stream from a thread of the host."""
        self.called(lane)
        self.device = max(self.device, self.host)
        self.rows.add(name, COMPUTING, self.device, duration, corr=self.corr)
        self.device += duration

    def called(self, lane: int) -> None:
        """Write the call that launches what comes next."""
        self.corr += 1
        self.rows.add("cudaLaunchKernel", lane, self.host, LAUNCH / 2, "HOST", corr=self.corr)
        self.host += LAUNCH

    def span(self, name: str, lane: int, since: float, corr: int = -1) -> None:
        """Write an operation of the host around what it did since then."""
        self.rows.add(name, lane, since, self.host - since, "HOST", corr)


def play_on_devices(job: Job, *, origin_ns: int = 10**15) -> Played:
    """Play the job on devices whose hosts run ahead; collectives run one after another on a stream of their own."""
    ranks = [_Launches(origin_ns) for _ in range(job.ranks)]
    buckets, seq = job.buckets(), 0
    numbers: list[dict[int, tuple[int, int]]] = [{} for _ in ranks]
    for step in range(job.steps):
        calls = [_launch_step(job, one, job.lag[rank], step, buckets) for rank, one in enumerate(ranks)]
        sizes = [sum(job.size[layer] for layer in bucket) for bucket in buckets]
        end = 0.0
        for b, bucket in enumerate(buckets):
            start = [max(calls[rank][b][0], end) for rank in range(job.ranks)]
            end = max(start) + job.latency_ns + sizes[b] / job.bytes_per_s * 1e9
            for rank, one in enumerate(ranks):
                numbers[rank][len(one.rows.rows)] = (seq + b, sizes[b])
                one.rows.add("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                             COMMUNICATING, start[rank], end - start[rank], "COLL", corr=calls[rank][b][1])  # fmt: skip
                one.device = max(one.device, end)
                for layer in bucket if not job.views else ():
                    since = one.host
                    one.launch("copy kernel", AUTOGRAD, job.size[layer] / 50)
                    one.span(COPY, AUTOGRAD, since)
        for one in ranks:
            since = one.host
            one.launch("adam kernel", MAIN, 2 * MS)
            one.span("Optimizer.step#SGD.step", MAIN, since)
        seq += len(buckets)
    parts = []
    for rank, one in enumerate(ranks):
        columns: dict[str, list[int]] = {"group": [], "seq": [], "bytes": []}
        for row in range(len(one.rows.rows)):
            number, size = numbers[rank].get(row, (-1, 0))
            for name, value in zip(columns, (0 if number >= 0 else -1, number, size), strict=True):
                columns[name].append(value)
        parts.append(joined(one.rows.trace(lanes=DEVICE_LANES, **columns), None, rank))
    return Played(
        (max(one.device for one in ranks) - origin_ns) / 1e9 / job.steps, StepWindow(concat(parts), job.steps)
    )


def _launch_step(job: Job, one: _Launches, lag: float, step: int, buckets: list[list[int]]) -> list[tuple[float, int]]:
    """Launch forward and backward of one rank; returns when its device reached each collective, and who called it."""
    one.rows.add("DistributedDataParallel.forward", MAIN, one.host, 1, "MARK")
    for layer, forward in enumerate(job.forward_ns):
        since = one.host
        one.launch("gemm", MAIN, forward * lag * job.slow.get(layer, 1.0))
        one.span("aten::mm", MAIN, since, FORWARD + step * 100 + layer)
        one.span(f"layer.{layer}", MAIN, since)
    calls, last = [], {bucket[-1] for bucket in buckets}
    for layer in reversed(range(len(job.forward_ns))):
        since = one.host
        one.launch("gemm", AUTOGRAD, 2 * job.forward_ns[layer] * lag * job.slow.get(layer, 1.0))
        one.span("MmBackward0", AUTOGRAD, since, FORWARD + step * 100 + layer)
        since = one.host
        one.launch("mul kernel", AUTOGRAD, job.size[layer] / 50)
        if layer in last:
            began = one.host
            one.called(AUTOGRAD)
            calls.append((max(one.device, one.host), one.corr))
            one.span("c10d::allreduce_", AUTOGRAD, began)
        one.span(GRADIENT, AUTOGRAD, since)
    return calls


def unoverlapped_s(replay: DdpReplay) -> float:
    """Return the naive sum: work of the slowest thread, and every collective after it; seconds per step."""
    total = 0.0
    for step, link in zip(replay.steps, replay.links, strict=True):
        total += max(int(thread.own_ns.sum()) for thread in step.threads)
        total += sum(link.latency_ns + link.duration_ns(int(size)) for size in step.size)
    return total / 1e9 / sum(window.num_steps for window in replay.windows)
