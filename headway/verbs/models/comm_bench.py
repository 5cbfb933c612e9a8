"""`headway comm bench`: what codecs of gradients cost on this host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from headway.comm.compression.advise import MEASURED, measure
from headway.core.files.bounded_json import read_json
from headway.core.units import format_fraction, format_seconds
from headway.cost.codecs import read_codec
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
