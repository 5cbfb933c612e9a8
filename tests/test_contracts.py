"""The import contracts hold, and would notice if they did not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import grimp
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


STARTING = ("headway.verbs.", "headway.integrations.", "headway.demo.", "headway.data.fleet.")
"""What may lead to torch without being a runtime room: it starts jobs, or is imported by them."""


def test_what_leads_to_torch_is_a_runtime_room_or_starts_one():
    graph = grimp.build_graph("headway", include_external_packages=True, exclude_type_checking_imports=True)
    leading = graph.find_downstream_modules("torch") | graph.find_downstream_modules("ray")
    pure = {name for name in leading if "runtime" not in name.split(".") and not name.startswith(STARTING)}

    assert "headway.data.runtime.loader.loader" in leading
    assert not pure


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("headway/core/units.py", "import headway.ledger.answers.ledger", "imports go down only"),
        ("headway/host/advise.py", "import headway.data.advise", "imports go down only"),
        ("headway/checkpoint/policies/policy.py", "import torch", "torch and ray"),
        ("headway/report/facts.py", "import headway.runtime.lane", "nothing leads to torch"),
    ],
)
def test_a_forbidden_import_is_seen(checkout, file, line, broken):
    path = checkout / file
    path.write_text(path.read_text() + f"\n{line}\n")

    answer = lint(checkout)

    assert answer.returncode != 0
    assert broken in answer.stdout
