"""The package keeps to its numbers of lines: a change that adds some removes others, or gives a reason for more."""

from __future__ import annotations

import tomllib

from tests.paths import ROOT

BOUNDS = tomllib.loads((ROOT / "tests" / "lines.toml").read_text())


def lines_of(folder: str) -> int:
    """Return the lines of all Python files below a folder of the checkout."""
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))


def test_every_room_keeps_to_its_lines():
    rooms = {path.name for path in (ROOT / "headway").iterdir() if (path / "__init__.py").exists()}
    over = {room: lines_of(f"headway/{room}") for room in rooms if lines_of(f"headway/{room}") > BOUNDS["rooms"][room]}

    assert rooms == BOUNDS["rooms"].keys()
    assert not over


def test_the_whole_and_its_tests_keep_to_theirs():
    assert lines_of("headway") <= BOUNDS["headway"]
    assert lines_of("headway/data/guard") <= BOUNDS["guard"]
    assert len(list((ROOT / "headway").rglob("*.py"))) <= BOUNDS["files"]
    assert lines_of("tests") <= BOUNDS["tests"]
