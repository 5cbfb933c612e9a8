"""The import contracts hold, and would notice if they did not."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from tests.paths import ROOT


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


WITH_TORCH = (
    "headway.runtime.", "headway.data.loader.", "headway.data.guard.", "headway.data.workers.", "headway.data.cached.",
    "headway.checkpoint.engine", "headway.checkpoint.state.", "headway.checkpoint.saves.",
    "headway.checkpoint.restores.", "headway.checkpoint.torch_dcp.", "headway.data.fleet.ray_workers",
    "headway.verbs.train", "headway.verbs.loading.data_bench",
)  # fmt: skip
"""Folders and files that work on torch's objects, besides files called apply.py and torch_*.py."""


def is_for_torch(module: str) -> bool:
    name = module.rpartition(".")[2]
    return module.startswith(WITH_TORCH) or name == "apply" or name.startswith("torch_")


@pytest.fixture(scope="module")
def graph():
    """Which modules import which."""
    return grimp.build_graph("headway", include_external_packages=True, exclude_type_checking_imports=True)


def test_torch_is_imported_only_where_a_file_or_a_folder_says_so(graph):
    importing = graph.find_modules_that_directly_import("torch") | graph.find_modules_that_directly_import("ray")

    assert "headway.comm.torch_buckets" in importing
    assert not is_for_torch("headway.checkpoint.policy")
    assert not sorted(name for name in importing if not is_for_torch(name))


LEADING = (
    "headway.verbs.", "headway.integrations.", "headway.data.fleet.", "headway.data.bytes.account",
    "headway.data.jagged", "headway.data.pipeline.", "headway.fault.",
)  # fmt: skip
"""What may lead to torch without importing it: it starts jobs, runs inside them, or is imported by them."""


def test_what_leads_to_torch_works_on_it_or_starts_what_does(graph):
    leading = graph.find_downstream_modules("torch") | graph.find_downstream_modules("ray")

    assert "headway.data.loader.loader" in leading
    assert not sorted(name for name in leading if not is_for_torch(name) and not name.startswith(LEADING))


FORBIDDEN = [
    ("headway.core.units", "headway.ledger.answers.ledger", "imports go down only"),
    ("headway.host.advise", "headway.data.advise", "imports go down only"),
    ("headway.checkpoint.advise", "torch", "nothing leads to torch"),
    ("headway.report.answers", "headway.runtime.lane", "nothing leads to torch"),
]
"""Module, what it may not import, what the contract says that this breaks."""


def test_forbidden_imports_are_seen(checkout):
    for module, imported, _ in FORBIDDEN:
        path = (checkout / module.replace(".", "/")).with_suffix(".py")
        path.write_text(path.read_text() + f"\nimport {imported}\n")

    answer = lint(checkout)

    assert answer.returncode != 0
    _, *parts = re.split(r"\n(.+)\n-+\n", answer.stdout.partition("Broken contracts")[2])
    for module, imported, contract in FORBIDDEN:
        broken = [text for title, text in zip(parts[::2], parts[1::2], strict=True) if contract in title]
        assert f"{module} -> {imported} (l." in "".join(broken)
