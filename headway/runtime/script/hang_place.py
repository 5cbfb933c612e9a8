"""Where in its script a rank of a hung job is: in `next(loader)`, and what its workers do, or behind its training loop.

All of it is read off stacks that were asked for, and off the script's source: nothing is recorded for it. A rank has
left its loop where a rank that waits in a step is, in the same function, inside of a loop that its own line is not in.

>>> source = "for x in loader:\\n    if x:\\n        step(x)\\nevaluate()"
>>> loops_left(source, 4, 3), loops_left(source, 2, 3)
(1, 0)
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from headway.ledger.hang_reports import frames
from headway.runtime.host import process_probe
from headway.runtime.script.gap_stacks import OWN, is_scripts

MOST_WORKERS = 8
"""Workers of a loader that are asked for their stacks, one after the other: they write to one file."""

WORKER_S = 0.5
"""Deadline of each."""

LOCKED = (
    ", waiting for a lock: if a thread held it when the worker was forked, nobody lets it go there "
    "(multiprocessing_context='spawn', or no such threads before the workers)"
)
"""What is said of a worker that waits in the kernel for a lock of its own process."""

LOADER, FETCH = os.path.join("torch", "utils", "data", ""), os.path.join("_utils", "fetch.py")
_FRAME = re.compile(r"(.*):(\d+) in (.*)")


class Frame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Return it in words."""
        return f"{os.path.basename(self.file)}:{self.line}" + f" in {self.function}" * (self.function != "<module>")


def stack_of(text: object) -> list[Frame]:
    """Return the frames of the thread that matters, outermost first; [] where the stack is not known."""
    found = [_FRAME.fullmatch(frame) for frame in frames(str(text or ""))]
    return [Frame(match[1], int(match[2]), match[3]) for match in reversed(found) if match]


def add_places(rows: Sequence[dict[str, Any]], signals: Mapping[int, int], files: Mapping[int, Path]) -> None:
    """Add to the rows of a hang watch, whose stacks are known, 'place' in words and the stacks of awaited 'workers'.

    `signals` says by which signal a rank, and what is forked from it, writes its stacks, and `files` to which file.
    """
    stacks = {row["rank"]: stack_of(row.get("stack")) for row in rows}
    training = [row for row in rows if str(row["op"] or "").startswith("comm.") and stacks[row["rank"]]]
    for row in rows:
        rank, own = row["rank"], stacks[row["rank"]]
        others = [other for other in training if other["rank"] != rank]
        found = _in_loader(row, own, signals.get(rank, 0), files[rank]) or _behind_loop(row, own, others, stacks)
        if found:
            row["place"] = found


def _in_loader(row: dict[str, Any], stack: Sequence[Frame], signal: int, file: Path) -> str:
    """Say which loader a rank waits for, and where its batch is being made; '' where it waits for none."""
    at = next((k for k, frame in enumerate(stack) if frame.function == "__next__" and _loads(frame.file)), 0)
    if not at:
        return ""
    row["workers"] = workers = _workers(row["pid"], signal, file)
    known = [f"worker {worker['pid']} {doing}" for worker in workers if (doing := _doing(worker))]
    if not workers and any(is_scripts(frame.file) for frame in stack[at:]):
        known = [f"it reads at {_innermost(stack[at:])}"]
    words = f"next(loader) at {_innermost(stack[:at])}, for step {row['step'] + 1}"
    return f"{words}: {'; '.join(known)}" if known else words


def _innermost(stack: Sequence[Frame]) -> Frame:
    """Return the innermost frame of the script's own, or of any where there is none."""
    return next((frame for frame in reversed(stack) if is_scripts(frame.file)), stack[-1])


def _doing(worker: Mapping[str, Any]) -> str:
    """Say what a worker does; '' where it waits to be given a batch to make."""
    stack = stack_of(worker["stack"])
    if any(frame.file.endswith(FETCH) for frame in stack):
        waits_for_lock = str(worker.get("wait_channel") or "").startswith("futex")
        return f"is at {_innermost(stack)}" + LOCKED * waits_for_lock
    return "" if stack else f"does not say where it is (process state {worker['state']})"


def _loads(file: str) -> bool:
    return LOADER in file or file.startswith(OWN)


def _workers(pid: int, signal: int, file: Path) -> list[dict[str, Any]]:
    """Ask the loader's worker processes of a rank for their stacks; those that were forked answer."""
    found = [child for child in process_probe.children(pid) if process_probe.name(child).startswith("pt_data_worker")]
    rows = []
    for child in found[:MOST_WORKERS]:
        state = process_probe.state(child)
        answer = process_probe.ask({0: child}, {0: signal}, {0: file}, deadline_s=WORKER_S)[0]
        rows.append({"pid": child, "state": state, **answer})
    return rows


def _behind_loop(
    row: Mapping[str, Any],
    stack: Sequence[Frame],
    others: Sequence[Mapping[str, Any]],
    stacks: Mapping[int, Sequence[Frame]],
) -> str:
    """Say that a rank has left its training loop while another one waits in a step; '' where it has not."""
    for other in others:
        for own, peer in zip(stack, stacks[other["rank"]], strict=False):
            if (own.file, own.function) != (peer.file, peer.function):
                break
            if own.line == peer.line:
                continue
            with suppress(OSError, ValueError, SyntaxError):  # no source: nothing is said
                if loop := loops_left(Path(own.file).read_text(encoding="utf-8"), own.line, peer.line):
                    name = os.path.basename(own.file)
                    return (
                        f"{own}: it has left the loop at {name}:{loop} after {row['step']} steps, and rank "
                        f"{other['rank']} goes on with step {other['step'] + 1}: uneven inputs "
                        "(torch.distributed.algorithms.Join, or as many batches on each rank)"
                    )
            break
    return ""


def loops_left(source: str, line: int, within: int) -> int:
    """Return the line of the outermost loop that holds line `within` and not `line`; 0 where there is none."""
    found = (part for part in ast.walk(ast.parse(source)) if isinstance(part, (ast.For, ast.AsyncFor, ast.While)))
    bounds = sorted((loop.lineno, loop.end_lineno or loop.lineno) for loop in found)
    return next((begin for begin, end in bounds if begin <= within <= end and not begin <= line <= end), 0)
