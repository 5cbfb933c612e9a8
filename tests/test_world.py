"""The benchmarks about scripts of others: their clock, their page, and a tenth of their cases and mixes."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.world.page import page
from headway.verbs.bench import results_page, tables_page
from tests.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
SITE = BENCHMARKS / "world" / "site"
CASES = ROOT.parent / "shared" / "cases" / "scripts"

SCRIPT = """
import torch
from torch.utils.data import DataLoader

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(torch.ones(6, 4), 2)


def evaluate():
    model.eval()
    with torch.no_grad():
        for x in loader:
            model(x)
    model.train()


for _epoch in range(2):
    for x in loader:
        for _part in range(2):
            model(x).sum().backward()
        optimizer.step()
    evaluate()
"""


def bench(name, *arguments):
    """Run a benchmark and return its one JSON line."""
    command = [sys.executable, BENCHMARKS / f"{name}.py", *arguments]
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode in (0, 3), done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def row(**more):
    """Return a row of the world's result: evaluation as the clock says, input not."""
    return {
        "version": "1.0", "deterministic": True, "losses_equal": True, "applied_losses_equal": None, "remedies": [],
        "steps": [40, 40], "devices": [1, 1], "points_off": {"eval": 0.4, "input": -9.0},
        "seconds": {"eval": [1.2, 1.25], "input": [0.0, 0.9]}, **more,
    }  # fmt: skip


@pytest.mark.slow
def test_the_clock_counts_what_a_script_does(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    spans = json.dumps({"eval": ["__main__:evaluate"]})
    names = {**os.environ, "PYTHONPATH": str(SITE), "WORLD_CLOCK": str(tmp_path), "WORLD_SPANS": spans}

    subprocess.run([sys.executable, SITE / "timed_script.py", script], env=names, check=True, timeout=100)

    (seen,) = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert (seen["updates"], seen["backwards"], seen["batches"]) == (6, 12, 12)
    assert seen["forwards"] == {"train grad": 12, "eval no_grad": 6}
    assert seen["span_s"]["eval"] >= seen["eval_next_s"] + seen["forward_s"]["eval no_grad"] > 0


def test_the_page_tells_what_is_seen_from_what_is_not():
    result = {"rows_met": 0, "rows_run": 3, "left_out": ["rests"], "date": "2000-01-01", "rows": {
        "books": row(), "counts": row(steps=[0, 40], losses_equal=False), "breaks": {"met": False, "failed": "exit 1"},
    }}  # fmt: skip

    text = page(result)

    assert "| books | 1.0 | 40 / 40 | equal | no plan | eval 1.20 / 1.25 s | input 0.00 / 0.90 s | none |" in text
    assert "| counts | 1.0 | 0 / 40 | **differ** |" in text
    assert "Not run this time: rests." in text
    assert "| breaks |  |  |  |  |  | not run: exit 1 |  |" in text


def test_the_pages_of_results_are_current():
    world = json.loads((BENCHMARKS / "results" / "world.json").read_text())

    assert (ROOT / "docs" / "compatibility.md").read_text() == page(world)
    assert (ROOT / "docs" / "results.md").read_text() == results_page()
    assert (ROOT / "docs" / "results-tables.md").read_text() == tables_page()


@pytest.mark.slow
def test_finished_rows_are_the_caches_or_the_kept_ones_and_nothing_runs(tmp_path):
    kept = json.loads((BENCHMARKS / "results" / "world.json").read_text())
    name, other = list(kept["rows"])[:2]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / f"{name.replace('/', '-')}.json").write_text(json.dumps(row(met=False, date="2000-01-01")))

    result = bench("world", "--finished", "--cache", tmp_path)

    assert (result["met"], result["rows"].keys()) == (False, kept["rows"].keys())
    assert result["rows"][name] == row(met=False, date="2000-01-01")
    assert result["rows"][other] == {"date": kept["date"], **kept["rows"][other]}


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
