"""The import contracts hold, and would notice if they did not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

LINT = Path(sys.executable).with_name("lint-imports")


def lint(checkout: Path) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(checkout)!r}); from importlinter.cli import lint_imports; "
    code += "sys.exit(lint_imports(no_cache=True))"
    return subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, timeout=100)


@pytest.fixture
def checkout(tmp_path):
    """A copy of the package and its contracts."""
    shutil.copytree(ROOT / "headway", tmp_path / "headway", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_contracts_hold(checkout):
    answer = lint(checkout)

    assert answer.returncode == 0, answer.stdout


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("headway/core/units.py", "import headway.ledger.ledger", "imports go down only"),
        ("headway/host/advise.py", "import headway.data.advise", "imports go down only"),
        ("headway/ledger/ledger.py", "import torch", "torch and ray"),
    ],
)
def test_a_forbidden_import_is_seen(checkout, file, line, broken):
    path = checkout / file
    path.write_text(path.read_text() + f"\n{line}\n")

    answer = lint(checkout)

    assert answer.returncode != 0
    assert broken in answer.stdout
