"""A fleet of workers as a random process: what an autoscaler does to buffers, waiting and the number of workers.

Use it to judge a scaling rule where no fleet of that size is at hand. Workers
make batches one after another into buffers of their own, readers take one per
step from the fullest buffer, the autoscaler looks once per period. Seconds
and batches per second.

>>> history = simulate([(50.0, 300.0)], rate_per_s=10.0, scaler=Autoscaler(), seed=1)
>>> history.num_workers[-1] in (5, 6), history.waited_s < 30
(True, True)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.data.fleet.autoscale import Autoscaler, Load
from headway.sim.graph.process import Process, SimulationEvent


@dataclass(slots=True)
class History:
    """What happened, period by period."""

    num_workers: list[int] = field(default_factory=list)
    """[periods] Workers that serve after each decision."""
    waited_per_period_s: list[float] = field(default_factory=list)
    """[periods] Time that readers waited."""
    total_s: float = 0.0

    @property
    def waited_s(self) -> float:
        """Time that readers waited in all."""
        return sum(self.waited_per_period_s)


@dataclass(slots=True, eq=False)
class _SimulatedWorker:
    buffered: int = 0
    begun_s: float | None = None
    """Up to when its work on a batch is counted; None while its buffer is full."""
    draining: bool = False


class _Fleet:
    """The process: workers, one reader that stands for all, and the autoscaler's clock."""

    def __init__(self, process: Process, noise: float, buffer: int, boot_s: float) -> None:
        self.process, self.noise, self.buffer, self.boot_s = process, noise, buffer, boot_s
        self.rate_per_s = math.nan
        self.workers: list[_SimulatedWorker] = []
        self.booting: list[SimulationEvent] = []
        self.step_s = math.inf
        """Time of a training step; infinite while nobody reads."""
        self.next_take: SimulationEvent | None = None
        self.waits_since_s: float | None = None
        self.taken, self.prepared, self.busy_s, self.waited_s = 0, 0, 0.0, 0.0

    def set_demand(self, per_s: float) -> None:
        """Let readers take `per_s` batches per second from now on; at 0 they leave."""
        idle = math.isinf(self.step_s)
        self.step_s = 1 / per_s if per_s else math.inf
        if idle and per_s:
            self.take()
        if not per_s:
            self._end_wait()
            if self.next_take is not None:
                self.next_take.cancel()

    def set_rate(self, per_s: float) -> None:
        """Let a worker make `per_s` batches per second, from the batch on that it begins next."""
        self.rate_per_s = per_s

    def serving(self) -> list[_SimulatedWorker]:
        return [worker for worker in self.workers if not worker.draining]

    def resize(self, wanted: int) -> None:
        """Start workers, or drain those with the least in their buffers."""
        serving, booting = self.serving(), [event for event in self.booting if event.action is not None]
        for _ in range(wanted - len(serving) - len(booting)):
            self.booting.append(self.process.after(self.boot_s, self._started))
        too_many = len(serving) + len(booting) - wanted
        for event in booting[: max(too_many, 0)]:
            event.cancel()
        for worker in sorted(serving, key=lambda w: w.buffered)[: max(len(serving) - wanted, 0)]:
            worker.draining = True
        self._remove_drained()

    def _started(self) -> None:
        worker = _SimulatedWorker()
        self.workers.append(worker)
        self._begin(worker)

    def _begin(self, worker: _SimulatedWorker) -> None:
        if worker.draining or worker.buffered >= self.buffer:
            worker.begun_s = None
            return
        worker.begun_s = self.process.now_s
        # Lognormal with mean 1: batches differ, the rate is what it is.
        draw = self.process.rng("service").normal(-(self.noise**2) / 2, self.noise)
        self.process.after(math.exp(draw) / self.rate_per_s, self._made, worker)

    def _made(self, worker: _SimulatedWorker) -> None:
        self._count_busy(worker)
        self.prepared += 1
        worker.buffered += 1
        self._begin(worker)
        if self._end_wait():
            self.take()

    def _end_wait(self) -> bool:
        """Count a wait that ends now; returns whether there was one."""
        if self.waits_since_s is None:
            return False
        self.waited_s += self.process.now_s - self.waits_since_s
        self.waits_since_s = None
        return True

    def _count_busy(self, worker: _SimulatedWorker) -> None:
        """Count its time up to now, also on a batch that is not done: else long ones would count too little."""
        if worker.begun_s is not None:
            self.busy_s += self.process.now_s - worker.begun_s
            worker.begun_s = self.process.now_s

    def take(self) -> None:
        """Take one batch and train on it, or wait for one."""
        fullest = max(self.workers, key=lambda worker: worker.buffered, default=None)
        if fullest is None or not fullest.buffered:
            self.waits_since_s = self.process.now_s
            return
        fullest.buffered -= 1
        self.taken += 1
        if fullest.begun_s is None:
            self._begin(fullest)
        self._remove_drained()
        self.next_take = self.process.after(self.step_s, self.take)

    def _remove_drained(self) -> None:
        self.workers = [w for w in self.workers if not (w.draining and not w.buffered and w.begun_s is None)]

    def load(self, period_s: float) -> Load:
        """Return what happened since the last call, and begin again."""
        if self.waits_since_s is not None:
            self.waited_s += self.process.now_s - self.waits_since_s
            self.waits_since_s = self.process.now_s
        for worker in self.workers:
            self._count_busy(worker)
        serving = self.serving()
        load = Load(
            num_workers=len(serving), prepared=self.prepared, busy_s=self.busy_s,
            buffered=sum(worker.buffered for worker in serving) / max(len(serving), 1), taken=self.taken,
            waited_fraction=min(self.waited_s / period_s, 1.0), period_s=period_s,
        )  # fmt: skip
        self.taken, self.prepared, self.busy_s, self.waited_s = 0, 0, 0.0, 0.0
        return load


def simulate(
    demand: Sequence[tuple[float, float]],
    *,
    rate_per_s: float | Sequence[tuple[float, float]],
    scaler: Autoscaler,
    seed: int,
    noise: float = 0.2,
    buffer: int = 8,
    period_s: float = 10.0,
    boot_s: float = 2.0,
    first_workers: int = 1,
) -> History:
    """Play `demand`, steps of (batches/s, seconds), against workers of `rate_per_s`, a number or such steps too.

    A demand of 0 means that nobody reads; rates stay as they are after their last step. `noise` is the deviation of the
    logarithm of a batch's time; a new worker takes `boot_s` to start.
    """
    process = Process(seed)
    fleet = _Fleet(process, noise, buffer, boot_s)
    history = History(total_s=sum(seconds for _, seconds in demand))

    def look() -> None:
        load = fleet.load(period_s)
        wanted = scaler.decide(load)
        fleet.resize(wanted)
        history.num_workers.append(wanted)
        history.waited_per_period_s.append(load.waited_fraction * period_s)
        process.after(period_s, look)

    rates = rate_per_s if isinstance(rate_per_s, Sequence) else [(rate_per_s, history.total_s)]
    for steps, change in ((rates, fleet.set_rate), (demand, fleet.set_demand)):
        begun_s = 0.0
        for per_s, seconds in steps:
            process.after(begun_s, change, per_s)
            begun_s += seconds
    fleet.resize(first_workers)
    process.after(period_s, look)
    process.run(until_s=history.total_s)
    return history
