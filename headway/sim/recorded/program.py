"""A recorded run that can be replayed with edits: what would a step have taken, had this been different?

Use it on what `headway run` records always: no profiler window is needed. The
training threads of all ranks, the loads of their batches, cores and storage
are replayed as operations; a prediction is the measured step time x replayed
with the edits / replayed without. A replay without edits that misses the
measured step time by more than 5 % refuses to predict. Times in results are
float seconds, inside they are int64 ns.

    program = Program.from_run(run)
    program.predict(["workers=4", "checkpoint=none"]).speedup
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import BarMissedError, InputError
from headway.core.machine.host_load import HostLoad
from headway.core.units import NS_PER_S, format_fraction, plural
from headway.sim.ddp.ddp_replay import DdpReplay
from headway.sim.graph.intervals import CONTENDED_FRACTION, most_discrepancy, speedup_interval
from headway.sim.recorded.core_use import Contention
from headway.sim.recorded.lane import LABEL, LABELS
from headway.sim.recorded.loader_model import LoaderModel, busiest_host, host_pressure, own_service, storage_is_shared
from headway.sim.recorded.pool_waits import BUSY, PoolWaits
from headway.sim.recorded.recording import Recording, first_alone, first_steady
from headway.sim.recorded.segment_times import Costs, beside_loads, brings_workers, edited_segments, on_busy_cores
from headway.sim.recorded.stage_orders import INPUT_SHARES, MOST_STARVED, RecordedPipeline, check_stages, reordered
from headway.sim.recorded.unroll import Unrolled, unroll
from headway.sim.whatif import Edit, Prediction, ResolvedEdits, parse_edit, scenario_of
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace
from headway.trace.recording.run_facts import RunFacts

if TYPE_CHECKING:
    from headway.trace.recording.runs import Run

MAX_RANK_STEPS = 8000
"""Ranks x steps that are replayed; a longer run is cut, and what is rare is scaled to its rate over the whole run."""

MIN_STEPS = 4
"""Steady steps that a prediction needs."""


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A run that can be replayed. Build it with `from_run`."""

    recording: Recording
    """What was recorded, cut into segments."""

    models: tuple[LoaderModel, ...]
    """The loaders of each rank."""

    cores: int
    """Usable cores of the host."""

    load: HostLoad | None
    """What other processes took of them; None where that was not recorded."""

    busy: NDArray[np.float64]
    """[ranks] Share of compute that occupies a core of the host (0 when an accelerator, or a sleep, does it)."""

    busy_known: bool
    """Whether the run says so; if not, the share that explains the run best was taken."""

    pressure: float
    """How much longer CPU work takes because of other work on the host; assumed costs are multiplied by it."""

    starved: float
    """Share of the recorded run-queue waits that nothing in the replay explains, and that edits leave as they are."""

    strength: float
    """Share of the recorded other load that competes with the job for its cores."""

    shared: bool | None
    """Whether loads share one storage pipe; None when the run does not show it."""

    service: float
    """Blocked time that one shared pipe needs / blocked time recorded."""

    warm: int
    """First step that counts: those before it are warm-up."""

    measured_s: float
    """Mean time of a steady step, as recorded; left out are headway's work once in a run, and steps beside children."""

    replayed_s: float
    """The same over those steps that are replayed: the first ones, when the run is long."""

    costs: Costs
    """What the run could not show."""

    facts: RunFacts
    """What run.json says."""

    pool: PoolWaits
    """What the threads waited for that share operators with the training thread."""

    run: Run | None = None
    """The run folder, for its deep windows; None for a bare trace."""

    deep: list[DdpReplay | InputError] = field(default_factory=list)
    """Its deep windows once they were asked for, or why they cannot be used."""

    replays: dict[tuple[ResolvedEdits, bool], NDArray[np.float64]] = field(default_factory=dict)
    """Replays done so far: (scenario, scaled to the whole run) -> [k] ns per steady step, mean over ranks."""

    orders: dict[tuple[str | None, float, float], Recording] = field(default_factory=dict)
    """Recordings with another order of their pipeline, once asked for: by schedule, bubble, share of the input."""

    @classmethod
    def from_run(cls, run: Run, *, costs: Costs | None = None) -> Program:
        """Build the program of the last attempt of a recorded run."""
        return replace(cls.from_trace(run.parts, run.facts, costs=costs), run=run)

    @classmethod
    def from_trace(
        cls, trace: Trace | Parts, facts: RunFacts | Mapping[str, Any], *, costs: Costs | None = None
    ) -> Program:
        """Build it from finalised rows and the content of run.json; of parts one rank is in memory at a time.

        `costs` replaces the typical costs of what the run cannot show. Raises
        `InputError` when too few steps were recorded.
        """
        parts, facts = Parts.of(trace), RunFacts.of(facts)
        num_ranks = max(1, sum(rank >= 0 for rank in parts.numbers))
        recording = Recording.from_trace(parts, max_steps=max(MIN_STEPS + 2, MAX_RANK_STEPS // num_ranks))
        warm = first_steady(recording)
        if recording.num_steps - warm < MIN_STEPS:
            raise InputError(
                f"the run has {plural(recording.num_steps, 'step')}, {warm} of warm-up; a what-if needs at least "
                f"{MIN_STEPS} steady ones. Record more steps."
            )
        # Cores that nobody counted are taken to have been enough.
        cores = facts.cores or busiest_host(recording)
        load = facts.host_load if facts.host_load is not None and facts.host_load.readings else None
        pool = PoolWaits.of(recording, cores, load, facts)
        pressure = host_pressure(recording, cores, alone=pool.alone) if costs is None else 1.0
        costs = (costs or Costs()).slowed(pressure)
        models = tuple(
            LoaderModel.of(batches, lane, facts.effective_loaders, costs)
            for batches, lane in zip(recording.batches, recording.lanes, strict=True)
        )
        share = facts.compute_cpu_fraction
        busy = recording.busy if share is None else np.full(len(models), share)
        kept = np.array([np.ptp(lane.step_end_ns[warm:]) - lane.once_ns(warm) for lane in recording.lanes])
        first = first_alone(recording, warm, facts.asked_until_ns)
        whole = recording.last_end_ns - [lane.step_end_ns[first] + lane.once_ns(first) for lane in recording.lanes]
        program = cls(
            recording=recording,
            models=models,
            cores=cores,
            load=load,
            pressure=pressure,
            busy=np.nan_to_num(busy, nan=1.0),
            busy_known=bool(np.isfinite(busy).all()),
            starved=1.0,
            strength=1.0,
            shared=storage_is_shared(recording),
            service=own_service(recording.batches) if any(b.group.size for b in recording.batches) else 1.0,
            warm=warm,
            measured_s=float(whole.mean()) / (recording.recorded_steps - first) / NS_PER_S,
            replayed_s=float(kept.mean()) / (recording.num_steps - warm) / NS_PER_S,
            costs=costs,
            facts=facts,
            pool=pool,
        )
        return program._fitted()

    @property
    def fidelity(self) -> float:
        """Return measured / replayed step time without edits; 1 is perfect."""
        return self.replayed_s * NS_PER_S / float(self.steps_ns(ResolvedEdits(), whole=False).mean())

    def predict(
        self,
        edits: Iterable[Edit | str] = (),
        *,
        max_discrepancy: float | None = None,
        interval: bool = True,
        seed: int = 0,
    ) -> Prediction:
        """Predict the mean steady step under `edits`; `interval=False` saves the replays behind the interval.

        Raises `InputError` for an edit that is wrong or cannot be predicted
        from this run, `BarMissedError` when the replay without edits misses
        the measured time by more than `max_discrepancy` (default: `bar`).
        """
        given = tuple(parse_edit(edit) if isinstance(edit, str) else edit for edit in edits)
        scenario = scenario_of(given)
        inside, rest, note = self._split(scenario)
        if rest != scenario and rest == ResolvedEdits():
            return self._from_windows(inside, Prediction(self.measured_s, self.measured_s, (1.0, 1.0), ()), given)
        if rest != scenario:
            others = [edit for edit in given if self._split(scenario_of([edit]))[0] != scenario_of([edit])]
            plain = self.predict(others, max_discrepancy=max_discrepancy, interval=interval, seed=seed)
            return self._from_windows(inside, plain, given)
        self._check(scenario, max_discrepancy)
        # Of a bare trace nothing is known of its host's cores.
        busy = float(self.busy.mean()) if self.run is not None else 0.0
        likely = beside_loads(self.recording, scenario, busy)
        base, after = self.steps_ns(ResolvedEdits(), seed), self.steps_ns(likely, seed)
        step_s = self.measured_s * float(after.mean() / base.mean())
        speedup = float(base.mean() / max(after.mean(), 1e-9))
        wanted = interval and scenario != ResolvedEdits()
        # What workers cost beside compute may be nothing: the range begins from there.
        bounds = self._interval(scenario, base, self.steps_ns(scenario, seed), seed) if wanted else (speedup, speedup)
        notes = " ".join([*self._notes(scenario), *([note] if note else [])])
        return Prediction(self.measured_s, step_s, bounds, tuple(map(str, given)), notes)

    def windows(self) -> DdpReplay:
        """Return the replay of the run's deep windows. Raises `InputError` when it has none that a replay can use."""
        if not self.deep:
            if self.run is None:
                raise InputError("a bare trace has no deep windows. Name the run folder.")
            try:
                self.deep.append(DdpReplay.from_run(self.run))
            except InputError as cause:
                self.deep.append(cause)
        found = self.deep[0]
        if isinstance(found, InputError):
            raise found
        return found

    @property
    def replays_links(self) -> bool:
        """Whether deep windows answer what another bandwidth would do."""
        return self._split(ResolvedEdits(bandwidth=2.0))[0] != ResolvedEdits()

    def _split(self, scenario: ResolvedEdits) -> tuple[ResolvedEdits, ResolvedEdits, str]:
        """Return what the deep windows have to answer, the rest, and why windows that could have helped do not.

        Theirs are bucket sizes, links, and operations that only they show. What they can answer together they answer
        together; loaders and the host are not in them.
        """
        unseen = tuple(pair for pair in scenario.factors if not self._shows(pair[0]))
        by_device = self.talks_by_device and (
            scenario.bandwidth != 1.0 or any(pattern == COMM_GLOB for pattern, _ in unseen)
        )
        inside = replace(scenario.only("bucket_mb", "compress", "bandwidth"), factors=unseen)
        if inside == ResolvedEdits():
            return inside, scenario, ""
        # Why they cannot is kept beside the answer of the always-on records, or said with the refusal.
        try:
            deep = self.windows()
            if scenario.bucket_mb is None and scenario.compress is None:
                deep.check(inside)
        except (InputError, BarMissedError) as cause:
            if by_device:
                raise InputError(f"what devices communicate is seen in deep windows only: {cause}") from None
            for target, value in (("bucket_mb", scenario.bucket_mb), ("compress", scenario.compress)):
                if value is None:
                    continue
                given = Edit(target, value)
                raise InputError(
                    f"{given} is not predictable from this run: {cause} Try it live with headway run --apply."
                ) from None
            return ResolvedEdits(), scenario, f"Deep windows do not tell more: {cause}"
        if not all(pattern == COMM_GLOB or deep.matches(pattern) for pattern, _ in unseen):
            return ResolvedEdits(), scenario, ""  # The check of the always-on names says which names there are.
        if deep.answers(scenario):
            return scenario, ResolvedEdits(), ""
        left = tuple(pair for pair in scenario.factors if pair not in unseen)
        return inside, replace(scenario, factors=left, bucket_mb=None, compress=None, bandwidth=1.0), ""

    def _from_windows(self, inside: ResolvedEdits, rest: Prediction, given: tuple[Edit, ...]) -> Prediction:
        """Add what the windows say to `rest`: seconds of a step, because the two parts of it follow each other."""
        deep = self.windows()
        ratio, (low, high) = deep.ratio(inside)
        step_s, fastest, slowest = (
            max(0.0, rest.step_s + rest.base_step_s * (value - 1)) for value in (ratio, low, high)
        )
        spread = (rest.speedup / max(rest.interval[1], 1e-9), rest.speedup / max(rest.interval[0], 1e-9))
        bounds = tuple(self.measured_s / max(time, 1e-9) for time in (slowest * spread[1], fastest * spread[0]))
        notes = [rest.note] if rest.note else []
        return Prediction(
            self.measured_s, step_s, (bounds[0], bounds[1]), tuple(map(str, given)), " ".join([*notes, deep.words()])
        )

    @property
    def talks_by_device(self) -> bool:
        """Whether devices communicate, if anything does: the training threads of ranks on devices waited for nobody."""
        return not self.recording.meetings and any(work is not None for work in self.recording.devices)

    def _shows(self, pattern: str) -> bool:
        """Say whether the always-on records have operations that the glob `pattern` matches."""
        if pattern == COMM_GLOB and self.talks_by_device:
            return False
        single = ResolvedEdits(factors=((pattern, 0.5),))
        return pattern in KNOWN_GLOBS or any(single.factor(name) != 1 for name in self._names() | set(PARTS))

    def _names(self) -> set[str]:
        return {LABELS[code] for lane in self.recording.lanes for code in np.unique(lane.label)}

    def steps_ns(self, scenario: ResolvedEdits, seed: int = 0, *, whole: bool = True) -> NDArray[np.float64]:
        """Replay under `scenario` and return [k] the duration of each steady step, mean over ranks.

        `whole` scales what is rare to its rate over the whole run, where only a part of it is replayed.
        """
        key = (scenario, whole or self.recording.num_steps == self.recording.recorded_steps)
        if key not in self.replays:
            self.replays[key] = self._replay(scenario, seed, self.models, whole=whole)
        return self.replays[key]

    def unrolled(self, edits: Iterable[Edit | str] = ()) -> Unrolled:
        """Return the operations, their order and their durations under `edits`: what a prediction replays."""
        return self._unrolled(scenario_of(edits), 0, self.models)

    def _replay(
        self, scenario: ResolvedEdits, seed: int, models: tuple[LoaderModel, ...], *, whole: bool = True
    ) -> NDArray[np.float64]:
        horizon = 2.0 * max(int(lane.step_end_ns[-1] - lane.step_end_ns[0]) for lane in self.recording.lanes)
        while True:
            unrolled = self._unrolled(scenario, seed, models, whole=whole, horizon_ns=horizon)
            ends = unrolled.step_end_ns()
            if ends.max() <= horizon or not self.contention(scenario).rivals:
                return np.asarray(np.diff(ends[:, self.warm - 1 :], axis=1).mean(axis=0), dtype=np.float64)
            horizon *= 2.0

    def _unrolled(
        self,
        scenario: ResolvedEdits,
        seed: int,
        models: tuple[LoaderModel, ...],
        *,
        whole: bool = True,
        horizon_ns: float = 0.0,
    ) -> Unrolled:
        """Unroll; `whole` as in `edited_segments`, other load competes until `horizon_ns`."""
        shared, recording = self.shares_storage(scenario), self.reordered(scenario)
        pace = self._load_pace(scenario.straggler)
        starved = 0.0 if scenario.other is not None or self.pool.frees(scenario) else self.starved  # others' waits
        loading = tuple(
            model.under(scenario, seed + index, starved).paced(factor * (self.service if shared else 1.0), factor)
            for index, (model, factor) in enumerate(zip(models, pace, strict=True))
        )
        return unroll(
            recording,
            loading,
            segment_ns=edited_segments(
                recording, scenario, self.costs, whole=whole, longer=self.pool.longer(scenario, loading)
            ),
            occupancy=self.pool.occupancy(scenario, self.busy, starved),
            contention=self.contention(scenario),
            shared_storage=shared,
            horizon_ns=horizon_ns,
            accelerator=scenario.accelerator,
        )

    def reordered(self, scenario: ResolvedEdits) -> Recording:
        """Return the recording with the order of its pipeline that `scenario` asks for."""
        key = (scenario.schedule, scenario.bubble, scenario.input_share)
        if key not in self.orders:
            self.orders[key] = reordered(self.recording, scenario)
        return self.orders[key]

    def contention(self, scenario: ResolvedEdits) -> Contention:
        """Return what competes for the cores under `scenario`."""
        ranks = int(np.bincount(self.recording.host).max())
        edits = (scenario.cores, scenario.other)
        return Contention.of(self.load, self.cores, groups=ranks, edits=edits, strength=self.strength)

    def shares_storage(self, scenario: ResolvedEdits) -> bool:
        """Say whether loads queue for one pipe under `scenario`: as told, else as the run shows, else not."""
        told = scenario.storage_shared
        return bool(self.shared) if told is None else told

    def _load_pace(self, excess: float) -> NDArray[np.float64]:
        """Return [ranks] factor on loads that leaves `excess` of what slow ranks load longer than their peers."""
        mean = np.array(
            [batches.part_ns.sum(axis=1).mean() if len(batches.seq) else 0.0 for batches in self.recording.batches]
        )
        if excess == 1.0 or (mean > 0).sum() < 2:
            return np.ones(mean.size)
        typical = np.quantile(mean[mean > 0], 0.5, method="lower")
        slow = np.where(mean > 1.02 * typical, typical / np.maximum(mean, 1), 1.0)
        return np.asarray(1 + (excess - 1) * (1 - slow))

    def _fitted(self) -> Program:
        """Return this program with the unknown shares that explain the run best: of compute, other load, waits.

        Where the run does not tell candidates apart, the first one stays: compute occupies a core, others compete with
        all that they use, and recorded waits for a core stay as they are, because the bound on the job's CPU time was
        not what caused them.
        """
        alone = self.load is None and busiest_host(self.recording) <= self.cores
        shares = self.busy.mean() * np.ones(1) if self.busy_known else np.array([1.0, 0.5, 0.0])
        outsides = (1.0,) if alone else (1.0, 0.5, 0.0)
        # Others that run at a lower priority, or on other cores than the job's threads, compete less than they use.
        strengths = (1.0, 0.5, 0.25, 0.0) if self.load is not None and self.load.demand > 0 else (1.0,)
        best, gap = self, np.inf
        for share, strength, outside in product(shares, strengths, outsides):
            busy = self.busy if self.busy_known else np.full(self.busy.size, share)
            other = replace(self, busy=busy, strength=strength, starved=outside, replays={})
            if abs(other.fidelity - 1) < gap - 0.005:
                best, gap = other, abs(other.fidelity - 1)
            if gap < 0.005:
                break
        return best

    @property
    def bar(self) -> float:
        """Return by how much the replay may miss the run: more in a short one, whose steps say less of their mean."""
        return most_discrepancy(self.recording.recorded_steps)

    def _check(self, scenario: ResolvedEdits, max_discrepancy: float | None) -> None:
        """Refuse what this run cannot answer."""
        gap, most = abs(self.fidelity - 1), self.bar if max_discrepancy is None else max_discrepancy
        if gap > most:
            beside = f" Beside it, {self.load.words()}." if self.load is not None and self.load.demand >= BUSY else ""
            raise BarMissedError(
                f"the replay without edits misses the measured step time by {format_fraction(gap)}; a what-if needs "
                f"at most {format_fraction(most, 0)}.{beside} Record a longer or a quieter run."
            )
        check_stages(self.recording, scenario)
        names = self._names() | set(PARTS)
        for pattern, _ in scenario.factors:
            if not self._shows(pattern):
                raise InputError(
                    f"no recorded operation matches {pattern!r}. Choose among: {', '.join(sorted(names))}."
                )

    def _interval(
        self, scenario: ResolvedEdits, base: NDArray[np.float64], after: NDArray[np.float64], seed: int
    ) -> tuple[float, float]:
        """Return a range of the speedup: resampled blocks of steps, costs that were assumed, what the replay misses."""
        point, replays = base.mean() / max(after.mean(), 1e-9), list[NDArray[np.float64]]()
        if brings_workers(self.recording, scenario):
            for factor in (0.5, 2.0):
                replays.append(self._replay(scenario, seed, tuple(m.with_handoff(factor) for m in self.models)))
            replays.append(self._replay(on_busy_cores(self.recording, scenario), seed, self.models))
        if self.pool.stalls:
            replays.append(replace(self, pool=replace(self.pool, stays=True))._replay(scenario, seed, self.models))
        if scenario.compute_threads is not None:
            replays += [replace(self, pool=pool)._replay(scenario, seed, self.models) for pool in self.pool.bounds()]
        if self._splits(scenario):
            replays += [self.steps_ns(replace(scenario, input_share=share)) for share in INPUT_SHARES]
        shifts = [float(base.mean() / steps_ns.mean() / point) for steps_ns in replays]
        shifts += self.pool.beside_others(scenario) if brings_workers(self.recording, scenario) else []
        return speedup_interval(
            base, after, shifts=shifts, discrepancy=abs(self.fidelity - 1), seed=seed,
            contended=self.contention(scenario).taken_fraction >= CONTENDED_FRACTION,
        )  # fmt: skip

    def _splits(self, scenario: ResolvedEdits) -> bool:
        """Say whether the edits split backwards that were recorded whole."""
        return scenario.schedule == "zero_bubble" and not RecordedPipeline.of(self.recording).split

    def _notes(self, scenario: ResolvedEdits) -> list[str]:
        """Say what the model had to assume for these edits."""
        notes = []
        loads = any(batches.part_ns[:, 0].any() for batches in self.recording.batches)
        if brings_workers(self.recording, scenario):
            notes.append("The hand-off from workers was not recorded: typical costs are assumed.")
        kept = sorted({int(g) for m in self.models for g in m.batches.group[~m.tunable] if scenario.reaches(int(g))})
        if scenario.workers is not None and kept:
            notes.append(f"Loader {', '.join(map(str, kept))} must not be read ahead and keeps its workers.")
        if self.pressure > 1.5 and (scenario.workers or scenario.buffered_logging):
            notes.append(
                f"Other work on the host makes CPU work take {self.pressure:.1f} times as long, as it did then."
            )
        if scenario.workers and loads and self.shared is None and scenario.storage_shared is None:
            notes.append("Storage is assumed to serve all workers at full speed (storage=shared if it does not).")
        if (scenario.workers or scenario.cores) and not self.busy_known:
            notes.append(
                f"Compute is assumed to occupy {format_fraction(float(self.busy.mean()), 0)} of a core per rank."
            )
        if scenario.bandwidth != 1:
            notes.append("Only exposed communication is recorded: its latency share and hidden part are not known.")
        if scenario.cache_fraction and any((batches.epoch == 0).all() for batches in self.recording.batches):
            notes.append("The run has one epoch: a cache pays from the second on.")
        p2p = [LABEL["comm.send"], LABEL["comm.recv"]]
        matched = self.recording.messages.point.size
        if not matched and any(np.isin(lane.label, p2p).any() for lane in self.recording.lanes):
            notes.append("Sends and receives keep their recorded duration.")
        starved = float(self.recording.waiting.mean())
        if (scenario.schedule is not None or not scenario.bubble) and starved > MOST_STARVED:
            share = format_fraction(starved, 0)
            notes.append(f"Ranks had no core for {share} of their compute: with less bubble they wait more.")
        if self._splits(scenario):
            notes.append("Half of a backward is taken to be for the gradient of the input; the range has 1/3 to 2/3.")
        if self.recording.num_steps < self.recording.recorded_steps:
            notes.append(f"Replayed: the first {self.recording.num_steps} of {self.recording.recorded_steps} steps.")
        return notes


COMM_GLOB = "comm.*"
KNOWN_GLOBS = (COMM_GLOB, "checkpoint.*", "host.*", "host.gc", "host.collect", "host.logging")
"""Globs that edits write themselves: they need not match anything."""

PARTS = ("input.fetch", "input.prep", "input.collate", "input.iter")
"""Operations inside a load that `op:GLOB` reaches too."""
