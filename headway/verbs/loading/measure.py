"""Run a script three times and measure its input stalls: cold, cached and synthetic input (DS-Analyzer, VLDB 2021).

Prep stall = T3 - T1 and fetch stall = T2 - T3, where T1, T2, T3 are the mean
step times with synthetic batches, with a cold page cache, and with raw data
in memory. The script is launched unmodified; `headway.data.stalls.torch_measurements`
measures inside its ranks. Times are seconds, sizes bytes.

`headway data verify-resume`: prove on a script's own data that its loader goes on exactly.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from headway.catalog import CHECKS, MEASUREMENTS
from headway.core.errors import BarMissedError, InputError
from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.core.files.safe_files import read_json
from headway.core.machine.host import host_cores
from headway.core.units import format_bytes
from headway.data.stalls.model import NOISE, STALL_FRACTION, WARMUP_STEPS, StallReport, attribute, from_phases
from headway.report.paper import ScreenOptions, add_row, draw, headed, paragraph
from headway.runtime.launching.launch import launch
from headway.runtime.launching.options import LaunchOptions, check
from headway.runtime.launching.run_of_ranks import ExitReport
from headway.runtime.run_folder.recording import RUNS, claim_folder, next_folder
from headway.sim.recorded.program import Program
from headway.trace.events.loader_facts import LoaderFacts
from headway.trace.recording.run_facts import RunFacts, outcomes_of
from headway.trace.recording.runs import Run
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import AsModule, GivenPath, GivenScript

STEPS = 60
"""Steps of each phase by default, warm-up included."""

MAX_DIFFERENCE = 0.1
"""A replay of the cold run that differs by more from the step measured (headway's own work taken out) is not shown."""


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """What one of the three runs measured."""

    step_s: tuple[float, ...]
    """[steps] Seconds of each step, mean over ranks."""

    batches: dict[str, int]
    """Group of a loader -> batches that the rank with most of them was handed."""

    epoch_batches: dict[str, int]
    """Group of a loader -> batches of one pass, as far as known."""

    used: dict[str, float]
    """All ranks and workers, warm-up to end: cpu_s, read_bytes, seconds; at the end: rss_, shm_, page_cache_bytes.

    Empty when the script ended before.
    """

    complete: bool
    """Whether every rank took all its steps."""

    files_dropped: int = 0
    """Files that were dropped from the page cache."""

    dropping_s: float = 0.0
    """What that cost the busiest loader worker; in the training thread it is taken out of the steps."""

    @property
    def mean_s(self) -> float:
        """Mean step after the warm-up."""
        return float(np.mean(self.step_s[WARMUP_STEPS:]))

    @property
    def main(self) -> str:
        """The loader that most batches came from."""
        return max(self.batches, key=lambda group: self.batches[group])

    @classmethod
    def read(cls, run: Path) -> PhaseResult | None:
        """Read RUN/phase; of several processes that were one rank, the one with most steps. None when no rank wrote."""
        ranks: dict[str, dict[str, Any]] = {}
        for file in sorted((run / "phase").glob("r*-*.json")):
            found, rank = read_json(file), file.stem.partition("-")[0]
            if rank not in ranks or len(found["step_s"]) > len(ranks[rank]["step_s"]):
                ranks[rank] = found
        if not ranks:
            return None
        rows = list(ranks.values())
        count = min(len(row["step_s"]) for row in rows)
        times = np.mean([row["step_s"][:count] for row in rows], axis=0) if count else np.zeros(0)
        groups = sorted({group for row in rows for group in row["batches"]})
        batches = {group: max(row["batches"].get(group, 0) for row in rows) for group in groups}
        return cls(
            tuple(times.tolist()), batches, rows[0]["epoch_batches"], _used([row["used"] for row in rows]),
            all(row["complete"] for row in rows), sum(row.get("files_dropped", 0) for row in rows),
            max(row.get("dropping_s", 0.0) for row in rows),
        )  # fmt: skip

    def to_json(self, examples: float | None) -> dict[str, object]:
        """Return the phase's part of the answer; `examples` = of all ranks in one step, None when not known."""
        used, seconds = self.used, self.used.get("seconds", 0.0)
        return {
            "step_s": self.mean_s, "steps": len(self.step_s) - WARMUP_STEPS,
            "examples_per_s": examples / self.mean_s if examples else None,
            "read_bytes_per_s": used["read_bytes"] / seconds if seconds else None,
            "cpu_fraction": used["cpu_s"] / seconds / host_cores() if seconds else None,
            **{name: used.get(name) for name in ("rss_bytes", "shm_bytes", "page_cache_bytes")},
        }  # fmt: skip


def _used(rows: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Sum over ranks what happened between their two readings; {} unless all have two."""
    if not all(len(row) == 2 for row in rows):
        return {}
    used = {name: sum(after[name] - before[name] for before, after in rows) for name in ("cpu_s", "read_bytes")}
    used["rss_bytes"] = sum(after["rss_bytes"] for _, after in rows)
    used["seconds"] = float(np.mean([after["seconds"] - before["seconds"] for before, after in rows]))
    return used | {name: rows[0][1][name] for name in ("shm_bytes", "page_cache_bytes")}


def measure(
    script: Sequence[str], *, steps: int = STEPS, nproc_per_node: str | None = None, module: bool = False,
    out: Path | None = None,
) -> tuple[StallReport, dict[str, object]]:  # fmt: skip
    """Run `script` three times; return the split, and the object of `headway data stalls --json` with `phases` in it.

    The script's output goes to stderr; its three run folders are kept in
    `out`. Raises `InputError` when the script fails, reads through no
    DataLoader, or takes too few steps.
    """
    if steps <= WARMUP_STEPS:
        raise InputError(
            f"--steps is {steps}, and the first {WARMUP_STEPS} steps of each phase are warm-up. "
            f"Pass at least {WARMUP_STEPS + 1}; {STEPS} is the default."
        )
    check(LaunchOptions(nproc_per_node=nproc_per_node, module=module), script)
    folder = claim_folder(out) if out else next_folder(RUNS, f"{Path(script[0]).stem}-stalls")
    phases: dict[str, PhaseResult] = {}
    for number, name in enumerate(MEASUREMENTS, 1):
        phase = name.partition(".")[2]
        text = f"headway: phase {number} of {len(MEASUREMENTS)}, {phase} input, {steps} steps"
        print(text, file=sys.stderr, flush=True)
        parameters: dict[str, Any] = {"steps": steps, "warmup": WARMUP_STEPS}
        if phases:
            parameters |= {"batches": phases["cold"].batches, "epoch_batches": phases["cold"].epoch_batches}
        report = _launched(Remedy(name, parameters), MEASUREMENTS, folder, phase, script, nproc_per_node, module=module)
        phases[phase] = checked(phase, PhaseResult.read(folder / phase), report)
    return answer(script, folder, phases)


def _launched(
    remedy: Remedy, remedies: dict[str, str], folder: Path, name: str, script: Sequence[str],
    nproc_per_node: str | None, *, module: bool,
) -> ExitReport:  # fmt: skip
    """Run a script under one remedy, without windows and words, in the folder `name` of `folder`."""
    plan = folder / f"{name}.json"
    write_plan(PlanFile((remedy,)), plan)
    options = LaunchOptions(
        nproc_per_node=nproc_per_node, module=module, out=folder / name, apply=plan, remedies=remedies, windows=0.0,
        quiet=True, json=True,
    )  # fmt: skip
    return launch(options, script)


def checked(name: str, phase: PhaseResult | None, report: ExitReport) -> PhaseResult:
    """Return the phase if it can be used; raises `InputError` with what to change."""
    if phase is None and not report.code:
        raise InputError(
            f"no rank of the script was measured in the {name} phase: it imported no torch, or HEADWAY=off stopped the "
            "recording. Run a script that trains with torch."
        )
    if phase is None or report.run is None or (report.cls != "ok" and not phase.complete):
        raise InputError(
            f"the script failed in the {name} phase (exit code {report.code}, {report.cls}); its run is in "
            f"{report.run}. Make it work with `headway run` first."
        )
    if not phase.batches:
        raise InputError(
            "the script read nothing through a torch DataLoader, and the phases change what its loaders do. "
            "Run a script that reads its data through one."
        )
    facts = facts_of_run(report.run).loaders.get(phase.main, LoaderFacts())
    size, batch_size = facts.dataset_size, facts.batch_size
    if size is not None and batch_size and size < batch_size:
        raise InputError(f"the dataset has {size} examples, fewer than one batch of {batch_size}. Use a smaller batch.")
    if len(phase.step_s) <= WARMUP_STEPS:
        raise InputError(
            f"the script ended after {len(phase.step_s)} optimizer steps in the {name} phase, and the first "
            f"{WARMUP_STEPS} are warm-up. Run it for more epochs, or on more data."
        )
    return phase


def facts_of_run(run: Path) -> RunFacts:
    """Return what run.json says of a run that has just ended."""
    return RunFacts.of(read_json(run / "run.json"))


def answer(
    script: Sequence[str], folder: Path, phases: Mapping[str, PhaseResult]
) -> tuple[StallReport, dict[str, object]]:
    """Return the split, and the JSON object: with the phases behind it, and beside it the replay of the cold run."""
    count = min(len(phase.step_s) for phase in phases.values())
    phases = {name: replace(phase, step_s=phase.step_s[:count]) for name, phase in phases.items()}
    cold = phases["cold"]
    facts = facts_of_run(folder / "cold")
    batch_size = facts.loaders.get(cold.main, LoaderFacts()).batch_size
    per_step = cold.batches[cold.main] / count
    examples = per_step * batch_size * facts.world_size if batch_size else None
    report = from_phases(phases["synthetic"].step_s, phases["warm"].step_s, cold.step_s)
    replayed, problem = replay(folder / "cold", cold.mean_s)
    report = replace(
        report,
        steps_per_epoch=cold.epoch_batches.get(cold.main, 0) / per_step,
        fix=replayed.fix if replayed else (),
        flags=(*report.flags, *doubts(phases, waiting(folder / "warm"), folder)),
        note=replayed.note if replayed else problem,
    )
    return report, {
        **report.to_json(), "source": Path(script[0]).name, "runs": str(folder),
        "phases": {name: phase.to_json(examples) for name, phase in phases.items()},
        "replayed": replayed.to_json() if replayed else None,
    }  # fmt: skip


def replay(run: Path, measured_s: float) -> tuple[StallReport | None, str]:
    """Return the same split by replay of the cold run and '', or None and why there is none."""
    try:
        report = attribute(Program.from_run(Run.open(run)))
    except (InputError, BarMissedError) as reason:
        return None, f"No fixes are predicted, the cold run cannot be replayed: {reason}"
    if abs(report.step_s / measured_s - 1) > MAX_DIFFERENCE:
        return None, (
            f"No fixes are predicted: dropping files took so long that the cold run shows {report.step_s:.3g} s per "
            f"step, where the cold input alone takes {measured_s:.3g} s."
        )
    return report, ""


def waiting(run: Path) -> float:
    """Return the share of its loads' time in which a run was blocked below the dataset, after the warm-up."""
    trace = Run.open(run).trace
    steady = trace.events["step"] >= WARMUP_STEPS
    duration_ns = trace.events["duration_ns"]
    whole_ns = int(duration_ns[trace.named("input.load") & steady].sum())
    return int(duration_ns[trace.named("input.fetch") & steady].sum()) / whole_ns if whole_ns else 0.0


def doubts(phases: Mapping[str, PhaseResult], waited_fraction: float, folder: Path) -> list[str]:
    """Return what speaks against the phases having been what their names say."""
    cold, warm = phases["cold"], phases["warm"]
    found = []
    if cold.used and not cold.files_dropped:
        found.append(
            "The dataset opened no file that could be dropped from the page cache: cold means its source as it is."
        )
    elif cold.used and not cold.used["read_bytes"]:
        found.append(
            f"The cold phase read nothing from storage although {cold.files_dropped} files were dropped: their file "
            "system keeps them in memory, or C code reads them unseen. The fetch stall is a lower bound."
        )
    if cold.dropping_s > STALL_FRACTION * sum(cold.step_s):
        found.append(
            f"A loader worker spent {cold.dropping_s:.2g} s of the cold phase on dropping files from the page cache: "
            "the fetch stall is an upper bound."
        )
    if warm.used and cold.used and warm.used["read_bytes"] > max(STALL_FRACTION * cold.used["read_bytes"], 1 << 20):
        found.append(
            f"The cached phase still read {format_bytes(warm.used['read_bytes'])} from storage: the page cache did not "
            "hold the data. Part of the fetch stall is counted as prep."
        )
    if waited_fraction > STALL_FRACTION and warm.mean_s > phases["synthetic"].mean_s * (1 + NOISE):
        found.append(
            f"With raw data in memory, loads were still blocked for {100 * waited_fraction:.0f} % of their time: a "
            "network, a lock or a sleep in the dataset, which no page cache removes. It is counted as prep here; "
            f"the replay tells it apart: headway data stalls {folder / 'cold'}"
        )
    return found


def verify_resume(
    *, batches: int = 12, nproc_per_node: str | None = None, module: AsModule = False, out: GivenPath | None = None,
    json: AsJson = False, script: GivenScript = None,
) -> int:  # fmt: skip
    """Interrupt the loaders of a script, go on, and compare every example bit by bit.

    The script is started unmodified and stopped at its first optimizer step.
    Before that, each loader it reads is read by headway's own loader, without
    interruption and with one, going on with other numbers of workers and
    ranks. Exit code 3 if anything differed. What a script draws at random
    outside its dataset and collate function is its own to save.

    Example: `headway data verify-resume -- train.py --lr 1e-3`

    Args:
      batches: Global batches to compare, over the ends of epochs.
      nproc_per_node: Ranks on this host, a number, auto, cpu or gpu. 1 by default.
      module: The script is a module, as in python -m.
      out: Folder for the run; headway-runs/SCRIPT-resume-N by default.
    """
    if script is None:
        raise InputError("there is no script to verify. Put it behind --: headway data verify-resume -- train.py")
    if batches < 2:
        raise InputError(f"--batches is {batches}; an interruption needs a batch before and after it. Pass 2 or more.")
    check(LaunchOptions(nproc_per_node=nproc_per_node, module=module), script)
    folder = claim_folder(out) if out else next_folder(RUNS, f"{Path(script[0]).stem}-resume")
    remedy = Remedy("check.resume", {"batches": batches})
    report = _launched(remedy, CHECKS, folder, "run", script, nproc_per_node, module=module)
    if report.code:
        raise InputError(
            f"the script failed (exit code {report.code}, {report.cls}); its run is in {folder / 'run'}. Make it work "
            "with `headway run` first."
        )
    loaders = _loaders(folder / "run")
    equal = [case["examples"] and case["batches"] is not False for row in loaders for case in row.get("cases", [])]
    answer = {
        "schema": "headway.data-verify-resume/1", "script": script[0], "run": str(folder / "run"), "loaders": loaders,
        "exact": bool(equal) and all(equal), "compared": len(equal),
    }  # fmt: skip
    emit(answer, lambda screen: _screen(answer, screen), as_json=json)
    return 0 if answer["exact"] else 3


def _loaders(run: Path) -> list[dict[str, Any]]:
    """Return the facts of every loader, of the first rank: all ranks read the same. Raises `InputError` on none."""
    found: list[dict[str, Any]] = []
    for row in outcomes_of(run, rank=0):
        found += (loaders := (row.facts or {}).get("loaders", []))
        if row.reason_not_applied and not loaders:
            found.append({"dataset": "", "reason_not_applied": row.reason_not_applied})
    if not found:
        raise InputError("the script read nothing through a torch DataLoader before its first optimizer step.")
    return found


def _screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    words = {True: "equal", False: "DIFFERENT", None: "-"}
    parts: list[Any] = []
    for row in answer["loaders"]:
        workers = f", {row['num_workers']} worker{'s' * (row['num_workers'] != 1)}" if "num_workers" in row else ""
        parts.append(Text(f"  {row['dataset']}{workers}" if row.get("dataset") else "  Loaders", style="bold"))
        if "reason_not_applied" in row:
            parts.append(paragraph(f"Not verified: {row['reason_not_applied']}"))
            continue
        table = headed("goes on with", "examples", "batches", align="left left left")
        for case in row["cases"]:
            add_row(table, case["case"], words[case["examples"]], words[case["batches"]])
        parts.append(table)
        if row["hint"]:
            parts.append(paragraph(row["hint"]))
        if row["loader"] == "torch":
            parts.append(paragraph(OF_TORCH, style="dim"))
    verdict = "Resume is exact." if answer["exact"] else "Resume is NOT proven exact."
    end = Text(f"  {verdict} {answer['compared']} interruptions compared.", style="bold")
    return draw([*parts, "", end], **screen)


OF_TORCH = (
    "The script uses torch's own loader, which has no state: this is what `from headway.data import DataLoader` would "
    "give it."
)
