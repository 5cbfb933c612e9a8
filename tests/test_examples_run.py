"""Every example prints what stands beside it (`HEADWAY_WRITE_GOLDEN=1` writes it)."""

from __future__ import annotations

import os
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
