"""The benchmarks about scripts of others: their pages, and a part of their cases and mixes."""

import json
import subprocess
import sys

import pytest

from benchmarks._pages import results_page, tables_page
from benchmarks.world.page import page
from tests.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
CASES = ROOT.parent / "shared" / "cases" / "scripts"


def bench(name, *arguments):
    """Run a benchmark and return its one JSON line."""
    command = [sys.executable, BENCHMARKS / f"{name}.py", *arguments]
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode in (0, 3), done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_the_pages_of_results_are_current():
    world = json.loads((BENCHMARKS / "results" / "world.json").read_text())

    assert (ROOT / "docs" / "compatibility.md").read_text() == page(world)
    assert (ROOT / "docs" / "results.md").read_text() == results_page()
    assert (ROOT / "docs" / "results-tables.md").read_text() == tables_page()


@pytest.mark.slow
@pytest.mark.skipif(not CASES.is_dir(), reason="the cases of known truth are not beside this checkout")
@pytest.mark.parametrize("number", ["03"])
def test_a_case_has_its_true_steps_and_seconds_and_prints_the_same_with_every_remedy(number):
    (result,) = bench("cases", number)["rows"].values()

    assert result["wrong"] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7])
def test_evaluation_script_and_closures_have_the_seconds_of_the_loops_own_clock(seed):
    (result,) = bench("eval_script_time", seed)["rows"]

    assert result["steps"][0] == result["steps"][1]
    assert {line: off for line, off in result["points_off"].items() if abs(off) > result["bar"]} == {}
