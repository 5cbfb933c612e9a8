"""`headway ckpt ls`, `show`, `verify`, `scrub`, `diff`, `prune`: what is stored, and whether it is intact."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.text import Text

from headway.checkpoint.policy import Keep
from headway.core.errors import DamageError, FormatError, InputError
from headway.core.units import clean, format_bytes, format_seconds, plural
from headway.report.paper import ScreenOptions, add_row, draw, grid, headed, paragraph, uncut
from headway.storage.checks.contents import Contents, Tensor, contents, opened
from headway.storage.checks.difference import difference
from headway.storage.checks.verification import Verified, VerifyReport, scrub, verified, verify
from headway.storage.commit import CommittedCheckpoint, commit_record
from headway.storage.manifest import METADATA, CommitRecord
from headway.storage.object_commit import CommittedObject, checkpoints, discard, recover_root
from headway.storage.redundancy.parity_files import State, state
from headway.storage.stores import url_of
from headway.verbs.shared.output import AsJson, emit

LINES = 20
"""Lines of damage or of tensors on a screen; the JSON has all."""


def ls(root: Path, /, *, json: AsJson = False) -> int:
    """List the checkpoints of a run: step, age, size, ranks, redundancy, and what the last scrub found.

    Only committed ones are listed; a save in progress, or one that was cut
    short, is none. Exit code 2 when the folder does not exist.

    Example: `headway ckpt ls runs/llama/checkpoints`

    Args:
      root: The folder that holds the step-<n> of a run, or its URL (s3://...).
    """
    url = url_of(root)
    notes = verified(_folder(root)) if url is None else {}
    rows = [_row(checkpoint, notes.get(Path(checkpoint.path).name)) for checkpoint in checkpoints(root)]
    answer = {"schema": "headway.ckpt.ls/1", "root": url or str(root), "checkpoints": rows}
    return emit(answer, lambda screen: _list_screen(answer, screen), as_json=json)


def _folder(root: Path) -> Path:
    if not root.is_dir():
        raise InputError(f"{root} is no folder. Name the folder that holds the step-<n> of a run.")
    if (root / METADATA).exists():
        raise InputError(f"{root} is a checkpoint itself. Name the folder above it.")
    return root


def _row(checkpoint: CommittedCheckpoint | CommittedObject, last: Verified | None) -> dict[str, Any]:
    """Return what there is to say of a checkpoint without reading its elements."""
    path, sizes = checkpoint.path, checkpoint.store.list()
    parity: State | None = State("none", "none", 0)
    kind = "headway" if checkpoint.ours else "dcp"
    if isinstance(checkpoint, CommittedObject):
        record: CommitRecord | None = checkpoint.record
    else:
        try:
            record = commit_record(checkpoint.store, list(sizes)) if checkpoint.ours else None
        except FormatError:  # whole, and written by a newer headway: listed all the same
            kind, record = "headway, newer", None
        parity = state(checkpoint.path) if record else None
    created = record.created_unix_s if record else Path(path).stat().st_mtime
    known = last if last is not None and last.root == (record.root if record else None) else None
    return {
        "step": checkpoint.step, "path": str(path), "format": kind, "created_unix_s": created,
        "age_s": max(0.0, time.time() - created), "num_bytes": sum(sizes.values()),
        **{name: getattr(record, name, None) for name in ("world_size", "attempt", "redundancy")},
        "redundancy_status": parity.status if parity else None,
        "parity": (parity.scheme if parity.status == "redundant" else "none") if parity else None,
        "root": record.root if record else None, "verified_unix_s": known.unix_s if known else None,
        "verified": known.status if known else None,
    }  # fmt: skip


def _list_screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    if not answer["checkpoints"]:
        return draw([paragraph(f"{answer['root']} holds no committed checkpoint.")], **screen)
    table = grid("right", "right", "right", "right", "left", "left", "left")
    add_row(table, "step", "age", "size", "ranks", "redundancy", "root", "last scrub", style="dim")
    for row in answer["checkpoints"]:
        look = "never"
        if row["verified"]:
            look = f"{row['verified']}, {format_seconds(time.time() - row['verified_unix_s'])} ago"
        add_row(
            table, str(row["step"]), format_seconds(row["age_s"]), format_bytes(row["num_bytes"]),
            str(row["world_size"] or ""), _protection(row), (row["root"] or "")[:12], look,
            style="bold red" if row["verified"] not in (None, "good") else "",
        )  # fmt: skip
    return draw([uncut(table)], **screen)


def _protection(row: Mapping[str, Any]) -> str:
    """Say what parity a checkpoint has, or was to have and has not yet."""
    if row["redundancy"] is None:
        return str(row["format"])
    done = row["redundancy_status"] in ("redundant", "none")
    return str(row["parity"]) if done else f"{row['redundancy']}, not yet"


def show(path: Path, /, *, only: str = "*", json: AsJson = False) -> int:
    """Show what a checkpoint holds: its tensors with dtype, shape, stored boxes and files, and its other values.

    Reads checkpoints of headway, of torch.distributed.checkpoint, and files
    of torch.save and safetensors; no torch is needed and nothing in them is
    run. What loading them would run is named.

    Example: `headway ckpt show checkpoints/step-400 --only 'model.layers.0.*'`

    Args:
      path: A checkpoint, a file, or an index of files; a folder of checkpoints stands for the newest.
      only: Names to show, with * and ? for any characters.
    """
    held = opened(contents(path))
    tensors = {fqn: tensor for fqn, tensor in held.tensors.items() if fnmatchcase(fqn, only)}
    values = [value.to_json() | {"name": name} for name, value in held.values.items() if fnmatchcase(name, only)]
    values += [{"name": name, "type": "", "value": None} for name in held.objects if fnmatchcase(name, only)]
    if not tensors and not values and only != "*":
        names = [*held.tensors, *held.values, *held.objects]
        few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise InputError(f"nothing in {path} is called {only!r}; it holds {few}. Use --only with * and ?.")
    answer = {
        "schema": "headway.ckpt.show/1", "path": str(path) if Path(path).is_file() else held.store.place,
        "format": held.format, **{name: getattr(held.record, name, None) for name in ("step", "world_size", "root")},
        "num_bytes": sum(tensor.num_bytes for tensor in tensors.values()),
        "tensors": [_tensor_row(fqn, tensor) for fqn, tensor in tensors.items()],
        "objects": [value["name"] for value in values], "values": values, "notes": list(held.notes),
    }  # fmt: skip
    return emit(answer, lambda screen: _show_screen(answer, held, screen), as_json=json)


def _tensor_row(fqn: str, tensor: Tensor) -> dict[str, Any]:
    boxes = [
        {
            "offsets": list(stored.box.offsets), "lengths": list(stored.box.lengths), "file": stored.file,
            "record_offset": stored.record_offset, "record_bytes": stored.record_bytes,
        }
        for stored in tensor.boxes
    ]  # fmt: skip
    facts = {"fqn": fqn, "dtype": tensor.dtype, "shape": list(tensor.shape), "num_bytes": tensor.num_bytes}
    return {**facts, "boxes": boxes}


def _show_screen(answer: Mapping[str, Any], held: Contents, screen: ScreenOptions) -> str:
    table = headed("tensor", "dtype", "shape", "size", "boxes", "files", align="left left left right right left")
    for row in answer["tensors"]:
        files = sorted({box["file"] for box in row["boxes"]})
        named = files[0] if len(files) == 1 else plural(len(files), "file")
        shape = "x".join(map(str, row["shape"])) or "one element"
        size = format_bytes(row["num_bytes"])
        add_row(table, clean(row["fqn"]), row["dtype"], shape, size, str(len(row["boxes"])), clean(named))
    parts: list[Any] = [uncut(table), ""] if answer["tensors"] else []
    if answer["values"]:
        others = headed("other value", "type", "value", align="left left left")
        for row in answer["values"]:
            told = held.values.get(row["name"])
            add_row(others, clean(row["name"]), clean(row["type"]), told.text if told else "not told: see --json")
        parts += [uncut(others), ""]
    facts = [f"{plural(len(answer['tensors']), 'tensor')}, {format_bytes(answer['num_bytes'])}"]
    facts += [plural(len(answer["values"]), "other value")] if answer["values"] else []
    facts += [f"format {answer['format']}"]
    facts += [f"step {answer['step']}, {plural(answer['world_size'], 'rank')}"] if answer["step"] is not None else []
    parts.append(paragraph(", ".join(facts)))
    parts += [paragraph(f"note: {note}", style="yellow") for note in answer["notes"]]
    return draw(parts, **screen)


def verify_(path: Path, /, *, all: bool = False, shallow: bool = False, json: AsJson = False) -> int:
    """Check that a checkpoint is what was written, and say which tensor is not.

    Works on checkpoints of headway, of torch.distributed.checkpoint, and on
    files of torch.save and safetensors; no torch is needed and nothing in
    them is run. A note names what loading them would run. Exit code 0 good,
    3 damaged, 2 no checkpoint. A folder of checkpoints stands for the newest
    one.

    Example: `headway ckpt verify checkpoints/step-400`

    Args:
      path: A checkpoint, a folder of checkpoints, a file, or an index of files.
      all: Every checkpoint of a folder of them.
      shallow: Leave out the elements of tensors: sizes, metadata, containers only.
    """
    paths = [checkpoint.path for checkpoint in checkpoints(path)] if all else [path]
    reports = [verify(step, deep=not shallow) for step in paths]
    if not reports:
        raise InputError(f"{path} holds no step-<n>. Drop --all, or name the folder of a run's checkpoints.")
    worst = max(reports, key=lambda report: SEVERITY.index(report.status))
    answer = reports[0].to_json()
    if all:
        told = [report.to_json() for report in reports]
        answer = {"schema": "headway.ckpt.verify/1", "status": worst.status, "checkpoints": told}
        answer["damaged"] = [{"path": one["path"], **damage} for one in told for damage in one["damaged"]]
        answer["checked_bytes"] = sum(report.checked_bytes for report in reports)
        answer["notes"] = [{"path": one["path"], "note": note} for one in told for note in one["notes"]]
    emit(answer, lambda screen: _verify_screen(reports, screen), as_json=json)
    return worst.exit_code


SEVERITY = ("good", "not_a_checkpoint", "repairable", "lost")
"""Statuses, worst last."""


def _verify_screen(reports: list[VerifyReport], screen: ScreenOptions) -> str:
    parts: list[Any] = []
    for report in reports:
        style = {"good": "bold green", "not_a_checkpoint": "bold"}.get(report.status, "bold red")
        words = report.status.replace("_", " ")
        parts.append(Text.assemble("  ", (words, style), f"  {clean(report.path)}"))
        if report.damaged:
            parts.append(_damage_table(report))
        checked = f"{format_bytes(report.checked_bytes)} checked"
        if report.unchecked_bytes:
            checked += f", {format_bytes(report.unchecked_bytes)} have no checksum"
        parts.append(paragraph(f"{report.format or 'no known format'}; {checked}", style="dim"))
        parts += [paragraph(f"note: {note}", style="yellow") for note in report.notes[:LINES]]
        if (more := len(report.notes) - LINES) > 0:
            parts.append(paragraph(f"and {plural(more, 'more note')}; --json has all", style="dim"))
        if report.status == "repairable":
            parts.append(paragraph(f"Run: headway ckpt repair {report.path}"))
    return draw(parts, **screen)


def _damage_table(report: VerifyReport) -> Any:
    table = headed("file", "at byte", "what", "tensor", align="left right left left")
    for damage in report.damaged[:LINES]:
        add_row(table, clean(damage.file), str(damage.offset_bytes), damage.what, clean(damage.tensor or ""))
    if len(report.damaged) > LINES:
        add_row(table, f"and {len(report.damaged) - LINES} more", "", "", "", style="dim")
    return uncut(table)


def scrub_(root: Path, /, *, rate_mb_s: float = 50.0, json: AsJson = False) -> int:
    """Verify all checkpoints of a run in the background, at a bounded rate, the longest unverified first.

    Exit code 3 when one is damaged. When it was interrupted it goes on with
    what it has not looked at for longest.

    Example: `headway ckpt scrub runs/llama/checkpoints --rate-mb-s 20`

    Args:
      root: The folder that holds the step-<n> of a run.
      rate_mb_s: Read at most so many MB per second; 0 reads as fast as it goes.
    """
    if rate_mb_s < 0:
        raise InputError(f"--rate-mb-s is {rate_mb_s:g}; a rate is at least 0. Pass 0 for no limit.")

    def tell(report: VerifyReport) -> None:
        if not json and sys.stderr.isatty():
            print(f"{report.status:11} {report.path}", file=sys.stderr)

    reports = scrub(root, bytes_per_s=rate_mb_s * 1e6, tell=tell)
    told = [report.to_json() for report in reports]
    damaged = sum(report.status in ("repairable", "lost") for report in reports)
    answer = {
        "schema": "headway.ckpt.scrub/1", "root": str(root), "checkpoints": told, "damaged": damaged,
        "checked_bytes": sum(report.checked_bytes for report in reports),
    }  # fmt: skip
    emit(answer, lambda s: _verify_screen(reports, s) if reports else _list_screen(answer, s), as_json=json)
    return 3 if damaged else 0


def diff(first: Path, second: Path, /, *, json: AsJson = False) -> int:
    """Compare two checkpoints bit by bit: tensors added, removed, of another dtype or shape, with other content.

    They may be of different formats, layouts and numbers of ranks. Exit code
    0 when they are equal, 3 when not.

    Example: `headway ckpt diff checkpoints/step-400 checkpoints/step-500`

    Args:
      first: A checkpoint, or a torch.save or safetensors file.
      second: Another one.
    """
    found = difference(contents(first), contents(second))
    answer = {"schema": "headway.ckpt.diff/1", "first": str(first), "second": str(second), **found.to_json()}
    emit(answer, lambda screen: _diff_screen(answer, screen), as_json=json)
    return 0 if found.is_equal else 3


def _diff_screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    table = grid("left", "left", "left")
    for word, names in (("removed", answer["removed"]), ("added", answer["added"])):
        for name in names[:LINES]:
            add_row(table, word, clean(name), "")
    for change in answer["changed"][:LINES]:
        add_row(table, "changed", clean(change["name"]), _changed(change))
    rest = sum(max(0, len(answer[kind]) - LINES) for kind in ("removed", "added", "changed"))
    verdict = "The two are equal." if answer["equal"] else "The two differ."
    parts: list[Any] = [] if answer["equal"] else [uncut(table), ""]
    parts += [paragraph(f"and {rest} more", style="dim")] if rest else []
    verb = "is" if answer["num_equal"] == 1 else "are"
    parts.append(paragraph(f"{verdict} {plural(answer['num_equal'], 'value')} {verb} bit-equal."))
    if answer["unread_bytes"]:
        told = f"{format_bytes(answer['unread_bytes'])} are equal by their checksums, and were not read"
        parts.append(paragraph(f"{told}: headway ckpt verify says whether they are intact.", style="dim"))
    return draw(parts, **screen)


def _changed(change: Mapping[str, Any]) -> str:
    """Say what became of a value that both have."""
    if change["what"] == "content":
        count = change["num_elements"]
        return f"{plural(count, 'element')} {'differs' if count == 1 else 'differ'}"
    if change["what"] == "object":
        return "the pickled bytes differ"
    what = "" if change["what"] == "value" else f"{change['what']}: "
    return f"{what}{change['before']} -> {change['after']}"


def prune(root: Path, /, *, keep: str = "last=2", yes: bool = False, json: AsJson = False) -> int:
    """Remove old checkpoints, and what dead saves left; without --yes say only what would be removed.

    The newest checkpoint that is intact, or that parity can repair, always
    stays: where the rule would keep none such, it is kept besides.

    Example: `headway ckpt prune checkpoints --keep last=3,every=1000 --yes`

    Args:
      root: The folder that holds the step-<n> of a run.
      keep: What stays: last=N, the newest N; every=K, those whose step is a multiple of K.
      yes: Remove them.
    """
    rule, top = parse_keep(keep), url_of(root) or _folder(root)
    found = checkpoints(top)
    by_step = {one.step: one for one in found}
    surplus = rule.disposable(by_step, lambda step: _intact(by_step[step]))
    goes = [one for one in found if one.step in surplus]
    freed = sum(sum(one.store.list().values()) for one in goes)
    leftovers: Sequence[Path | str] = []
    if yes:
        for one in goes:
            discard(one)
        leftovers = recover_root(top)
    answer = {
        "schema": "headway.ckpt.prune/1", "root": str(top), "removed": yes,
        "steps": [one.step for one in goes], "kept": [one.step for one in found if one.step not in surplus],
        "spared": sorted(rule.surplus(by_step) - surplus), "num_bytes": freed,
        "leftovers": [str(path) for path in leftovers],
    }  # fmt: skip
    return emit(answer, lambda screen: _prune_screen(answer, screen), as_json=json)


def _intact(checkpoint: CommittedCheckpoint | CommittedObject) -> bool:
    """Say whether a checkpoint may be relied on: all of it is verified, it is the last one to lose."""
    try:
        return verify(checkpoint.path).status in ("good", "repairable")
    except (FormatError, DamageError):
        return False
    except InputError:
        if isinstance(checkpoint, CommittedObject):  # no access: nothing is said of what lies there
            raise
        return False


def parse_keep(text: str) -> Keep:
    """Return the rule that `last=N,every=K` writes.

    >>> parse_keep("last=3,every=1000")
    Keep(last=3, every=1000)
    """
    told: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("last", "every") or not value.isdigit() or name in told:
            raise InputError(f"--keep {text!r} is not a rule. Write last=N, every=K, or both: last=3,every=1000.")
        told[name] = int(value)
    return Keep(last=told.get("last", 1), every=told.get("every"))


def _prune_screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    word = "Removed" if answer["removed"] else "Would remove"
    size, steps = format_bytes(answer["num_bytes"]), ", ".join(map(str, answer["steps"]))
    few = "step" if len(answer["steps"]) == 1 else "steps"
    parts: list[Any] = [paragraph(f"{word} {few} {steps} ({size})." if steps else "There is no step to remove.")]
    if answer["kept"]:
        parts.append(paragraph(f"Stays: {', '.join(map(str, answer['kept']))}."))
    if answer["spared"]:
        spared = ", ".join(map(str, answer["spared"]))
        parts.append(paragraph(f"Of these {spared} against the rule: what it would keep is damaged."))
    if answer["leftovers"]:
        parts.append(paragraph(f"Removed besides: {plural(len(answer['leftovers']), 'save')} never committed."))
    if not answer["removed"] and answer["steps"]:
        parts.append(paragraph("Nothing was touched. Add --yes to remove them.", style="bold"))
    return draw(parts, **screen)
