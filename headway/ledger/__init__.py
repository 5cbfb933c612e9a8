"""Floor 3: accounts. Every device-nanosecond in one bucket, and what caused each loss.

Names are resolved on first use, so that a launcher that needs one table does
not load the analysis.

>>> from headway.ledger import Ledger
>>> Ledger.__module__
'headway.ledger.answers.ledger'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.ledger.answers.causes import find_causes as find_causes
    from headway.ledger.answers.ledger import Ledger as Ledger
    from headway.ledger.buckets import BUCKETS as BUCKETS
    from headway.ledger.cause import Cause as Cause

PUBLIC: dict[str, str] = {
    "BUCKETS": "headway.ledger.buckets",
    "Cause": "headway.ledger.cause",
    "Ledger": "headway.ledger.answers.ledger",
    "find_causes": "headway.ledger.answers.causes",
}
"""Every name of the room's front door -> its module."""


def __getattr__(name: str) -> object:
    """Resolve a public name on first use (PEP 562)."""
    if name not in PUBLIC:
        raise AttributeError(f"module 'headway.ledger' has no attribute {name!r}; it has: {', '.join(sorted(PUBLIC))}")
    return getattr(importlib.import_module(PUBLIC[name]), name)
