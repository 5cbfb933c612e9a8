"""A sheet of terminal text: width, colour, and what to do where Unicode does not fit.

Every screen is a string. `screen_of` looks at where it will be shown (a tty
or a file, NO_COLOR, TERM, encoding); `draw` lays rich renderables out on it.

>>> draw([Text("62 % lost")], width=20)
'62 % lost'
>>> bar(0.5, 8), bar(0.5, 8, unicode=False)
('████', '####')
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, TypedDict

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.core.units import clean

DEFAULT_WIDTH = 88
"""Columns when nobody said otherwise: a file, a pipe."""

WIDEST = 100
"""Columns beyond which a line of figures is no longer read as one line."""

NARROWEST = 56
"""Columns below which the tables would lose digits; narrower terminals wrap."""


class ScreenOptions(TypedDict, total=False):
    """Where a screen is shown; each renderer takes these as keywords."""

    width: int
    """Columns, default 88."""

    color: bool
    """Write ANSI colours, default no."""

    unicode: bool
    """Bars and signs beyond ASCII are allowed, default yes."""


def screen_of(output: IO[str] | None, environ: Mapping[str, str] = os.environ) -> ScreenOptions:
    """Return the options that fit `output`: colour only on a tty without NO_COLOR, ASCII where UTF-8 is not spoken.

    None is a standard output that was closed before Python started: what is drawn then goes nowhere.
    """
    dumb = environ.get("TERM", "") == "dumb"
    tty = output is not None and output.isatty() and not dumb
    given = environ.get("COLUMNS", "")
    columns = int(given) if given.isdecimal() else DEFAULT_WIDTH
    columns = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns if tty else columns
    encoding = (getattr(output, "encoding", None) or "ascii").lower().replace("-", "").replace("_", "")
    return ScreenOptions(
        width=max(NARROWEST, min(columns, WIDEST)),
        color=tty and not environ.get("NO_COLOR"),
        unicode=encoding.startswith("utf") and not dumb,
    )


def draw(
    parts: Iterable[RenderableType], *, width: int = DEFAULT_WIDTH, color: bool = False, unicode: bool = True
) -> str:
    """Lay `parts` out one below the other and return the text, without trailing blanks or a final newline."""
    buffer = io.StringIO()
    console = Console(
        file=buffer, width=width, color_system="256" if color else None, force_terminal=color, no_color=not color,
        force_jupyter=False, legacy_windows=False, markup=False, emoji=False, highlight=False,
    )  # fmt: skip
    for part in parts:
        console.print(part, crop=False)
    text = "\n".join(line.rstrip() for line in buffer.getvalue().split("\n")).rstrip("\n")
    return text if unicode else to_ascii(text)


STEERING = dict.fromkeys(
    [*range(9), *range(11, 32), *range(127, 160), 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)], " "
)
"""Characters by which a name in a file could steer the terminal or reorder a line -> a blank."""

ASCII_SIGNS = str.maketrans(
    {"━": "-", "╸": " ", "…": "~", "·": ".", "–": "-", "—": "-", "×": "x", "±": "~", "µ": "u", "→": ">", "✓": "+"}
    | {"✗": "x", "“": '"', "”": '"', "‘": "'", "’": "'", "─": "-", "≤": "<", "≥": ">"}
    | dict.fromkeys("▏▎▍", " ")
    | dict.fromkeys("▌▋▊▉█", "#")
)
"""Each sign beyond ASCII that our screens or a fix may hold -> one ASCII character, so that columns stay aligned."""


def to_ascii(text: str) -> str:
    """Return `text` in ASCII, one character for one; whatever has no counterpart becomes '?'."""
    return text.translate(ASCII_SIGNS).encode("ascii", "replace").decode("ascii")


EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(fraction: float, columns: int, *, unicode: bool = True) -> str:
    """Return a horizontal bar of `fraction` x `columns` cells, to an eighth of a cell; never empty above zero."""
    eighths = round(8 * columns * max(0.0, min(1.0, fraction)))
    if not unicode:
        return "#" * round(eighths / 8)
    if fraction > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    return "█" * full + (EIGHTHS[rest] if rest else "")


def thin_bar(fraction: float, columns: int, *, unicode: bool = True) -> str:
    """Return a slighter bar, for a part of what a `bar` shows; to half a cell.

    >>> thin_bar(0.45, 10), thin_bar(0.45, 10, unicode=False)
    ('━━━━╸', '----')
    """
    halves = round(2 * columns * max(0.0, min(1.0, fraction)))
    if not unicode:
        return "-" * (halves // 2)
    full, rest = divmod(max(1, halves) if fraction > 0 else 0, 2)
    return "━" * full + "╸" * rest


def grid(*columns: str, gap: int = 2, indent: int = 2) -> Table:
    """Return an empty table without lines; a column is named by its alignment: 'left', 'right', 'fill' or 'fold'.

    'left' and 'right' never wrap; 'fill' takes the rest of the line and is cut
    with an ellipsis; 'fold' takes the rest and wraps.
    """
    table = Table.grid(padding=(0, gap, 0, 0), expand=any(c in ("fill", "fold") for c in columns))
    table.add_column(width=max(0, indent - gap))
    for column in columns:
        rest = column in ("fill", "fold")
        table.add_column(
            justify="right" if column == "right" else "left", no_wrap=column != "fold",
            overflow="fold" if column == "fold" else "ellipsis", ratio=1 if rest else None,
        )  # fmt: skip
    return table


def headed(*titles: str, align: str = "") -> Table:
    """Return a `grid` under a quiet row of `titles`; `align` is as in "left right fold".

    Without it the first column is aligned to the left, and the others to the right.
    """
    table = grid(*(align.split() or ["left", *["right"] * (len(titles) - 1)]))
    add_row(table, *titles, style="dim")
    return table


def add_row(table: Table, *cells: str | Text, style: str = "") -> None:
    """Add a row below the indent of a `grid`; text is taken literally, but for what would steer the terminal."""
    table.add_row("", *(c if isinstance(c, Text) else Text(c.translate(STEERING)) for c in cells), style=style)


def uncut(table: Table) -> Table:
    """Make a `grid` as wide as its rows are, on any screen: of a listing no name and no figure is cut.

    A narrow terminal folds such lines; a pipe gets them whole.
    """
    console = Console(width=10_000)
    table.width = table.__rich_measure__(console, console.options).maximum
    return table


def title(text: str, aside: str = "", *, width: int) -> Table:
    """Return a bold heading with a quiet remark at the right edge; a remark too long loses its beginning."""
    room = width - len(text) - 2
    remark = clean(aside)
    remark = remark if len(remark) <= room else "…" + remark[len(remark) - room + 1 :]
    head = Table.grid(expand=True)
    head.add_column(no_wrap=True)
    head.add_column(justify="right", no_wrap=True, ratio=1)
    head.add_row(Text(text, style="bold"), Text(remark, style="dim"))
    return head


def paragraph(text: str | Text, *, indent: int = 2, style: str = "") -> Table:
    """Return wrapped prose, indented."""
    table = Table.grid(expand=True)
    table.add_column(width=indent)
    table.add_column(ratio=1, overflow="fold")
    table.add_row("", text if isinstance(text, Text) else Text(text.translate(STEERING), style=style))
    return table


def command_line(label: str, command: str) -> Group:
    """Return a command to copy, indented, on one line however long: a terminal folds it without breaking it."""
    # In a group: a bare text is joined to others when printed, and forgets that it must not wrap.
    return Group(Text.assemble("  ", (f"{label}  ", "dim"), (command, "bold"), no_wrap=True, overflow="ignore"))


def next_of(command: str) -> list[RenderableType]:
    """Return the line of what to type next; [] where there is nothing."""
    return ["", command_line("Next", clean(command))] if command else []


def joined(parts: Sequence[str], separator: str = " · ") -> str:
    """Join what is not empty."""
    return separator.join(part for part in parts if part)
