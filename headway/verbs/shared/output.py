"""What every verb does last: print one JSON object, or text for a person."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from headway.core.processes.beside import say_beside
from headway.report.paper import ScreenOptions, screen_of


def emit(answer: Mapping[str, Any], render: Callable[[ScreenOptions], str], *, as_json: bool) -> None:
    """Print `answer` as exactly one JSON object, or the text that `render` makes for this screen."""
    if as_json:
        print(json.dumps(finite(answer), allow_nan=False))
    else:
        print(render(screen_of(sys.stdout)).rstrip("\n"))


def emit_beside(render: Callable[[ScreenOptions], str]) -> None:
    """Print the text that `render` makes on stderr: stdout belongs to the script that was run."""
    say_beside(render(screen_of(sys.stderr)).rstrip("\n") + "\n")


def finite(value: Any) -> Any:
    """Return `value` with what JSON cannot hold replaced: NaN and infinities by null, numpy scalars by numbers."""
    if isinstance(value, Mapping):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    if hasattr(value, "tolist"):
        return finite(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
