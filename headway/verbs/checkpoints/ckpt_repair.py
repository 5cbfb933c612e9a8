"""`headway ckpt repair`: rebuild what is damaged of a checkpoint, or say what is lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.core.errors import InputError
from headway.core.files.inside import check_inside
from headway.core.units import format_bytes, plural
from headway.report.paper import ScreenOptions, draw, paragraph
from headway.storage.checks.repair import repair as repair_checkpoint
from headway.storage.commits.commit import STEP, is_own
from headway.storage.redundancy.parity import state, warnings
from headway.storage.stored.manifest import COMMIT
from headway.storage.stored.objects import url_of
from headway.verbs.shared.output import emit

LINES = 20
"""Files and losses named on a screen; the JSON has all."""

VERDICTS = {
    "good": "Nothing is damaged; nothing was written.",
    "repaired": "Every file is again, bit for bit, what was saved.",
    "repairable": "Dry run: nothing was written. Run it again without --dry-run.",
    "lost": "Parity does not give this back; nothing was written. Restore an older checkpoint: headway ckpt ls",
}
"""Status -> what the screen says last."""


def repair(path: Path, /, *, dry_run: bool = False, json: bool = False) -> int:
    """Rebuild what is damaged of a checkpoint from parity and copies, bit for bit.

    Every rebuilt file is held to the checksum of the commit before it takes
    the damaged one's place; good files are not touched. A repair that is
    interrupted can be run again. Parity that a rank has not made yet is
    made. Exit code 0 when all is whole, 3 when something is lost: ranks,
    tensors and rows are named, and nothing is written.

    Example: `headway ckpt repair runs/llama/checkpoints/step-4000`

    Parameters
    ----------
    path
        A checkpoint; of the folder of a run, its newest one.
    dry_run
        Say what would be rebuilt, and write nothing; exit code 3 when there is anything.
    json
        Print one JSON object instead of text.
    """
    root, path = path, checkpoint_at(path)
    check_inside(root, path / COMMIT)
    done = repair_checkpoint(path, dry_run=dry_run)
    kept = state(path)
    answer = {
        **done.to_json(), "redundancy": {"scheme": kept.scheme, "status": kept.status},
        "warnings": [] if done.status == "lost" else warnings(path),
    }  # fmt: skip
    lost = [str(missing) for missing in done.missing]
    emit(answer, lambda screen: _screen(answer, lost, screen), as_json=json)
    return done.exit_code


def checkpoint_at(path: Path) -> Path:
    """Return the checkpoint that a path names: itself, or the newest one in it, also one whose commit record is lost.

    Raises `InputError` for what is no folder.
    """
    url = url_of(path)
    if url is not None:
        raise InputError(f"{url} is a bucket; this works on folders. Copy the checkpoint into one, and name that.")
    if not path.is_dir():
        raise InputError(
            f"{path} is no folder. Name the folder of a checkpoint, or the one that holds a run's step-<n>."
        )
    steps = {
        int(match[1]): step for step in path.glob("step-*") if (match := STEP.fullmatch(step.name)) and is_own(step)
    }
    return steps[max(steps)] if steps and not is_own(path) else path


def _screen(answer: Mapping[str, Any], lost: list[str], screen: ScreenOptions) -> str:
    """Return what was rebuilt or is lost, the warnings, the verdict."""
    parts: list[Any] = []
    files = answer["files"]
    if files:
        size = format_bytes(answer["rebuilt_bytes"])
        told = f"rebuilt; {size} came from parity" if answer["status"] == "repaired" else "to rebuild"
        parts.append(paragraph(f"{plural(len(files), 'file')} {told}:"))
        parts += [paragraph(name, indent=4) for name in files[:LINES]]
    if lost:
        ranks = sorted({entry["rank"] for entry in answer["missing"]})
        told = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        parts.append(paragraph(f"lost of {told}:", style="bold red"))
        parts += [paragraph(line, indent=4) for line in lost[:LINES]]
    more = max(len(files), len(lost)) - LINES
    if more > 0:
        parts.append(paragraph(f"... and {more} more; --json names all", style="dim"))
    parts += [paragraph(f"warning: {text}", style="yellow") for text in answer["warnings"]]
    kept = answer["redundancy"]
    parity = "no parity" if kept["scheme"] == "none" else f"parity {kept['scheme']}, {kept['status']}"
    parts.append(paragraph(f"{answer['path']}: {parity}", style="dim"))
    return draw([*parts, paragraph(VERDICTS[answer["status"]], style="bold")], **screen)
