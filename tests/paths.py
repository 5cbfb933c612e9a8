"""Where test data lives, and a clear skip when it does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"


def python_path(*folders: Path) -> str:
    """Return a PYTHONPATH of these folders and what stands there already: the quick start of tests' processes."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def shared(relative: str) -> Path:
    """Return the path of a public benchmark file beside the checkout, or skip the test."""
    path = ROOT.parent / "shared" / "data" / relative
    if not path.exists():
        pytest.skip(f"public benchmark data {relative} is not beside this checkout")
    return path
