"""`headway data`: the input side of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from headway.core.errors import InputError
from headway.core.units import format_bytes, format_seconds
from headway.data.stalls.model import StallReport, attribute, what_if
from headway.ledger.answers.input_counts import count_words
from headway.report.paper import ScreenOptions, add_row, draw, grid, paragraph
from headway.report.terminal import render_stalls, render_whatif
from headway.sim.recorded.program import Program
from headway.sim.whatif import Prediction
from headway.verbs.loading.measure import STEPS, measure
from headway.verbs.shared.output import emit
from headway.verbs.shared.source import run_at


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
    run: Path | None = None,
    /,
    *,
    options: Annotated[WhatIfOptions, Parameter(name="*")] = NOTHING,
    steps: int | None = None,
    nproc_per_node: str | None = None,
    module: Annotated[bool, Parameter(alias="-m")] = False,
    out: Path | None = None,
    json: bool = False,
    script: Annotated[list[str] | None, Parameter(parse=False)] = None,
) -> int:
    """Split a run's input stalls into fetch, prep and transfer, and name the best remedy.

    A recorded run is replayed without each. A script behind `--` is run
    three times instead, unmodified and for a few steps: with a cold page
    cache, with raw data in memory, and with batches that are there already.
    What it writes, it writes three times.

    Example: `headway data stalls headway-runs/train-1 --workers 4`

    Example: `headway data stalls --steps 60 -- train.py --lr 1e-3`

    Parameters
    ----------
    run
        A run folder; the newest one by default.
    steps
        With a script: optimizer steps of each of the three runs, the first 5 of which are warm-up. 60 by default.
    nproc_per_node
        With a script: ranks on this host, a number, auto, cpu or gpu. 1 by default.
    module
        With a script: it is a module, as in python -m.
    out
        With a script: folder for the three runs; headway-runs/SCRIPT-stalls-N by default.
    json
        Print one JSON object instead of text.
    """
    if script is not None:
        return _measured(run, options, steps, nproc_per_node, module=module, out=out, json=json, script=script)
    given = {"--steps": steps, "--nproc-per-node": nproc_per_node, "--module": module or None, "--out": out}
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise InputError(f"{', '.join(wrong)} needs a script to run. Put it behind --, or drop the option.")
    recorded = run_at(run)
    program = Program.from_run(recorded)
    report = attribute(program)
    answer: dict[str, Any] = {**report.to_json(), "counts": recorded.facts.input}
    prediction = what_if(program, **options.asked) if options.asked else None
    if prediction is not None:
        after = attribute(program, prediction.edits, fixes=False)
        answer |= {"what_if": prediction.to_json(), "after": after.to_json()}
    emit(answer, lambda screen: _replayed_screen(report, recorded.facts.input, prediction, screen), as_json=json)
    return 0


def _measured(
    run: Path | None,
    options: WhatIfOptions,
    steps: int | None,
    nproc_per_node: str | None,
    *,
    module: bool,
    out: Path | None,
    json: bool,
    script: list[str],
) -> int:
    """Measure the script in three phases."""
    wrong = ([f"the run {run}"] if run else []) + [f"--{name.replace('_', '-')}" for name in options.asked]
    if wrong:
        raise InputError(
            f"{', '.join(wrong)} and a script behind -- exclude each other: what-ifs are of a recorded run. Drop one; "
            "measure the script first, then ask of OUT/cold."
        )
    report, answer = measure(
        script, steps=STEPS if steps is None else steps, nproc_per_node=nproc_per_node, module=module, out=out
    )
    emit(answer, lambda screen: _measured_screen(report, answer, screen), as_json=json)
    return 0


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
    table = grid("left", "right", "right", "right", "right", "right", "right")
    add_row(table, "phase", "step", "examples/s", "read", "CPU", "memory", "/dev/shm", style="dim")
    for name, phase in answer["phases"].items():
        rate, read, cpu = phase["examples_per_s"], phase["read_bytes_per_s"], phase["cpu_fraction"]
        add_row(
            table,
            name,
            format_seconds(phase["step_s"]),
            "" if rate is None else f"{rate:.4g}",
            "" if read is None else f"{format_bytes(read)}/s",
            "" if cpu is None else f"{100 * cpu:.0f} %",
            *("" if phase[key] is None else format_bytes(phase[key]) for key in ("rss_bytes", "shm_bytes")),
        )
    where = paragraph(f"The three runs are in {answer['runs']}", style="dim")
    below = draw([Text("  What was measured", style="bold"), table, "", where], **screen)
    return f"{render_stalls(report, source=answer['source'], **screen)}\n\n{below}"
