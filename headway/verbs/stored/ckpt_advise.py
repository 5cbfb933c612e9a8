"""`headway ckpt advise` and `headway ckpt bench`: how to save, and what a save costs on this host."""

from __future__ import annotations

import json as jsonlib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from headway.checkpoint.advise import (
    SETTINGS,
    SaveMethod,
    SavingJob,
    job_with,
    measured_mtbf_s,
    propose,
    protections,
    recorded_saves,
    ways,
)
from headway.checkpoint.costs import measure
from headway.core.errors import HeadwayError, InputError
from headway.core.units import format_bytes, format_fraction, format_seconds, parse_bytes
from headway.ledger.answers.ledger import Ledger
from headway.plan.setup import Setup
from headway.report.paper import ScreenOptions, add_row, draw, grid, headed, paragraph, title
from headway.sim.recorded.program import Program
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import RunPath, Settings, Size, run_at

STOCK_TIMEOUT_S = 300


def advise(run: RunPath | None = None, /, *, set_: Settings = None, json: AsJson = False) -> int:
    """Compute how often to save, whether to write behind the steps, and what a failure loses each way.

    A recorded RUN is replayed with its saves changed; facts given with --set
    take the place of what it shows. Without a run they say it all. Where the
    mean time between failures is known, from the run's own or from mtbf_s,
    the interval is the one that loses least to saves and failures together.

    Example: `headway ckpt advise headway-runs/train-1 --set mtbf_s=36000`

    Args:
      run: A run folder; needed unless --set says what a step and a save take.
      set_:
        A fact, as name=value: step_s, save_s (seconds), every (steps between saves), state (bytes per rank), copy
        (bytes per second), mtbf_s, budget, ranks, hosts.
    """
    if run is None and not set_:
        raise InputError(f"there is nothing to advise on. Name a run, or pass --set with {', '.join(SETTINGS)}.")
    proposals, recorded = ([], None) if run is None else _recorded(run)
    job = job_with(set_ or [], recorded)
    answer = {
        "schema": "headway.ckpt.advise/1", "run": None if run is None else str(run), "job": asdict(job),
        "proposals": [row.to_json() for row in proposals], "ways": [asdict(way) for way in ways(job)],
        "redundancy": [asdict(row) for row in protections(job)],
    }  # fmt: skip
    return emit(answer, lambda screen: _advice(answer, ways(job), screen), as_json=json)


def _recorded(path: Path) -> tuple[list[Any], SavingJob]:
    """Return what the room proposes for a run, and the job as the run shows it."""
    run = run_at(path)
    ledger, program, setup = Ledger.of(run), Program.from_run(run), Setup.from_facts(run.facts)
    saves = recorded_saves(program)
    if saves is None:
        raise InputError(
            f"{path} shows no save in the steps that are replayed: nothing to go by. Pass --set step_s=..., save_s=... "
            "and every=... without a run."
        )
    job = SavingJob(
        saves.step_s, saves.cost_s, saves.every_steps, saves.num_bytes, mtbf_s=measured_mtbf_s(ledger),
        ranks=setup.world_size, hosts=max(1, -(-setup.world_size // setup.ranks_per_host)), late_s=saves.late_s,
    )  # fmt: skip
    return list(propose(ledger, program, setup)), job


def _advice(answer: Mapping[str, Any], found: list[SaveMethod], screen: ScreenOptions) -> str:
    job = answer["job"]
    known = job["mtbf_s"] is not None
    often = f"A failure every {format_seconds(job['mtbf_s'])}." if known else "How often it fails is not known."
    words = f"A step takes {format_seconds(job['step_s'])} without saves; a save stops it for "
    words += f"{format_seconds(job['save_s'])}, every {job['every_steps']} steps. {often}"
    lost = "lost in all" if known else ""
    table = headed("", "steps", "stall", "overhead", "speedup", "at a failure", "at worst", lost)
    for way in found:
        lost = "" if way.lost_fraction is None else format_fraction(way.lost_fraction)
        add_row(
            table, way.name, f"{way.every_steps}", format_seconds(way.stall_s),
            format_fraction(way.overhead_fraction), f"{way.speedup:.2f}x", format_seconds(way.exposure_s),
            format_seconds(way.worst_exposure_s), lost,
        )  # fmt: skip
    head = title("headway ckpt advise", answer["run"] or "", width=screen.get("width", 88))
    lines: list[Any] = [head, "", paragraph(words), "", table, ""]
    for row in answer["proposals"]:
        if "predicted_speedup" in row:
            low, high = row["interval"]
            gain = f"{row['predicted_speedup']:.2f}x ({low:.2f} to {high:.2f}) by replay"
            lines.append(paragraph(f"{row['name']}: {gain}. {row['reason']} Risk: {row['risk']}."))
        else:
            lines.append(paragraph(f"{row['name']}: {row['reason']}", style="dim"))
    kept = headed("redundancy", "more bytes", "on local disks it survives the loss of", align="left right left")
    for row in answer["redundancy"]:
        ranks, hosts = row["lost_ranks"], row["lost_hosts"]
        survives = f"any {ranks} ranks' parts" if ranks > 1 else "any rank's part" if ranks else "nothing"
        survives += f", any {hosts} host{'s' * (hosts > 1)}" if hosts else ", not of a host" if ranks else ""
        add_row(kept, row["redundancy"], format_fraction(row["bytes_fraction"], 0), survives)
    return draw([*lines, "", kept], **screen)


def bench(
    folder: Path, /, *, size: Size = "64MiB", state: Size = "10GB", ours_only: bool = False, json: AsJson = False
) -> int:
    """Measure memory, checksums and FOLDER on this host, and say what a save of a given size would cost.

    Writes a few files into FOLDER and removes them. With `dcp.save` beside it,
    measured in a process of its own on the same folder.

    Example: `headway ckpt bench /mnt/checkpoints --state 40GB`

    Args:
      folder: The folder that checkpoints go to.
      size: Bytes to measure with; more is steadier.
      state: Bytes that one rank would save.
      ours_only: Leave out torch's own distributed checkpoint, which needs torch.
    """
    num_bytes, state_bytes = parse_bytes(size), parse_bytes(state)
    rates = measure(folder, num_bytes)
    peer_s = _stock_save_s(folder, num_bytes, state_bytes) if not ours_only else None
    answer = {
        "schema": "headway.ckpt.bench/1", "folder": str(folder), "measured_bytes": num_bytes,
        "bytes_per_s": {name: getattr(rates, name) for name in ("copy", "checksum", "write", "read")},
        "sync_s": rates.sync_s, "state_bytes": state_bytes, "blocked_s": rates.blocked_s(state_bytes),
        "durable_s": rates.durable_s(state_bytes), "restored_s": rates.restored_s(state_bytes), "dcp_save_s": peer_s,
    }  # fmt: skip
    return emit(answer, lambda screen: _figures(answer, screen), as_json=json)


def _stock_save_s(folder: Path, num_bytes: int, state_bytes: int) -> float:
    """Return what `dcp.save` of the state would take, by its measured rate."""
    module = "headway.checkpoint.torch_dcp.stock_save"
    command = [sys.executable, "-m", module, str(folder.resolve()), str(num_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=STOCK_TIMEOUT_S)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise HeadwayError(f"dcp.save could not be measured: {reason}. Install torch, or pass --ours-only.")
    told = jsonlib.loads(done.stdout.strip().splitlines()[-1])
    return float(told["save_s"]) * state_bytes / int(told["num_bytes"])


def _figures(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    rates = grid("left", "right")
    names = {"copy": "copy in memory", "checksum": "checksums", "write": "write until durable", "read": "read"}
    for name, text in names.items():
        add_row(rates, text, f"{format_bytes(answer['bytes_per_s'][name])}/s")
    add_row(rates, "make a small file durable", format_seconds(answer["sync_s"]))
    costs = headed(f"a save of {format_bytes(answer['state_bytes'])}", "blocked", "durable")
    add_row(costs, "headway", format_seconds(answer["blocked_s"]), format_seconds(answer["durable_s"]))
    if answer["dcp_save_s"] is not None:
        stock = format_seconds(answer["dcp_save_s"])
        add_row(costs, "dcp.save", stock, stock)
    restored = f"  Restored, verified: {format_seconds(answer['restored_s'])}."
    note = f"Rates of {format_bytes(answer['measured_bytes'])} on one rank, scaled; ranks share a disk and memory."
    head = title("headway ckpt bench", answer["folder"], width=screen.get("width", 88))
    return draw([head, "", rates, "", costs, Text(restored), "", paragraph(note, style="dim")], **screen)
