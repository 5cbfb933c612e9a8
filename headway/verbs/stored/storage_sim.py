"""`headway storage sim`: what it costs to keep non-volatile memory intact, simulated for each design."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.core.units import format_fraction, format_seconds, parse_bytes
from headway.lab.nvm_controller import NvmStats, simulate_nvm
from headway.lab.nvm_design import DESIGNS, MemorySystem
from headway.lab.nvm_traces import TRACES, read_trace
from headway.report.paper import ScreenOptions, add_row, draw, headed, paragraph, uncut
from headway.verbs.shared.output import AsJson, emit

MOST_ROWS = 5_000_000
"""Longer traces take minutes in every design."""


def sim(
    trace: Path | None = None,
    *,
    made: str = "set",
    requests: int = 6000,
    seed: int = 0,
    designs: str = ",".join(DESIGNS),
    mapped: str = "256MiB",
    json: AsJson = False,
) -> int:
    """Simulate the cost of checksums and parity over memory that is mapped and written by stores.

    Plays a trace through caches, a memory controller and NVM modules, once
    per design: no redundancy, the controller part by part, and software at the
    end of each transaction. All figures are simulated.

    Example: `headway storage sim --made tree --requests 12000`

    Args:
      trace: A text file: lines `R ADDRESS`, `W ADDRESS`, `E NANOSECONDS` (end of a request).
      made: Without a file: set, get, stream or tree.
      requests: Requests of the made trace.
      seed: Seed of the made trace.
      designs: Names, separated by commas.
      mapped: Bytes that are mapped, from address 0 on.
    """
    memory = MemorySystem(mapped_bytes=parse_bytes(mapped))
    chosen = {name: pick(DESIGNS, name.strip(), "design") for name in designs.split(",")}
    make = pick(TRACES, made, "trace")
    if seed < 0:
        raise InputError(f"the seed is {seed}; pass a whole number >= 0.")
    if requests > MOST_ROWS:
        raise InputError(f"{requests} requests; at most {MOST_ROWS} are simulated. Pass fewer.")
    rows = make(requests, seed) if trace is None else read_trace(trace, memory.mapped_bytes)
    if len(rows) > MOST_ROWS:
        raise InputError(f"the trace has {len(rows)} rows; at most {MOST_ROWS} are simulated. Take a part of it.")
    plain = simulate_nvm(rows, replace(DESIGNS["none"], memory=memory))
    found = {name: simulate_nvm(rows, replace(design, memory=memory)) for name, design in chosen.items()}
    answer = {
        "schema": "headway.storage.sim/1",
        "simulated": True,
        "trace": made if trace is None else str(trace),
        "num_accesses": plain.num_accesses,
        "designs": [_row(name, stats, plain) for name, stats in found.items()],
    }
    return emit(answer, lambda screen: _screen(answer, screen), as_json=json)


def _row(name: str, stats: NvmStats, plain: NvmStats) -> dict[str, Any]:
    return {
        "design": name,
        "data_reads": stats.data_reads,
        "data_writes": stats.data_writes,
        "redundancy_reads": stats.redundancy_reads,
        "redundancy_writes": stats.redundancy_writes,
        "amplification": stats.amplification,
        "worst_read_amplification": stats.worst_read_amplification,
        "time_s": stats.time_s,
        "slowdown": stats.slowdown(plain),
        "energy_j": stats.energy_j,
    }


def _screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    rows = headed("design", "NVM for data", "for redundancy", "x", "worst read", "time", "slower")
    for row in answer["designs"]:
        add_row(
            rows, row["design"], f"{row['data_reads'] + row['data_writes']:,}",
            f"{row['redundancy_reads'] + row['redundancy_writes']:,}", f"{row['amplification']:.2f}",
            f"{row['worst_read_amplification']}", format_seconds(row["time_s"]),
            format_fraction(row["slowdown"], signed=True),
        )  # fmt: skip
    head = Text(f"  {answer['trace']}: {answer['num_accesses']:,} accesses, simulated")
    words = (
        "NVM accesses are lines of 64 bytes. x: all of them per one for data; worst read: lines read for one that "
        "missed; slower: than without redundancy. Nothing here was measured on hardware."
    )
    return draw([head, "", uncut(rows), "", paragraph(words, style="dim")], **screen)
