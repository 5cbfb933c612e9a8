"""Whether compressed gradients would pay: this host's codecs are measured, the recorded windows replayed with each.

Measured once per run, in a child process, and kept in RUN/codecs.json: neither torch nor the measurement's load is in
the command's process. Nothing is measured without the grant.

>>> CANDIDATES[0]
'half'
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headway.comm.advise_table import Table, best_table
from headway.core.errors import HeadwayError, InputError
from headway.core.files.bounded_json import read_json
from headway.cost.codecs import MIN_BYTES, CodecTimes
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.ddp.ddp_replay import CODECS_FILE, DdpReplay
from headway.sim.recorded.program import Program

NAME, GRANT = "comm.compress", "lossy"

CANDIDATES = ("half", "int8", "dither:4", "sign", "topk:0.01:bf16")
"""Codecs that are tried, nearest to the plain gradient first. Others are for those who know their model:
`headway whatif compress=NAME` predicts them, a plan file names them."""

MEASURED = (
    *CANDIDATES,
    "bfloat16",
    "natural:4",
    "topk:0.01",
    "topk:0.001:bf16",
    "randomk:0.01",
    "shared-randomk:0.01",
)
"""What is measured where nobody says."""

EQUAL = 0.03
"""Of codecs predicted within this of the fastest, the one nearest to the plain gradient is taken."""

LONGEST_S = 20.0
"""A measurement may take this long."""


def measure(codecs: Sequence[str], path: Path) -> CodecTimes:
    """Measure codecs in a child process, into the file `path`. Raises `InputError` where the child fails."""
    command = [sys.executable, "-m", "headway.comm.runtime.measure", ",".join(codecs), str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S * 3, check=False)
    except subprocess.TimeoutExpired as cause:
        raise InputError(f"codecs were not measured within {LONGEST_S * 3:g} s: the host is too busy.") from cause
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"codecs could not be measured: {last}")
    return read_times(path)


def read_times(path: Path) -> CodecTimes:
    """Read a table of codecs."""
    return CodecTimes.from_json(read_json(path, fix="Measure anew: headway comm bench."))


def propose_compression(program: Program, setup: Setup) -> Proposal | Refusal:
    """Return the codec under which the recorded steps are shortest, or why none is proposed."""
    if GRANT not in setup.limits.allow:
        return Refusal(NAME, "comm", "compressed gradients change results: grant --allow lossy to have it predicted")
    try:
        deep = program.windows()
        if deep.busy:
            raise InputError(f"{deep.busy}.")
        if program.run is None:
            raise InputError("a bare trace does not say which host would encode.")
        path = program.run.path / CODECS_FILE
        times = read_times(path) if path.exists() else None
        if times is None or not set(CANDIDATES) <= set(times.rows):
            times = measure(MEASURED, path)
        deep = replace(deep, codecs=times)
        program.deep[:] = [deep]
        found = {codec: program.predict([f"compress={codec}"]) for codec in CANDIDATES}
    except HeadwayError as cause:
        return Refusal(NAME, "comm", f"what compressed gradients would win is not known: {cause}")
    fastest = min(prediction.step_s for prediction in found.values())
    codec = next(name for name in CANDIDATES if found[name].step_s <= fastest * (1 + EQUAL))
    best = found[codec]
    table = _table(deep, best.speedup)
    tried = ", ".join(f"{name} {prediction.speedup:.2f}x" for name, prediction in found.items())
    speedup, interval = best.speedup, best.interval
    chosen: str | dict[str, str] = codec
    if table is not None:
        share = table.speedup / best.speedup
        speedup, interval = table.speedup, (interval[0] * share, interval[1] * share)
        chosen = table.codecs
        tried += f", a codec for each of {len(table.codecs)} gradients {table.speedup:.2f}x"
    if speedup < MIN_SPEEDUP:
        return Refusal(NAME, "comm", f"the link is fast for what this host's cores need to encode: {tried}")
    return Proposal(
        name=NAME,
        room="comm",
        edits=(f"compress={codec}",),
        predicted_speedup=speedup,
        interval=interval,
        applies=True,
        parameters={"codec": chosen, "feedback": True, "two_way": True, "min_bytes": MIN_BYTES},
        cost="a thread per rank that encodes and decodes; two residuals, a copy of the gradients and more",
        risk="gradients are approximated: compare the loss with that of an uncompressed run",
        allow=GRANT,
        conflicts=("comm.bucket",),
        reason=f"Tried: {tried}. {best.note}",
    )


def _table(deep: DdpReplay, speedup: float) -> Table | None:
    """Return the best table of codecs by parameter, where it beats the best codec for all, which wins `speedup`."""
    try:
        table = best_table(deep, CANDIDATES)
    except InputError:  # names, order or buckets are not known: one codec for all is
        return None
    return table if table.codecs and table.speedup > speedup * (1 + EQUAL) else None
