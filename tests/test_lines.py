"""The package keeps to its numbers: who adds deletes, or raises a bound in tests/lines.toml and says why there."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache

from tests.paths import ROOT

BOUNDS = tomllib.loads((ROOT / "tests" / "lines.toml").read_text())


def lines_of(folder: str) -> int:
    """Return the lines of all Python files below a folder of the checkout."""
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))


@cache
def nodes() -> list[ast.AST]:
    """Return every node of every file of the package."""
    return [node for path in (ROOT / "headway").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]


def bindings() -> Counter[str]:
    """Return how often each name is assigned to or a parameter."""
    stored = (n.id for n in nodes() if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return Counter([*stored, *(n.arg for n in nodes() if isinstance(n, ast.arg))])


def public_signatures() -> Iterator[str]:
    """Yield the parameters and results of functions and methods without an underscore."""
    for node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield ast.unparse(node.args) + (" -> " + ast.unparse(node.returns) if node.returns else "")


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


def test_what_has_no_type_becomes_no_more():
    assert sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes()) <= BOUNDS["any"]
    assert sum("dict[str, Any]" in signature for signature in public_signatures()) <= BOUNDS["untyped_dicts"]


def test_words_that_name_nothing_are_bound_no_more_often():
    """`found`, `place`: say `rows`, `index`. What is there may stay until its function is touched."""
    counts = bindings()

    assert {word: counts[word] for word, bound in BOUNDS["words"].items() if counts[word] > bound} == {}
