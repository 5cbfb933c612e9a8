"""`headway comm bench`, `headway comm overlap`: what codecs cost on this host; what hiding a collective wins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from headway.comm.compression.advise import MEASURED, measure
from headway.comm.overlap.chooser import OVERLAP_FILE, SCHEMA
from headway.comm.overlap.chooser import measure as measure_forms
from headway.core.files.bounded_json import read_json
from headway.core.units import format_fraction, format_seconds
from headway.cost.codecs import read_codec
from headway.cost.overlaps import read_shape
from headway.report.paper import ScreenOptions, add_row, draw, grid, paragraph, uncut
from headway.verbs.shared.output import emit


def bench(*, codecs: str = "", out: Annotated[Path | None, Parameter(alias="-o")] = None, json: bool = False) -> int:
    """Measure encoding and decoding of gradients, which `headway plan --allow lossy` and `whatif compress=` replay.

    Example: `headway comm bench --codecs sign,topk:0.01 -o headway-runs/train-1/codecs.json`

    Parameters
    ----------
    codecs
        Names, separated by commas: half, bfloat16, sign, topk:0.01, randomk:0.01, shared-randomk:0.01, dither:4,
        natural:4, int8.
    out
        The file; codecs.json in this directory by default. Put it into a run folder to predict from.
    json
        Print one JSON object (schema headway.comm-bench/1) instead of text.
    """
    names = [name.strip() for name in codecs.split(",")] if codecs else list(MEASURED)
    for name in names:
        read_codec(name)
    path = out or Path("codecs.json")
    measure(list(dict.fromkeys(names)), path)
    answer = read_json(path)
    emit(answer, lambda screen: _screen(answer, screen), as_json=json)
    return 0


def _screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    """Draw the row of each codec's largest size."""
    rows = grid("left", "right", "right", "right", "right")
    add_row(rows, "codec", "numbers", "encode", "decode", "of fp32", style="dim")
    largest = max(row["numel"] for row in answer["rows"])
    for row in answer["rows"]:
        if row["numel"] == largest:
            share = format_fraction(row["wire_bytes"] / (4 * row["numel"]), 2)
            times = (format_seconds(row["encode_s"]), format_seconds(row["decode_s"]))
            add_row(rows, row["codec"], f"{row['numel']:,}", *times, share)
    return draw([uncut(rows), "", paragraph(f"All sizes: {answer['path']}")], **screen)


def overlap(
    *,
    shapes: str,
    ranks: int = 2,
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
    again: bool = False,
    json: bool = False,
) -> int:
    """Time a matmul beside its all-gather or reduce-scatter in every form, and choose one: plain unless 5 % are won.

    Example: `headway comm overlap --shapes 512x1024x4096,rs:512x4096x1024 --json`

    Parameters
    ----------
    shapes
        MxKxN, separated by commas: the matmul of one rank. The M rows are gathered from all ranks; rs:MxKxN scatters
        the M rows of the sum over ranks instead.
    ranks
        Processes on this host, over gloo; a rank that a launcher started measures with the launcher's ranks.
    out
        The table of what was measured; overlap.json in this directory by default. Put it into a run folder to predict
        from.
    again
        Measure the shapes anew that the table has already.
    json
        Print one JSON object (schema headway.comm-overlap/1) instead of text.
    """
    read = [read_shape(name) for name in shapes.split(",")]
    path = out or Path(OVERLAP_FILE)
    table = measure_forms(read, path, ranks=ranks, again=again)
    rows = [row for shape in dict.fromkeys(read) if (row := table.of(shape)) is not None]
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "rows": [
            {
                "shape": row.shape,
                "chosen": row.chosen,
                "plain_s": row.seconds("plain"),
                "chosen_s": row.seconds(row.chosen),
                "ideal_s": row.ideal_s,
            }
            for row in rows
        ],
        "ranks": table.ranks,
        "device": table.device,
        "dtype": table.dtype,
        "path": str(path),
    }
    if os.environ.get("RANK", "0") == "0":  # of a launcher's ranks one speaks
        emit(facts, lambda screen: _choices(facts, screen), as_json=json)
    return 0


def _choices(facts: Mapping[str, Any], screen: ScreenOptions) -> str:
    """Draw the choice for each shape."""
    rows = grid("left", "left", "right", "right", "right", "right")
    add_row(rows, "shape", "chosen", "plain", "chosen", "ideal", "", style="dim")
    for row in facts["rows"]:
        times = (format_seconds(row[name]) for name in ("plain_s", "chosen_s", "ideal_s"))
        add_row(rows, row["shape"], row["chosen"], *times, f"{row['plain_s'] / row['chosen_s']:.2f}x")
    note = f"{facts['ranks']} ranks, {facts['dtype']} on {facts['device']}. Ideal: the longer of matmul and collective."
    return draw([uncut(rows), "", paragraph(f"{note} Kept in {facts['path']}.")], **screen)
