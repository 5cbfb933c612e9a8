"""`headway storage region|backends`: a protected region's file while nobody has it open; how stores are noticed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.core.errors import InputError
from headway.core.units import format_bytes, plural
from headway.report.paper import ScreenOptions, add_row, draw, grid, headed, paragraph, uncut
from headway.storage.commit import committed, is_own
from headway.storage.redundancy.restripe import restripe as restripe_checkpoint
from headway.storage.regions.dirty import BACKENDS, works
from headway.storage.regions.pagemap import PAGE_BYTES
from headway.storage.regions.scrub import inspect
from headway.storage.stores import url_of
from headway.verbs.shared.output import AsJson, emit

SHOWN_PAGES = 10
"""Damaged pages on a screen; `--json` holds all."""

VERDICTS = {
    "good": "Every page is what was written.",
    "repairable": "Every damaged page can be rebuilt. Run it again with --repair.",
    "lost": "Some damaged pages cannot be rebuilt; they were left as they are. Restore them from a copy.",
    "unclean": "It was not closed: its process died. Whoever opens it next adopts what is there.",
}
"""Status -> what it means."""


def region(file: Path, /, *, repair: bool = False, rate_mb_s: float | None = None, json: AsJson = False) -> int:
    """Compare every page of a protected region with its checksum; with --repair rebuild those that changed.

    For the file of a headway.storage.ProtectedRegion that nobody has open.
    Exit code 3 when a page is damaged and not repaired, or when the region
    was not closed and some pages cannot be verified.

    Example: `headway storage region cache/state.bin --repair`

    Args:
      file: The region's data; its sidecar lies beside it, FILE.guard.
      repair: Write back what can be rebuilt from parity.
      rate_mb_s: Read at most so many MB (10**6 bytes) per second.
    """
    if rate_mb_s is not None and not rate_mb_s > 0:
        raise InputError(f"--rate-mb-s is {rate_mb_s}; pass more than 0, or leave it out.")
    seen = inspect(file, repair=repair, rate_bytes_per_s=(rate_mb_s or 0) * 1e6)
    report, geometry = seen.report, seen.geometry
    changed = sorted({*report.corrupt.tolist()} - {*report.repaired.tolist()})
    pages = [{"page": page, "offset_bytes": page * geometry.page} for page in changed]
    answer = {
        "schema": "headway.storage.region/1", "file": str(file), "status": seen.status, "was_closed": seen.was_closed,
        "epoch": seen.epoch, "num_bytes": geometry.num_bytes, "page_bytes": geometry.page, "stripe": geometry.stripe,
        "parity": geometry.parity, "checked_bytes": report.num_bytes, "elapsed_s": report.elapsed_s,
        "damaged": pages if seen.was_closed else [], "unverified": [] if seen.was_closed else pages,
        "unrepairable": report.unrepairable.tolist() if seen.was_closed else [],
        "damaged_sidecar_stripes": report.corrupt_sidecar.tolist() if seen.was_closed else [],
        "repaired": report.repaired.tolist(), "shadow_pages": seen.shadow_pages,
    }  # fmt: skip
    emit(answer, lambda screen: _region_screen(answer, screen), as_json=json)
    return 0 if seen.status == "good" or not (changed or seen.was_closed) else 3


def _region_screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    pages = answer["num_bytes"] // answer["page_bytes"]
    lines: list[Any] = [
        paragraph(
            f"{answer['file']}: {format_bytes(answer['num_bytes'])}, {plural(pages, 'page')} in stripes of "
            f"{answer['stripe']} + {answer['parity']}, opened {plural(answer['epoch'], 'time')}",
            style="dim",
        ),
        "",
    ]
    differ = [*answer["damaged"], *answer["unverified"]]
    if differ:
        lost, rows = set(answer["unrepairable"]), grid("right", "right", "left")
        add_row(rows, "page", "offset", "", style="dim")
        for row in differ[:SHOWN_PAGES]:
            state = "unverified" if not answer["was_closed"] else "lost" if row["page"] in lost else "repairable"
            add_row(rows, str(row["page"]), str(row["offset_bytes"]), state, style="red" if state == "lost" else "")
        if len(differ) > SHOWN_PAGES:
            add_row(rows, "...", "", f"{len(differ) - SHOWN_PAGES} more")
        lines += [uncut(rows), ""]
    if answer["repaired"]:
        lines.append(paragraph(f"Rebuilt and written back: {plural(len(answer['repaired']), 'page')}."))
    if answer["damaged_sidecar_stripes"]:
        stripes = plural(len(answer["damaged_sidecar_stripes"]), "stripe")
        lines.append(paragraph(f"Damaged in the sidecar: parity or checksums of {stripes}."))
    return draw([*lines, paragraph(VERDICTS[answer["status"]], style="bold")], **screen)


def backends(*, json: AsJson = False) -> int:
    """Test which ways to find out what pages of memory were written work on this host, and which one "auto" takes.

    Asks the kernel with a small map of each kind of memory.

    Example: `headway storage backends`
    """
    reasons = {name: works(name) for name in BACKENDS}
    chosen = "rehash" if reasons["pagemap_scan"] else "pagemap_scan"
    answer = {
        "schema": "headway.storage.backends/1", "kernel": os.uname().release, "page_bytes": PAGE_BYTES, "auto": chosen,
        "backends": [{"name": name, "works": not reason, "reason": reason} for name, reason in reasons.items()],
    }  # fmt: skip
    return emit(answer, lambda screen: _backends_screen(answer, screen), as_json=json)


def _backends_screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    rows = grid("left", "left", "left")
    for row in answer["backends"]:
        mark = "auto" if row["name"] == answer["auto"] else ""
        add_row(rows, row["name"], "works" if row["works"] else f"does not: {row['reason']}", mark)
    return draw([paragraph(f"Linux {answer['kernel']}", style="dim"), "", uncut(rows)], **screen)


# `headway storage restripe`: give committed checkpoints another scheme of parity.


def restripe(path: Path, /, *, to: str, cap_mb_s: float = 0.0, json: AsJson = False) -> int:
    """Replace the parity of committed checkpoints: the data are read once and stay as they are.

    The old parity is removed when the new one is durable; an interrupted
    transition keeps one of the two whole, and goes on when it is run again.

    Example: `headway storage restripe runs/llama/checkpoints --to 8+2 --cap-mb-s 50`

    Args:
      path: A checkpoint, or the folder of a run: then all of its checkpoints, the oldest first.
      to: The scheme: k+m, or +m for as wide a stripe as there are ranks.
      cap_mb_s: At most so many MB read and written per second; 0: no cap.
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
    return emit(answer, lambda screen: _screen(answer, screen), as_json=json)


def _screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    table = headed("checkpoint", "before", "now", "read", "written", align="left left left right right")
    for row in answer["checkpoints"]:
        sizes = (format_bytes(row["read_bytes"]), format_bytes(row["written_bytes"]))
        add_row(table, row["path"], row["before"], row["after"], *sizes)
    return draw([uncut(table)], **screen)
