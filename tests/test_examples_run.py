"""Every example prints what stands beside it (`HEADWAY_WRITE_GOLDEN=1` writes it)."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.paths import ROOT


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_prints_what_it_promises(example):
    answer = subprocess.run([sys.executable, example], cwd=ROOT, capture_output=True, text=True, timeout=100)
    expected = example.with_suffix(".out")
    if os.environ.get("HEADWAY_WRITE_GOLDEN"):
        expected.write_text(answer.stdout)

    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == expected.read_text()
    assert len(example.read_text().splitlines()) < 40


def test_the_notebook_runs_and_its_workers_wait_less(tmp_path):
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "cells.py").write_text(code)
    done = subprocess.run([sys.executable, "cells.py"], capture_output=True, text=True, timeout=120, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("input.fetch")
    before, after = (float(number) for number in re.findall(r"([\d.]+) s (?:before|with)", done.stdout))
    assert after < before
    assert "<html" in (tmp_path / "page.html").read_text()[:200]
