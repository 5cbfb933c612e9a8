"""Where test data lives, and a clear skip when it does not."""

from pathlib import Path

import pytest

from benchmarks._command import python_path as python_path

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"


def shared(relative: str) -> Path:
    """Return the path of a public benchmark file beside the checkout, or skip the test."""
    path = ROOT.parent / "shared" / "data" / relative
    if not path.exists():
        pytest.skip(f"public benchmark data {relative} is not beside this checkout")
    return path
