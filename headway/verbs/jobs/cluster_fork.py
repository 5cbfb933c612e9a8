"""`headway cluster fork`: a script in copies on unlike devices, and how long jobs would take so, simulated."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from rich.text import Text

from headway.cluster.fork.answer import ForkAnswer, fork_answer, read_jobs, read_speeds, run_answer
from headway.cluster.fork.coordinator import Fork
from headway.core.errors import InputError, say_beside
from headway.core.files.safe_files import MOST
from headway.report.paper import ScreenOptions, add_row, draw, headed, paragraph, uncut
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import GivenPath, GivenScript


def fork(
    *, speeds: str, jobs: GivenPath | None = None, slot_s: float = 0.0, slot_cost_s: float = 1.0,
    dir: GivenPath | None = None, json: AsJson = False, script: GivenScript = None,
) -> int:  # fmt: skip
    """Train with a copy of a script on each of several unlike devices, or simulate that for some jobs.

    HadarE: in each slot the batches of an epoch are dealt to the copies by the speeds of their devices; at its end the
    copies become one state again. Each batch is done by one copy; one that is lost leaves its share to the others. With
    --jobs nothing is run: jobs are simulated, beside whole jobs under las. The fluid bound is all steps over the sum of
    all speeds.

    Example: `headway cluster fork --speeds 4,2,1 -- train.py --lr 1e-3`

    Args:
      speeds:
        Steps per second of each device, separated by commas, in the order of CUDA; a device of 0 is left out. For a
        script a first guess, which what is measured replaces.
      jobs: JSON list of jobs, {"name": "a", "steps": 1000}, all there at the start: simulate them.
      slot_s:
        Longest time that copies train apart, in seconds; 0: 360, or 100 steps of the slowest device; of a script so
        long that averages take 5 % of it.
      slot_cost_s: Seconds that a simulated job pays in a slot in which it has several copies or starts again elsewhere.
      dir: Folder for the output, the run and the states of each copy; headway-fork-N by default.
    """
    rates = read_speeds(speeds)
    for index, rate in enumerate(rates):
        if not rate:
            say_beside(f"headway: device {index} does 0 steps/s and is left out\n")
    if (jobs is None) == (not script):
        raise InputError(
            "give a script behind -- to train with copies of it, or --jobs FILE to simulate jobs; one of the two."
        )
    if jobs is not None:
        result = fork_answer(read_jobs(jobs), rates, slot_s=slot_s, slot_cost_s=slot_cost_s)
    else:
        assert script, "checked above"
        result = _train(script, rates, slot_s, dir)
    used = [rate for rate in rates if rate]
    return emit(result, lambda screen: _screen(result, used, screen, ran=jobs is None), as_json=json)


def _train(script: list[str], rates: Sequence[float], slot_s: float, folder: Path | None) -> ForkAnswer:
    """Run a script in copies; raises `InputError`, or `HeadwayError` where no copy did well."""
    if not Path(script[0]).is_file():
        raise InputError(f"the script {script[0]!r} does not exist in {Path.cwd()}. Name a file of Python.")
    if not 0 <= slot_s < MOST:
        raise InputError(f"--slot-s is {slot_s:g}; pass seconds above 0, or leave it out.")
    if folder is None:
        folder = next(path for n in count(1) if not (path := Path(f"headway-fork-{n}")).exists())
    elif any(folder.glob("copy*")):
        raise InputError(f"--dir {folder} holds copies of an earlier script. Name another folder, or remove it.")
    say_beside(f"headway: copies run in {folder}/copy*: what they print is in their file out\n")
    devices = {index: rate for index, rate in enumerate(rates) if rate}
    with Fork(script, devices, folder, slot_s=slot_s, say=lambda line: say_beside(f"headway: {line}\n")) as copies:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: copies.stop())
        return run_answer(Path(script[0]).name, copies.run())


def _screen(result: ForkAnswer, rates: Sequence[float], screen: ScreenOptions, *, ran: bool) -> str:
    totals = headed("all jobs done after", "seconds", "of las")
    alone = "the fastest device alone" if ran else "whole jobs, las"
    for name, key_s in (("copies", result["total_s"]), (alone, result["las_s"])):
        add_row(totals, name, f"{key_s:,.1f}", f"{key_s / result['las_s']:.2f}")
    bound_s = result["bound_s"]
    add_row(totals, "no schedule sooner than", f"{bound_s:,.1f}", f"{bound_s / result['las_s']:.2f}")
    rows = headed("job", "steps", "done, s", "las, s", "copies", "slots", "paid, s")
    for row in result["rows"]:
        times = f"{row['end_s']:,.1f}", f"{row['las_end_s']:,.1f}"
        counts = f"{row['copies']}", f"{row['slots']}"
        add_row(rows, row["name"], f"{row['steps']:,}", *times, *counts, f"{row['cost_s']:,.1f}")
    note = "Copies train apart between two averages of their states, which changes what is learned."
    note = f"{'Measured' if ran else 'Simulated'}. {note}"
    head = Text(f"  {len(result['rows'])} jobs on {len(rates)} devices, {sum(rates):g} steps/s together")
    return draw([head, "", uncut(totals), "", uncut(rows), "", paragraph(note, style="dim")], **screen)
