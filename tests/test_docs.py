"""The documents show what the tool prints: every console block of README and tour is run again and compared.

`make golden` writes the blocks anew. The recorded run in tests/golden/run is a real one (`headway demo`), so that the
answers do not depend on this machine.
"""

import doctest
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headway.catalog import REMEDIES
from headway.cli import VERBS
from tests.paths import GOLDEN, ROOT, python_path

BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
WRITE = bool(os.environ.get("HEADWAY_WRITE_GOLDEN"))


@pytest.fixture
def folder(tmp_path):
    """A working directory that holds the recorded runs under the names the documents use."""
    shutil.copytree(GOLDEN / "runs", tmp_path / "headway-runs")
    return tmp_path


def answer(command: str, folder: Path) -> str:
    """Run one console line, `headway ...`, and return what it prints."""
    name, *arguments = shlex.split(command)
    assert name == "headway", f"the documents run only headway, not {name}"
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "TERM")}
    process = subprocess.run(
        [sys.executable, "-m", "headway.cli", *arguments], cwd=folder,
        env={**environment, "PYTHONPATH": python_path(ROOT), "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert process.returncode in (0, 3), process.stderr
    return "\n".join(line.rstrip() for line in process.stdout.strip("\n").splitlines())


def replayed(block: str, folder: Path) -> str:
    """Return the block with every command's output as it is now."""
    commands = [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    return "\n".join(f"$ {command}\n{answer(command, folder)}\n" for command in commands)


@pytest.mark.slow
@pytest.mark.parametrize("document", ["README.md", "docs/tour.md"])
def test_console_blocks_show_what_the_tool_prints(document, folder):
    text = (ROOT / document).read_text()
    current = BLOCK.sub(lambda match: f"```console\n{replayed(match[1], folder)}```", text)
    if WRITE:
        (ROOT / document).write_text(current)

    assert BLOCK.search(text), f"{document} shows nothing"
    assert WRITE or current == text


DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


@pytest.mark.parametrize("readme", [path for path in ROOT.glob("headway/*/README.md") if ">>>" in path.read_text()])
def test_the_examples_of_a_room_run(readme):
    result = doctest.testfile(str(readme), module_relative=False)

    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("document", sorted(path.relative_to(ROOT) for path in DOCUMENTS))
def test_links_between_documents_lead_somewhere(document):
    text = (ROOT / document).read_text()
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    lost = []
    for target in targets:
        name, _, anchor = target.partition("#")
        path = (ROOT / document).parent / name if name else ROOT / document
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            lost.append(target)

    assert not lost


def anchors(text: str) -> set[str]:
    """Return the names under which links find the headings of a document: lower case, hyphens for blanks."""
    headings = re.findall(r"^#+ +(.+?) *$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize(
    "document", sorted(path.relative_to(ROOT) for path in [*DOCUMENTS, *ROOT.glob("headway/**/*.md")])
)
def test_files_that_documents_name_are_there(document):
    places = ((ROOT / document).parent, ROOT / "headway", ROOT)
    named = [
        path
        for text in re.findall(r"`([\w{},./-]+/[\w{},.-]*\.py)`", (ROOT / document).read_text())
        for path in expanded(text)
    ]

    assert not [path for path in named if not any((place / path).exists() for place in places)]


def expanded(pattern: str) -> list[str]:
    """Return the paths that one with alternatives such as `sim/{edits,dag}.py` stands for."""
    head, brace, rest = pattern.partition("{")
    middle, _, tail = rest.partition("}")
    return [path for one in middle.split(",") for path in expanded(head + one + tail)] if brace else [pattern]


def test_the_page_of_commands_names_every_verb_and_remedy():
    text = (ROOT / "docs" / "commands.md").read_text()

    assert not [name for name in [*VERBS, *REMEDIES] if name not in text]
