"""The checks of taste a machine can make: sizes, docstrings, names, suppressions."""

from __future__ import annotations

import ast
import gc
import re
import statistics
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

from tests.paths import ROOT

SOURCES = sorted(p for p in (ROOT / "headway").rglob("*.py") if p != ROOT / "headway" / "verbs" / "train.py")
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef

BANNED = {
    "iteration": "step", "iterations": "steps", "iter_index": "step", "n_microbatches": "num_microbatches",
    "micro_batch": "microbatch", "badput": "the ledger's buckets", "gpu_id": "rank or device", "hot_spare": "standby",
    "ts": "start_ns", "dur": "duration_ns", "mb": "microbatch", "node": "op or host", "nodes": "ops or hosts",
    "iters": "steps", "cfg": "setup", "utilization": "mfu", "samples_per_sec": "examples_per_s",
}  # fmt: skip
"""Identifier -> the word of docs/glossary.md to use instead; whole identifiers only."""


@cache
def tree(path: Path) -> ast.Module:
    gc.disable()  # it would look for garbage among two million nodes, none of which is any
    try:
        return ast.parse(path.read_text())
    finally:
        gc.freeze()
        gc.enable()


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


@cache
def functions(path: Path) -> list[FUNCTION]:
    return [n for n in nodes(path) if isinstance(n, FUNCTION)]


def offenders(rule: Callable[[Path], object]) -> dict[str, object]:
    """Return file -> what `rule` has against it, for those that it has something against."""
    return {relative(path): found for path in SOURCES if (found := rule(path))}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_a_file_is_one_idea_of_at_most_500_lines():
    assert offenders(lambda path: len(path.read_text().splitlines()) > 500) == {}


def test_no_function_is_longer_than_80_lines():
    assert offenders(lambda path: [f.name for f in functions(path) if f.end_lineno - f.lineno + 1 > 80]) == {}


def test_functions_are_short_on_the_whole():
    lengths = sorted(f.end_lineno - f.lineno + 1 for path in SOURCES for f in functions(path))

    assert statistics.median(lengths) <= 12
    assert lengths[int(0.9 * len(lengths))] <= 35


def silent_names(path: Path) -> list[str]:
    silent = [] if ast.get_docstring(tree(path)) else ["the module itself"]
    public = [n for n in tree(path).body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]
    for thing in [thing for holder in [tree(path), *public] for thing in holder.body]:
        named = isinstance(thing, (ast.ClassDef, *FUNCTION.__args__)) and not thing.name.startswith("_")
        if named and not ast.get_docstring(thing):
            silent.append(thing.name)
    return silent


def test_every_module_and_every_public_name_says_what_it_is():
    assert offenders(silent_names) == {}


def banned_names(path: Path) -> dict[str, str]:
    used = {n.id for n in nodes(path) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    used |= {n.arg for n in nodes(path) if isinstance(n, ast.arg)}
    used |= {f.name for f in functions(path)}
    return {name: BANNED[name] for name in used & set(BANNED)}


def test_names_are_the_words_of_the_glossary():
    assert offenders(banned_names) == {}


def bare_suppressions(path: Path) -> list[str]:
    return [
        line.strip()
        for line in path.read_text().splitlines()
        if re.search(r"#\s*(noqa|type:\s*ignore)", line)
        and not re.search(r"(noqa: [A-Z]+\d+|type: ignore\[[\w, -]+\])[^#]*(#|-|:|\bbecause\b)\s*\S+ \S+", line)
    ]


def test_every_suppression_carries_a_code_and_a_reason():
    assert offenders(bare_suppressions) == {}


def test_a_class_name_stands_for_one_thing():
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{relative(path)}:{node.lineno}")

    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_loose_end_is_left_in_the_code():
    assert offenders(lambda path: re.findall(r"\b(TODO|FIXME|XXX|HACK)\b", path.read_text())) == {}


def test_drawers_do_not_exist():
    assert not [relative(p) for p in SOURCES if p.stem in {"utils", "util", "common", "misc", "helpers", "base"}]


def test_whoever_opens_a_folder_sees_it_whole():
    counts = Counter(path.parent for path in SOURCES if (ROOT / "headway") in path.parents and path.stem != "__init__")

    assert not [f"{relative(folder)}: {count} modules" for folder, count in counts.items() if count > 13]


def test_every_room_has_a_short_readme_and_a_doctest():
    rooms = sorted({p.parent for p in SOURCES if p.parent.parent == ROOT / "headway"})
    rooms = [room for room in rooms if room.name not in {"verbs", "__pycache__"}]

    missing = [room.name for room in rooms if not (room / "README.md").exists()]
    long = [r.name for r in rooms if r.name not in missing and len((r / "README.md").read_text().splitlines()) > 80]
    untested = [r.name for r in rooms if not any(">>>" in p.read_text() for p in r.rglob("*.py"))]

    assert (missing, long, untested) == ([], [], [])


def test_most_messages_of_errors_name_an_action():
    verbs = """pass give use name set choose write drop make install check run start add remove record try call put open
    merge sort keep raise lower free select convert export read point wait reorder split build take say list"""
    actions = rf"\b({'|'.join(verbs.split())})\b"
    messages = [
        ast.unparse(n.exc.args[0])
        for path in SOURCES
        for n in nodes(path)
        if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call) and n.exc.args
        and isinstance(n.exc.func, ast.Name) and n.exc.func.id.endswith("Error")
        and n.exc.func.id not in {"AssertionError", "AttributeError", "StopIteration"}
    ]  # fmt: skip
    telling = [m for m in messages if re.search(actions, m, re.IGNORECASE)]

    assert len(telling) >= 0.6 * len(messages)


BOUNDS = tomllib.loads((ROOT / "tests" / "lines.toml").read_text())


def bindings() -> Counter[str]:
    """Return how often each name is assigned to or a parameter."""
    stored = (n.id for path in SOURCES for n in nodes(path) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return Counter([*stored, *(n.arg for path in SOURCES for n in nodes(path) if isinstance(n, ast.arg))])


def public_signatures() -> Iterator[str]:
    """Yield the parameters and results of functions and methods without an underscore."""
    for function in chain.from_iterable(map(functions, SOURCES)):
        if not function.name.startswith("_"):
            yield ast.unparse(function.args) + (" -> " + ast.unparse(function.returns) if function.returns else "")


def test_what_has_no_type_becomes_no_more():
    assert sum(isinstance(n, ast.Name) and n.id == "Any" for path in SOURCES for n in nodes(path)) <= BOUNDS["any"]
    assert sum("dict[str, Any]" in signature for signature in public_signatures()) <= BOUNDS["untyped_dicts"]


def test_words_that_name_nothing_are_bound_no_more_often():
    """`found`, `place`: say `rows`, `index`. What is there may stay until its function is touched."""
    counts = bindings()

    assert {word: counts[word] for word, bound in BOUNDS["words"].items() if counts[word] > bound} == {}
