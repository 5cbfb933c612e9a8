"""`headway storage restripe`: give committed checkpoints another scheme of parity."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.core.errors import InputError
from headway.core.units import format_bytes
from headway.report.paper import ScreenOptions, add_row, draw, grid, uncut
from headway.storage.commits.commit import committed, is_own
from headway.storage.redundancy.restripe import restripe as restripe_checkpoint
from headway.storage.stored.objects import url_of
from headway.verbs.shared.output import emit


def restripe(path: Path, /, *, to: str, cap_mb_s: float = 0.0, json: bool = False) -> int:
    """Replace the parity of committed checkpoints: the data are read once and stay as they are.

    The old parity is removed when the new one is durable; an interrupted
    transition keeps one of the two whole, and goes on when it is run again.

    Example: `headway storage restripe runs/llama/checkpoints --to 8+2 --cap-mb-s 50`

    Parameters
    ----------
    path
        A checkpoint, or the folder of a run: then all of its checkpoints, the oldest first.
    to
        The scheme: k+m, or +m for as wide a stripe as there are ranks.
    cap_mb_s
        At most so many MB read and written per second; 0: no cap.
    json
        Print one JSON object instead of text.
    """
    if not cap_mb_s >= 0:
        raise InputError(f"--cap-mb-s is {cap_mb_s:g}; use a rate above 0, or 0 for no cap.")
    url = url_of(path)
    if url is not None:
        raise InputError(f"{url} is a bucket; parity is for folders. Name a folder.")
    own = path.is_dir() and is_own(path)
    steps = [path] if own else [step.path for step in committed(path) if step.ours]
    if not steps:
        raise InputError(
            f"{path} holds no checkpoint of headway's. Name one, or the folder that holds a run's step-<n>."
        )
    done = [restripe_checkpoint(step, to, cap_bytes_per_s=cap_mb_s * 1e6).to_json() for step in steps]
    answer = {"schema": "headway.storage.redundancy.restripe/1", "cap_bytes_per_s": cap_mb_s * 1e6, "checkpoints": done}
    emit(answer, lambda screen: _screen(answer, screen), as_json=json)
    return 0


def _screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    table = grid("left", "left", "left", "right", "right")
    add_row(table, "checkpoint", "before", "now", "read", "written", style="dim")
    for row in answer["checkpoints"]:
        sizes = (format_bytes(row["read_bytes"]), format_bytes(row["written_bytes"]))
        add_row(table, row["path"], row["before"], row["after"], *sizes)
    return draw([uncut(table)], **screen)
