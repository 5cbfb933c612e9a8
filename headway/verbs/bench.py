"""`headway bench`: run a benchmark of the checkout, keep its result, write docs/results.md and its own page."""

from __future__ import annotations

import ast
import json as jsonlib
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import headway
from headway.core.errors import InputError
from headway.core.tables import pick
from headway.verbs.shared.output import emit

FOLDER = Path(headway.__file__).resolve().parent.parent / "benchmarks"
"""Benchmarks belong to the checkout, not to the installed package."""

ROOMS = (
    "checkpoint", "comm", "compute", "parallel", "model", "fault", "cluster", "power", "data", "host", "plan",
    "storage", "ledger", "sim", "trace", "cost", "runtime",
)  # fmt: skip
"""Rooms in the order in which a benchmark that imports from several of them is listed under one."""

STUDIED = {"lab": "storage"}
"""Room of studies -> the room whose subject they are about."""


def bench(name: str | None = None, /, *, full: bool = False, keep: bool = False, json: bool = False) -> int:
    """Run the benchmark NAME; without a name, list them by room with the bar each one holds headway to.

    Example: `headway bench replay_vs_simpy --keep`

    Args:
      name: A file of benchmarks/, without its suffix.
      full: The large sweep, with every seed; takes minutes.
      keep:
        Write the result to benchmarks/results/, also that of a missed bar, and bring docs/results.md up to date (and
        the benchmark's own page, where its folder has a page.py).
      json: Print the list as one JSON object; a benchmark's result is one in any case.
    """
    table = benchmarks()
    if name is None:
        claims, rooms = {known: claim(path) for known, path in table.items()}, by_room(table)
        answer = {"schema": "headway.bench/1", "benchmarks": claims, "rooms": rooms}
        return emit(answer, lambda _: listing(claims, rooms), as_json=json)
    command = [sys.executable, str(pick(table, name, "benchmark")), *(["--full"] if full else [])]
    done = subprocess.run(command, cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    if keep and done.returncode in (0, 3):
        result = jsonlib.loads(done.stdout.strip().splitlines()[-1])
        result["command"] = f"headway bench {name}{' --full' if full else ''}"
        result["date"] = datetime.now(tz=UTC).date().isoformat()
        (FOLDER / "results" / f"{name}.json").write_text(jsonlib.dumps(result, indent=1) + "\n")
        write_pages()
        page = FOLDER / name / "page.py"
        if page.exists():
            subprocess.run([sys.executable, str(page)], check=True)
    return done.returncode


def benchmarks() -> dict[str, Path]:
    """Return benchmark name -> file. Raises `InputError` outside a checkout."""
    if not FOLDER.is_dir():
        raise InputError(f"there is no {FOLDER}: benchmarks come with a checkout. Run this in one.")
    return {path.stem: path for path in sorted(FOLDER.glob("*.py")) if not path.stem.startswith("_")}


def by_room(table: Mapping[str, Path]) -> dict[str, list[str]]:
    """Return room -> names of its benchmarks: the first of `ROOMS` that one imports from, "command" for the others."""
    found: dict[str, list[str]] = {room: [] for room in (*ROOMS, "command")}
    for name, path in table.items():
        imported = set(re.findall(r"^\s*(?:from|import) headway\.(\w+)", path.read_text(), re.MULTILINE))
        imported |= {STUDIED[room] for room in imported & STUDIED.keys()}
        found[next((room for room in ROOMS if room in imported), "command")].append(name)
    return {room: names for room, names in found.items() if names}


def listing(claims: Mapping[str, str], rooms: Mapping[str, list[str]]) -> str:
    """Return the list of benchmarks as text, a paragraph for each room."""
    blocks = [[room, *(f"  {known:26} {claims[known]}" for known in names)] for room, names in rooms.items()]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def claim(path: Path) -> str:
    """Return the first sentence of a benchmark's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.split("\n")[0]


GENERATED = (
    "Generated from `benchmarks/results/` by `headway bench NAME --keep`; do not edit. Two shared CPU cores,",
    "no accelerator: trust ratios and CPU-seconds, not wall time. What is simulated says so in its row.",
)


def write_pages() -> None:
    """Bring docs/results.md and docs/results-tables.md up to date."""
    docs = FOLDER.parent / "docs"
    (docs / "results.md").write_text(results_page())
    (docs / "results-tables.md").write_text(tables_page())


def results_page() -> str:
    """Return docs/results.md, one line for every kept result: its question, whether the bar was met, when."""
    rows, table = [], benchmarks()
    for path in sorted((FOLDER / "results").glob("*.json")):
        result: dict[str, Any] = jsonlib.loads(path.read_text())
        met = {True: "yes", False: "**no**", None: ""}[result.get("met")]
        question = claim(table[path.stem]).replace("|", "/") if path.stem in table else ""
        rows.append(f"| [{path.stem}](results-tables.md#{path.stem}) | {question} | {met} | {result.get('date', '')} |")
    return "\n".join([
        "# Results", "", *GENERATED, "The figures behind each line: [results-tables.md](results-tables.md).", "",
        "| `headway bench` | question | bar met | kept |", "|---|---|---|---|", *rows, "",
    ])  # fmt: skip


def tables_page() -> str:
    """Return docs/results-tables.md, made from every kept result."""
    lines = ["# Results in full", "", *GENERATED, ""]
    table = benchmarks()
    for path in sorted((FOLDER / "results").glob("*.json")):
        result: dict[str, Any] = jsonlib.loads(path.read_text())
        source = table.get(path.stem)
        lines += [f"## {path.stem}", ""]
        lines += [claim(source), ""] if source else []
        lines += [f"`{result.pop('command', '')}`, {result.pop('date', '')}", ""]
        result.pop("bench", None)
        tables = {key: value for key, value in result.items() if _is_table(value)}
        figures = {key: value for key, value in result.items() if key not in tables}
        lines += [
            "| figure | value |",
            "|---|---|",
            *(f"| {key} | {_cell(value)} |" for key, value in figures.items()),
            "",
        ]
        for value in tables.values():
            lines += [*_table(value), ""]
    return "\n".join(lines)


def _is_table(value: Any) -> bool:
    """Tell whether a figure is rows of figures: a list of objects, or objects by name."""
    rows = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
    return len(rows) > 1 and all(isinstance(row, dict) for row in rows)


def _table(value: Any) -> list[str]:
    """Return rows of figures as the lines of a table."""
    rows = value if isinstance(value, list) else [{"": name, **row} for name, row in value.items()]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return [*lines, *(f"| {' | '.join(_cell(row.get(key, '')) for key in columns)} |" for row in rows)]


def _cell(value: Any) -> str:
    """Write one figure for a person: four digits, no quotes or braces."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(entry)}" for key, entry in value.items())
    if isinstance(value, list):
        return " to ".join(map(_cell, value)) if _is_range(value) else ", ".join(map(_cell, value))
    return str(value).replace("|", "\\|")


def _is_range(value: list[Any]) -> bool:
    return len(value) == 2 and all(isinstance(entry, (int, float)) and not isinstance(entry, bool) for entry in value)
