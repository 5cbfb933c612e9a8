"""What a service knows: its jobs, their attempts and shares. The state follows from the events alone, in their order.

The engine of the simulation (`queue.engine.RoundEngine`) decides; here it is told what jobs did, in place of what it
would predict. Its rows say who runs on which type, `place` says on which slots of it:

    engine.running   job2 -> v100, job1 -> v100, job4 -> k80
    state.runs       job2: v100:0 v100:1   job1: v100:2   job4: k80:0      who runs already keeps its slots
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from headway.cluster.model import Cluster, Jobs, Rates, Resize, Values
from headway.cluster.policies import SERVED
from headway.cluster.queue.engine import RoundEngine
from headway.cluster.queue.logs import relative_speed
from headway.cluster.queue.outcome import Outcome
from headway.cluster.queue.rounds import ROUNDS_PER_DECISION, RoundReport, Timing, lag
from headway.cluster.service.executors import JobAttempt
from headway.cluster.service.store import (
    AttemptAsked,
    AttemptEnded,
    AttemptRunning,
    AttemptStarting,
    Event,
    JobCancelled,
    JobFigures,
    JobSubmitted,
    RoundAdvanced,
    ServerBegan,
)
from headway.core.errors import FormatError, HeadwayError, InputError
from headway.core.tables import pick

UNKNOWN_STEPS = float(2**40)
"""Steps of a job whose length nobody knows: no policy of a service asks for it."""

MOST_LOST = 5
"""An attempt that is lost is followed by another, unless so many in a row did no step (Gavel's limit of failures)."""

ENDED = ("finished", "failed", "cancelled")
"""States that a job stays in."""


@dataclass(slots=True)
class ServiceJob:
    """One submitted job."""

    id: str
    name: str
    scale: int
    """Slots that its next attempt has."""
    command: tuple[str, ...]
    folder: str
    owner: str
    index: int
    """Its row in the engine."""
    arrival_s: float
    sizes: tuple[int, int]
    """Fewest and most slots that it runs on; most, where a type has them."""
    state: str = "waiting"
    """waiting, running, leaving, finished, failed or cancelled."""
    attempt: int = 0
    """Number of its newest attempt, from 1."""
    slots: tuple[str, ...] = ()
    """What its attempt runs on; empty while it has none."""
    handle: str = ""
    began_s: float = math.nan
    """When that attempt was started."""
    asked_s: float = math.nan
    """When it was asked to leave."""
    steps: float = 0.0
    """Steps of attempts that have ended."""
    credited: float = 0.0
    """Steps that the engine knows of."""
    seconds_on: dict[str, float] = field(default_factory=dict)
    """Device type -> time that ended attempts had such devices."""
    start_s: float = math.nan
    finish_s: float = math.nan
    lost: int = 0
    """Attempts in a row that were lost before they did a step."""
    is_lost: bool = False
    """Its attempt was lost since the engine last heard of it."""
    is_unwanted: bool = False
    """Somebody has cancelled it."""
    reason: str = ""
    rates: dict[str, float] = field(default_factory=dict)
    """Device type -> steps/s as measured."""

    @property
    def is_alive(self) -> bool:
        """Whether it has an attempt."""
        return self.state in ("running", "leaving")

    def as_attempt(self) -> JobAttempt:
        """Return its attempt as executors know it."""
        ranks = len(self.slots) or self.scale
        return JobAttempt(self.id, self.attempt, ranks, self.command, self.folder, self.slots, self.handle)


class QueueRow(TypedDict):
    """A job, as `headway cluster queue --json` prints it."""

    id: str
    name: str
    state: str
    scale: int
    allocation: dict[str, float]
    placement: list[str]
    steps_done: int
    restarts: int
    reason: str


class JobExplanation(TypedDict):
    """Why a job runs or waits, as `headway cluster explain --json` prints it."""

    id: str
    name: str
    state: str
    share: dict[str, float]
    """Type -> fraction of time that the last decision gives it."""
    owed_s: float
    """Seconds that it should have had by now and has not (deficit)."""
    ahead: list[str]
    """Jobs that come before it at the next round."""
    binding: str | None
    """The row of the program that limits it: devices of a type, or its own time."""
    price: float
    """How much of its time more it would be given for one more device of that type."""
    words: str


class ServiceState:
    """Jobs, the engine, and who runs on which slots. Only `apply` and `advance` change it."""

    def __init__(self) -> None:
        """Know nothing; the first event is `ServerBegan`."""
        self.jobs: dict[str, ServiceJob] = {}
        self.runs: dict[str, list[str]] = {}
        """Job -> the slots that it is to run on."""
        self.fixed: frozenset[str] = frozenset()
        """Jobs that could not leave when the last round began."""
        self.served: ServerBegan | None = None
        self.now_s = self.next_s = 0.0
        self.round = 0
        self._engine: RoundEngine | None = None

    @classmethod
    def replay(cls, events: Sequence[Event]) -> ServiceState:
        """Return the state after these events; raises `FormatError` where they contradict the rules of this release."""
        state = cls()
        for event in events:
            state.apply(event)
        return state

    @property
    def engine(self) -> RoundEngine:
        """The rounds. Raises `FormatError` before a server has begun."""
        if self._engine is None:
            raise FormatError("the log does not begin with a server. Name another folder with --dir.")
        return self._engine

    def apply(self, event: Event) -> None:
        """Change the state by one event."""
        if isinstance(event, ServerBegan):
            self._serve(event)
        elif isinstance(event, JobSubmitted):
            self._submit(event)
        elif isinstance(event, RoundAdvanced):
            if self.advance(event.at_s, event.did, event.fixed) != event.runs:
                raise FormatError(
                    f"the decision at {event.at_s:g} s is another one by the rules of this release. Serve the folder "
                    "with the release that wrote it, or begin a new one."
                )
        else:
            self._change(self.job(event.job), event)
        if not isinstance(event, JobSubmitted):
            self.now_s = max(self.now_s, event.at_s)

    def job(self, name: str) -> ServiceJob:
        """Return a job by id, or by a name that one job has; raises `InputError`."""
        named = [job.id for job in self.jobs.values() if job.name == name]
        if len(named) > 1 and name not in self.jobs:
            raise InputError(f"{len(named)} jobs are called {name!r}: {', '.join(named)}. Name one of them by its id.")
        return pick(self.jobs, named[0] if len(named) == 1 and name not in self.jobs else name, "job")

    def live(self) -> list[ServiceJob]:
        """Return the jobs that have an attempt."""
        return [job for job in self.jobs.values() if job.is_alive]

    def running_jobs(self) -> list[ServiceJob]:
        """Return the jobs that the engine gave devices to, in the order of its rows."""
        by_index, running = list(self.jobs.values()), self.engine.running
        return [] if running is None else [by_index[index] for index in running.a.tolist()]

    def exists(self, slots: Sequence[str], cluster: Cluster | None = None) -> bool:
        """Say whether the cluster still has these slots."""
        cluster = cluster or self.engine.cluster
        pools = dict(zip(cluster.names, cluster.count.tolist(), strict=True))
        named = (slot.rpartition(":") for slot in slots)
        return all(int(number) < pools[device_type] for device_type, _, number in named)

    def due_s(self) -> float:
        """Return when the engine is to advance next; infinity = there is nothing to do."""
        engine = self.engine
        due_s = self.next_s if engine.running is not None or engine.active.size else math.inf
        if engine.next_job < len(engine.jobs) and (engine.running is None or engine.num_free):
            due_s = min(due_s, float(engine.jobs.arrival_s[engine.next_job]))
        if engine.resizes or any(job.is_lost or job.state in ENDED for job in self.running_jobs()):
            due_s = min(due_s, self.now_s)
        return max(due_s, self.now_s)

    def advance(self, at_s: float, did: Mapping[str, JobFigures], fixed: Sequence[str]) -> dict[str, list[str]]:
        """Let the engine end a round or a part of it; return job -> slots from now on."""
        engine, border_s = self.engine, self.engine.border_s
        rates = engine.rates.alone.copy()
        for name, figures in did.items():
            if figures.rates:
                job = self.jobs[name]
                device_type = job.as_attempt().device_type
                rates[job.index] = figures.rates
                job.rates[device_type] = figures.rates[engine.cluster.names.index(device_type)]
        if (rates != engine.rates.alone).any():
            engine.set_rates(rates)
        self.fixed = frozenset(fixed)
        reports = {
            self.jobs[name].index: RoundReport(figures.seconds, figures.steps, figures.ended, figures.done)
            for name, figures in did.items()
        }
        if engine.resizes and engine.resizes[0].at_s <= at_s:
            self._fit(fixed)
        length_s = engine.advance(at_s, reports, [self.jobs[name].index for name in fixed])
        self.next_s = math.inf if length_s is None else at_s + float(length_s)
        self.round += int(engine.border_s != border_s)
        runs = engine.running
        since = {} if runs is None else dict(zip(runs.a.tolist(), runs.since_s.tolist(), strict=True))
        for name, figures in did.items():
            job = self.jobs[name]
            job.is_lost = False
            if since.get(job.index, at_s) == at_s:  # what was reported is booked
                job.credited += figures.steps
        self.runs = self._place()
        return self.runs

    def since_s(self, job: ServiceJob) -> float:
        """Return since when the engine has counted a job that runs."""
        running = self.engine.running
        assert running is not None, "the job runs"
        return float(running.since_s[running.a.tolist().index(job.index)])

    def with_rate(self, job: ServiceJob, steps_per_s: float) -> list[float]:
        """[W] Return its rates once it was seen to do so many steps/s on its slots; empty where that says nothing new.

        Rates are rounded to 2 %, so that equal jobs stay equal. Types that it has not run on follow by peak speeds.
        """
        names = self.engine.cluster.names
        if not steps_per_s > 0 or len(names) == 1 or not job.slots:
            return []
        rounded = 1.02 ** round(math.log(steps_per_s) / math.log(1.02))
        device_type = job.as_attempt().device_type
        if math.isclose(job.rates.get(device_type, 0.0), rounded, rel_tol=0.03):
            return []
        speeds = speeds_of(names)
        guessed = dict(zip(names, (speeds * rounded / speeds[names.index(device_type)]).tolist(), strict=True))
        return [rounded if name == device_type else job.rates.get(name, guessed[name]) for name in names]

    def rows(self) -> list[QueueRow]:
        """Return a row per job, in order of arrival."""
        return [
            QueueRow(
                id=job.id, name=job.name, state=job.state, scale=job.scale, allocation=self.share(job),
                placement=list(job.slots), steps_done=int(max(job.steps, job.credited)),
                restarts=max(job.attempt - 1, 0), reason=job.reason or self.explain(job)["words"],
            )
            for job in self.jobs.values()
        ]  # fmt: skip

    def share(self, job: ServiceJob) -> dict[str, float]:
        """Return type -> fraction of time that a job is given; empty once it has ended."""
        row = self._row(job)
        x = () if row is None else np.round(self.engine.rows.x[row], 9).tolist()
        return dict(zip(self.engine.cluster.names, x, strict=bool(x)))

    def explain(self, job: ServiceJob, *, price: bool = False) -> JobExplanation:
        """Say in words why a job runs or waits; with `price`, the policy is asked what one more device would give."""
        engine, row, share = self.engine, self._row(job), self.share(job)
        if job.state in ENDED or row is None:
            return JobExplanation(
                id=job.id, name=job.name, state=job.state, share=share, owed_s=0.0, ahead=[], binding=None, price=0.0,
                words="it came after the last round began" if job.state not in ENDED else job.reason or job.state,
            )  # fmt: skip
        elapsed_s = self.now_s - engine.reset_at_s if math.isfinite(engine.reset_at_s) else 0.0
        behind = lag(engine.rows, elapsed_s, engine.timing.round_s / 2).sum(axis=1)
        if engine.running is not None:  # what the round that goes on has given so far is not booked yet
            had_s = dict(zip(engine.running.a.tolist(), self.now_s - engine.running.since_s, strict=True))
            behind -= np.array([had_s.get(index, 0.0) for index in engine.rows.a.tolist()])
        by_index, wants = list(self.jobs.values()), self.running_jobs()
        ahead = [
            by_index[engine.rows.a[other]].id
            for other in np.argsort(-behind, kind="stable").tolist()
            if behind[other] > behind[row] and by_index[engine.rows.a[other]] not in wants
        ]
        binding, gain = self._binding(job) if price else (None, 0.0)
        total, owed_s = sum(share.values()), float(behind[row])
        gives = f"the policy {self.policy} gives it {total:.0%} of its time"
        owes = f"{'it is owed' if owed_s >= 0 else 'it has had more than that by'} {abs(owed_s):.0f} s"
        if job.is_unwanted:
            reason = f"was cancelled, and leaves {', '.join(job.slots)} as soon as it has ended"
        elif job.state == "running" and job.id in self.runs and not (job.id in self.fixed and ahead):
            reason = f"runs on {', '.join(job.slots)}: {gives}, {owes}"
        elif job.state == "running":
            reason = f"keeps {', '.join(job.slots)}: it has never saved with a Checkpointer, so it cannot be moved"
        elif job.state == "leaving":
            reason = f"saves, and leaves {', '.join(job.slots)} to others: {gives}, {owes}"
        elif job.id in self.runs:
            reason = f"waits until {', '.join(self.runs[job.id])} is free"
        else:
            reason = f"waits: {gives}, {owes}; jobs that wait and come before it: {len(ahead)}"
        if binding:
            reason += f"; {binding} are all given away, one more would give it {gain:.0%} more of its time"
        elif price:
            reason += "; no row of devices limits it, its own time does"
        return JobExplanation(
            id=job.id, name=job.name, state=job.state, share=share, owed_s=owed_s, ahead=ahead, binding=binding,
            price=gain, words=reason,
        )  # fmt: skip

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return "" if self.served is None else self.served.policy

    def _row(self, job: ServiceJob) -> int | None:
        rows = np.flatnonzero(self.engine.rows.a == job.index)
        return int(rows[0]) if rows.size else None

    def _binding(self, job: ServiceJob) -> tuple[str | None, float]:
        """Return the pool whose next device would give a job most, and how much of its time: the price of its row."""
        best, gain = None, 1e-6
        shares = []
        for name, more in ((None, 0), *((name, 1) for name in self.engine.cluster.names)):
            trial = copy.deepcopy(self.engine)
            if name is not None:
                count = dict(zip(trial.cluster.names, trial.cluster.count.tolist(), strict=True))
                trial.cluster = Resize(0.0, name, count[name] + more).of(trial.cluster)
                trial.find_pools()
            trial.solve(self.now_s)
            row = np.flatnonzero(trial.rows.a == job.index)
            shares.append((name, float(trial.rows.x[row].sum())))
        for name, share in shares[1:]:
            if share - shares[0][1] > gain:
                best, gain = f"devices of {name}", share - shares[0][1]
        return best, gain if best else 0.0

    def _serve(self, event: ServerBegan) -> None:
        decide = pick(SERVED, event.policy, "policy of a service")
        timing = Timing("headway", event.round_s, event.round_s * ROUNDS_PER_DECISION, fills=True)
        if self._engine is None:
            cluster, none = Cluster.of(event.pools), Jobs([], np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
            rates = Rates.of(np.zeros((0, len(cluster.names))), none, cluster)
            self._engine = RoundEngine(none, cluster, decide, rates, 0, (0, 1 << 62), timing, live=True)
            self._engine.waiting_window = 1 << 62  # there is always another job to come
        engine = self._engine
        if set(event.pools) != set(engine.cluster.names):
            raise InputError(
                f"the folder's devices are {', '.join(engine.cluster.names)}, not {', '.join(event.pools)}. Give the "
                "types that it began with, or serve another folder."
            )
        engine.decide, engine.timing, self.served = decide, timing, event
        cluster = engine.following_cluster()
        for name, count in zip(cluster.names, cluster.count.tolist(), strict=True):
            if event.pools[name] != count:
                engine.resizes.append(Resize(event.at_s, name, event.pools[name]))

    def _fit(self, fixed: Sequence[str]) -> None:
        """Have jobs that can run on fewer slots run on as many as a type has, once devices leave or come back.

        The engine ends the round then: nobody runs in it, but for who cannot leave slots that stay.
        """
        cluster = self.engine.following_cluster()
        largest = max(cluster.count.tolist())
        for job in self.jobs.values():
            if job.state not in ENDED and not (job.id in fixed and self.exists(job.slots, cluster)):
                job.scale = min(max(largest, job.sizes[0]), job.sizes[1])
                self.engine.jobs.scale[job.index] = job.scale

    def _submit(self, event: JobSubmitted) -> None:
        sizes = event.fewest or event.scale, event.scale
        scale = min(max(max(self.engine.cluster.count.tolist()), sizes[0]), sizes[1])
        job = ServiceJob(
            event.job, event.name, scale, tuple(event.command), event.folder, event.owner, len(self.jobs), event.at_s,
            sizes,
        )  # fmt: skip
        self.jobs[job.id] = job
        names = self.engine.cluster.names
        numbers = np.array([job.scale]), np.array([UNKNOWN_STEPS]), np.array([event.at_s])
        self.engine.add(Jobs([job.id], *numbers, [job.name], [job.owner]), speeds_of(names)[None])

    def _change(
        self, job: ServiceJob, event: AttemptStarting | AttemptRunning | AttemptAsked | AttemptEnded | JobCancelled
    ) -> None:
        """Change one job by what happened to it."""
        if isinstance(event, AttemptStarting):
            job.state, job.attempt, job.slots, job.handle = "running", event.attempt, tuple(event.slots), ""
            job.began_s, job.asked_s, job.reason = event.at_s, math.nan, ""
            job.start_s = event.at_s if math.isnan(job.start_s) else job.start_s
        elif isinstance(event, AttemptRunning):
            job.handle = event.handle
        elif isinstance(event, AttemptAsked):
            job.state, job.asked_s = "leaving", event.at_s
        elif isinstance(event, JobCancelled):
            job.is_unwanted = True
        else:
            if job.is_alive:
                device_type = job.as_attempt().device_type
                job.seconds_on[device_type] = job.seconds_on.get(device_type, 0.0) + event.at_s - job.began_s
            job.steps += event.steps
            job.slots, job.reason = (), event.reason
            names = {"left": "waiting", "lost": "waiting", "done": "finished"}
            job.state = names.get(event.how, event.how)
            job.lost = job.lost + 1 if event.how == "lost" and not event.steps else 0
            job.is_lost = event.how == "lost"
            if job.state in ENDED:
                job.finish_s = event.at_s
                if job not in self.running_jobs():
                    self.engine.finish_s[job.index] = event.at_s
                    self.engine.forget_finished()

    def _place(self) -> dict[str, list[str]]:
        """Return job -> slots: who has slots of its type keeps them, then the lowest free ones, large jobs first."""
        engine = self.engine
        if engine.running is None:
            return {}
        names, count = engine.cluster.names, engine.cluster.count.tolist()
        idle = {name: dict.fromkeys(f"{name}:{k}" for k in range(n)) for name, n in zip(names, count, strict=True)}
        kinds = zip(self.running_jobs(), engine.running.kind.tolist(), strict=True)
        types = {job.id: names[k] for job, k in kinds}
        result: dict[str, list[str]] = {}
        for name, device_type in types.items():
            before = self.runs.get(name) or list(self.jobs[name].slots)
            if len(before) == self.jobs[name].scale and all(slot in idle[device_type] for slot in before):
                result[name] = before
                for slot in before:
                    del idle[device_type][slot]
        for name in sorted(types, key=lambda name: (-self.jobs[name].scale, self.jobs[name].index)):
            if name not in result:
                result[name] = list(idle[types[name]])[: self.jobs[name].scale]
                if len(result[name]) < self.jobs[name].scale:
                    raise HeadwayError(f"job {name} was given devices of {types[name]} that are not there.")
                for slot in result[name]:
                    del idle[types[name]][slot]
        return result


def speeds_of(names: Sequence[str]) -> Values:
    """[W] Peak speeds of device types, relative to each other; 1 for a type that nobody knows."""
    try:
        result = np.array([relative_speed(name, {}) for name in names])
    except InputError:
        return np.ones(len(names))
    return np.asarray(result / result.max())


def outcome_of(state: ServiceState) -> tuple[Outcome, Values, list[ServiceJob]]:
    """Return what came of the jobs that ran and have ended, their rates [n, W], and the jobs.

    A step of `Outcome.jobs` is one of training where rates were measured, else a second. Raises `InputError`.
    """
    ended = [job for job in state.jobs.values() if job.state in ENDED and job.seconds_on]
    if not ended:
        raise InputError("no job of this service has ended yet. Ask again when one has: headway cluster queue.")
    cluster = state.engine.cluster
    rates = state.engine.rates.alone[[job.index for job in ended]]
    on = np.array([[job.seconds_on.get(name, 0.0) for name in cluster.names] for job in ended])
    first_s = ended[0].arrival_s
    scale, arrival_s, start_s, finish_s = (
        np.array([getattr(job, name) for job in ended]) for name in ("scale", "arrival_s", "start_s", "finish_s")
    )
    work = np.maximum((on * rates).sum(axis=1), 1e-6)
    jobs = Jobs(
        [job.id for job in ended], scale, work, arrival_s - first_s, [job.name for job in ended],
        [job.owner for job in ended],
    )  # fmt: skip
    moves = np.array([job.attempt - 1 for job in ended])
    outcome = Outcome(
        jobs, cluster, (0, len(ended)), start_s - first_s, finish_s - first_s, np.zeros(len(ended)),
        work / rates.max(axis=1), moves, (on * scale[:, None]).sum(axis=0), 0.0,
    )  # fmt: skip
    return outcome, rates, ended
