"""`headway data stalls|cluster|audit`: the input side of a run.

Where loaders wait; a table with the rows of each session side by side; proof that examples were delivered once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from headway.core.errors import InputError
from headway.core.units import format_bytes, format_seconds
from headway.data.loader.audit import VERDICTS, Leg, judge, legs_of, passes_of
from headway.data.sessions import BATCH, cluster_parquet
from headway.data.stalls.model import StallReport, attribute, what_if
from headway.ledger.answers.ledger import count_words
from headway.report.paper import ScreenOptions, add_row, draw, grid, headed, paragraph
from headway.report.screens import render_stalls, render_whatif
from headway.sim.recorded.program import Program
from headway.sim.whatif import Prediction
from headway.trace.events.loader_facts import LoaderFacts
from headway.trace.recording.runs import Run, merge
from headway.verbs.loading.measure import STEPS, measure
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import AsModule, GivenPath, GivenScript, NewestRun, RunPath, newest_run, run_at


@dataclass(frozen=True, kw_only=True)
class WhatIfOptions:
    """What of a recorded run to imagine otherwise; all together."""

    cache_fraction: Annotated[float | None, Parameter(help="What if this fraction of the examples were cached.")] = None
    workers: Annotated[int | None, Parameter(help="What if each loader had so many workers.")] = None
    cores: Annotated[int | None, Parameter(help="What if the host had so many cores.")] = None
    storage: Annotated[float | None, Parameter(help="What if storage were so many times as fast.")] = None
    accelerator: Annotated[float | None, Parameter(help="What if the accelerator were so many times as fast.")] = None

    @property
    def asked(self) -> dict[str, Any]:
        """The options that were given."""
        return {name: value for name, value in asdict(self).items() if value is not None}


NOTHING = WhatIfOptions()


def stalls(
    run: NewestRun = None, /, *, options: Annotated[WhatIfOptions, Parameter(name="*")] = NOTHING,
    steps: int | None = None, nproc_per_node: str | None = None, module: AsModule = False, out: GivenPath | None = None,
    json: AsJson = False, script: GivenScript = None,
) -> int:  # fmt: skip
    """Split a run's input stalls into fetch, prep and transfer, and name the best remedy.

    A recorded run is replayed without each. A script behind `--` is run
    three times instead, unmodified and for a few steps: with a cold page
    cache, with raw data in memory, and with batches that are there already.
    What it writes, it writes three times.

    Example: `headway data stalls headway-runs/train-1 --workers 4`

    Example: `headway data stalls --steps 60 -- train.py --lr 1e-3`

    Args:
      steps: With a script: optimizer steps of each of the three runs, the first 5 of which are warm-up. 60 by default.
      nproc_per_node: With a script: ranks on this host, a number, auto, cpu or gpu. 1 by default.
      module: With a script: it is a module, as in python -m.
      out: With a script: folder for the three runs; headway-runs/SCRIPT-stalls-N by default.
    """
    if script is not None:
        wrong = ([f"the run {run}"] if run else []) + [f"--{name.replace('_', '-')}" for name in options.asked]
        if wrong:
            raise InputError(
                f"{', '.join(wrong)} and a script behind -- exclude each other: what-ifs are of a recorded run. Drop "
                "one; measure the script first, then ask of OUT/cold."
            )
        steps = STEPS if steps is None else steps
        split, answer = measure(script, steps=steps, nproc_per_node=nproc_per_node, module=module, out=out)
        return emit(answer, lambda screen: _measured_screen(split, answer, screen), as_json=json)
    given = {"--steps": steps, "--nproc-per-node": nproc_per_node, "--module": module or None, "--out": out}
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise InputError(f"{', '.join(wrong)} needs a script to run. Put it behind --, or drop the option.")
    recorded = run_at(run)
    program = Program.from_run(recorded)
    report = attribute(program)
    answer = {**report.to_json(), "counts": recorded.facts.input}
    prediction = what_if(program, **options.asked) if options.asked else None
    if prediction is not None:
        after = attribute(program, prediction.edits, fixes=False)
        answer |= {"what_if": prediction.to_json(), "after": after.to_json()}
    return emit(answer, lambda screen: _replayed_screen(report, recorded.facts.input, prediction, screen), as_json=json)


def _replayed_screen(
    report: StallReport, counts: Mapping[str, Any], prediction: Prediction | None, screen: ScreenOptions
) -> str:
    parts = [render_stalls(report, **screen)]
    counted = [Text(f"  {line}") for line in count_words(counts)]
    if counted:
        parts += [draw([Text("  What caches and orders counted", style="bold"), *counted], **screen)]
    if prediction is not None:
        parts += [render_whatif(prediction, **screen)]
    return "\n\n".join(parts)


def _measured_screen(report: StallReport, answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    """Return the split, and below it what each phase measured."""
    table = headed("phase", "step", "examples/s", "read", "CPU", "memory", "/dev/shm")
    for name, phase in answer["phases"].items():
        rate, read, cpu = phase["examples_per_s"], phase["read_bytes_per_s"], phase["cpu_fraction"]
        add_row(
            table, name, format_seconds(phase["step_s"]), "" if rate is None else f"{rate:.4g}",
            "" if read is None else f"{format_bytes(read)}/s", "" if cpu is None else f"{100 * cpu:.0f} %",
            *("" if phase[key] is None else format_bytes(phase[key]) for key in ("rss_bytes", "shm_bytes")),
        )  # fmt: skip
    where = paragraph(f"The three runs are in {answer['runs']}", style="dim")
    below = draw([Text("  What was measured", style="bold"), table, "", where], **screen)
    return f"{render_stalls(report, source=answer['source'], **screen)}\n\n{below}"


def cluster(
    source: Path, target: Path, /, *, by: str = "session", time: str | None = None, shuffle: int | None = None,
    batch_size: int = BATCH, json: AsJson = False,
) -> int:  # fmt: skip
    """Write a Parquet table with the rows of each session side by side, in time order inside.

    Rows of one session repeat most of each other's id lists. Side by side
    they compress, and a batch stores each different list once
    (headway.data.jagged). Clustered rows are not independent: shuffle whole
    sessions when reading them (headway.data.session_order).

    Example: `headway data cluster log.parquet clustered.parquet --by session --time timestamp`

    Args:
      source: The Parquet file to read.
      target: The Parquet file to write; it appears whole or not at all.
      by: Column that names the session of each row.
      time: Column that orders the rows of a session; the order they have by default.
      shuffle: Seed of a random order of the sessions; that of their first rows by default.
      batch_size: Rows of the batches that sessions per batch are reported for.
    """
    done = cluster_parquet(source, target, by=by, time=time, shuffle=shuffle, batch_size=batch_size)
    answer = {"schema": "headway.data.cluster/1", "target": str(target), **done.to_json()}
    return emit(answer, lambda screen: _screen(answer, screen), as_json=json)


def _screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    table = headed("", "before", "after")
    add_row(table, "file", format_bytes(answer["bytes_before"]), format_bytes(answer["bytes_after"]))
    mixed = [f"{answer[f'sessions_per_batch_{when}']:.4g}" for when in ("before", "after")]
    add_row(table, f"sessions per batch of {answer['batch_size']}", *mixed)
    rows = f"  {answer['num_rows']} rows of {answer['num_sessions']} sessions, {answer['rows_per_session']:.1f} each"
    written = Text(f"  Written to {answer['target']}", style="dim")
    return draw([Text(rows, style="bold"), table, written], **screen)


WRONG = ("repeats", "loses")
"""Verdicts that make the exit code 3."""


def audit(*runs: RunPath, json: AsJson = False) -> int:
    """Prove that every example was delivered exactly once per epoch, over interruptions and other world sizes.

    Reads what headway's own DataLoader noted in recorded runs: a sum of
    hashes per rank and pass. Name all the runs that one job consists of,
    the interrupted ones and those that went on; their order does not
    matter. What an interruption made the job do again is counted apart. An
    epoch that did not end is "open". Exit code 3 when an example was
    repeated or lost.

    Example: `headway data audit headway-runs/train-1 headway-runs/train-2`

    Args:
      runs: Run folders; the newest one by default. Folders of several hosts of one run count as one.
    """
    opened = _opened(runs or (newest_run(),))
    loaders = {int(group): facts for run in opened for group, facts in run.facts.loaders.items()}
    sizes = {group: facts.dataset_size for group, facts in loaders.items() if facts.dataset_size}
    epochs = judge(legs(opened), sizes)
    if not epochs:
        raise InputError(
            f"{', '.join(str(run.path) for run in opened)} holds no delivery of headway's DataLoader. Import it from "
            "headway.data in place of torch's and record again; torch's own leaves no such record."
        )
    rows = [
        {"dataset": loaders.get(epoch.loader, LoaderFacts()).dataset or None, **epoch.to_json()} for epoch in epochs
    ]
    answer = {
        "schema": "headway.data.audit/1", "runs": [str(run.path) for run in opened], "epochs": rows,
        "exact": all(epoch.verdict == "exact" for epoch in epochs),
        "wrong": sum(epoch.verdict in WRONG for epoch in epochs),
    }  # fmt: skip
    emit(answer, lambda screen: _audit_screen(answer, screen), as_json=json)
    return 3 if answer["wrong"] else 0


def _opened(paths: Iterable[Path]) -> list[Run]:
    """Open the runs; the parts of one run are joined."""
    found: dict[str, list[Run]] = {}
    for path in dict.fromkeys(Path(path).resolve() for path in paths):
        run = run_at(path)
        told = any(path.glob("run*.json"))  # a folder cut short has no name of its run
        found.setdefault(str(run.facts.run_id if told else path), []).append(run)
    return [merge(parts) for parts in found.values()]


def legs(runs: Iterable[Run]) -> list[Leg]:
    """Return the legs of all attempts of some runs, on the realtime clock."""
    found = []
    for run in runs:
        shift_ns = run.facts.realtime_shift_ns
        for number, attempt in enumerate(run.attempts()):
            ranks = zip(attempt.numbers, attempt, strict=True)
            passes = {rank: passes_of(part, rank, shift_ns=shift_ns) for rank, part in ranks}
            found += legs_of(run.path.name, number, passes)
    return found


def _audit_screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    table = grid("left", "right", "right", "right", "right", "left")
    add_row(table, "loader", "epoch", "expected", "delivered", "again", "verdict", style="dim")
    for row in answer["epochs"]:
        name = str(row["loader"]) if row["dataset"] is None else f"{row['loader']} ({row['dataset']})"
        name += f", replica {row['replica']}" if row["replica"] else ""
        add_row(
            table, name, f"{row['epoch']}", f"{row['expected']}", f"{row['delivered']}", f"{row['again']}",
            row["verdict"], style="bold red" if row["verdict"] in WRONG else "",
        )  # fmt: skip
    met = {row["verdict"] for row in answer["epochs"]}
    words = [paragraph(f"{verdict}: {meaning}", style="dim") for verdict, meaning in VERDICTS.items() if verdict in met]
    if answer["wrong"]:
        verdict = f"{answer['wrong']} epochs are NOT exact."
    elif "exact" in met:
        verdict = "Every epoch that ended was delivered exactly once."
    else:
        verdict = "No epoch ended; nothing that was delivered is wrong."
    return draw([table, "", *words, Text(f"  {verdict}", style="bold")], **screen)
