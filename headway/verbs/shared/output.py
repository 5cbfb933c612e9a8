"""What every verb does last: print one JSON object, or text for a person."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from headway.core.errors import InputError, say_beside
from headway.report.paper import ScreenOptions, screen_of
from headway.verbs.shared import at_work

AsJson = Annotated[bool, Parameter(help="Print one JSON object instead of text.")]
"""The option --json of a verb."""


def emit(answer: Mapping[str, Any], render: Callable[[ScreenOptions], str], *, as_json: bool) -> int:
    """Print `answer` as exactly one JSON object, or the text that `render` makes for this screen; return 0."""
    at_work.stop()
    if as_json:
        print(json.dumps(finite(answer), allow_nan=False))
    else:
        print(render(screen_of(sys.stdout)).rstrip("\n"))
    return 0


def emit_beside(render: Callable[[ScreenOptions], str]) -> None:
    """Print the text that `render` makes on stderr: stdout belongs to the script that was run."""
    at_work.stop()
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


# What MODULE:NAME on a command line names: imported as Python would from the current folder.


def imported(target: str, example: str, *, absent: str = "nothing to import", form: str = "MODULE:NAME") -> Any:
    """Import `target`, written as MODULE:NAME; raises `InputError`, with `example` where it is written otherwise.

    `absent` is what the target then does not name, `form` how a verb writes it.
    """
    module, _, name = target.partition(":")
    if not module or not name:
        raise InputError(f"{target!r} names {absent}. Write {form}, such as {example}.")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot import {target}: {error}. Run this where Python finds the module.") from error
