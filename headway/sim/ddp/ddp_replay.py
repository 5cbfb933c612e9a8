"""What-ifs of data-parallel training from deep windows: bucket size, link, one operation, and all of them together.

Use it for edits that change how communication overlaps backward, which the
always-on records do not show. A prediction is the measured step time x
replayed with the edits / replayed without, over the newest windows. What the
windows cannot tell is refused: a replay that misses them, collectives that
share the cores with compute (their duration is then a matter of scheduling,
not of size). Times in results are float seconds, inside int64 ns.

>>> MAX_DISCREPANCY, MAX_SPREAD
(0.05, 0.15)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import BarMissedError, InputError
from headway.core.files.safe_files import read_json
from headway.core.units import NS_PER_S, format_fraction
from headway.cost.codecs import CodecTimes
from headway.sim.ddp import ddp_link as ddp_buckets
from headway.sim.ddp.ddp_edits import (
    Compression,
    accelerated,
    gradients_of,
    matched,
    paced,
    scaled,
    with_buckets,
    with_codec,
)
from headway.sim.ddp.ddp_link import (
    SMALL_BYTES,
    Carried,
    CollectiveLink,
    DdpStep,
    compiled,
    fit,
    makespan_ns,
    paces_of,
    step_of,
)
from headway.sim.ddp.ddp_thread import WAIT, thread_of
from headway.sim.ddp.ddp_window import StepWindow, models_of, windows_of
from headway.sim.graph.dag import Dag
from headway.sim.graph.intervals import MAX_DISCREPANCY
from headway.sim.whatif import ResolvedEdits
from headway.trace.events.trace import Trace
from headway.trace.recording.runs import Run
from headway.trace.rings.rank_tables import DdpModel

MODEL_ERROR = 0.03
"""What a predicted change is off by in the middle (`headway bench ddp_change`): added to either end of an interval."""

CODEC_ERROR = 0.15
"""The same for codecs, beside that: cores that encode are shared with whatever else runs on the host."""

CODECS_FILE = "codecs.json"
"""File of a run folder: what the codecs of gradients took on the host (`headway comm bench`)."""

MAX_SPREAD = 0.15
"""Collectives whose rate differs by more (half the range of the middle half, as a fraction of the median) are held up
by the scheduler of busy cores, not by a link. Seen: links of one rate 0.01 to 0.05, busy loopback 0.27 to 0.47."""


@dataclass(frozen=True, slots=True, eq=False)
class DdpReplay:
    """The deep windows of a data-parallel run, ready for what-ifs. Build it with `from_run`."""

    windows: tuple[StepWindow, ...]
    """The windows that could be cut."""

    steps: tuple[DdpStep, ...]
    """One per window, at the pace of the steps beside it that were not profiled."""

    profiled: tuple[DdpStep, ...]
    """The same as the window saw them."""

    links: tuple[CollectiveLink, ...]
    """One per window: other work on the hosts and links comes and goes."""

    models: tuple[DdpModel, ...]
    """What the run noted of its DistributedDataParallel models."""

    busy: str
    """Why collectives share the cores with compute: then they keep the time they took; '' when a link decides it."""

    cores: int = 0
    """Usable cores of the host; 0 when not known."""

    codecs: CodecTimes | None = None
    """What the codecs of gradients take on the host; None when nobody measured that."""

    @classmethod
    def from_run(cls, run: Run) -> DdpReplay:
        """Cut the newest windows of `run`. Raises `InputError` when it has none that a replay can use, and says why."""
        windows = windows_of(run)
        if not windows:
            raise InputError(
                "no profiler sample of the run covers all ranks. Record a longer run, or give windows more of its time "
                "(headway run --windows 0.05)."
            )
        ranks = sorted({int(rank) for window in windows for rank in np.unique(window.trace.events["rank"])})
        made = cls.from_windows(windows, models=models_of(run), cores=run.facts.cores or 0, paces=paces_of(run, ranks))
        measured = run.path / CODECS_FILE
        if not measured.exists():
            return made
        return replace(made, codecs=CodecTimes.from_json(read_json(measured, fix="Measure anew: headway comm bench.")))

    @classmethod
    def from_windows(
        cls,
        windows: Sequence[StepWindow],
        *,
        models: Sequence[DdpModel] = (),
        cores: int = 0,
        paces: Mapping[tuple[int, int], float] | None = None,
    ) -> DdpReplay:
        """Cut `windows`; `cores` usable ones of the host, 0 when not known. Raises as `from_run`.

        `paces` is (number of a window, rank) -> pace, see `ddp_link`; 1 where it says nothing.
        """
        kept, steps, carried, reason = [], [], [], ""
        for window in windows:
            try:
                ranks = [int(rank) for rank in np.unique(window.trace.events["rank"])]
                step, loads = step_of(window.trace, [thread_of(window.trace, rank) for rank in ranks])
            except InputError as cause:
                reason = str(cause)
                continue
            kept.append(window)
            steps.append(step)
            carried.append(loads)
        if not steps:
            raise InputError(reason)
        links = _links(carried)
        known = paces or {}
        at_pace = [
            paced(step, {rank: value for (number, rank), value in known.items() if number == window.number})
            for step, window in zip(steps, kept, strict=True)
        ]
        busy = _busy(steps, links[0], cores)
        return cls(tuple(kept), tuple(at_pace), tuple(steps), tuple(links), tuple(models), busy, cores)

    @property
    def fidelity(self) -> float:
        """Observed / replayed time of all windows as they were profiled, without edits; 1 is perfect."""
        whole = replace(self, steps=self.profiled).makespans_ns(ResolvedEdits())
        return sum(step.observed_ns for step in self.profiled) / float(whole.sum())

    @property
    def step_s(self) -> float:
        """Replayed time of a step that is not profiled, without edits, s; nan when the windows hold no known number."""
        count = sum(window.num_steps for window in self.windows)
        return float(self.makespans_ns(ResolvedEdits()).sum()) / NS_PER_S / count if count else float("nan")

    def words(self) -> str:
        """Say what a prediction from the windows stands on."""
        rates = sorted(link.bytes_per_s / 1e6 for link in self.links)
        middle = rates[len(rates) // 2]
        count = len(self.windows)
        return (
            f"Replayed from {count} deep window{'s' if count > 1 else ''}: link {middle:.0f} MB/s of gradients, "
            f"{self.links[0].latency_ns / 1e6:.2f} ms per collective."
        )

    def answers(self, scenario: ResolvedEdits) -> bool:
        """Say whether the windows can tell what `scenario` asks for; the other edits are for `Program`."""
        known = scenario.only("factors", "bucket_mb", "compress", "bandwidth", "accelerator")
        return scenario == known and all(
            pattern == "comm.*" or self.matches(pattern) for pattern, _ in scenario.factors
        )

    def matches(self, pattern: str) -> bool:
        """Say whether an operation of the windows has a name that the glob `pattern` matches."""
        return any(matched(window.trace.names, pattern).any() for window in self.windows)

    def makespans_ns(self, scenario: ResolvedEdits) -> NDArray[np.int64]:
        """Return [windows] the replayed time of each window under `scenario`.

        Raises `InputError` when a bucket size cannot be laid out.
        """
        return np.array(
            [
                makespan_ns(
                    compiled(
                        self._edited(step, window, scenario),
                        link,
                        comm=float(np.prod([f for pattern, f in scenario.factors if pattern == "comm.*"])),
                        bandwidth=scenario.bandwidth,
                        as_recorded=bool(self.busy),
                    )
                )
                for step, window, link in zip(self.steps, self.windows, self.links, strict=True)
            ],
            dtype=np.int64,
        )

    def ratio(self, scenario: ResolvedEdits) -> tuple[float, tuple[float, float]]:
        """Return time after / before under `scenario`, and its range over the windows, widened by `MODEL_ERROR` and
        by what the replay misses.

        Raises `BarMissedError` when the replay misses the windows by more than 5 %, `InputError` when the windows
        cannot tell: a bucket size on busy cores, or one that cannot be laid out.
        """
        self.check(scenario)
        before, after = self.makespans_ns(ResolvedEdits()), self.makespans_ns(scenario)
        each = after / np.maximum(before, 1)
        whole = float(after.sum() / max(int(before.sum()), 1))
        if scenario == ResolvedEdits():
            return 1.0, (1.0, 1.0)
        miss = (
            MODEL_ERROR
            + (CODEC_ERROR if scenario.compress else 0.0)
            + abs(self.fidelity - 1) * min(1.0, abs(whole - 1))
        )
        return whole, (min(whole, float(each.min())) * (1 - miss), max(whole, float(each.max())) * (1 + miss))

    def check(self, scenario: ResolvedEdits) -> None:
        """Refuse what the windows cannot tell; raises as `ratio`."""
        size = scenario.bucket_mb
        live = "" if size is None else f"bucket_mb={size if isinstance(size, str) else f'{size:g}'}"
        live = live or (f"compress={scenario.compress}" if scenario.compress else "")
        if live and self.busy:
            raise InputError(
                f"{live} is not predictable here: {self.busy}. Try it live with "
                "headway run --apply; headway compare says what it won."
            )
        gap = abs(self.fidelity - 1)
        if gap > MAX_DISCREPANCY:
            raise BarMissedError(
                f"the replay of the deep windows misses them by {format_fraction(gap)}; a what-if needs at most "
                f"{format_fraction(MAX_DISCREPANCY, 0)}. Record a quieter run."
            )

    def _edited(self, step: DdpStep, window: StepWindow, scenario: ResolvedEdits) -> DdpStep:
        globs = [(pattern, factor) for pattern, factor in scenario.factors if pattern != "comm.*"]
        edited = scaled(step, window.trace, globs) if globs else step
        if scenario.accelerator != 1.0:
            edited = accelerated(edited, scenario.accelerator)
        if scenario.bucket_mb is not None:
            edited = with_buckets(edited, gradients_of(self.models), scenario.bucket_mb)
        if scenario.compress is not None:
            edited = with_codec(
                edited, self._compression(scenario.compress, len(edited.threads), bucket_mb=scenario.bucket_mb)
            )
        return edited

    def compressed_ns(self, codecs: Sequence[str]) -> NDArray[np.int64]:
        """Return [windows] the replayed time where the gradients travel by `codecs`, in order of readiness; '' = raw.

        Raises `InputError` where the gradients are not known.
        """
        gradients = gradients_of(self.models)
        if len(codecs) != len(gradients.size):
            raise InputError(f"{len(codecs)} codecs for {len(gradients.size)} gradients; give each one, '' for raw.")
        found = [
            makespan_ns(compiled(with_codec(step, self._compression("", len(step.threads), codecs=codecs)), link))
            for step, link in zip(self.steps, self.links, strict=True)
        ]
        return np.array(found, dtype=np.int64)

    def _compression(
        self, codec: str, ranks: int, *, bucket_mb: float | str | None = None, codecs: Sequence[str] = ()
    ) -> Compression:
        """Return how a codec for all gradients, or one for each, works on these ranks and this host."""
        if self.codecs is None:
            raise InputError(
                f"what the codec {codec} takes on this host was not measured. Measure it into the run folder: "
                f"headway comm bench -o RUN/{CODECS_FILE}."
            )
        shared = 0 < self.cores < 2 * ranks
        try:
            gradients = gradients_of(self.models)
        except InputError:  # how large its tensors are is not known: a bucket counts as one
            return Compression(codec, self.codecs, shared_cores=shared)
        each = list(zip(gradients.size, codecs or [codec] * len(gradients.size), strict=True))
        limit = gradients.limit if bucket_mb is None else ddp_buckets.limits(bucket_mb)
        buckets = ddp_buckets.assign(gradients.size, gradients.kind, limit)
        listed = [[each[at] for at in bucket] for bucket in buckets]
        return Compression(codec, self.codecs, listed, shared_cores=shared)


def ddp_dag(trace: Trace) -> Dag:
    """Return the Dag of a window of all ranks for `greedy` in the order 'ready,priority,index'.

    Its lane 0 is the link, edges order the rest. `fidelity` is observed / replayed time, `coverage` the share of
    the threads' time that is their own work, or a wait that its collective explains. Raises `InputError` as
    `DdpReplay.from_windows`.
    """
    made = DdpReplay.from_windows([StepWindow(trace, 0)])
    step = made.steps[0]
    late = sum(int(thread.own_ns[thread.what == WAIT].sum()) for thread in step.threads)
    dag = compiled(step, made.links[0], as_recorded=bool(made.busy)).dag
    whole = max(1, step.observed_ns * len(step.threads))
    return replace(dag, fidelity=made.fidelity, coverage=max(0.0, 1 - late / whole))


def _busy(steps: Sequence[DdpStep], link: CollectiveLink, cores: int) -> str:
    """Say why collectives compete with compute for the cores of the host; '' when a link of one rate holds them up."""
    if link.spread <= MAX_SPREAD:
        return ""
    ranks = max(len(step.threads) for step in steps)
    shared = f", while {ranks} ranks keep {cores} cores busy" if 0 < cores <= ranks else ""
    return (
        f"the rate of its collectives varies by {format_fraction(link.spread, 0)} either way{shared}: how long one "
        "takes is a matter of scheduling, not of its size"
    )


def _links(carried: Sequence[Sequence[Carried]]) -> list[CollectiveLink]:
    """Return the link of each window; of a window without large collectives, that of all windows together."""
    whole = fit([one for loads in carried for one in loads])
    return [
        replace(fit(loads), spread=whole.spread) if any(one.size > SMALL_BYTES for one in loads) else whole
        for loads in carried
    ]
