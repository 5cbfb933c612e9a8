"""docs/results.md and docs/results-tables.md, made from every kept result: `headway bench NAME --keep` runs this."""

from __future__ import annotations

import json
from typing import Any

from headway.verbs.demo import FOLDER, benchmarks, claim

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
        result: dict[str, Any] = json.loads(path.read_text())
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
        result: dict[str, Any] = json.loads(path.read_text())
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


if __name__ == "__main__":
    write_pages()
