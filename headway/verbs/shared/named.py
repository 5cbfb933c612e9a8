"""What MODULE:NAME on a command line names: imported as Python would from the current folder."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from headway.core.errors import InputError


def imported(target: str, example: str) -> Any:
    """Import `target`, written as MODULE:NAME; raises `InputError`, with `example` where it is written otherwise."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise InputError(f"{target!r} names nothing to import. Write MODULE:NAME, such as {example}.")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot import {target}: {error}. Run this where Python finds the module.") from error
