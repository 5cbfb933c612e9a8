"""`headway ckpt repair|export|import|reshard`, `headway storage restripe`: a checkpoint made whole, or in another form.

`headway storage region|backends`: a protected region's file while nobody has it open; how stores are noticed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from headway.core.errors import InputError
from headway.core.files.private import check_inside
from headway.core.units import format_bytes, parse_bytes, plural
from headway.report.paper import ScreenOptions, add_row, draw, grid, headed, paragraph, uncut
from headway.storage.checks.repair import repair as repair_checkpoint
from headway.storage.commit import STEP, committed, is_own
from headway.storage.manifest import COMMIT, CommitRecord
from headway.storage.redundancy.parity import state, warnings
from headway.storage.redundancy.restripe import restripe as restripe_checkpoint
from headway.storage.regions.dirty import BACKENDS, works
from headway.storage.regions.pagemap import PAGE_BYTES
from headway.storage.regions.scrub import inspect
from headway.storage.stores import url_of
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import OutPath, Size

REPAIR_LINES = 20
"""Files and losses named on a screen; the JSON has all."""

VERDICTS = {
    "good": "Nothing is damaged; nothing was written.",
    "repaired": "Every file is again, bit for bit, what was saved.",
    "repairable": "Dry run: nothing was written. Run it again without --dry-run.",
    "lost": "Parity does not give this back; nothing was written. Restore an older checkpoint: headway ckpt ls",
}
"""Status -> what the screen says last."""


def repair(path: Path, /, *, dry_run: bool = False, json: AsJson = False) -> int:
    """Rebuild what is damaged of a checkpoint from parity and copies, bit for bit.

    Every rebuilt file is held to the checksum of the commit before it takes
    the damaged one's place; good files are not touched. A repair that is
    interrupted can be run again. Parity that a rank has not made yet is
    made. Exit code 0 when all is whole, 3 when something is lost: ranks,
    tensors and rows are named, and nothing is written.

    Example: `headway ckpt repair runs/llama/checkpoints/step-4000`

    Args:
      path: A checkpoint; of the folder of a run, its newest one.
      dry_run: Say what would be rebuilt, and write nothing; exit code 3 when there is anything.
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
        text = "Name the folder of a checkpoint, or the one that holds a run's step-<n>."
        raise InputError(f"{path} is no folder. {text}")
    named = {step: match for step in path.glob("step-*") if (match := STEP.fullmatch(step.name))}
    steps = {int(match[1]): step for step, match in named.items() if is_own(step)}
    return steps[max(steps)] if steps and not is_own(path) else path


def _screen(answer: Mapping[str, Any], lost: list[str], screen: ScreenOptions) -> str:
    parts: list[Any] = []
    files = answer["files"]
    if files:
        size = format_bytes(answer["rebuilt_bytes"])
        told = f"rebuilt; {size} came from parity" if answer["status"] == "repaired" else "to rebuild"
        parts.append(paragraph(f"{plural(len(files), 'file')} {told}:"))
        parts += [paragraph(name, indent=4) for name in files[:REPAIR_LINES]]
    if lost:
        ranks = sorted({entry["rank"] for entry in answer["missing"]})
        told = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        parts.append(paragraph(f"lost of {told}:", style="bold red"))
        parts += [paragraph(line, indent=4) for line in lost[:REPAIR_LINES]]
    more = max(len(files), len(lost)) - REPAIR_LINES
    if more > 0:
        parts.append(paragraph(f"... and {more} more; --json names all", style="dim"))
    parts += [paragraph(f"warning: {text}", style="yellow") for text in answer["warnings"]]
    kept = answer["redundancy"]
    parity = "no parity" if kept["scheme"] == "none" else f"parity {kept['scheme']}, {kept['status']}"
    parts.append(paragraph(f"{answer['path']}: {parity}", style="dim"))
    return draw([*parts, paragraph(VERDICTS[answer["status"]], style="bold")], **screen)


LINES = 8
"""Names that a screen shows; the JSON has all."""


def export(
    path: Path, /, *, out: OutPath, prefix: str = "", dtype: str | None = None, file: Size = "5GB", json: AsJson = False
) -> int:
    """Write a checkpoint as safetensors or as a torch.save file.

    Blocks are verified as they are read. A safetensors export holds tensors
    only, and becomes several files under an index where it is large.

    Example: `headway ckpt export runs/llama/step-4000 -o model.safetensors --prefix model. --dtype bf16`

    Args:
      path: A checkpoint, headway's or torch's; of the folder of a run, its newest one.
      out: The file to write: .safetensors, or .pt, .pth, .bin, .ckpt. It must not exist.
      prefix: Write only names that begin with it, without it.
      dtype: Cast floating-point tensors: bf16, fp16, fp32, fp64.
      file: Largest safetensors file.
    """
    from headway.checkpoint.torch_dcp.convert import export as write

    file_bytes = parse_bytes(file)
    if file_bytes < 1:
        raise InputError(f"--file is {file}; a file holds at least a byte. Pass 5GB.")
    done = write(_source(path), out, prefix=prefix, dtype=dtype, file_bytes=file_bytes)
    answer = {"schema": "headway.ckpt.export/1", "path": str(path), "out": str(out), **asdict(done)}
    size, names = format_bytes(done.num_bytes), list(done.left_out)
    parts = [paragraph(f"{plural(done.tensors, 'tensor')}, {size}, in {plural(len(done.files), 'file')}:")]
    parts += [paragraph(name, indent=4) for name in done.files[:LINES]]
    if names:
        more = f" and {len(names) - LINES} more" if len(names) > LINES else ""
        parts.append(paragraph(f"left out: {', '.join(names[:LINES])}{more}", style="dim"))
    return emit(answer, lambda screen: draw(parts, **screen), as_json=json)


def import_(
    path: Path, /, *, out: OutPath, prefix: str = "", world: int = 1, redundancy: str = "none", json: AsJson = False
) -> int:
    """Make a checkpoint of safetensors files, a torch.save file, or another checkpoint.

    It has digests and a commit record from then on, and is restored like a
    saved one. A torch.save file is read by torch's restricted unpickler.

    Example: `headway ckpt import llama/model.safetensors.index.json -o runs/llama/step-0 --prefix model.`

    Args:
      path: A .safetensors file or index, a .pt, .pth, .bin or .ckpt file, or a checkpoint's folder.
      out: The checkpoint to write, best called step-<n>. It must not exist.
      prefix: Goes before every name.
      world: Number of ranks whose files it consists of.
      redundancy: Parity over them: none, xor, +m, k+m.
    """
    from headway.checkpoint.torch_dcp.convert import rewrite

    record = rewrite(_source(path), out, world_size=world, redundancy=redundancy, prefix=prefix)
    return _told("import", path, out, record, as_json=json)


def reshard(
    path: Path, /, *, world: int, out: OutPath, without: Annotated[list[str], Parameter(negative=())] | None = None,
    redundancy: str = "none", json: AsJson = False,
) -> int:  # fmt: skip
    """Rewrite a checkpoint into the files of another number of ranks, bit for bit.

    Nothing needs this to load on another world size: a restore cuts what it
    reads as it wants. It is for whoever copies one rank's files to one host.

    Example: `headway ckpt reshard runs/llama/step-4000 --world 8 -o runs/llama-8/step-4000`

    Args:
      path: A checkpoint, headway's or torch's; of the folder of a run, its newest one.
      world: Number of ranks.
      out: The checkpoint to write, best called step-<n>. It must not exist.
      without: An object or tensor to leave out, with all below it; may be given again.
      redundancy: Parity over the new files: none, xor, +m, k+m.
    """
    from headway.checkpoint.torch_dcp.convert import rewrite

    record = rewrite(_source(path), out, world_size=world, redundancy=redundancy, without=without or ())
    return _told("reshard", path, out, record, as_json=json)


def _source(path: Path) -> Path:
    """Return what a path names: a file, a checkpoint, or the newest checkpoint in it."""
    return checkpoint_at(path) if path.is_dir() or url_of(path) else path


def _told(verb: str, path: Path, out: Path, record: CommitRecord, *, as_json: bool) -> int:
    images = [entry.num_bytes for entry in record.files if entry.kind == "image"]
    answer = {
        "schema": f"headway.ckpt.{verb}/1", "path": str(path), "out": str(out), "step": record.step,
        "world_size": record.world_size, "num_bytes": sum(images), "root": record.root,
        "redundancy": record.redundancy,
    }  # fmt: skip
    size, ranks = format_bytes(sum(images)), plural(record.world_size, "rank")
    head = paragraph(f"{out}: {size} in the files of {ranks}, committed.")
    parts = [head, paragraph(f"root {record.root}", style="dim")]
    return emit(answer, lambda screen: draw(parts, **screen), as_json=as_json)


SHOWN_PAGES = 10
"""Damaged pages on a screen; `--json` holds all."""

REGION_VERDICTS = {
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
    head = f"{answer['file']}: {format_bytes(answer['num_bytes'])}, {plural(pages, 'page')} in stripes of "
    head += f"{answer['stripe']} + {answer['parity']}, opened {plural(answer['epoch'], 'time')}"
    lines: list[Any] = [paragraph(head, style="dim"), ""]
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
    return draw([*lines, paragraph(REGION_VERDICTS[answer["status"]], style="bold")], **screen)


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
    rows = grid("left", "left", "left")
    for name, reason in reasons.items():
        add_row(rows, name, f"does not: {reason}" if reason else "works", "auto" if name == chosen else "")
    head = paragraph(f"Linux {answer['kernel']}", style="dim")
    return emit(answer, lambda screen: draw([head, "", uncut(rows)], **screen), as_json=json)


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
    is_one = path.is_dir() and is_own(path)
    steps = [path] if is_one else [step.path for step in committed(path) if step.ours]
    if not steps:
        text = "Name one, or the folder that holds a run's step-<n>."
        raise InputError(f"{path} holds no checkpoint of headway's. {text}")
    done: list[dict[str, Any]] = [
        restripe_checkpoint(step, to, cap_bytes_per_s=cap_mb_s * 1e6).to_json() for step in steps
    ]
    answer = {"schema": "headway.storage.redundancy.restripe/1", "cap_bytes_per_s": cap_mb_s * 1e6, "checkpoints": done}
    table = headed("checkpoint", "before", "now", "read", "written", align="left left left right right")
    for row in done:
        sizes = (format_bytes(row["read_bytes"]), format_bytes(row["written_bytes"]))
        add_row(table, row["path"], row["before"], row["after"], *sizes)
    return emit(answer, lambda screen: draw([uncut(table)], **screen), as_json=json)
